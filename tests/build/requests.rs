//! What a `VarBuilder` can do to a request on its way, all of it at once: right values, and copies counted.

use candle_core::{DType, Device, Tensor};
use candle_ipc_cache::manifest::ElementType;
use candle_ipc_cache::{Cast, IpcCache};
use half::bf16;

use crate::stand_in::{Model, StandIn};

const VALUES: [f32; 4] = [1., -2.5, 3., 0.125];

fn serve() -> StandIn {
    let halves = VALUES.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes());
    let model = Model::new("m")
        .floats("a.w", &[2, 2], &VALUES)
        .tensor("b.w", ElementType::BF16, &[4], halves.collect())
        .alias("tied.w", "a.w");
    StandIn::serving(model.build())
}

#[track_caller]
fn assert_values(tensor: &Tensor, dtype: DType) {
    assert_eq!(tensor.dtype(), dtype);
    let values = tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
    assert_eq!(values.to_vec1::<f32>().unwrap(), VALUES);
}

#[test]
fn every_way_to_bend_a_request_gives_the_right_values_and_is_counted() {
    let daemon = serve();
    let cache = IpcCache::attach(&daemon.config("m"), &Device::Cpu).unwrap();
    let vb = cache.var_builder(DType::F32);
    let copied = |bytes: u64| assert_eq!(cache.report().copied_bytes, bytes);
    let cast = |stored, asked, tensors, bytes| Cast {
        stored,
        asked,
        tensors,
        bytes,
    };

    // As it is stored, and twice: candle's host tensors are copies each.
    let first = vb.get(4, "b.w");
    copied(8);
    let other = vb
        .pp("b")
        .get_with_hints_dtype(4, "w", Default::default(), DType::BF16);
    copied(16);
    assert_values(&first.unwrap(), DType::F32);
    assert_values(&other.unwrap(), DType::BF16);
    let casts = [cast(ElementType::BF16, DType::F32, 1, 8)];
    assert_eq!(cache.report().casts, casts);

    // The names of one tensor share it, so that asking again copies nothing.
    for name in ["a.w", "tied.w", "a.w"] {
        assert_values(&vb.get((2, 2), name).unwrap(), DType::F32);
        copied(16 + 16);
    }

    let bent = vb
        .pp("x.y")
        .set_prefix("b")
        .to_dtype(DType::F16)
        .set_device(Device::Cpu);
    let tensor = bent.get(4, "w").unwrap();
    assert_values(&tensor, DType::F16);
    copied(32 + 8);
    // candle's own renamed builder keeps the prefix of the one that it renames: from the root, then.
    let renamed = bent.root().rename_f(|name: &str| name.replace("b.", "a."));
    let renamed = renamed.set_prefix("b").to_dtype(DType::F16);
    let tensor = renamed.get((2, 2), "w").unwrap();
    assert_values(&tensor, DType::F16);
    assert!(renamed.contains_tensor("w") && !renamed.contains_tensor("v"));
    // Another dtype of a tensor with two names: another copy.
    copied(40 + 16);
    let casts = cache.report().casts;
    assert!(casts.contains(&cast(ElementType::BF16, DType::F16, 1, 8)));
    assert!(casts.contains(&cast(ElementType::F32, DType::F16, 1, 16)));

    // candle's `get_unchecked` takes the dtype that the builder was made with.
    let unchecked = vb.to_dtype(DType::F64).get_unchecked("b.w").unwrap();
    assert_values(&unchecked, DType::F32);
    let unchecked = vb.get_unchecked_dtype("b.w", DType::F64).unwrap();
    assert_values(&unchecked, DType::F64);
    copied(56 + 8 + 8);
    assert_eq!(cache.report().let_go, None);
}

#[test]
fn a_model_that_bends_requests_is_built_and_its_errors_are_listed() {
    let daemon = serve();
    let cache = IpcCache::attach(&daemon.config("m"), &Device::Cpu).unwrap();
    let build = |length: usize| {
        cache.build(DType::F32, move |vb| {
            let vb = vb.set_device(Device::Cpu).to_dtype(DType::F16);
            let vb = vb.rename_f(|name: &str| name.replace("c.", "b."));
            Ok((vb.get((2, 2), "a.w")?, vb.pp("c").get(length, "w")?))
        })
    };
    let (a, b) = build(4).unwrap();
    assert_values(&a, DType::F16);
    assert_values(&b, DType::F16);
    let error = build(3).unwrap_err();
    let found = error.unmet().expect("a wrong shape");
    assert_eq!(found.misshapen[0].name, "b.w");
    assert_eq!(
        (&found.misshapen[0].asked, &found.misshapen[0].held),
        (&vec![vec![3]], &vec![4])
    );
}
