//! What an engine sees: tensors equal to the checkpoint's, proof of identity, and errors that say what to do.
//! The daemon's side is played by `common/stand_in.rs`, because most of these daemons misbehave.
#![allow(clippy::unwrap_used)]

use std::os::fd::OwnedFd;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{CpuStorage, DType, Device, Error, Module, Storage, Tensor};
use candle_ipc_cache::key::Receipt;
use candle_ipc_cache::manifest::{Digest, ElementType, Manifest};
use candle_ipc_cache::protocol::{EpochId, Progress, Refusal, Reply, Request};
use candle_ipc_cache::slab::{SlabError, host};
use candle_ipc_cache::socket::SocketError;
use candle_ipc_cache::tensors::{TensorError, ggml_dtype, plain_dtype};
use candle_ipc_cache::{AttachError, FromIpcCache, HandOff, IpcCache, IpcConfig, Proof};
use candle_nn::VarBuilder;

#[path = "common/stand_in.rs"]
mod stand_in;
use stand_in::{Entry, Model, StandIn};

#[path = "engine/copies.rs"]
mod copies;

/// A wait that no test reaches unless something hangs.
const HANG: Duration = Duration::from_secs(20);

fn attach(daemon: &StandIn) -> IpcCache {
    IpcCache::attach(&daemon.config("m"), &Device::Cpu).expect("an attach")
}

fn refused(config: &IpcConfig) -> AttachError {
    IpcCache::attach(config, &Device::Cpu).expect_err("this attach must be refused")
}

/// candle's error without the backtrace that RUST_BACKTRACE puts around it.
fn bare(error: Error) -> Error {
    match error {
        Error::WithBacktrace { inner, .. } => bare(*inner),
        other => other,
    }
}

/// Bytes without a pattern that a shifted or cut copy could share.
fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let mut hasher = blake3::Hasher::new();
    hasher.update(&seed.to_le_bytes());
    hasher.finalize_xof().fill(&mut bytes);
    bytes
}

/// Bytes of a type in which every value is a usual number, so that equal values mean equal bytes.
fn values(element: ElementType, count: u64) -> Vec<u8> {
    let n = count as usize;
    match element {
        ElementType::F16 => (0..n)
            .flat_map(|i| half::f16::from_f32(i as f32 / 16.).to_le_bytes())
            .collect(),
        ElementType::BF16 => (0..n)
            .flat_map(|i| half::bf16::from_f32((i % 256) as f32).to_le_bytes())
            .collect(),
        ElementType::F32 => (0..n).flat_map(|i| (i as f32 / 3.).to_le_bytes()).collect(),
        ElementType::F64 => (0..n).flat_map(|i| (i as f64 / 3.).to_le_bytes()).collect(),
        _ => noise(
            (count / element.block_elements() * element.block_bytes()) as usize,
            count,
        ),
    }
}

/// The bytes in a tensor's own storage.
fn stored_bytes(tensor: &Tensor) -> Vec<u8> {
    macro_rules! bytes {
        ($values:expr) => {
            $values.iter().flat_map(|v| v.to_le_bytes()).collect()
        };
    }
    let (storage, _) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        panic!("not on the CPU")
    };
    match storage {
        CpuStorage::U8(v)
        | CpuStorage::F4(v)
        | CpuStorage::F6E2M3(v)
        | CpuStorage::F6E3M2(v)
        | CpuStorage::F8E8M0(v) => v.clone(),
        CpuStorage::U32(v) => bytes!(v),
        CpuStorage::I16(v) => bytes!(v),
        CpuStorage::I32(v) => bytes!(v),
        CpuStorage::I64(v) => bytes!(v),
        CpuStorage::BF16(v) => bytes!(v),
        CpuStorage::F16(v) => bytes!(v),
        CpuStorage::F32(v) => bytes!(v),
        CpuStorage::F64(v) => bytes!(v),
        CpuStorage::F8E4M3(v) => v.iter().map(|v| v.to_bits()).collect(),
    }
}

/// Where a tensor's F32 storage begins.
fn address(tensor: &Tensor) -> usize {
    let (storage, _) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(CpuStorage::F32(v)) => v.as_ptr() as usize,
        Storage::Cpu(CpuStorage::F64(v)) => v.as_ptr() as usize,
        _ => panic!("neither F32 nor F64 on the CPU"),
    }
}

// ------------------------------------------------------------------------------------ plain tensors

#[test]
fn every_dtype_that_candle_has_is_served_with_equal_bytes() {
    let plain: Vec<_> = ElementType::ALL
        .iter()
        .copied()
        .filter(|e| plain_dtype(*e).is_some())
        .collect();
    let mut model = Model::new("m");
    model.per_slab = 4;
    for element in &plain {
        model = model.tensor(element.as_str(), *element, &[3, 8], values(*element, 24));
    }
    let daemon = StandIn::serving(model.build());
    let cache = attach(&daemon);
    for element in plain {
        let dtype = plain_dtype(element).expect("it was chosen for that");
        let tensor = cache
            .var_builder(dtype)
            .get((3, 8), element.as_str())
            .expect("a tensor");
        assert_eq!((tensor.dtype(), tensor.dims()), (dtype, &[3, 8][..]));
        let raw = cache.raw(element.as_str()).expect("bytes");
        if element == ElementType::U16 {
            let wide = raw
                .chunks(2)
                .map(|b| u32::from(u16::from_le_bytes([b[0], b[1]])));
            assert_eq!(
                tensor
                    .flatten_all()
                    .and_then(|t| t.to_vec1::<u32>())
                    .unwrap(),
                wide.collect::<Vec<_>>()
            );
        } else {
            assert_eq!(stored_bytes(&tensor), raw, "{element}");
        }
        assert_eq!(raw, values(element, 24), "{element}");
    }
}

