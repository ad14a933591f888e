//! Models that take their weights in either form: blocks as quantized layers, or dequantized to plain tensors.
//! What the cache serves must equal candle's own tensors over the same bytes, to the bit.
#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{CpuStorage, DType, Device, Error, Module, Result, Storage, Tensor};
use candle_ipc_cache::manifest::ElementType;
use candle_ipc_cache::tensors::ggml_dtype;
use candle_ipc_cache::{
    Dequantized, FromIpcCache, IpcCache, IpcConfig, MaybeQuantizedEmbedding, MaybeQuantizedLinear,
    MaybeQuantizedVarBuilder,
};
use candle_nn::{Embedding, Linear, VarBuilder};

#[path = "common/stand_in.rs"]
mod stand_in;
use stand_in::{Model, StandIn};

/// Numbers between -2 and 2 without a pattern.
fn noise(count: usize, seed: u64) -> Vec<f32> {
    let mut bytes = vec![0; count];
    let mut hasher = blake3::Hasher::new();
    hasher.update(&seed.to_le_bytes());
    hasher.finalize_xof().fill(&mut bytes);
    bytes.iter().map(|b| (f32::from(*b) - 128.) / 64.).collect()
}

fn tensor(shape: &[usize], seed: u64) -> Tensor {
    Tensor::from_vec(noise(shape.iter().product(), seed), shape, &Device::Cpu).unwrap()
}

/// candle's own quantized tensor.
fn blocks(element: ElementType, shape: &[usize], seed: u64) -> Arc<QTensor> {
    let dtype = ggml_dtype(element).unwrap();
    Arc::new(QTensor::quantize(&tensor(shape, seed), dtype).unwrap())
}

/// Models with tensors of candle's own.
trait With {
    fn blocks(self, name: &str, blocks: &QTensor) -> Self;
    fn plain(self, name: &str, tensor: &Tensor) -> Self;
}

fn dims(shape: &[usize]) -> Vec<u64> {
    shape.iter().map(|d| *d as u64).collect()
}

impl With for Model {
    fn blocks(self, name: &str, blocks: &QTensor) -> Self {
        let mut elements = ElementType::ALL.iter();
        let element = elements.find(|e| ggml_dtype(**e) == Some(blocks.dtype()));
        let bytes = blocks.data().unwrap().to_vec();
        self.tensor(name, *element.unwrap(), &dims(blocks.shape().dims()), bytes)
    }

    fn plain(self, name: &str, tensor: &Tensor) -> Self {
        let element = match tensor.dtype() {
            DType::F32 => ElementType::F32,
            DType::BF16 => ElementType::BF16,
            other => panic!("{other:?}"),
        };
        let mut bytes = Vec::new();
        tensor.write_bytes(&mut bytes).unwrap();
        self.tensor(name, element, &dims(tensor.dims()), bytes)
    }
}

fn attach(config: &IpcConfig) -> IpcCache {
    IpcCache::attach(config, &Device::Cpu).expect("an attach")
}

/// That both are one tensor to the bit: dtype, shape and values.
#[track_caller]
fn assert_same(ours: &Tensor, theirs: &Tensor) {
    assert_eq!((ours.dtype(), ours.dims()), (theirs.dtype(), theirs.dims()));
    let bytes = |tensor: &Tensor| {
        let mut bytes = Vec::new();
        tensor.write_bytes(&mut bytes).unwrap();
        bytes
    };
    assert!(bytes(ours) == bytes(theirs), "values differ in some bit");
}

/// Where a tensor's F32 or BF16 storage begins.
fn address(tensor: &Tensor) -> usize {
    let (storage, _) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(CpuStorage::F32(v)) => v.as_ptr() as usize,
        Storage::Cpu(CpuStorage::BF16(v)) => v.as_ptr() as usize,
        _ => panic!("neither F32 nor BF16 on the CPU"),
    }
}

/// candle's error without the backtrace that RUST_BACKTRACE puts around it.
fn bare(error: Error) -> Error {
    match error {
        Error::WithBacktrace { inner, .. } => bare(*inner),
        other => other,
    }
}

// ------------------------------------------------------------------------------------- dequantized

