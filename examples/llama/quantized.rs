//! A quantized Llama over any source of `QTensor`s: the weight cache, or a GGUF file. Its arithmetic is, operation
//! by operation, that of `candle_transformers::models::quantized_llama`. Names, and the order of the rows that are
//! rotated, are those of GGUF files or of Hugging Face checkpoints.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::quantized::{QMatMul, QTensor};
use candle_core::{D, DType, Device, IndexOp, Module, Result, Tensor, bail};
use candle_transformers::models::llama::{Llama3RopeConfig, Llama3RopeType, LlamaConfig};
use candle_transformers::utils::{build_causal_mask, repeat_kv};

/// Where quantized tensors come from, by name.
pub(crate) trait Quantized {
    /// The tensor of this name.
    fn get(&self, name: &str) -> Result<Arc<QTensor>>;

    /// Whether there is a tensor of this name.
    fn contains(&self, name: &str) -> bool;
}

/// A GGUF file that tensors are read from, each time one is asked for.
pub(crate) struct GgufFile {
    file: File,
    content: Content,
    device: Device,
}

impl GgufFile {
    /// Reads the header of a GGUF file that is in one part.
    pub(crate) fn open(path: &Path, device: &Device) -> Result<Self> {
        let file = File::open(path)?;
        let content = Content::read(&mut &file)?;
        let parts = number(&content, "split.count").unwrap_or(1);
        if parts > 1 {
            bail!(
                "{} is one of {parts} parts: only the cache reads a model in parts",
                path.display()
            )
        }
        Ok(Self {
            file,
            content,
            device: device.clone(),
        })
    }

    /// The header: metadata and places of tensors.
    pub(crate) fn content(&self) -> &Content {
        &self.content
    }
}

impl Quantized for GgufFile {
    fn get(&self, name: &str) -> Result<Arc<QTensor>> {
        let tensor = self.content.tensor(&mut &self.file, name, &self.device)?;
        Ok(Arc::new(tensor))
    }

    fn contains(&self, name: &str) -> bool {
        self.content.tensor_infos.contains_key(name)
    }
}

/// Whose names a checkpoint's tensors have, and whose order of the rows that are rotated.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Form {
    /// A GGUF file's: neighbouring rows of a head are rotated.
    Gguf,
    /// A Hugging Face folder's: a row is rotated with the one half a head further.
    HuggingFace,
}

/// What tensors are called, without the `.weight` at the end.
struct Names {
    embedding: &'static str,
    norm: &'static str,
    output: &'static str,
    /// Followed by the layer's number, and one of those below.
    layers: &'static str,
    attention_norm: &'static str,
    query: &'static str,
    key: &'static str,
    value: &'static str,
    attention_output: &'static str,
    feed_norm: &'static str,
    gate: &'static str,
    up: &'static str,
    down: &'static str,
}

impl Form {
    const fn names(self) -> Names {
        match self {
            Self::Gguf => Names {
                embedding: "token_embd",
                norm: "output_norm",
                output: "output",
                layers: "blk",
                attention_norm: "attn_norm",
                query: "attn_q",
                key: "attn_k",
                value: "attn_v",
                attention_output: "attn_output",
                feed_norm: "ffn_norm",
                gate: "ffn_gate",
                up: "ffn_up",
                down: "ffn_down",
            },
            Self::HuggingFace => Names {
                embedding: "model.embed_tokens",
                norm: "model.norm",
                output: "lm_head",
                layers: "model.layers",
                attention_norm: "input_layernorm",
                query: "self_attn.q_proj",
                key: "self_attn.k_proj",
                value: "self_attn.v_proj",
                attention_output: "self_attn.o_proj",
                feed_norm: "post_attention_layernorm",
                gate: "mlp.gate_proj",
                up: "mlp.up_proj",
                down: "mlp.down_proj",
            },
        }
    }
}

/// The numbers a Llama is built from.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// Names of tensors, order of rows.
    pub(crate) form: Form,
    /// Query heads.
    pub(crate) heads: usize,
    /// Key and value heads; each serves `heads / key_heads` query heads.
    pub(crate) key_heads: usize,
    /// Layers.
    pub(crate) layers: usize,
    /// Width of the residual stream.
    pub(crate) width: usize,
    /// Components of a head that are rotated.
    pub(crate) rotated: usize,
    /// Base of the rotation's wavelengths.
    pub(crate) rope_base: f32,
    /// How long wavelengths are stretched, beyond what the model was first trained for.
    pub(crate) rope_scaling: Option<Llama3RopeConfig>,
    /// Whether the output is the embedding's matrix, even where there is another.
    pub(crate) tied: bool,
    /// Added to a mean square before its root is taken.
    pub(crate) norm_epsilon: f64,
    /// Positions that the model was trained for.
    pub(crate) context: usize,
}