#[test]
fn tensors_equal_those_that_candle_loads_from_the_same_safetensors_bytes() {
    let types = [
        (ElementType::F32, safetensors::Dtype::F32),
        (ElementType::BF16, safetensors::Dtype::BF16),
        (ElementType::U16, safetensors::Dtype::U16),
        (ElementType::I64, safetensors::Dtype::I64),
        (ElementType::F4, safetensors::Dtype::F4),
    ];
    let data: Vec<_> = types.iter().map(|(e, _)| values(*e, 24)).collect();
    let views: Vec<_> = types
        .iter()
        .zip(&data)
        .map(|((e, d), bytes)| {
            let view = safetensors::tensor::TensorView::new(*d, vec![2, 12], bytes);
            (e.as_str(), view.unwrap())
        })
        .collect();
    let file = safetensors::serialize(views, None).unwrap();
    let theirs = candle_core::safetensors::load_buffer(&file, &Device::Cpu).unwrap();
    let mut model = Model::new("m");
    for ((element, _), bytes) in types.iter().zip(data) {
        model = model.tensor(element.as_str(), *element, &[2, 12], bytes);
    }
    let daemon = StandIn::serving(model.build());
    let cache = attach(&daemon);
    for (name, theirs) in theirs {
        let ours = cache
            .var_builder(theirs.dtype())
            .get(theirs.shape(), &name)
            .unwrap();
        assert_eq!(stored_bytes(&ours), stored_bytes(&theirs), "{name}");
    }
}

#[test]
fn large_tensors_are_copied_whole_and_counted() {
    // Not a whole number of the pieces that threads copy.
    let count = (2 << 20) + 13;
    let bytes = noise(count * 4, 1);
    let model = Model::new("m").tensor("big", ElementType::U32, &[count as u64], bytes.clone());
    let model = model.tensor(
        "wide",
        ElementType::U16,
        &[count as u64],
        bytes[..2 * count].to_vec(),
    );
    let daemon = StandIn::serving(model.build());
    let cache = attach(&daemon);
    assert_eq!(cache.report().copied_bytes, 0);
    let vb = cache.var_builder(DType::U32);
    assert!(stored_bytes(&vb.get(count, "big").unwrap()) == bytes);
    let wide: Vec<u32> = bytes[..2 * count]
        .chunks(2)
        .map(|b| u32::from(u16::from_le_bytes([b[0], b[1]])))
        .collect();
    assert!(vb.get(count, "wide").unwrap().to_vec1::<u32>().unwrap() == wide);
    assert_eq!(cache.report().copied_bytes, 6 * count as u64);
}

#[test]
fn scalars_and_empty_tensors_keep_their_shapes() {
    let model = Model::new("m")
        .floats("empty", &[0, 4], &[])
        .floats("scalar", &[], &[2.5])
        .floats("tail", &[3, 0], &[]);
    let daemon = StandIn::serving(model.build());
    let vb = attach(&daemon).var_builder(DType::F32);
    assert_eq!(
        vb.get((), "scalar").unwrap().to_scalar::<f32>().unwrap(),
        2.5
    );
    assert_eq!(vb.get((0, 4), "empty").unwrap().elem_count(), 0);
    assert_eq!(vb.get_unchecked("tail").unwrap().dims(), &[3, 0]);
}

#[test]
fn a_type_that_candle_lacks_is_refused_by_name_and_its_bytes_are_there() {
    let lacking = [
        ElementType::Bool,
        ElementType::I8,
        ElementType::U64,
        ElementType::F8E5M2,
        ElementType::C64,
    ];
    let mut model = Model::new("m").floats("good", &[1], &[1.]);
    for element in lacking {
        let name = format!("t.{}", element.as_str());
        model = model.tensor(&name, element, &[3], values(element, 3));
    }
    let daemon = StandIn::serving(model.build());
    let cache = attach(&daemon);
    let vb = cache.var_builder(DType::F32);
    for element in lacking {
        let name = format!("t.{}", element.as_str());
        for error in [
            vb.get(3, &name).unwrap_err(),
            vb.get_unchecked(&name).unwrap_err(),
        ] {
            let text = error.to_string();
            assert!(
                text.contains(&name) && text.contains(element.as_str()) && text.contains("raw("),
                "{text}"
            );
        }
        assert!(vb.contains_tensor(&name));
        assert_eq!(cache.raw(&name).unwrap(), values(element, 3));
    }
    assert_eq!(vb.get(1, "good").unwrap().to_vec1::<f32>().unwrap(), [1.]);
}

#[test]
fn names_that_share_weights_share_one_storage_in_every_dtype() {
    let model = Model::new("m")
        .floats("embed.weight", &[2, 2], &[1., 2., 3., 4.])
        .floats("other", &[2], &[1., 2.])
        .alias("lm_head.weight", "embed.weight");
    let daemon = StandIn::serving(model.build());
    let cache = attach(&daemon);
    for dtype in [DType::F32, DType::F64] {
        let vb = cache.var_builder(dtype);
        let one = vb.get((2, 2), "embed.weight").unwrap();
        let two = vb.pp("lm_head").get((2, 2), "weight").unwrap();
        assert_eq!(address(&one), address(&two));
        let (a, b) = (vb.get(2, "other").unwrap(), vb.get(2, "other").unwrap());
        assert_ne!(address(&a), address(&b));
    }
    assert_eq!(cache.memory_bytes(), 256 + 8);
    assert_eq!(cache.report().tensors, 3);
}

