//! Weights that an engine copies into memory of its own, and what it hears on a lease.
//! A copy must equal what is mapped, and leave nothing mapped behind.

use std::sync::mpsc::channel;

use candle_ipc_cache::protocol::STEP;

use super::*;

/// A model with a tensor of every type, some of odd shapes, and a tied name.
fn everything() -> Model {
    let mut model = Model::new("m")
        .floats("empty", &[0, 4], &[])
        .floats("scalar", &[], &[2.5])
        .alias("tied", "F32");
    model.per_slab = 5;
    for element in ElementType::ALL.iter().copied() {
        if element.is_quantized() {
            let dtype = ggml_dtype(element).expect("every quantized type is one of GGML's");
            let (_, bytes) = quantized(dtype, 4);
            model = model.tensor(element.as_str(), element, &[4, 512], bytes);
        } else {
            model = model.tensor(element.as_str(), element, &[3, 8], values(element, 24));
        }
    }
    model
}

fn attach_copy(daemon: &StandIn) -> IpcCache {
    IpcCache::attach(&daemon.config("m").copy(true), &Device::Cpu).expect("an attach")
}

#[test]
fn a_copy_says_goodbye_at_attach_and_outlives_the_daemon() {
    let daemon = StandIn::serving(everything().build());
    let cache = attach_copy(&daemon);
    daemon.next();
    assert_eq!(daemon.next(), Some(Request::Received));
    assert_eq!(daemon.next(), Some(Request::Goodbye));
    drop(daemon);
    assert!(!cache.daemon_lost());
    let scalar = cache.var_builder(DType::F32).get((), "scalar").unwrap();
    assert_eq!(scalar.to_scalar::<f32>().unwrap(), 2.5);
    let detached = cache.detach().unwrap();
    assert_eq!((detached.tensors, detached.bytes), (0, 0));
}

#[test]
fn nothing_of_a_copied_entry_stays_mapped_but_its_manifest() {
    let model = Model::new("m").tensor("a", ElementType::U8, &[1 << 20], noise(1 << 20, 3));
    let entry = model.build();
    let slab = rustix::fs::fstat(&entry.slabs[0]).unwrap().st_ino;
    let mapped = |inode: u64| {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let inode = inode.to_string();
        maps.lines()
            .any(|line| line.split_whitespace().nth(4) == Some(&inode))
    };
    let daemon = StandIn::serving(entry);
    let shared = attach(&daemon);
    assert!(mapped(slab));
    drop(shared);
    let copy = attach_copy(&daemon);
    assert!(!mapped(slab));
    let tensor = copy.var_builder(DType::U8).get(1 << 20, "a").unwrap();
    assert!(stored_bytes(&tensor) == noise(1 << 20, 3));
}

#[test]
fn copied_tensors_equal_mapped_ones_in_every_type() {
    let model = everything();
    let bytes: usize = model.tensors.iter().map(|t| t.3.len()).sum();
    let no_tensor = ["BOOL", "I8", "U64", "F8_E5M2", "C64"];
    let daemon = StandIn::serving(model.build());
    let (mapped, copy) = (attach(&daemon), attach_copy(&daemon));
    assert_eq!(copy.report().copied_bytes, bytes as u64);
    assert!(copy.report().copy && !mapped.report().copy);
    for entry in &mapped.manifest().tensors {
        let (name, element) = (&entry.name, entry.element);
        if let Some(dtype) = plain_dtype(element) {
            let ours = copy.var_builder(dtype).get_unchecked(name).unwrap();
            let theirs = mapped.var_builder(dtype).get_unchecked(name).unwrap();
            assert_eq!(ours.dims(), theirs.dims());
            assert_eq!(stored_bytes(&ours), stored_bytes(&theirs), "{name}");
        }
        // candle takes no scalar as a QTensor: both say so.
        let ours = copy.quantized().get_no_shape(name);
        let theirs = mapped.quantized().get_no_shape(name);
        match (ours, theirs) {
            (Ok(ours), Ok(theirs)) => {
                assert_eq!(
                    (ours.dtype(), ours.shape()),
                    (theirs.dtype(), theirs.shape())
                );
                assert_eq!(ours.data().unwrap(), theirs.data().unwrap(), "{name}");
            }
            (Err(ours), Err(theirs)) => {
                let first_line = |e: Error| e.to_string().lines().next().map(String::from);
                assert_eq!(first_line(ours), first_line(theirs), "{name}");
            }
            (ours, theirs) => panic!("{name}: {ours:?}, {theirs:?}"),
        }
        match copy.raw(name) {
            Ok(raw) => assert_eq!(raw, mapped.raw(name).unwrap(), "{name}"),
            Err(e) => assert!(e.to_string().contains("ask for the tensor"), "{e}"),
        }
        if no_tensor.contains(&element.as_str()) {
            assert!(copy.raw(name).is_ok(), "{name}");
        }
    }
}