#[test]
fn dequantized_tensors_equal_candles_own_in_every_block_type_and_are_counted() {
    let types: Vec<_> = ElementType::ALL
        .iter()
        .copied()
        .filter(|e| e.is_quantized())
        .collect();
    assert_eq!(types.len(), 12);
    let mut model = Model::new("m");
    let mut theirs = Vec::new();
    for element in types {
        let own = blocks(element, &[6, 512], 1);
        model = model.blocks(element.as_str(), &own);
        theirs.push((element.as_str(), own));
    }
    model = model.tensor("none", ElementType::Q8_0, &[0, 512], vec![]);
    let daemon = StandIn::serving(model.build());
    for copy in [false, true] {
        let cache = attach(&daemon.config("m").dequantize(true).copy(copy));
        assert_eq!(cache.report().dequantized, Dequantized::default());
        let copied = cache.report().copied_bytes;
        let mut wanted = Dequantized::default();
        for dtype in [DType::F32, DType::BF16] {
            let vb = cache.var_builder(dtype);
            for (name, own) in &theirs {
                let dense = own.dequantize(&Device::Cpu).unwrap();
                let dense = dense.to_dtype(dtype).unwrap();
                assert_same(&vb.get((6, 512), name).unwrap(), &dense);
                wanted.tensors += 1;
                wanted.bytes += own.storage_size_in_bytes() as u64;
                wanted.made_bytes += (6 * 512 * dtype.size_in_bytes()) as u64;
            }
        }
        let report = cache.report();
        assert_eq!(report.dequantized, wanted);
        assert!(report.casts.is_empty());
        assert_eq!(report.copied_bytes, copied);
        let text = report.to_string();
        let line = format!(
            "dequant   {} tensors of {} bytes",
            wanted.tensors, wanted.bytes
        );
        assert!(text.contains(&line), "{text}");
        let vb = cache.var_builder(DType::F32);
        assert_eq!(vb.get((0, 512), "none").unwrap().dims(), &[0, 512]);
        let unchecked = vb.get_unchecked_dtype("Q4_K", DType::F32).unwrap();
        assert_same(&unchecked, &vb.get((6, 512), "Q4_K").unwrap());
    }
}

#[test]
fn plain_requests_for_blocks_are_refused_unless_asked_for_and_the_error_says_how() {
    let model = Model::new("m").blocks("w", &blocks(ElementType::Q4K, &[2, 256], 1));
    let daemon = StandIn::serving(model.build());
    let off = daemon.config("m").option("dequantize", "true").unwrap();
    let off = off.option("dequantize", "off").unwrap();
    for config in [daemon.config("m"), off] {
        let cache = attach(&config);
        let vb = cache.var_builder(DType::F32);
        let maybe = cache.maybe_quantized(DType::F32);
        for error in [
            vb.get((2, 256), "w").unwrap_err(),
            vb.get_unchecked("w").unwrap_err(),
            maybe.get((2, 256), "w").unwrap_err(),
        ] {
            let text = error.to_string();
            for part in [
                "`w`",
                "Q4_K",
                "IpcCache::quantized()",
                "IpcCache::maybe_quantized()",
                "IpcConfig::dequantize(true)",
            ] {
                assert!(text.contains(part), "{part}: {text}");
            }
        }
        assert_eq!(cache.report().dequantized, Dequantized::default());
    }
    let on = daemon.config("m").option("dequantize", "on").unwrap();
    let vb = attach(&on).var_builder(DType::F32);
    assert!(vb.get((2, 256), "w").is_ok());
    let misshapen = bare(vb.get((256, 2), "w").unwrap_err());
    assert!(
        matches!(&misshapen, Error::UnexpectedShape { got, .. } if got.dims() == [2, 256]),
        "{misshapen}"
    );
}

#[test]
fn names_that_share_blocks_share_one_dequantized_tensor() {
    let model = Model::new("m")
        .blocks("embed.weight", &blocks(ElementType::Q6K, &[4, 256], 1))
        .blocks("other", &blocks(ElementType::Q6K, &[4, 256], 2))
        .alias("lm_head.weight", "embed.weight");
    let daemon = StandIn::serving(model.build());
    for copy in [false, true] {
        let cache = attach(&daemon.config("m").dequantize(true).copy(copy));
        for dtype in [DType::F32, DType::BF16] {
            let vb = cache.var_builder(dtype);
            let one = vb.get((4, 256), "embed.weight").unwrap();
            let two = vb.get((4, 256), "lm_head.weight").unwrap();
            assert_eq!(address(&one), address(&two));
            let own = [(); 2].map(|()| vb.get((4, 256), "other").unwrap());
            assert_ne!(address(&own[0]), address(&own[1]));
        }
        // The shared one was made once for each dtype, the other each time.
        assert_eq!(cache.report().dequantized.tensors, 2 + 4);
    }
}