#[test]
fn another_dtype_is_converted_as_candle_does_and_counted() {
    let values = [0.1f32, 1e30, -7.7, 65504.];
    let model = Model::new("m").floats("a", &[4], &values).tensor(
        "ids",
        ElementType::U16,
        &[2],
        [65535u16, 7].iter().flat_map(|v| v.to_le_bytes()).collect(),
    );
    let daemon = StandIn::serving(model.build());
    let cache = attach(&daemon);
    let theirs = Tensor::new(&values, &Device::Cpu).unwrap();
    let theirs = theirs.to_dtype(DType::BF16).unwrap();
    let ours = cache.var_builder(DType::BF16).get(4, "a").unwrap();
    assert_eq!(stored_bytes(&ours), stored_bytes(&theirs));
    cache.var_builder(DType::F32).get(4, "a").unwrap();
    let ids = cache.var_builder(DType::U32).get(2, "ids").unwrap();
    assert_eq!(ids.to_vec1::<u32>().unwrap(), [65535, 7]);
    let casts = cache.report().casts;
    let casts: Vec<_> = casts
        .iter()
        .map(|c| (c.stored, c.asked, c.tensors, c.bytes))
        .collect();
    assert_eq!(
        casts,
        [
            (ElementType::F32, DType::BF16, 1, 16),
            (ElementType::U16, DType::U32, 1, 4)
        ]
    );
}

#[test]
fn strict_serves_stored_dtypes_and_converts_nothing() {
    let model = Model::new("m").floats("a", &[1], &[1.]);
    let daemon = StandIn::serving(model.build());
    let cache = IpcCache::attach(&daemon.config("m").strict(true), &Device::Cpu).unwrap();
    assert!(cache.var_builder(DType::F32).get(1, "a").is_ok());
    let text = cache
        .var_builder(DType::BF16)
        .get(1, "a")
        .unwrap_err()
        .to_string();
    assert!(
        text.contains("`a`") && text.contains("F32") && text.contains("BF16"),
        "{text}"
    );
    assert!(cache.report().casts.is_empty());
}

#[test]
fn a_conversion_that_candle_lacks_names_the_tensor() {
    let model = Model::new("m").tensor("packed", ElementType::F4, &[4], vec![1, 2]);
    let daemon = StandIn::serving(model.build());
    let vb = attach(&daemon).var_builder(DType::F32);
    let text = vb.get(4, "packed").unwrap_err().to_string();
    assert!(text.contains("`packed`") && text.contains("F4"), "{text}");
}

#[test]
fn a_wrong_shape_is_candles_own_error_with_the_name() {
    let model = Model::new("m").floats("layer.weight", &[2, 3], &[0.; 6]);
    let daemon = StandIn::serving(model.build());
    let vb = attach(&daemon).var_builder(DType::F32);
    match bare(vb.pp("layer").get((3, 2), "weight").unwrap_err()) {
        Error::UnexpectedShape { msg, expected, got } => {
            assert!(msg.contains("layer.weight"));
            assert_eq!((expected.dims(), got.dims()), (&[3, 2][..], &[2, 3][..]));
        }
        other => panic!("{other:?}"),
    }
}

// -------------------------------------------------------------------------------------------- names

#[test]
fn a_missing_name_is_candles_own_error_and_names_the_nearest_under_every_prefix() {
    let tails = [
        "embed_tokens.weight",
        "layers.0.self_attn.q_proj.weight",
        "norm.weight",
    ];
    let prefixes = [
        "model.language_model.",
        "language_model.model.",
        "",
        "deberta.",
        "base_model.model.model.",
    ];
    for prefix in prefixes {
        let mut model = Model::new("m");
        for tail in tails {
            model = model.floats(&format!("{prefix}{tail}"), &[1], &[0.]);
        }
        let daemon = StandIn::serving(model.build());
        let vb = attach(&daemon).var_builder(DType::F32);
        for tail in tails {
            let asked = format!("model.{tail}");
            assert!(!vb.contains_tensor(&asked));
            let error = vb.get(1, &asked).unwrap_err();
            let text = error.to_string();
            let Error::Context { inner, .. } = error else {
                panic!("{error:?}")
            };
            assert!(matches!(bare(*inner), Error::CannotFindTensor { path } if path == asked));
            let nearest = format!("nearest: `{prefix}{tail}`");
            assert!(text.contains(&nearest), "{prefix:?}: {text}");
            assert!(text.contains("only the prefix differs"), "{text}");
        }
    }
}

#[test]
fn a_misspelt_name_finds_its_neighbours_and_a_strange_one_finds_none() {
    let mut model = Model::new("m");
    for layer in 0..300 {
        for part in ["q_proj", "k_proj", "v_proj"] {
            let name = format!("model.layers.{layer}.self_attn.{part}.weight");
            model = model.floats(&name, &[1], &[0.]);
        }
    }
    let daemon = StandIn::serving(model.build());
    let vb = attach(&daemon).var_builder(DType::F32);
    for (asked, nearest) in [
        (
            "model.layers.217.self_attn.k_porj.weight",
            "model.layers.217.self_attn.k_proj.weight",
        ),
        (
            "model.layers.217.self_attn.k_proj.weigth",
            "model.layers.217.self_attn.k_proj.weight",
        ),
        (
            "layers.299.self_attn.v_proj.weight",
            "model.layers.299.self_attn.v_proj.weight",
        ),
    ] {
        let text = vb.get(1, asked).unwrap_err().to_string();
        assert!(text.contains(&format!("nearest: `{nearest}`")), "{text}");
    }
    for asked in ["", "ß", "x.y", &"é".repeat(5000)] {
        let text = vb.get(1, asked).unwrap_err().to_string();
        assert!(text.contains("nor one with a name like it"), "{text}");
    }
}