#[test]
fn a_copied_quantized_tensor_computes_exactly_as_the_mapped_one() {
    let daemon = StandIn::serving(everything().build());
    let (mapped, copy) = (attach(&daemon), attach_copy(&daemon));
    let x = Tensor::rand(-1f32, 1., (3, 512), &Device::Cpu).unwrap();
    for (element, _) in ggml_types().filter(|(e, _)| e.is_quantized() && *e != ElementType::Q8_1) {
        let product = |cache: &IpcCache| {
            let weight = cache.quantized().get((4, 512), element.as_str()).unwrap();
            QMatMul::from_arc(weight).unwrap().forward(&x).unwrap()
        };
        assert_eq!(
            stored_bytes(&product(&mapped)),
            stored_bytes(&product(&copy)),
            "{element}"
        );
    }
}

#[test]
fn each_copied_tensor_is_copied_once_and_every_later_copy_is_counted() {
    let model = Model::new("m")
        .floats("a", &[1, 32], &[1.; 32])
        .alias("tied", "a");
    let daemon = StandIn::serving(model.build());
    let cache = attach_copy(&daemon);
    let vb = cache.var_builder(DType::F32);
    let one = vb.get((1, 32), "a").unwrap();
    for name in ["a", "tied"] {
        assert_eq!(address(&vb.get((1, 32), name).unwrap()), address(&one));
    }
    assert_eq!(cache.report().copied_bytes, 128);
    let quantized = cache.quantized();
    let one = quantized.get((1, 32), "a").unwrap();
    assert!(Arc::ptr_eq(&one, &quantized.get((1, 32), "tied").unwrap()));
    assert_eq!(cache.report().copied_bytes, 256);
}

#[test]
fn a_copy_of_damaged_memory_is_refused_where_verifying_was_asked_for() {
    let mut entry = one_tensor();
    entry.slabs[0] = host::sealed("other", &2f32.to_le_bytes()).unwrap();
    let daemon = StandIn::serving(entry);
    let error = refused(&daemon.config("m").copy(true).verify(true));
    assert!(matches!(error, AttachError::Tensor(_)), "{error}");
}

#[test]
fn a_hand_off_without_an_answer_leaves_the_copy_in_use() {
    let daemon = StandIn::answering(Box::new(|c, _| {
        let entry = one_tensor();
        entry.send(c, &entry.reply());
        // Whatever comes next is not answered.
        let _ = c.receive::<Request>(HANG);
        let _ = c.receive::<Request>(HANG);
        rustix::net::shutdown(c, rustix::net::Shutdown::Both).unwrap();
    }));
    let cache = IpcCache::attach(&daemon.config("m").hand_off(true), &Device::Cpu).unwrap();
    let report = cache.report();
    assert!(matches!(report.hand_off, Some(HandOff::Unknown { .. })));
    assert!(report.copy && report.to_string().contains("hand-off  not known"));
    assert!(cache.var_builder(DType::F32).get(1, "a").is_ok());
}

#[test]
fn an_engine_takes_everything_that_is_said_on_its_lease() {
    // Far more than a socket holds: somebody must read them.
    const WORDS: usize = 5_000;
    let (said, all) = channel();
    let said = std::sync::Mutex::new(said);
    let daemon = StandIn::answering(Box::new(move |c, _| {
        let entry = one_tensor();
        entry.send(c, &entry.reply());
        let taken = (0..WORDS).all(|_| c.send(&Reply::Sweep, &[], HANG).is_ok());
        let strange = Reply::Done;
        let taken = taken && c.send(&strange, &[], HANG).is_ok();
        said.lock().unwrap().send(taken).unwrap();
    }));
    let cache = attach(&daemon);
    assert_eq!(all.recv_timeout(HANG + STEP), Ok(true));
    assert!(!cache.daemon_lost());
    assert!(cache.var_builder(DType::F32).get(1, "a").is_ok());
    daemon.next();
    assert_eq!(daemon.next(), Some(Request::Received));
    drop(cache);
    assert_eq!(daemon.next(), Some(Request::Goodbye));
}
