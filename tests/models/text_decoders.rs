//! Decoders of one kind: embeddings, blocks of attention and a feed-forward part, and a head.

use candle_transformers::models::*;

use crate::harness::{Case, forward, ids};

pub(crate) fn cases() -> Vec<Case> {
    vec![Case::new("llama", |vb| {
        let config = llama::Config {
            hidden_size: 32,
            intermediate_size: 48,
            vocab_size: 40,
            num_hidden_layers: 2,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            use_flash_attn: false,
            rms_norm_eps: 1e-5,
            rope_theta: 10_000.,
            bos_token_id: None,
            eos_token_id: None,
            rope_scaling: None,
            max_position_embeddings: 32,
            tie_word_embeddings: false,
        };
        let ids = ids(6, 40, vb.device())?;
        let (dtype, device) = (vb.dtype(), vb.device().clone());
        let model = llama::Llama::load(vb, &config)?;
        forward(move || {
            let mut cache = llama::Cache::new(true, dtype, &config, &device)?;
            model.forward(&ids, 0, &mut cache)
        })
    })]
}
