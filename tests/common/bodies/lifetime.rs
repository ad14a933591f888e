//! How long memory and its lease last: as long as anything refers to them, and no longer.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use candle_core::DType;
use candle_core::quantized::GgmlDType;
use candle_ipc_cache::FromIpcCache;
use candle_ipc_cache::manifest::ElementType;
use candle_ipc_cache::protocol::Request;
use candle_nn::VarBuilder;

use super::{blocks, one_tensor};
use crate::place::Place;
use crate::stand_in::{HANG, Model};

pub(crate) fn tensors_outlive_the_handle_and_the_daemon(place: &Place) {
    let bytes = blocks(GgmlDType::Q4_0, 4);
    let model = Model::new("m")
        .tensor("q", ElementType::Q4_0, &[4, 512], bytes.clone())
        .floats("p", &[2], &[1., 2.]);
    let daemon = place.serve(model);
    let cache = place.attach(&daemon);
    let quantized = cache.quantized().get_no_shape("q").unwrap();
    let plain = cache.var_builder(DType::F32).get(2, "p").unwrap();
    let builder = cache.var_builder(DType::F32);
    assert!(!cache.daemon_lost());
    drop(daemon);
    let start = Instant::now();
    while !cache.daemon_lost() {
        assert!(
            start.elapsed() < HANG,
            "the end of the daemon is not noticed"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(cache);
    assert_eq!(
        builder.get(2, "p").unwrap().to_vec1::<f32>().unwrap(),
        [1., 2.]
    );
    drop(builder);
    assert_eq!(plain.to_vec1::<f32>().unwrap(), [1., 2.]);
    assert_eq!(quantized.data().unwrap(), bytes);
}

pub(crate) fn detaching_says_goodbye_and_what_is_still_alive(place: &Place) {
    let bytes = blocks(GgmlDType::Q4_0, 4);
    let mut model = Model::new("m")
        .tensor("a", ElementType::Q4_0, &[4, 512], bytes.clone())
        .tensor("b", ElementType::Q4_0, &[4, 512], bytes.clone())
        .floats("c", &[2], &[1., 2.]);
    model.per_slab = 1;
    let daemon = place.serve(model);
    let cache = place.attach(&daemon);
    let memory = cache.memory_bytes();
    let vb = cache.quantized();
    let one = vb.get_no_shape("a").unwrap();
    drop(vb.get_no_shape("b").unwrap());
    drop(vb);
    let plain = cache.var_builder(DType::F32).get(2, "c").unwrap();
    let detached = cache.detach().unwrap();
    let read_shared_memory = 1 + usize::from(place.serves_in_place());
    assert_eq!(
        (detached.tensors, detached.bytes),
        (read_shared_memory, place.kept_mapped(4 * 16 * 18, memory))
    );
    assert_eq!((detached.builders, detached.daemon_lost), (0, false));
    daemon.next();
    assert_eq!(daemon.next(), Some(Request::Received));
    assert_eq!(daemon.next(), Some(Request::Goodbye));
    assert_eq!(one.data().unwrap(), bytes);
    assert_eq!(plain.to_vec1::<f32>().unwrap(), [1., 2.]);
    drop((one, plain));
    place.sweep();
    assert!(daemon.quiet_for(Duration::from_millis(100)));

    let detached = place.attach(&daemon).detach().unwrap();
    assert_eq!((detached.tensors, detached.bytes), (0, 0));
}

pub(crate) fn the_lease_lasts_as_long_as_a_tensor_reads_shared_memory(place: &Place) {
    let bytes = blocks(GgmlDType::Q4_0, 4);
    let model = Model::new("m").tensor("a", ElementType::Q4_0, &[4, 512], bytes);
    let daemon = place.serve(model);
    let cache = place.attach(&daemon);
    let tensor = cache.quantized().get_no_shape("a").unwrap();
    drop(cache);
    place.sweep();
    daemon.next();
    assert_eq!(daemon.next(), Some(Request::Received));
    assert!(daemon.quiet_for(Duration::from_millis(100)));
    drop(tensor);
    place.sweep();
    assert_eq!(daemon.next(), Some(Request::Goodbye));
}

pub(crate) fn one_line_gives_a_builder_that_holds_the_lease(place: &Place) {
    let daemon = place.serve(one_tensor());
    let vb = VarBuilder::from_ipc_cache(&daemon.config("m"), DType::F32, &place.device).unwrap();
    assert_eq!(vb.get(1, "a").unwrap().to_vec1::<f32>().unwrap(), [1.]);
    daemon.next();
    assert_eq!(daemon.next(), Some(Request::Received));
    assert!(daemon.quiet_for(Duration::from_millis(50)));
    drop(vb);
    assert_eq!(daemon.next(), Some(Request::Goodbye));
}

pub(crate) fn sixty_four_engines_attach_at_the_same_moment(place: &Place) {
    let mut model = Model::new("m");
    for i in 0..200 {
        model = model.floats(&format!("t.{i:03}"), &[1], &[i as f32]);
    }
    model.per_slab = 10;
    let daemon = place.serve(model);
    let start = Barrier::new(64);
    std::thread::scope(|scope| {
        for _ in 0..64 {
            scope.spawn(|| {
                start.wait();
                let vb = place.attach(&daemon).var_builder(DType::F32);
                for i in [0, 99, 199] {
                    let tensor = vb.get(1, &format!("t.{i:03}")).unwrap();
                    assert_eq!(tensor.to_vec1::<f32>().unwrap(), [i as f32]);
                }
            });
        }
    });
}

pub(crate) fn what_was_served_in_place_and_is_held_by_nobody_is_counted_as_let_go(place: &Place) {
    let model = Model::new("m")
        .floats("a", &[4], &[1., 2., 3., 4.])
        .floats("b", &[8], &[0.; 8])
        .tensor("q", ElementType::Q8_0, &[1, 32], vec![0; 34]);
    let daemon = place.serve(model);
    let cache = place.attach(&daemon);
    let let_go = |bytes: u64| {
        let expected = place.serves_in_place().then_some(bytes);
        assert_eq!(cache.report().let_go, expected);
    };
    let vb = cache.var_builder(DType::F32);
    let_go(0);
    let a = vb.get(4, "a").unwrap();
    let b = vb.get(8, "b").unwrap();
    let view = b.narrow(0, 2, 2).unwrap();
    drop(b);
    let_go(0);
    drop(view);
    let_go(32);
    // One of two is held; and what is asked for again is back.
    drop(vb.get(4, "a").unwrap());
    let b = vb.get(8, "b").unwrap();
    let_go(0);
    drop((a, b));
    let_go(48);
    let q = cache.quantized().get_no_shape("q").unwrap();
    let_go(48);
    drop(q);
    let_go(48 + 34);
}
