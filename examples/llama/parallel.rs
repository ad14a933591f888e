//! A dense Llama spread over several processes, each with a part of every matrix and a GPU of its own. The parts add
//! up: what one rank computes is summed over all of them, twice a layer. Nothing is held whole but the norms.

use std::rc::Rc;

use candle_core::{D, DType, IndexOp, Module, Result, Tensor, bail};
use candle_nn::var_builder::{Backend, Shard, VarBuilderArgs};
use candle_nn::{Linear, RmsNorm};
use candle_transformers::utils::build_causal_mask;

use crate::quantized::{Config, Heads, Rotation};

/// The ranks that a model is spread over, as one of them sees them.
pub(crate) trait Group {
    /// This rank's number, from 0.
    fn rank(&self) -> usize;

    /// How many there are.
    fn size(&self) -> usize;

    /// The sum over the ranks' tensors, which have one shape. Every rank gets the same.
    fn sum(&self, part: &Tensor) -> Result<Tensor>;
}

/// One rank's part of a Llama, with its part of the key and value cache.
pub(crate) struct Parallel {
    /// Rows of the embedding: those of the tokens from `rank * rows` on.
    embedding: Tensor,
    layers: Vec<Layer>,
    norm: RmsNorm,
    /// As many rows of the matrix that makes logits.
    output: Linear,
    group: Rc<dyn Group>,
}

struct Layer {
    attention_norm: RmsNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    attention_output: Linear,
    feed_norm: RmsNorm,
    gate: Linear,
    up: Linear,
    down: Linear,
    /// This rank's.
    heads: Heads,
    group: Rc<dyn Group>,
}

/// Reads one rank's parts.
struct Parts<'a, B: Backend> {
    weights: VarBuilderArgs<'a, B>,
    shard: Shard,
}

impl<B: Backend<Hints = Shard>> Parts<'_, B> {
    fn part(&self, name: &str, dim: usize) -> Result<Tensor> {
        // The shape is the part's own, and follows from the hint.
        let shard = Shard { dim, ..self.shard };
        self.weights.pp(name).get_with_hints((), "weight", shard)
    }

    /// A matrix of which this rank makes some of the outputs.
    fn outputs(&self, name: &str) -> Result<Linear> {
        Ok(Linear::new(self.part(name, 0)?, None))
    }

    /// A matrix of which this rank takes some of the inputs.
    fn inputs(&self, name: &str) -> Result<Linear> {
        Ok(Linear::new(self.part(name, 1)?, None))
    }

    fn norm(&self, name: &str, config: &Config) -> Result<RmsNorm> {
        let whole = Shard::default();
        let weight = self
            .weights
            .pp(name)
            .get_with_hints(config.width, "weight", whole)?;
        Ok(RmsNorm::new(weight, config.norm_epsilon))
    }
}

impl Parallel {
    /// Builds this rank's part, one of two or more, of the model that `config` describes, for at most `context` positions.
    pub(crate) fn load<B: Backend<Hints = Shard>>(
        weights: VarBuilderArgs<'_, B>,
        config: &Config,
        context: usize,
        group: Rc<dyn Group>,
    ) -> Result<Self> {
        let (rank, size) = (group.rank(), group.size());
        if !config.heads.is_multiple_of(size) || !config.key_heads.is_multiple_of(size) {
            bail!(
                "{} heads and {} key heads cannot be spread over {size} processes",
                config.heads,
                config.key_heads
            )
        }
        let (dtype, device) = (weights.dtype(), weights.device().clone());
        let rotation = Rotation::new(config, context, dtype, &device)?;
        let parts = Parts {
            weights,
            shard: Shard {
                dim: 0,
                rank,
                world_size: size,
            },
        };
        let mut layers = Vec::with_capacity(config.layers.min(1024));
        for index in 0..config.layers {
            let name = |part: &str| format!("model.layers.{index}.{part}");
            layers.push(Layer {
                attention_norm: parts.norm(&name("input_layernorm"), config)?,
                query: parts.outputs(&name("self_attn.q_proj"))?,
                key: parts.outputs(&name("self_attn.k_proj"))?,
                value: parts.outputs(&name("self_attn.v_proj"))?,
                attention_output: parts.inputs(&name("self_attn.o_proj"))?,
                feed_norm: parts.norm(&name("post_attention_layernorm"), config)?,
                gate: parts.outputs(&name("mlp.gate_proj"))?,
                up: parts.outputs(&name("mlp.up_proj"))?,
                down: parts.inputs(&name("mlp.down_proj"))?,
                heads: Heads::new(config.heads / size, config.key_heads / size, &rotation)?,
                group: group.clone(),
            });
        }
        let embedding = parts.part("model.embed_tokens", 0)?;
        let output = match config.tied {
            true => Linear::new(embedding.clone(), None),
            false => parts.outputs("lm_head")?,
        };
        Ok(Self {
            embedding,
            layers,
            norm: parts.norm("model.norm", config)?,
            output,
            group,
        })
    }

