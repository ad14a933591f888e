//! The worker on a GPU: what it quantizes lies there as candle makes it.

use candle_core::quantized::QTensor;
use candle_core::{DType, Device, Tensor};
use candle_ipc_cache::checkpoint::{Checkpoint, Options};
use candle_ipc_cache::quantize::{Quantize, TYPES, Target};
use candle_ipc_cache::tensors::ggml_dtype;
use candle_ipc_cache::worker::{LoadOptions, fill};

use crate::support::*;

#[test]
fn quantized_exports_have_candles_own_bytes() {
    let Some((gpu, _alone)) = gpu() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let tensors: Vec<(String, Tensor)> =
        [("a", 300, 512, DType::BF16), ("b", 2304, 1024, DType::F32)]
            .into_iter()
            .map(|(name, rows, columns, dtype)| {
                let values = floats(rows * columns, rows as u64);
                let tensor = Tensor::from_vec(values, (rows, columns), &Device::Cpu).unwrap();
                (name.to_string(), tensor.to_dtype(dtype).unwrap())
            })
            .collect();
    candle_core::safetensors::save(&tensors.iter().cloned().collect(), &path).unwrap();
    let checkpoint = Checkpoint::open(&path, &Options::default()).unwrap();
    for (word, target) in TYPES {
        let Target::As(element) = target else {
            continue;
        };
        let options = LoadOptions {
            device: gpu.id,
            quantize: Some(Quantize::new(word.parse().unwrap())),
            ..LoadOptions::default()
        };
        let loaded = fill(&checkpoint, &options, &|_| {}).unwrap();
        let manifest = &loaded.manifest;
        let mapping = map(&gpu, &loaded.export.slabs, &manifest.slabs).unwrap();
        for (name, tensor) in &tensors {
            let entry = &manifest.tensors[manifest.find(name).unwrap()];
            assert_eq!(entry.element, *element, "{word}");
            let mut found = vec![0; entry.bytes as usize];
            mapping
                .read(entry.slab as usize, entry.offset, &mut found)
                .unwrap();
            let candles = QTensor::quantize(tensor, ggml_dtype(*element).unwrap()).unwrap();
            assert!(*candles.data().unwrap() == found, "{name} as {word}");
        }
        mapping.unmap().unwrap();
    }
}
