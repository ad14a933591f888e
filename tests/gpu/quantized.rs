//! Quantized tensors over mapped slabs, beside candle's own.

use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{DType, Device, Module, Tensor};
use candle_ipc_cache::manifest::{ALIGNMENT, ElementType, Manifest};
use candle_ipc_cache::slab::cuda::GRANULARITY;
use candle_ipc_cache::tensors::cuda::sweep;
use candle_ipc_cache::tensors::{MappedWeights, TensorError, ggml_dtype};

use crate::support::*;

const BLOCKS: [ElementType; 12] = [
    ElementType::Q4_0,
    ElementType::Q4_1,
    ElementType::Q5_0,
    ElementType::Q5_1,
    ElementType::Q8_0,
    ElementType::Q8_1,
    ElementType::Q2K,
    ElementType::Q3K,
    ElementType::Q4K,
    ElementType::Q5K,
    ElementType::Q6K,
    ElementType::Q8K,
];

/// candle's own quantized tensor on the GPU.
fn own(dtype: GgmlDType, shape: &[usize], device: &Device) -> QTensor {
    let values = floats(shape.iter().product(), 21);
    let host = Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
    QTensor::quantize_onto(&host, dtype, device).unwrap()
}

fn difference(a: &Tensor, b: &Tensor) -> f32 {
    let d = (a - b)
        .unwrap()
        .abs()
        .unwrap()
        .flatten_all()
        .unwrap()
        .max(0)
        .unwrap();
    d.to_scalar::<f32>().unwrap()
}

/// Both answers, or that both refuse.
fn same(what: &str, a: candle_core::Result<Tensor>, b: candle_core::Result<Tensor>) -> bool {
    match (a, b) {
        (Ok(a), Ok(b)) => {
            assert_eq!(difference(&a, &b), 0.0, "{what}");
            true
        }
        (Err(_), Err(_)) => false,
        (a, b) => panic!("{what}: candle's own {a:?}, ours {b:?}"),
    }
}

#[test]
fn quantized_tensors_compute_as_candles_own_do() {
    let Some((gpu, device, _alone)) = engine() else {
        return;
    };
    let shape = [1024usize, 2048];
    let dims = shape.map(|d| d as u64);
    let all: Vec<_> = BLOCKS
        .into_iter()
        .chain([ElementType::F32, ElementType::F16, ElementType::BF16])
        .collect();
    let owns: Vec<QTensor> = all
        .iter()
        .map(|e| own(ggml_dtype(*e).unwrap(), &shape, &device))
        .collect();
    let contents: Vec<Content> = all
        .iter()
        .zip(&owns)
        .map(|(e, own)| (e.as_str(), *e, &dims[..], own.data().unwrap().into_owned()))
        .collect();
    let entry = entry(gpu.id, &contents);
    let weights = entry.map(&device);
    for (element, own) in all.iter().zip(owns) {
        let ours = weights.quantized(entry.find(element.as_str())).unwrap();
        assert_eq!((ours.dtype(), ours.shape()), (own.dtype(), own.shape()));
        assert_eq!(ours.data().unwrap(), own.data().unwrap(), "{element}");
        let again = weights.quantized(entry.find(element.as_str())).unwrap();
        assert!(Arc::ptr_eq(&ours, &again));
        let mut done = Vec::new();
        if same(
            &format!("{element} dequantized"),
            own.dequantize(&device),
            ours.dequantize(&device),
        ) {
            done.push("dequantize".to_string());
        }
        let ids = Tensor::new(&[3u32, 1000, 3], &device).unwrap();
        if same(
            &format!("{element} embedding"),
            own.embedding(&ids),
            ours.embedding(&ids),
        ) {
            done.push("embedding".to_string());
        }
        let own = QMatMul::from_qtensor(own).unwrap();
        let ours = QMatMul::from_arc(ours).unwrap();
        for batch in [1, 8, 64] {
            for dtype in [DType::F32, DType::BF16] {
                let x =
                    Tensor::from_vec(floats(batch * 2048, batch as u64), (batch, 2048), &device)
                        .unwrap();
                let x = x.to_dtype(dtype).unwrap();
                let forward = |m: &QMatMul| m.forward(&x).and_then(|y| y.to_dtype(DType::F32));
                if same(
                    &format!("{element} batch {batch} {dtype:?}"),
                    forward(&own),
                    forward(&ours),
                ) {
                    done.push(format!("{batch}x{dtype:?}"));
                }
            }
        }
        println!("{element}: difference 0 in {}", done.join(", "));
    }
    assert_eq!(
        weights.sweep().tensors,
        0,
        "something still holds a quantized tensor"
    );
    device.synchronize().unwrap();
    drop(weights);
    assert_eq!(sweep().tensors, 0);
    // candle's own context is clean, and what it freed was its own.
    let sum = Tensor::ones((4,), DType::F32, &device)
        .unwrap()
        .sum_all()
        .unwrap();
    assert_eq!(sum.to_scalar::<f32>().unwrap(), 4.0);
}

