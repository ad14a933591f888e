//! Encoders with decoders that attend to them.

use candle_transformers::models::*;
use serde_json::json;

use super::{TOKENS, VOCABULARY, config};
use crate::harness::{Case, forward, ids};

pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case::f32_only("marian", |vb| {
            let config = marian::Config {
                vocab_size: VOCABULARY as usize,
                decoder_vocab_size: Some(VOCABULARY as usize),
                max_position_embeddings: 32,
                encoder_layers: 2,
                encoder_ffn_dim: 48,
                encoder_attention_heads: 4,
                decoder_layers: 2,
                decoder_ffn_dim: 48,
                decoder_attention_heads: 4,
                d_model: 32,
                ..marian::Config::opus_mt_fr_en()
            };
            let ids = ids(TOKENS, VOCABULARY, vb.device())?;
            let mut model = marian::MTModel::new(&config, vb)?;
            forward(move || {
                model.reset_kv_cache();
                let encoded = model.encoder().forward(&ids, 0)?;
                model.decode(&ids, &encoded, 0)
            })
        }),
        Case::new("t5::T5EncoderModel", |vb| {
            let config = config(t5())?;
            let ids = ids(TOKENS, VOCABULARY, vb.device())?;
            let mut model = t5::T5EncoderModel::load(vb, &config)?;
            forward(move || {
                model.clear_kv_cache();
                model.forward(&ids)
            })
        })
        .by_hand(SHARED),
        Case::f32_only("t5::T5ForConditionalGeneration", |vb| {
            let config = config(t5())?;
            let ids = ids(TOKENS, VOCABULARY, vb.device())?;
            let mut model = t5::T5ForConditionalGeneration::load(vb, &config)?;
            forward(move || {
                model.clear_kv_cache();
                model.forward(&ids, &ids)
            })
        })
        .by_hand(SHARED),
    ]
}

/// Where the embeddings lie in most checkpoints: the constructor looks whether it is there.
const SHARED: &[(&str, &[usize])] = &[("shared.weight", &[VOCABULARY as usize, 32])];

fn t5() -> serde_json::Value {
    json!({
        "d_ff": 48,
        "d_kv": 8,
        "d_model": 32,
        "dropout_rate": 0.0,
        "eos_token_id": 1,
        "feed_forward_proj": "gated-gelu",
        "initializer_factor": 1.0,
        "is_encoder_decoder": true,
        "num_heads": 4,
        "num_layers": 2,
        "pad_token_id": 0,
        "relative_attention_num_buckets": 8,
    })
}