#[test]
fn strict_serves_dequantized_tensors_as_f32_alone() {
    let model = Model::new("m").blocks("w", &blocks(ElementType::Q8_0, &[2, 32], 1));
    let daemon = StandIn::serving(model.build());
    let cache = attach(&daemon.config("m").strict(true).dequantize(true));
    let plain = cache.var_builder(DType::F32).get((2, 32), "w");
    assert_eq!(plain.unwrap().dtype(), DType::F32);
    let refused = cache.var_builder(DType::BF16).get((2, 32), "w");
    let text = refused.unwrap_err().to_string();
    for part in ["`w`", "Q8_0", "BF16", "ask for F32", "quantized()"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(cache.report().dequantized.tensors, 1);
}

#[test]
fn dequantized_tensors_outlive_the_handle_and_hold_no_lease() {
    let own = blocks(ElementType::Q5_1, &[3, 64], 9);
    let daemon = StandIn::serving(Model::new("m").blocks("w", &own).build());
    let cache = attach(&daemon.config("m").dequantize(true));
    let plain = cache.var_builder(DType::F32).get((3, 64), "w").unwrap();
    let left = cache.detach().unwrap();
    assert_eq!((left.tensors, left.builders), (0, 0));
    drop(daemon);
    assert_same(&plain, &own.dequantize(&Device::Cpu).unwrap());
}

// ------------------------------------------------------------------------------------ either form

/// A model's code, once, over whatever builder it is given: ids of shape `(batch, length)` to logits.
struct Tiny {
    embedding: MaybeQuantizedEmbedding,
    norm: Tensor,
    inner: MaybeQuantizedLinear,
    outer: MaybeQuantizedLinear,
    head: MaybeQuantizedLinear,
}

const VOCAB: usize = 40;
const WIDTH: usize = 256;
const INNER: usize = 512;

impl Tiny {
    fn load(vb: &MaybeQuantizedVarBuilder) -> Result<Self> {
        let embedding = vb.pp("embed_tokens").embedding(VOCAB, WIDTH)?;
        let head = match vb.contains_tensor("lm_head.weight") {
            true => vb.pp("lm_head").linear_no_bias(WIDTH, VOCAB)?,
            false => embedding.as_linear()?,
        };
        let layer = vb.pp("layers").pp(0);
        Ok(Self {
            head,
            embedding,
            norm: layer.get(WIDTH, "norm.weight")?,
            inner: layer.pp("inner").linear(WIDTH, INNER)?,
            outer: layer.pp("outer").linear_b(INNER, WIDTH, false)?,
        })
    }

    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let x = self.embedding.forward(ids)?;
        let y = candle_nn::ops::rms_norm(&x, &self.norm, 1e-5)?;
        let y = self.outer.forward(&self.inner.forward(&y)?.silu()?)?;
        self.head.forward(&(x + y)?)
    }
}

/// Weights of [`Tiny`], in F32.
fn weights() -> HashMap<String, Tensor> {
    [
        ("embed_tokens.weight", &[VOCAB, WIDTH][..]),
        ("layers.0.norm.weight", &[WIDTH]),
        ("layers.0.inner.weight", &[INNER, WIDTH]),
        ("layers.0.inner.bias", &[INNER]),
        ("layers.0.outer.weight", &[WIDTH, INNER]),
    ]
    .into_iter()
    .enumerate()
    .map(|(seed, (name, shape))| {
        let small = (tensor(shape, seed as u64) / 8.).unwrap();
        (name.to_string(), small)
    })
    .collect()
}

/// The same with matrices as blocks, and these as candle has them.
fn quantized_weights() -> (Model, HashMap<String, Arc<QTensor>>) {
    let (mut model, mut own) = (Model::new("m"), HashMap::new());
    for (name, tensor) in weights() {
        if tensor.rank() < 2 {
            model = model.plain(&name, &tensor);
            continue;
        }
        let dtype = match name.as_str() {
            "embed_tokens.weight" => GgmlDType::Q6K,
            _ => GgmlDType::Q4K,
        };
        let blocks = QTensor::quantize(&tensor, dtype).unwrap();
        model = model.blocks(&name, &blocks);
        own.insert(name, Arc::new(blocks));
    }
    (model, own)
}