#[test]
fn experts_compute_as_candles_own_do() {
    let Some((gpu, device, _alone)) = engine() else {
        return;
    };
    let (experts, n, k, batch, top) = (8usize, 256usize, 512usize, 5usize, 2usize);
    let supported = [
        ElementType::Q8_0,
        ElementType::Q2K,
        ElementType::Q3K,
        ElementType::Q4K,
        ElementType::Q5K,
        ElementType::Q6K,
    ];
    let dims = [experts as u64, n as u64, k as u64];
    let x = Tensor::from_vec(floats(batch * k, 31), (batch, 1, k), &device).unwrap();
    let ids: Vec<u32> = (0..batch * top).map(|i| (i * 3 % experts) as u32).collect();
    let ids = Tensor::from_vec(ids, (batch, top), &device).unwrap();
    for element in supported {
        let own = own(ggml_dtype(element).unwrap(), &[experts, n, k], &device);
        let entry = entry(
            gpu.id,
            &[("w", element, &dims, own.data().unwrap().into_owned())],
        );
        let weights = entry.map(&device);
        let ours = weights.quantized(0).unwrap();
        let (a, b) = (
            own.indexed_moe_forward(&x, &ids),
            ours.indexed_moe_forward(&x, &ids),
        );
        assert!(same(&format!("{element} experts"), a, b));
        println!("{element}: indexed_moe_forward, difference 0");
    }
    assert_eq!(sweep().tensors, 0);
}

#[test]
fn a_quantized_tensor_keeps_its_memory_and_gives_it_back() {
    let Some((gpu, device, _alone)) = engine() else {
        return;
    };
    let own = own(GgmlDType::Q4K, &[4096, 4096], &device);
    let data = own.data().unwrap().into_owned();
    let entry = entry(
        gpu.id,
        &[("w", ElementType::Q4K, &[4096, 4096], data.clone())],
    );
    let held = Arc::new(());
    let weights = entry.try_map(&device, held.clone()).unwrap();
    let ours = weights.quantized(0).unwrap();
    drop((entry, weights));
    assert_eq!(sweep().tensors, 1);
    assert_eq!(ours.data().unwrap().into_owned(), data);
    let m = QMatMul::from_arc(ours).unwrap();
    let x = Tensor::from_vec(floats(4096, 41), (1, 4096), &device).unwrap();
    let y = m.forward(&x).unwrap();
    let before = free(&gpu);
    drop(m);
    assert_eq!(sweep().tensors, 0);
    assert_eq!(Arc::strong_count(&held), 1);
    assert_eq!(
        values(&y),
        values(&QMatMul::from_qtensor(own).unwrap().forward(&x).unwrap())
    );
    assert!(
        free_again(&gpu, before + (9 << 20)) >= before + (8 << 20),
        "the memory did not come back"
    );
}

#[test]
fn blocks_without_zeros_behind_them_are_not_adopted() {
    let Some((gpu, device, _alone)) = engine() else {
        return;
    };
    // Fills its slab to the last byte: there is no room for the zeros.
    let rows = GRANULARITY / 144 / 2;
    let bytes = ElementType::Q4K.bytes(&[rows, 512]).unwrap();
    let other = [(
        "w",
        ElementType::Q4K,
        &[rows, 512][..],
        noise(bytes as usize, 51),
    )];
    let mut made = entry(gpu.id, &other);
    let mut manifest = (*made.manifest).clone();
    manifest.slabs = vec![GRANULARITY];
    manifest.tensors[0].offset = (GRANULARITY - bytes) / ALIGNMENT * ALIGNMENT;
    let encoded = manifest.encode(Vec::new()).unwrap();
    made.manifest = Arc::new(Manifest::decode(&encoded).unwrap());
    made.export = export(gpu.id, &[noise(GRANULARITY as usize, 52)]);
    let refused = made.map(&device).quantized(0).unwrap_err();
    println!("{refused}");
    assert!(
        matches!(refused, TensorError::NotInPlace { .. }),
        "{refused}"
    );
}