impl Config {
    /// Reads the `llama.*` keys of a GGUF header.
    pub(crate) fn from_gguf(content: &Content) -> Result<Self> {
        let architecture = match content.metadata.get("general.architecture") {
            Some(Value::String(name)) => name.as_str(),
            _ => "",
        };
        if architecture != "llama" {
            bail!("the file's architecture is {architecture:?}, this example runs \"llama\"")
        }
        if number(content, "llama.expert_count").unwrap_or(0) > 1 {
            bail!("the file is a mixture of experts, this example runs dense Llamas")
        }
        let config = Self {
            form: Form::Gguf,
            heads: number(content, "llama.attention.head_count")?,
            key_heads: number(content, "llama.attention.head_count_kv")?,
            layers: number(content, "llama.block_count")?,
            width: number(content, "llama.embedding_length")?,
            rotated: number(content, "llama.rope.dimension_count")?,
            rope_base: match content.metadata.get("llama.rope.freq_base") {
                Some(value) => value.to_f32()?,
                None => 10_000.,
            },
            rope_scaling: None,
            tied: false,
            norm_epsilon: match content
                .metadata
                .get("llama.attention.layer_norm_rms_epsilon")
            {
                Some(value) => f64::from(value.to_f32()?),
                None => bail!("the header lacks llama.attention.layer_norm_rms_epsilon"),
            },
            context: number(content, "llama.context_length")?,
        };
        config.checked()
    }

    /// Reads a Hugging Face `config.json`.
    pub(crate) fn from_json(json: &[u8]) -> Result<Self> {
        let config = llama_config(json)?;
        let heads = config.num_attention_heads;
        let read = Self {
            form: Form::HuggingFace,
            heads,
            key_heads: config.num_key_value_heads(),
            layers: config.num_hidden_layers,
            width: config.hidden_size,
            rotated: config.hidden_size.checked_div(heads).unwrap_or(0),
            rope_base: config.rope_theta,
            rope_scaling: config.rope_scaling,
            tied: config.tie_word_embeddings.unwrap_or(false),
            norm_epsilon: config.rms_norm_eps,
            context: config.max_position_embeddings,
        };
        read.checked()
    }

    fn checked(self) -> Result<Self> {
        let Self {
            heads,
            key_heads,
            width,
            ..
        } = self;
        if heads == 0 || width % heads != 0 {
            bail!("a width of {width} cannot be shared by {heads} heads")
        }
        if key_heads == 0 || heads % key_heads != 0 {
            bail!("{heads} heads cannot share {key_heads} key heads")
        }
        Ok(self)
    }
}

/// Reads a `config.json` that describes a Llama as candle computes it: without biases, and with heads that share
/// the width.
pub(crate) fn llama_config(json: &[u8]) -> Result<LlamaConfig> {
    let read = |error: serde_json::Error| candle_core::Error::msg(format!("config.json: {error}"));
    let all: serde_json::Value = serde_json::from_slice(json).map_err(read)?;
    match all["model_type"].as_str() {
        Some("llama") => {}
        Some(kind) => {
            bail!("config.json says model_type {kind:?}, this example runs \"llama\"")
        }
        None => bail!("config.json says no model_type, this example runs \"llama\""),
    }
    for bias in ["attention_bias", "mlp_bias"] {
        if all[bias] == true {
            bail!("config.json says {bias}, this example runs Llamas without biases")
        }
    }
    // Without a base of its own, candle would take the usual one and rotate wrongly.
    if all["rope_theta"].is_null() && all["rope_parameters"].is_object() {
        bail!("config.json says rope_parameters, this example reads rope_theta and rope_scaling")
    }
    let config: LlamaConfig = serde_json::from_slice(json).map_err(read)?;
    if let Some(head) = all["head_dim"].as_u64()
        && head.checked_mul(config.num_attention_heads as u64) != Some(config.hidden_size as u64)
    {
        bail!(
            "config.json says {} heads of {head}, this example runs Llamas whose heads share the width of {}",
            config.num_attention_heads,
            config.hidden_size
        )
    }
    Ok(config)
}

fn number(content: &Content, key: &str) -> Result<usize> {
    match content.metadata.get(key) {
        Some(value) => Ok(value.to_u64()? as usize),
        None => bail!("the header lacks {key}"),
    }
}

/// A Llama with its key and value cache.
pub(crate) struct Llama {
    embedding: QMatMul,
    layers: Vec<Layer>,
    norm: Norm,
    output: QMatMul,
}