#[test]
fn a_missing_head_is_not_invented_and_the_error_mentions_the_tie() {
    for (held, asked) in [
        ("model.embed_tokens.weight", "lm_head.weight"),
        ("token_embd.weight", "output.weight"),
    ] {
        let daemon = StandIn::serving(Model::new("m").floats(held, &[1], &[0.]).build());
        let vb = attach(&daemon).var_builder(DType::F32);
        assert!(!vb.contains_tensor(asked));
        let text = vb.get(1, asked).unwrap_err().to_string();
        assert!(
            text.contains("tie_word_embeddings") && text.contains(&format!("`{held}`")),
            "{text}"
        );
    }
}

// ----------------------------------------------------------------------------------------- quantized

/// A quantized entry of `rows` times 512, and candle's own tensor over the same bytes.
fn quantized(dtype: GgmlDType, rows: usize) -> (QTensor, Vec<u8>) {
    let values = noise(rows * 512, 3);
    let values: Vec<f32> = values
        .iter()
        .map(|b| (f32::from(*b) - 128.) / 64.)
        .collect();
    let source = Tensor::from_vec(values, (rows, 512), &Device::Cpu).unwrap();
    let tensor = QTensor::quantize(&source, dtype).unwrap();
    let bytes = tensor.data().unwrap().to_vec();
    (tensor, bytes)
}

fn ggml_types() -> impl Iterator<Item = (ElementType, GgmlDType)> {
    ElementType::ALL
        .iter()
        .filter_map(|e| Some((*e, ggml_dtype(*e)?)))
}

#[test]
fn quantized_tensors_over_mapped_pages_compute_exactly_as_candles_own() {
    let rows = 40;
    let mut model = Model::new("m");
    let mut theirs = Vec::new();
    for (element, dtype) in ggml_types() {
        let (tensor, bytes) = quantized(dtype, rows);
        model = model.tensor(element.as_str(), element, &[rows as u64, 512], bytes);
        theirs.push((element.as_str(), Arc::new(tensor)));
    }
    assert_eq!(theirs.len(), 15);
    let daemon = StandIn::serving(model.build());
    let cache = attach(&daemon);
    let vb = cache.quantized();
    let ids = Tensor::new(&[0u32, 39, 7, 7], &Device::Cpu).unwrap();
    for (name, theirs) in theirs {
        let ours = vb.get((rows, 512), name).unwrap();
        assert_eq!(
            (ours.dtype(), ours.shape()),
            (theirs.dtype(), theirs.shape())
        );
        assert_eq!(ours.data().unwrap(), theirs.data().unwrap());
        let bytes = |t: candle_core::Result<Tensor>| stored_bytes(&t.unwrap());
        assert_eq!(
            bytes(ours.dequantize(&Device::Cpu)),
            bytes(theirs.dequantize(&Device::Cpu)),
            "{name}"
        );
        assert_eq!(
            bytes(ours.embedding(&ids)),
            bytes(theirs.embedding(&ids)),
            "{name}"
        );
        for batch in [1, 8, 64] {
            let x = Tensor::randn(0f32, 1., (batch, 512), &Device::Cpu).unwrap();
            for dtype in [DType::F32, DType::F16] {
                let x = x.to_dtype(dtype).unwrap();
                let forward = |t: &Arc<QTensor>| QMatMul::QTensor(t.clone()).forward(&x);
                assert_eq!(
                    bytes(forward(&ours)),
                    bytes(forward(&theirs)),
                    "{name}, batch {batch}, {dtype:?}"
                );
            }
        }
    }
    assert_eq!(cache.report().copied_bytes, 0);
}

#[test]
fn two_requests_for_one_quantized_tensor_share_it_and_it_lies_in_the_mapping() {
    let (_, bytes) = quantized(GgmlDType::Q4K, 4);
    let model = Model::new("m")
        .tensor("a.weight", ElementType::Q4K, &[4, 512], bytes)
        .alias("b.weight", "a.weight");
    let daemon = StandIn::serving(model.build());
    let cache = attach(&daemon);
    let vb = cache.quantized();
    let one = vb.pp("a").get((4, 512), "weight").unwrap();
    let two = vb.pp("b").get_no_shape("weight").unwrap();
    assert!(Arc::ptr_eq(&one, &two));
    let raw = cache.raw("a.weight").unwrap();
    assert_eq!(one.data().unwrap().as_ptr(), raw.as_ptr());
}

#[test]
fn quantized_requests_are_checked_as_candle_checks_them() {
    let (_, bytes) = quantized(GgmlDType::Q8_0, 4);
    let model = Model::new("m")
        .tensor("w", ElementType::Q8_0, &[4, 512], bytes)
        .tensor("empty", ElementType::Q8_0, &[0, 512], vec![])
        .tensor("ids", ElementType::I64, &[1], vec![0; 8])
        .floats("scalar", &[], &[1.]);
    let daemon = StandIn::serving(model.build());
    let cache = attach(&daemon);
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
    let w = vb.get_no_shape("w").unwrap();
    let beyond = Tensor::new(&[4u32], &Device::Cpu).unwrap();
    assert!(w.embedding(&beyond).is_err());
    let empty = vb.get_no_shape("empty").unwrap();
    assert_eq!(empty.dequantize(&Device::Cpu).unwrap().dims(), &[0, 512]);
}

