//! The dense Llama: candle's own model and configuration, over whatever `VarBuilder` it is given.
//! The same call builds it from the cache and from files.

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama::{Cache, Llama};

use crate::quantized::llama_config;

/// Candle's Llama with its key and value cache.
pub(crate) struct Dense {
    llama: Llama,
    cache: Cache,
    empty: Cache,
    context: usize,
}

impl Dense {
    /// Builds the model that `config`, a `config.json`, describes, for at most `context` positions.
    pub(crate) fn load(
        weights: VarBuilder<'static>,
        config: &[u8],
        context: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let mut config = llama_config(config)?.into_config(false);
        // The rotation table has a row for every position: a model trained for many would pay for all of them.
        config.max_position_embeddings = config.max_position_embeddings.min(context);
        let empty = Cache::new(true, dtype, &config, device)?;
        Ok(Self {
            llama: Llama::load(weights, &config)?,
            cache: empty.clone(),
            empty,
            context: config.max_position_embeddings,
        })
    }

    /// Positions that it has room for.
    pub(crate) fn context(&self) -> usize {
        self.context
    }

    /// Logits, shape `(batch, vocabulary)`, after the last of `tokens`, shape `(batch, length)`, which stand at
    /// `position` and on. Position 0 begins a new text.
    pub(crate) fn forward(
        &mut self,
        tokens: &Tensor,
        position: usize,
    ) -> candle_core::Result<Tensor> {
        if position == 0 {
            self.cache = self.empty.clone();
        }
        self.llama.forward(tokens, position, &mut self.cache)
    }
}