impl Llama {
    /// Builds the model for at most `context` positions. Tensors are used where they lie.
    pub(crate) fn load(
        weights: &dyn Quantized,
        config: &Config,
        context: usize,
        device: &Device,
    ) -> Result<Self> {
        let tensor = |name: &str| weights.get(&format!("{name}.weight"));
        let linear = |name: &str| QMatMul::from_arc(tensor(name)?);
        let norm = |name: &str| {
            Ok::<_, candle_core::Error>(Norm {
                weight: tensor(name)?.dequantize(device)?,
                epsilon: config.norm_epsilon as f32,
            })
        };
        let rotation = Rotation::new(config, context, DType::F32, device)?;
        let names = config.form.names();
        let embedding = linear(names.embedding)?;
        // A checkpoint without an output matrix reuses the embedding's.
        let own = !config.tied && weights.contains(&format!("{}.weight", names.output));
        let output = match own {
            true => linear(names.output)?,
            false => embedding.clone(),
        };
        let mut layers = Vec::with_capacity(config.layers.min(1024));
        for index in 0..config.layers {
            let name = |part: &str| format!("{}.{index}.{part}", names.layers);
            layers.push(Layer {
                attention_norm: norm(&name(names.attention_norm))?,
                query: linear(&name(names.query))?,
                key: linear(&name(names.key))?,
                value: linear(&name(names.value))?,
                attention_output: linear(&name(names.attention_output))?,
                feed_norm: norm(&name(names.feed_norm))?,
                gate: linear(&name(names.gate))?,
                up: linear(&name(names.up))?,
                down: linear(&name(names.down))?,
                heads: Heads::new(config.heads, config.key_heads, &rotation)?,
            });
        }
        Ok(Self {
            embedding,
            layers,
            norm: norm(names.norm)?,
            output,
        })
    }

    /// Logits, shape `(batch, vocabulary)`, after the last of `tokens`, shape `(batch, length)`, which stand at
    /// `position` and on. Position 0 begins a new text.
    pub(crate) fn forward(&mut self, tokens: &Tensor, position: usize) -> Result<Tensor> {
        let (_batch, length) = tokens.dims2()?;
        let mask = match length {
            1 => None,
            _ => Some(build_causal_mask(length, position, tokens.device())?),
        };
        // Stock code dequantizes the whole embedding first, to the same values; rows alone leave it shared.
        let mut x = self.embedding.embedding(tokens)?;
        for layer in &mut self.layers {
            x = layer.forward(&x, mask.as_ref(), position)?;
        }
        let x = self.norm.forward(&x)?;
        let x = x.i((.., length - 1, ..))?;
        self.output.forward(&x)
    }
}

struct Layer {
    attention_norm: Norm,
    query: QMatMul,
    key: QMatMul,
    value: QMatMul,
    attention_output: QMatMul,
    feed_norm: Norm,
    gate: QMatMul,
    up: QMatMul,
    down: QMatMul,
    heads: Heads,
}

impl Layer {
    fn forward(&mut self, x: &Tensor, mask: Option<&Tensor>, position: usize) -> Result<Tensor> {
        let attention = self.attend(&self.attention_norm.forward(x)?, mask, position)?;
        let x = (attention + x)?;
        let fed = self.feed_norm.forward(&x)?;
        let gate = self.gate.forward(&fed)?;
        let up = self.up.forward(&fed)?;
        let fed = self.down.forward(&(candle_nn::ops::silu(&gate)? * up)?)?;
        fed + x
    }

    fn attend(&mut self, x: &Tensor, mask: Option<&Tensor>, position: usize) -> Result<Tensor> {
        let (q, k, v) = (
            self.query.forward(x)?,
            self.key.forward(x)?,
            self.value.forward(x)?,
        );
        let y = self.heads.attend(q, k, v, mask, position)?;
        self.attention_output.forward(&y)
    }
}

/// One layer's heads, and the keys and values that they have seen.
pub(crate) struct Heads {
    queries: usize,
    /// Each serves `queries / keys` query heads.
    keys: usize,
    rotation: Rotation,
    minus_infinity: Tensor,
    past: Option<(Tensor, Tensor)>,
}

impl Heads {
    /// Heads that have seen nothing.
    pub(crate) fn new(queries: usize, keys: usize, rotation: &Rotation) -> Result<Self> {
        Ok(Self {
            queries,
            keys,
            rotation: rotation.clone(),
            minus_infinity: Tensor::new(f32::NEG_INFINITY, rotation.cosines.device())?,
            past: None,
        })
    }