// ------------------------------------------------------------------------------------------ identity

/// A safetensors file of two tensors, and the model that a worker would make of it.
fn checkpoint_file(path: &std::path::Path, values: [f32; 3]) -> Model {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let view = |shape: Vec<usize>, bytes| {
        safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape, bytes).unwrap()
    };
    let file = safetensors::serialize(
        [
            ("a", view(vec![2], &bytes[..8])),
            ("b", view(vec![1], &bytes[8..])),
        ],
        None,
    )
    .unwrap();
    std::fs::write(path, file).unwrap();
    // A receipt taken in the tick of the write cannot vouch for the file.
    std::thread::sleep(Duration::from_millis(60));
    let mut model = Model::new("m").floats("a", &[2], &values[..2]);
    model = model.floats("b", &[1], &values[2..]);
    let open = std::fs::File::open(path).unwrap();
    model.sources = vec![Receipt::of(&open, path).unwrap()];
    model
}

fn touch(path: &std::path::Path) {
    let file = std::fs::File::options().append(true).open(path).unwrap();
    file.set_modified(std::time::SystemTime::now()).unwrap();
}

#[test]
fn a_file_rewritten_under_the_same_header_is_refused_and_one_only_touched_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let model = checkpoint_file(&path, [1., 2., 3.]);
    let daemon = StandIn::serving(model.build());
    assert_eq!(attach(&daemon).report().identity, Proof::SourcesUntouched);

    touch(&path);
    assert_eq!(attach(&daemon).report().identity, Proof::SourcesHashed);

    let length = std::fs::metadata(&path).unwrap().len();
    checkpoint_file(&path, [1., 2., 4.]);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), length);
    let error = refused(&daemon.config("m"));
    let text = error.to_string();
    assert!(
        matches!(&error, AttachError::Stale { file, .. } if *file == path),
        "{text}"
    );
    assert!(
        text.contains("tensor `b`") && !text.contains("tensor `a`"),
        "{text}"
    );
    let (old, new) = (
        Digest::of(&3f32.to_le_bytes()),
        Digest::of(&4f32.to_le_bytes()),
    );
    assert!(
        text.contains(&old.to_string()) && text.contains(&new.to_string()),
        "{text}"
    );
    assert!(text.contains("candle-cache load"), "{text}");

    let trusting = daemon.config("m").trust_name(true);
    let cache = IpcCache::attach(&trusting, &Device::Cpu).unwrap();
    assert_eq!(cache.report().identity, Proof::Trusted);

    std::fs::remove_file(&path).unwrap();
    assert_eq!(attach(&daemon).report().identity, Proof::NameOnly);
}

#[test]
fn a_file_cut_or_replaced_by_something_else_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let daemon = StandIn::serving(checkpoint_file(&path, [1., 2., 3.]).build());
    std::fs::write(&path, b"not a checkpoint").unwrap();
    let text = refused(&daemon.config("m")).to_string();
    assert!(
        text.contains("model.safetensors") && text.contains("trust_name"),
        "{text}"
    );
}

#[test]
fn the_checkpoint_that_an_engine_means_decides() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let daemon = StandIn::serving(checkpoint_file(&path, [1., 2., 3.]).build());
    let with = |path: &std::path::Path| daemon.config("m").checkpoint(path);
    let proof = |path: &std::path::Path| {
        IpcCache::attach(&with(path), &Device::Cpu).map(|c| c.report().identity)
    };
    assert_eq!(proof(&path).unwrap(), Proof::CheckpointUntouched);

    let copy = folder.path().join("copy.safetensors");
    std::fs::copy(&path, &copy).unwrap();
    assert_eq!(proof(&copy).unwrap(), Proof::CheckpointHashed);

    let other = folder.path().join("other.safetensors");
    checkpoint_file(&other, [9., 2., 3.]);
    let error = proof(&other).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, AttachError::Mismatch(_)), "{text}");
    assert!(
        text.contains("tensor `a`") && text.contains("other.safetensors"),
        "{text}"
    );

    let absent = proof(&folder.path().join("absent.safetensors")).unwrap_err();
    assert!(
        absent.to_string().contains("absent.safetensors"),
        "{absent}"
    );
}

#[test]
fn names_and_shapes_that_differ_are_listed_up_to_a_count() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    checkpoint_file(&path, [1., 2., 3.]);
    let mut model = Model::new("m").floats("a", &[1, 2], &[1., 2.]);
    for i in 0..20 {
        model = model.floats(&format!("extra.{i}"), &[1], &[0.]);
    }
    let daemon = StandIn::serving(model.build());
    let text = refused(&daemon.config("m").checkpoint(&path)).to_string();
    assert!(
        text.contains("wanted F32 [2], the cache holds F32 [1, 2]"),
        "{text}"
    );
    assert!(
        text.contains("tensor `b`: wanted F32 [1], the cache holds no such tensor"),
        "{text}"
    );
    assert!(text.contains("and 14 more"), "{text}");
}

#[test]
fn a_pinned_digest_accepts_these_weights_and_no_others() {
    let entry = Model::new("m").floats("a", &[1], &[1.]).build();
    let root = entry.manifest.root;
    let daemon = StandIn::serving(entry);
    let pinned = daemon.config("m").root(root);
    let cache = IpcCache::attach(&pinned, &Device::Cpu).unwrap();
    assert_eq!(cache.report().identity, Proof::Root);
    let other = Digest::of(b"other");
    let text = refused(&daemon.config("m").root(other)).to_string();
    assert!(
        text.contains(&other.to_string()) && text.contains(&root.to_string()),
        "{text}"
    );
}