    /// Logits in F32, shape `(1, vocabulary)`, after the last of `tokens`, shape `(1, length)`, which stand at
    /// `position` and on. Position 0 begins a new text. Every rank must call it with the same.
    pub(crate) fn forward(&mut self, tokens: &Tensor, position: usize) -> Result<Tensor> {
        let (_batch, length) = tokens.dims2()?;
        let mask = match length {
            1 => None,
            _ => Some(build_causal_mask(length, position, tokens.device())?),
        };
        let mut x = self.embed(tokens)?;
        for layer in &mut self.layers {
            x = layer.forward(&x, mask.as_ref(), position)?;
        }
        let x = self.norm.forward(&x)?;
        let x = x.i((.., length - 1, ..))?.contiguous()?;
        // Each rank has some of the logits, and zeros for the others': the sum puts them beside each other.
        let part = self.output.forward(&x)?;
        let (rank, rows) = (self.group.rank(), part.dim(D::Minus1)?);
        let after = (self.group.size() - rank - 1) * rows;
        let padded = part.pad_with_zeros(D::Minus1, rank * rows, after)?;
        self.group.sum(&padded)?.to_dtype(DType::F32)
    }

    /// The tokens' rows, of which this rank has some, and zeros for the others'.
    fn embed(&self, tokens: &Tensor) -> Result<Tensor> {
        let (batch, length) = tokens.dims2()?;
        let (rows, width) = self.embedding.dims2()?;
        let first = (self.group.rank() * rows) as u32;
        let ids = tokens.flatten_all()?.to_vec1::<u32>()?;
        let mine = |id: &u32| {
            (*id >= first)
                .then(|| id - first)
                .filter(|i| (*i as usize) < rows)
        };
        let rows_of: Vec<u32> = ids.iter().map(|id| mine(id).unwrap_or(0)).collect();
        let kept: Vec<f32> = ids
            .iter()
            .map(|id| f32::from(u8::from(mine(id).is_some())))
            .collect();
        let device = self.embedding.device();
        let kept = Tensor::new(kept, device)?
            .to_dtype(self.embedding.dtype())?
            .unsqueeze(1)?;
        let rows_of = Tensor::new(rows_of, device)?;
        let part = self
            .embedding
            .index_select(&rows_of, 0)?
            .broadcast_mul(&kept)?;
        self.group.sum(&part)?.reshape((batch, length, width))
    }
}

impl Layer {
    fn forward(&mut self, x: &Tensor, mask: Option<&Tensor>, position: usize) -> Result<Tensor> {
        let attention = self.attend(&self.attention_norm.forward(x)?, mask, position)?;
        let x = (attention + x)?;
        let fed = self.feed_norm.forward(&x)?;
        let gate = candle_nn::ops::silu(&self.gate.forward(&fed)?)?;
        let fed = self.down.forward(&(gate * self.up.forward(&fed)?)?)?;
        self.group.sum(&fed)? + x
    }

    fn attend(&mut self, x: &Tensor, mask: Option<&Tensor>, position: usize) -> Result<Tensor> {
        let (q, k, v) = (
            self.query.forward(x)?,
            self.key.forward(x)?,
            self.value.forward(x)?,
        );
        let y = self.heads.attend(q, k, v, mask, position)?;
        self.group.sum(&self.attention_output.forward(&y)?)
    }
}