    /// What the heads make of queries, keys and values, each of shape `(batch, length, heads * head)`, which stand at
    /// `position` and on: a tensor of the queries' shape. Computed in F32. Position 0 begins a new text.
    pub(crate) fn attend(
        &mut self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Option<&Tensor>,
        position: usize,
    ) -> Result<Tensor> {
        let split = |x: Tensor, heads: usize| {
            let (batch, length, width) = x.dims3()?;
            x.reshape((batch, length, heads, width / heads))?
                .transpose(1, 2)?
                .contiguous()
        };
        let q = self.rotation.apply(&split(q, self.queries)?, position)?;
        let k = self.rotation.apply(&split(k, self.keys)?, position)?;
        let v = split(v, self.keys)?;
        let (k, v) = match &self.past {
            Some((past_k, past_v)) if position > 0 => (
                Tensor::cat(&[past_k, &k], 2)?,
                Tensor::cat(&[past_v, &v], 2)?,
            ),
            _ => (k, v),
        };
        self.past = Some((k.clone(), v.clone()));

        let dtype = q.dtype();
        let q = q.to_dtype(DType::F32)?;
        let k = repeat_kv(k, self.queries / self.keys)?.to_dtype(DType::F32)?;
        let v = repeat_kv(v, self.queries / self.keys)?.to_dtype(DType::F32)?;
        let scores = (q.matmul(&k.t()?)? / (q.dim(D::Minus1)? as f64).sqrt())?;
        let scores = match mask {
            None => scores,
            Some(mask) => {
                let mask = mask.broadcast_as(scores.shape())?;
                let hidden = self.minus_infinity.broadcast_as(scores.shape())?;
                mask.where_cond(&hidden, &scores)?
            }
        };
        let scores = candle_nn::ops::softmax_last_dim(&scores)?;
        let y = scores.matmul(&v.contiguous()?)?.to_dtype(dtype)?;
        y.transpose(1, 2)?.flatten_from(2)
    }
}

struct Norm {
    weight: Tensor,
    epsilon: f32,
}

impl Norm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        candle_nn::ops::rms_norm(x, &self.weight, self.epsilon)
    }
}

/// Rotary position embedding over the pairs that a checkpoint's form gives.
#[derive(Clone)]
pub(crate) struct Rotation {
    form: Form,
    cosines: Tensor,
    sines: Tensor,
}

impl Rotation {
    /// The tables for positions below `context`, in `dtype`.
    pub(crate) fn new(
        config: &Config,
        context: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let frequencies = (0..config.rotated)
            .step_by(2)
            .map(|i| 1f32 / config.rope_base.powf(i as f32 / config.rotated as f32));
        let frequencies: Vec<f32> = match &config.rope_scaling {
            Some(scaling) if matches!(scaling.rope_type, Llama3RopeType::Llama3) => frequencies
                .map(|frequency| stretched(frequency, scaling))
                .collect(),
            _ => frequencies.collect(),
        };
        let frequencies = Tensor::new(frequencies, device)?.unsqueeze(0)?;
        let positions = Tensor::arange(0, context as u32, device)?
            .to_dtype(DType::F32)?
            .unsqueeze(D::Minus1)?;
        let angles = positions.matmul(&frequencies)?;
        Ok(Self {
            form: config.form,
            cosines: angles.cos()?.to_dtype(dtype)?,
            sines: angles.sin()?.to_dtype(dtype)?,
        })
    }

    /// Rotates `x`, shape `(batch, heads, length, head)`, which stands at `position` and on.
    pub(crate) fn apply(&self, x: &Tensor, position: usize) -> Result<Tensor> {
        let length = x.dim(2)?;
        let cosines = self.cosines.narrow(0, position, length)?;
        let sines = self.sines.narrow(0, position, length)?;
        match self.form {
            Form::Gguf => candle_nn::rotary_emb::rope_i(x, &cosines, &sines),
            Form::HuggingFace => candle_nn::rotary_emb::rope(x, &cosines, &sines),
        }
    }
}

/// A frequency in radians a position, scaled as of Llama 3.1 and as candle's dense Llama does: high ones stay, low
/// ones are divided by the factor, and those between go over from one to the other.
fn stretched(frequency: f32, scaling: &Llama3RopeConfig) -> f32 {
    let trained = scaling.original_max_position_embeddings as f32;
    let wavelength = 2. * std::f32::consts::PI / frequency;
    if wavelength < trained / scaling.high_freq_factor {
        return frequency;
    }
    if wavelength > trained / scaling.low_freq_factor {
        return frequency / scaling.factor;
    }
    let high = (trained / wavelength - scaling.low_freq_factor)
        / (scaling.high_freq_factor - scaling.low_freq_factor);
    (1. - high) * frequency / scaling.factor + high * frequency
}