#[test]
fn an_entry_that_was_loaded_under_another_name_is_refused() {
    let daemon = StandIn::serving(Model::new("other").floats("a", &[1], &[1.]).build());
    let text = refused(&daemon.config("m")).to_string();
    assert!(text.contains("wanted m, the cache holds other"), "{text}");
}

#[test]
fn verifying_names_the_tensor_whose_bytes_are_not_those_that_were_loaded() {
    let good = Model::new("m")
        .floats("a", &[2], &[1., 2.])
        .floats("b", &[1], &[3.]);
    let bad = Model::new("m")
        .floats("a", &[2], &[1., 2.])
        .floats("b", &[1], &[4.]);
    let (mut entry, mut other) = (good.build(), bad.build());
    let honest = StandIn::serving(Model::new("m").floats("a", &[1], &[1.]).build());
    let verified = IpcCache::attach(&honest.config("m").verify(true), &Device::Cpu).unwrap();
    assert!(verified.report().verified);
    std::mem::swap(&mut entry.slabs, &mut other.slabs);
    let daemon = StandIn::serving(entry);
    let error = refused(&daemon.config("m").verify(true));
    assert!(
        matches!(&error, AttachError::Tensor(e) if matches!(&**e, TensorError::Damaged { name, .. } if name == "b")),
        "{error}"
    );
}

// --------------------------------------------------------------------------------- dishonest daemons

fn one_tensor() -> Entry {
    Model::new("m").floats("a", &[1], &[1.]).build()
}

/// A memory file that is not sealed.
fn unsealed(bytes: &[u8]) -> OwnedFd {
    let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("unsealed", flags).unwrap();
    rustix::io::write(&fd, bytes).unwrap();
    fd
}

#[test]
fn memory_that_its_owner_could_still_change_is_refused() {
    let mut entry = one_tensor();
    entry.slabs[0] = unsealed(&[0; 4]);
    let daemon = StandIn::serving(entry);
    let error = refused(&daemon.config("m"));
    let AttachError::Slab { source, .. } = &error else {
        panic!("{error}")
    };
    assert!(
        matches!(&**source, SlabError::NotSealed { what, .. } if what == "slab 0"),
        "{error}"
    );
    let mut entry = one_tensor();
    let bytes = entry.manifest.encode(vec![]).unwrap();
    entry.manifest_fd = unsealed(&bytes);
    let daemon = StandIn::serving(entry);
    let error = refused(&daemon.config("m"));
    assert!(
        error.to_string().contains("the manifest is not sealed"),
        "{error}"
    );
}

#[test]
fn a_slab_of_another_size_is_refused_with_both_sizes() {
    for bytes in [0usize, 3, 5] {
        let mut entry = one_tensor();
        entry.slabs[0] = host::sealed("short", &vec![0; bytes]).unwrap();
        let daemon = StandIn::serving(entry);
        let error = refused(&daemon.config("m"));
        let AttachError::Slab { source, .. } = error else {
            panic!("{error}")
        };
        let SlabError::WrongSize { found, wanted, .. } = *source else {
            panic!("{source}")
        };
        assert_eq!((found, wanted), (bytes as u64, 4));
    }
}

#[test]
fn a_manifest_that_lies_or_is_none_is_refused() {
    let lies: [fn(&mut Manifest); 4] = [
        |m| m.tensors[0].offset = 256,
        |m| m.tensors[0].slab = 1,
        |m| m.tensors[0].bytes = 1 << 40,
        |m| m.tensors[0].shape = vec![1 << 40],
    ];
    for lie in lies {
        let mut entry = one_tensor();
        let mut bytes = entry.manifest.encode(vec![]).unwrap();
        lie(&mut entry.manifest);
        // As a worker of another making would write it: the table is well formed, its claims are not.
        let config = bincode::config::standard().with_fixed_int_encoding();
        let table = bincode::serde::encode_to_vec(&entry.manifest, config).unwrap();
        bytes.truncate(64);
        bytes[16..24].copy_from_slice(&(table.len() as u64).to_le_bytes());
        bytes[24..56].copy_from_slice(&Digest::of(&table).0);
        bytes.extend_from_slice(&table);
        entry.manifest_fd = host::sealed("lie", &bytes).unwrap();
        let daemon = StandIn::serving(entry);
        let error = refused(&daemon.config("m"));
        assert!(matches!(error, AttachError::Manifest { .. }), "{error}");
    }
    for bytes in [&b""[..], &[0; 63], &[0xff; 4096]] {
        let mut entry = one_tensor();
        entry.manifest_fd = host::sealed("noise", bytes).unwrap();
        let daemon = StandIn::serving(entry);
        let error = refused(&daemon.config("m"));
        assert!(matches!(error, AttachError::Manifest { .. }), "{error}");
    }
}