fn ids() -> Tensor {
    Tensor::new(&[[1u32, 39, 7, 7, 0], [2, 3, 4, 5, 6]], &Device::Cpu).unwrap()
}

/// [`Tiny`]'s arithmetic in candle's own words, over its own quantized tensors.
fn by_hand(own: &HashMap<String, Arc<QTensor>>, ids: &Tensor) -> Result<Tensor> {
    let plain = weights();
    let matmul = |name: &str, x: &Tensor| QMatMul::from_arc(own[name].clone())?.forward(x);
    let x = own["embed_tokens.weight"].embedding(ids)?;
    let y = candle_nn::ops::rms_norm(&x, &plain["layers.0.norm.weight"], 1e-5)?;
    let y = matmul("layers.0.inner.weight", &y)?.broadcast_add(&plain["layers.0.inner.bias"])?;
    let y = matmul("layers.0.outer.weight", &y.silu()?)?;
    matmul("embed_tokens.weight", &(x + y)?)
}

#[test]
fn one_model_code_runs_quantized_and_dense_from_the_cache_and_from_a_var_builder() {
    let (model, own) = quantized_weights();
    let daemon = StandIn::serving(model.build());
    let cache = attach(&daemon.config("m"));
    let quantized = Tiny::load(&cache.maybe_quantized(DType::F32)).unwrap();
    assert!(quantized.inner.is_quantized() && quantized.outer.is_quantized());
    assert!(quantized.embedding.is_quantized() && quantized.head.is_quantized());
    let logits = quantized.forward(&ids()).unwrap();
    assert_same(&logits, &by_hand(&own, &ids()).unwrap());
    // Plain tensors alone were copied, and nothing was dequantized.
    let report = cache.report();
    assert_eq!(report.copied_bytes, 4 * (WIDTH + INNER) as u64);
    assert_eq!(report.dequantized, Dequantized::default());

    let tensors = weights();
    let mut model = Model::new("m");
    for (name, tensor) in &tensors {
        model = model.plain(name, tensor);
    }
    let dense = StandIn::serving(model.build());
    let vb = MaybeQuantizedVarBuilder::from_ipc_cache(&dense.config("m"), DType::F32, &Device::Cpu);
    let shared = Tiny::load(&vb.unwrap()).unwrap();
    assert!(!shared.inner.is_quantized() && !shared.embedding.is_quantized());
    assert!(!shared.head.is_quantized());
    let own = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
    let own = Tiny::load(&own.into()).unwrap();
    let dense_logits = own.forward(&ids()).unwrap();
    assert_same(&shared.forward(&ids()).unwrap(), &dense_logits);

    // Quantized and dense are one model, but for rounding.
    let largest = |t: Tensor| {
        t.abs()
            .unwrap()
            .max_all()
            .unwrap()
            .to_scalar::<f32>()
            .unwrap()
    };
    let scale = largest(dense_logits.clone());
    let error = largest((logits - dense_logits).unwrap());
    assert!(error > 0. && error < scale / 10., "{error} of {scale}");
}

#[test]
fn dequantized_weights_make_the_same_code_a_dense_model() {
    let (model, own) = quantized_weights();
    let daemon = StandIn::serving(model.build());
    let cache = attach(&daemon.config("m").dequantize(true));
    let dense = Tiny::load(&cache.var_builder(DType::F32).into()).unwrap();
    assert!(!dense.inner.is_quantized() && !dense.head.is_quantized());
    let mut tensors = weights();
    for (name, blocks) in own {
        tensors.insert(name, blocks.dequantize(&Device::Cpu).unwrap());
    }
    let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
    let theirs = Tiny::load(&vb.into()).unwrap().forward(&ids()).unwrap();
    assert_same(&dense.forward(&ids()).unwrap(), &theirs);
    assert_eq!(cache.report().dequantized.tensors, 3);

    // Blocks stay blocks where the builder knows of them, whatever plain requests are answered with.
    let maybe = cache.maybe_quantized(DType::F32);
    assert!(Tiny::load(&maybe).unwrap().inner.is_quantized());
    let plain = maybe.get((WIDTH, INNER), "layers.0.outer.weight").unwrap();
    assert_eq!(plain.dtype(), DType::F32);
}

