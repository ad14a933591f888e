//! Quantized tensors over mapped memory, beside candle's own over the same blocks.

use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{DType, Device, Error, Module, Result, Tensor};
use candle_ipc_cache::manifest::ElementType;

use super::{bare, blocks, ggml_types, matrix};
use crate::place::{Place, stored_bytes};
use crate::stand_in::Model;

/// Whether both answer, and then with equal bytes.
pub(super) fn same(what: &str, theirs: Result<Tensor>, ours: Result<Tensor>) -> bool {
    match (theirs, ours) {
        (Ok(theirs), Ok(ours)) => {
            assert_eq!(theirs.dims(), ours.dims(), "{what}");
            assert!(stored_bytes(&theirs) == stored_bytes(&ours), "{what}");
            true
        }
        (Err(_), Err(_)) => false,
        (theirs, ours) => panic!("{what}: candle's own {theirs:?}, ours {ours:?}"),
    }
}

pub(crate) fn quantized_tensors_over_mapped_memory_compute_exactly_as_candles_own(place: &Place) {
    let rows = 40;
    let mut model = Model::new("m");
    let mut theirs = Vec::new();
    for (element, dtype) in ggml_types() {
        let tensor = place.quantize(&matrix(rows), dtype).unwrap();
        let bytes = tensor.data().unwrap().to_vec();
        model = model.tensor(element.as_str(), element, &[rows as u64, 512], bytes);
        theirs.push((element.as_str(), Arc::new(tensor)));
    }
    assert_eq!(theirs.len(), 15);
    let daemon = place.serve(model);
    let cache = place.attach(&daemon);
    let vb = cache.quantized();
    let ids = Tensor::new(&[0u32, 39, 7, 7], &place.device).unwrap();
    for (name, theirs) in theirs {
        let ours = vb.get((rows, 512), name).unwrap();
        assert_eq!(
            (ours.dtype(), ours.shape()),
            (theirs.dtype(), theirs.shape())
        );
        assert_eq!(ours.data().unwrap(), theirs.data().unwrap());
        let dequantize = |t: &QTensor| t.dequantize(&Device::Cpu);
        assert!(same(name, dequantize(&theirs), dequantize(&ours)));
        assert_eq!(
            same(name, theirs.embedding(&ids), ours.embedding(&ids)),
            place.embeds(ours.dtype()),
            "{name}, embedding"
        );
        for batch in [1, 8, 64] {
            let x = Tensor::randn(0f32, 1., (batch, 512), &Device::Cpu).unwrap();
            for dtype in [DType::F32, DType::F16] {
                let x = x.to_dtype(dtype).unwrap().to_device(&place.device).unwrap();
                let forward = |t: &Arc<QTensor>| QMatMul::QTensor(t.clone()).forward(&x);
                let what = format!("{name}, batch {batch}, {dtype:?}");
                assert_eq!(
                    same(&what, forward(&theirs), forward(&ours)),
                    place.multiplies(ours.dtype()),
                    "{what}"
                );
            }
        }
    }
    assert_eq!(cache.report().copied_bytes, 0);
}

pub(crate) fn two_requests_for_one_quantized_tensor_share_it_and_it_lies_in_the_mapping(
    place: &Place,
) {
    let model = Model::new("m")
        .floats("a", &[2], &[1., 2.])
        .tensor(
            "b.weight",
            ElementType::Q4K,
            &[4, 512],
            blocks(GgmlDType::Q4K, 4),
        )
        .alias("c.weight", "b.weight");
    let daemon = place.serve(model);
    let cache = place.attach(&daemon);
    let vb = cache.quantized();
    let one = vb.pp("b").get((4, 512), "weight").unwrap();
    let two = vb.pp("c").get_no_shape("weight").unwrap();
    assert!(Arc::ptr_eq(&one, &two));
    let manifest = cache.manifest();
    let entry = |name| &manifest.tensors[manifest.find(name).unwrap()];
    let (a, b) = (entry("a"), entry("b.weight"));
    assert_eq!(a.slab, b.slab);
    let slab = place.mapped_address(&cache, "a") - a.offset as usize;
    assert_eq!(place.blocks_address(&one), slab + b.offset as usize);
}

pub(crate) fn quantized_requests_are_checked_as_candle_checks_them(place: &Place) {
    let model = Model::new("m")
        .tensor(
            "w",
            ElementType::Q8_0,
            &[4, 512],
            blocks(GgmlDType::Q8_0, 4),
        )
        .tensor("empty", ElementType::Q8_0, &[0, 512], vec![])
        .tensor("ids", ElementType::I64, &[1], vec![0; 8])
        .floats("scalar", &[], &[1.]);
    let daemon = place.serve(model);
    let cache = place.attach(&daemon);
    let vb = cache.quantized();
    let plain = cache.var_builder(DType::F32).get((4, 512), "w");
    let text = plain.unwrap_err().to_string();
    assert!(
        text.contains("`w`") && text.contains("quantized()"),
        "{text}"
    );
    let misshapen = bare(vb.get((512, 4), "w").unwrap_err());
    assert!(matches!(misshapen, Error::UnexpectedShape { .. }));
    assert!(vb.contains_key("w") && !vb.contains_key("v"));
    let missing = vb.get_no_shape("v").unwrap_err().to_string();
    assert!(missing.contains("cannot find tensor v"), "{missing}");
    let ids = vb.get_no_shape("ids").unwrap_err().to_string();
    assert!(ids.contains("`ids`") && ids.contains("I64"), "{ids}");
    let scalar = vb.get_no_shape("scalar").unwrap_err().to_string();
    assert!(scalar.contains("`scalar`"), "{scalar}");

    // candle's CUDA kernels read the row that is not there, which for these four rows is zeros, and none is launched
    // for an empty tensor. What candle's own tensor does, ours does; on the host that is known.
    let own = |values: &Tensor| place.quantize(values, GgmlDType::Q8_0).unwrap();
    let w = vb.get_no_shape("w").unwrap();
    let beyond = Tensor::new(&[4u32], &place.device).unwrap();
    let theirs = own(&matrix(4)).embedding(&beyond);
    let ours = w.embedding(&beyond);
    assert_eq!(ours.is_ok(), theirs.is_ok());
    assert!(ours.is_err() || !place.is_host());
    let empty = vb.get_no_shape("empty").unwrap();
    assert_eq!(empty.shape().dims(), &[0, 512]);
    let nothing = Tensor::zeros((0, 512), DType::F32, &Device::Cpu).unwrap();
    let dims = |t: &QTensor| Some(t.dequantize(&Device::Cpu).ok()?.dims().to_vec());
    assert_eq!(dims(&empty), dims(&own(&nothing)));
    assert!(!place.is_host() || dims(&empty) == Some(vec![0, 512]));
}