#[test]
fn an_answer_that_does_not_match_its_descriptors_is_refused() {
    let honest = one_tensor().reply();
    let Reply::Attached {
        epoch,
        memory_bytes,
        ..
    } = honest
    else {
        panic!("{honest:?}")
    };
    let answers = [
        Reply::Attached {
            epoch,
            anchor: true,
            slabs: 1,
            memory_bytes,
        },
        Reply::Attached {
            epoch,
            anchor: false,
            slabs: 0,
            memory_bytes,
        },
        Reply::Attached {
            epoch,
            anchor: true,
            slabs: 0,
            memory_bytes,
        },
        Reply::Attached {
            epoch,
            anchor: false,
            slabs: u32::MAX,
            memory_bytes,
        },
        Reply::Attached {
            epoch,
            anchor: false,
            slabs: 1,
            memory_bytes: 5,
        },
        Reply::Done,
    ];
    for answer in answers {
        let entry = one_tensor();
        let reply = answer.clone();
        let daemon = StandIn::answering(Box::new(move |c, _| entry.send(c, &reply)));
        let error = refused(&daemon.config("m"));
        assert!(
            matches!(error, AttachError::BadAnswer { .. }),
            "{answer:?}: {error}"
        );
    }
}

#[test]
fn another_epoch_than_the_one_asked_for_is_refused() {
    let daemon = StandIn::serving(one_tensor());
    let given = EpochId([7; 16]);
    let cache = IpcCache::attach(&daemon.config("m").epoch(given), &Device::Cpu).unwrap();
    assert_eq!(cache.epoch(), given);
    let wanted = EpochId([8; 16]);
    let error = refused(&daemon.config("m").epoch(wanted));
    assert!(
        matches!(error, AttachError::OtherEpoch { wanted: w, found } if w == wanted && found == given),
        "{error}"
    );
}

#[test]
fn something_else_on_the_socket_is_called_so() {
    let daemon = StandIn::answering(Box::new(|c, _| {
        rustix::net::send(
            c,
            b"HTTP/1.1 400 Bad Request",
            rustix::net::SendFlags::NOSIGNAL,
        )
        .unwrap();
    }));
    let text = refused(&daemon.config("m")).to_string();
    assert!(text.contains("no message of candle-ipc-cache"), "{text}");
}

// ------------------------------------------------------------------------------- waits and refusals

#[test]
fn without_a_daemon_the_error_says_where_it_looked() {
    let folder = tempfile::tempdir().unwrap();
    let error = refused(&IpcConfig::new("m").socket_dir(folder.path()));
    let text = error.to_string();
    assert!(matches!(error, AttachError::NoDaemon { .. }), "{text}");
    let socket = folder.path().join("daemon.sock");
    assert!(text.contains(&socket.display().to_string()), "{text}");
    assert!(text.contains("candle-cache serve"), "{text}");
}

#[test]
fn a_daemon_that_never_answers_costs_the_connect_timeout() {
    let daemon = StandIn::answering(Box::new(|_, _| {}));
    let start = Instant::now();
    let patience = Duration::from_millis(200);
    let error = refused(&daemon.config("m").connect_timeout(patience));
    let AttachError::Socket { source, .. } = &error else {
        panic!("{error}")
    };
    assert!(
        matches!(**source, SocketError::Deadline(d) if d == patience),
        "{error}"
    );
    assert!(start.elapsed() < HANG);
}

#[test]
fn a_refusal_carries_its_code_and_the_daemons_reason() {
    let daemon = StandIn::answering(Box::new(|c, _| {
        let reply = Reply::Refused {
            code: Refusal::NoEntry,
            reason: "no entry `m`; there are `n`".into(),
        };
        c.send(&reply, &[], HANG).unwrap();
    }));
    let error = refused(&daemon.config("m"));
    assert!(error.to_string().contains("there are `n`"), "{error}");
    assert!(
        matches!(
            error,
            AttachError::Refused {
                code: Refusal::NoEntry,
                ..
            }
        ),
        "{error}"
    );
}

fn loading(done: u64) -> Reply {
    Reply::Loading(Progress {
        phase: "load".into(),
        done,
        total: 10,
    })
}

#[test]
fn an_entry_that_is_loading_is_waited_for_longer_than_the_connect_timeout() {
    let entry = one_tensor();
    let daemon = StandIn::answering(Box::new(move |c, _| {
        for done in 0..10 {
            c.send(&loading(done), &[], HANG).unwrap();
            std::thread::sleep(Duration::from_millis(60));
        }
        entry.send(c, &entry.reply());
    }));
    let config = daemon
        .config("m")
        .connect_timeout(Duration::from_millis(300));
    let cache = IpcCache::attach(&config, &Device::Cpu).unwrap();
    assert!(cache.var_builder(DType::F32).get(1, "a").is_ok());
}