#[test]
fn a_quantized_layer_is_candles_qmatmul_and_keeps_its_inputs_dtype() {
    let weight = blocks(ElementType::Q4K, &[48, 512], 3);
    let bias = tensor(&[48], 4).to_dtype(DType::BF16).unwrap();
    let model = Model::new("m")
        .blocks("a.weight", &weight)
        .plain("a.bias", &bias);
    let daemon = StandIn::serving(model.build());
    let cache = attach(&daemon.config("m").strict(true));
    let vb = cache.maybe_quantized(DType::BF16).pp("a");
    let (with, without) = (
        vb.linear(512, 48).unwrap(),
        vb.linear_no_bias(512, 48).unwrap(),
    );
    let qmatmul = QMatMul::from_arc(weight).unwrap();
    let wide_bias = bias.to_dtype(DType::F32).unwrap();
    for shape in [&[1, 512][..], &[9, 512], &[2, 5, 512], &[2, 3, 4, 512]] {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let x = tensor(shape, 5).to_dtype(dtype).unwrap();
            let y = qmatmul.forward(&x.to_dtype(DType::F32).unwrap()).unwrap();
            assert_same(&without.forward(&x).unwrap(), &y.to_dtype(dtype).unwrap());
            let y = y.broadcast_add(&wide_bias).unwrap();
            assert_same(&with.forward(&x).unwrap(), &y.to_dtype(dtype).unwrap());
        }
    }
    let strided = tensor(&[512, 9], 6).t().unwrap();
    let y = qmatmul.forward(&strided.contiguous().unwrap()).unwrap();
    assert_same(&without.forward(&strided).unwrap(), &y);
    assert!(cache.report().casts.is_empty());
}

#[test]
fn a_quantized_embedding_is_candles_own_in_the_builders_dtype_and_its_own_head() {
    let rows = blocks(ElementType::Q6K, &[VOCAB, WIDTH], 3);
    let daemon = StandIn::serving(Model::new("m").blocks("e.weight", &rows).build());
    let cache = attach(&daemon.config("m"));
    let theirs = rows.embedding(&ids()).unwrap();
    for dtype in [DType::F32, DType::BF16] {
        let vb = cache.maybe_quantized(dtype);
        assert_eq!((vb.dtype(), vb.device().is_cpu()), (dtype, true));
        let ours = vb.pp("e").embedding(VOCAB, WIDTH).unwrap();
        let x = theirs.to_dtype(dtype).unwrap();
        assert_eq!(x.dims(), &[2, 5, WIDTH]);
        assert_same(&ours.forward(&ids()).unwrap(), &x);
        let y = QMatMul::from_arc(rows.clone()).unwrap();
        let y = y.forward(&x.to_dtype(DType::F32).unwrap()).unwrap();
        let head = ours.as_linear().unwrap();
        assert_same(&head.forward(&x).unwrap(), &y.to_dtype(dtype).unwrap());
    }
    // The blocks stayed where they lie.
    let one = cache.quantized().get_no_shape("e.weight").unwrap();
    let raw = cache.raw("e.weight").unwrap();
    assert_eq!(one.data().unwrap().as_ptr(), raw.as_ptr());
    assert_eq!(cache.report().copied_bytes, 0);
}

#[test]
fn an_embedding_and_its_head_share_one_storage_in_both_forms() {
    let rows = blocks(ElementType::Q8_0, &[4, 32], 3);
    let holders = Arc::strong_count(&rows);
    let embedding = MaybeQuantizedEmbedding::from_qtensor(rows.clone(), DType::F32).unwrap();
    let head = embedding.as_linear().unwrap();
    assert_eq!(Arc::strong_count(&rows), holders + 2);
    drop((embedding, head));
    assert_eq!(Arc::strong_count(&rows), holders);

    let table = tensor(&[4, 32], 3);
    let model = Model::new("m")
        .plain("e.weight", &table)
        .alias("h.weight", "e.weight");
    let daemon = StandIn::serving(model.build());
    let cache = attach(&daemon.config("m"));
    let vb = cache.maybe_quantized(DType::F32);
    let x = tensor(&[3, 32], 4);
    let theirs = Linear::new(table.clone(), None).forward(&x).unwrap();
    let embedding = vb.pp("e").embedding(4, 32).unwrap();
    let tied = embedding.as_linear().unwrap();
    let aliased = vb.pp("h").linear_no_bias(32, 4).unwrap();
    assert_same(&tied.forward(&x).unwrap(), &theirs);
    assert_same(&aliased.forward(&x).unwrap(), &theirs);
    let ids = Tensor::new(&[3u32, 0], &Device::Cpu).unwrap();
    let rows = Embedding::new(table, 32).forward(&ids).unwrap();
    assert_same(&embedding.forward(&ids).unwrap(), &rows);
    // One copy for the embedding, its head, and the alias.
    assert_eq!(cache.report().copied_bytes, 4 * 4 * 32);
}