#[test]
fn the_wait_that_an_engine_is_ready_for_is_told_to_the_daemon() {
    let daemon = StandIn::serving(one_tensor());
    let config = daemon.config("m").state_timeout(Duration::from_secs(77));
    for (config, seconds) in [(config.clone(), 77), (config.wait(false), 0)] {
        let cache = IpcCache::attach(&config, &Device::Cpu).unwrap();
        match daemon.next() {
            Some(Request::Attach { wait, entry, .. }) => {
                assert_eq!(
                    (wait, entry.name.as_str()),
                    (Duration::from_secs(seconds), "m")
                );
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(daemon.next(), Some(Request::Received));
        drop(cache);
        assert_eq!(daemon.next(), Some(Request::Goodbye));
    }
}

#[test]
fn a_load_that_never_ends_is_given_up_with_how_far_it_came() {
    // The stand-in does not refuse when the wait is over, as the daemon would: the engine must.
    let daemon = StandIn::answering(Box::new(
        |c, _| while c.send(&loading(3), &[], HANG).is_ok() {},
    ));
    let config = daemon.config("m").state_timeout(Duration::ZERO);
    let start = Instant::now();
    let error = refused(&config);
    let AttachError::StillLoading { progress, .. } = error else {
        panic!("{error}")
    };
    assert_eq!((progress.done, progress.total), (3, 10));
    assert!(start.elapsed() < HANG);
}

#[test]
fn a_daemon_that_dies_while_an_engine_waits_is_noticed_at_once() {
    let daemon = StandIn::answering(Box::new(|c, _| {
        c.send(&loading(3), &[], HANG).unwrap();
        rustix::net::shutdown(c, rustix::net::Shutdown::Both).unwrap();
    }));
    let start = Instant::now();
    let error = refused(&daemon.config("m"));
    let AttachError::Socket { source, .. } = &error else {
        panic!("{error}")
    };
    assert!(matches!(**source, SocketError::Closed), "{error}");
    assert!(start.elapsed() < HANG);
}

// ---------------------------------------------------------------------------------- lease and lifetime

#[test]
fn tensors_outlive_the_handle_and_the_daemon() {
    let (theirs, bytes) = quantized(GgmlDType::Q4_0, 4);
    let model = Model::new("m")
        .tensor("q", ElementType::Q4_0, &[4, 512], bytes)
        .floats("p", &[2], &[1., 2.]);
    let daemon = StandIn::serving(model.build());
    let cache = attach(&daemon);
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
    assert_eq!(quantized.data().unwrap(), theirs.data().unwrap());
}

#[test]
fn detaching_says_goodbye_and_what_is_still_alive() {
    let (_, bytes) = quantized(GgmlDType::Q4_0, 4);
    let mut model = Model::new("m")
        .tensor("a", ElementType::Q4_0, &[4, 512], bytes.clone())
        .tensor("b", ElementType::Q4_0, &[4, 512], bytes);
    model.per_slab = 1;
    let daemon = StandIn::serving(model.build());
    let cache = attach(&daemon);
    let vb = cache.quantized();
    let one = vb.get_no_shape("a").unwrap();
    drop(vb.get_no_shape("b").unwrap());
    drop(vb);
    let detached = cache.detach().unwrap();
    assert_eq!((detached.tensors, detached.bytes), (1, 4 * 16 * 18));
    assert_eq!((detached.builders, detached.daemon_lost), (0, false));
    daemon.next();
    assert_eq!(daemon.next(), Some(Request::Received));
    assert_eq!(daemon.next(), Some(Request::Goodbye));
    drop(one);
    assert!(daemon.quiet_for(Duration::from_millis(100)));
}

#[test]
fn the_lease_lasts_as_long_as_a_tensor_reads_shared_memory() {
    let (_, bytes) = quantized(GgmlDType::Q4_0, 4);
    let model = Model::new("m").tensor("a", ElementType::Q4_0, &[4, 512], bytes);
    let daemon = StandIn::serving(model.build());
    let cache = attach(&daemon);
    let tensor = cache.quantized().get_no_shape("a").unwrap();
    drop(cache);
    daemon.next();
    assert_eq!(daemon.next(), Some(Request::Received));
    assert!(daemon.quiet_for(Duration::from_millis(100)));
    drop(tensor);
    assert_eq!(daemon.next(), Some(Request::Goodbye));
}

#[test]
fn one_line_gives_a_builder_that_holds_the_lease() {
    let daemon = StandIn::serving(one_tensor());
    let vb = VarBuilder::from_ipc_cache(&daemon.config("m"), DType::F32, &Device::Cpu).unwrap();
    assert_eq!(vb.get(1, "a").unwrap().to_vec1::<f32>().unwrap(), [1.]);
    daemon.next();
    assert_eq!(daemon.next(), Some(Request::Received));
    assert!(daemon.quiet_for(Duration::from_millis(50)));
    drop(vb);
    assert_eq!(daemon.next(), Some(Request::Goodbye));
}

#[test]
fn small_files_and_attributes_come_back_byte_for_byte() {
    let mut model = Model::new("m").floats("a", &[1], &[1.]);
    let config = b"\xef\xbb\xbf{\"x\": Infinity,\r\n}".to_vec();
    model.files = vec![
        ("tokenizer/t.json".into(), noise(100_000, 5)),
        ("config.json".into(), config.clone()),
        ("empty".into(), vec![]),
    ];
    model.attributes = vec![("format".into(), "pt".into())];
    let daemon = StandIn::serving(model.build());
    let cache = attach(&daemon);
    assert_eq!(cache.file("config.json"), Some(&config[..]));
    assert_eq!(cache.file("tokenizer/t.json"), Some(&noise(100_000, 5)[..]));
    assert_eq!(cache.file("empty"), Some(&[][..]));
    assert_eq!(cache.file("absent"), None);
    let names: Vec<_> = cache.files().collect();
    assert_eq!(names, ["config.json", "empty", "tokenizer/t.json"]);
    assert_eq!(cache.attribute("format"), Some("pt"));
    assert_eq!(cache.attribute("absent"), None);
}

#[test]
fn sixty_four_engines_attach_at_the_same_moment() {
    let mut model = Model::new("m");
    for i in 0..200 {
        model = model.floats(&format!("t.{i:03}"), &[1], &[i as f32]);
    }
    model.per_slab = 10;
    let daemon = StandIn::serving(model.build());
    let start = Barrier::new(64);
    std::thread::scope(|scope| {
        for _ in 0..64 {
            scope.spawn(|| {
                start.wait();
                let vb = attach(&daemon).var_builder(DType::F32);
                for i in [0, 99, 199] {
                    let tensor = vb.get(1, &format!("t.{i:03}")).unwrap();
                    assert_eq!(tensor.to_vec1::<f32>().unwrap(), [i as f32]);
                }
            });
        }
    });
}