#[test]
fn dense_layers_in_bf16_are_candles_own() {
    let weight = tensor(&[6, 32], 1).to_dtype(DType::BF16).unwrap();
    let bias = tensor(&[6], 2).to_dtype(DType::BF16).unwrap();
    let model = Model::new("m")
        .plain("a.weight", &weight)
        .plain("a.bias", &bias);
    let daemon = StandIn::serving(model.build());
    let vb = attach(&daemon.config("m")).maybe_quantized(DType::BF16);
    let x = tensor(&[2, 3, 32], 3).to_dtype(DType::BF16).unwrap();
    let theirs = Linear::new(weight, Some(bias)).forward(&x).unwrap();
    let ours = vb.pp("a").linear(32, 6).unwrap();
    assert!(!ours.is_quantized());
    assert_same(&ours.forward(&x).unwrap(), &theirs);
}

#[test]
fn what_a_layer_lacks_is_named_with_its_path() {
    let model = Model::new("m")
        .blocks("a.q_proj.weight", &blocks(ElementType::Q8_0, &[4, 32], 1))
        .blocks("a.norm.weight", &blocks(ElementType::Q8_0, &[1, 32], 1));
    let daemon = StandIn::serving(model.build());
    let cache = attach(&daemon.config("m"));
    let vb = cache.maybe_quantized(DType::F32).pp("a");
    assert!(vb.contains_tensor("q_proj.weight") && !vb.contains_tensor("a.q_proj.weight"));

    let text = vb.pp("q_porj").linear_no_bias(32, 4).unwrap_err();
    let text = text.to_string();
    assert!(
        text.contains("a.q_porj.weight") && text.contains("nearest: `a.q_proj.weight`"),
        "{text}"
    );
    let text = vb.pp("q_proj").linear(32, 4).unwrap_err().to_string();
    assert!(text.contains("a.q_proj.bias"), "{text}");
    for misshapen in [
        vb.pp("q_proj").linear_no_bias(4, 32).map(drop),
        vb.pp("q_proj").embedding(32, 4).map(drop),
    ] {
        let error = bare(misshapen.unwrap_err());
        let Error::UnexpectedShape { msg, .. } = &error else {
            panic!("{error}")
        };
        assert!(msg.contains("a.q_proj.weight"), "{msg}");
    }
    // A plain layer over blocks: candle's own constructor hears what to call.
    let text = candle_nn::linear_no_bias(32, 4, vb.var_builder().pp("q_proj")).unwrap_err();
    let text = text.to_string();
    assert!(text.contains("maybe_quantized()"), "{text}");
}

#[test]
fn stacked_experts_come_as_one_qtensor_of_three_dimensions() {
    let own = blocks(ElementType::Q4K, &[3, 8, 256], 1);
    let model = Model::new("m").blocks("mlp.experts.weight", &own);
    let daemon = StandIn::serving(model.build());
    for copy in [false, true] {
        let cache = attach(&daemon.config("m").copy(copy));
        let ours = cache.quantized().pp("mlp.experts");
        let ours = ours.get((3, 8, 256), "weight").unwrap();
        assert_eq!(ours.shape().dims3().unwrap(), (3, 8, 256));
        assert_eq!((ours.dtype(), ours.rank()), (own.dtype(), 3));
        assert_eq!(ours.data().unwrap(), own.data().unwrap());
        assert_same(
            &ours.dequantize(&Device::Cpu).unwrap(),
            &own.dequantize(&Device::Cpu).unwrap(),
        );
        let no_matrix = MaybeQuantizedLinear::from_qtensor(ours.clone(), None);
        assert!(no_matrix.is_err());
        assert!(MaybeQuantizedEmbedding::from_qtensor(ours, DType::F32).is_err());
    }
}
