//! Decoders whose blocks carry a state on from token to token, all of them or some.

use candle_core::Tensor;
use candle_nn::VarBuilder;
use candle_transformers::models::*;
use serde_json::json;

use super::{TOKENS, VOCABULARY, config, growing_decoder};
use crate::harness::{Case, Forward, forward, ids};

/// Tokens of a forward pass that takes one at a time.
const STEPS: usize = 3;

pub(crate) fn cases() -> Vec<Case> {
    vec![
        growing_decoder!("based", based::Model, {
            "n_embd": 32,
            "n_inner": 64,
            "n_layer": 3,
            "n_head": 4,
            "alt_mixer_layers": [1],
            "alt_mixer_2_layers": [2],
            "alt_mixer": { "num_heads": 4, "feature_dim": 4, "feature_map": { "input_dim": 4 } },
            "alt_mixer_2": { "num_heads": 4, "window_size": 8 }
        }),
        Case::new("granitemoehybrid", |vb| {
            let config: granitemoehybrid::GraniteMoeHybridConfig = config(json!({
                "shared_intermediate_size": 48
            }))?;
            let config = config.into_config(false);
            let ids = ids(TOKENS, VOCABULARY, vb.device())?;
            let (dtype, device) = (vb.dtype(), vb.device().clone());
            let model = granitemoehybrid::GraniteMoeHybrid::load(vb, &config)?;
            forward(move || {
                let mut cache =
                    granitemoehybrid::GraniteMoeHybridCache::new(true, dtype, &config, &device)?;
                model.forward(&ids, 0, &mut cache)
            })
        }),
        Case::new("lfm2", |vb| {
            let config: lfm2::Lfm2Config = config(json!({
                "block_ffn_dim_multiplier": 1.0,
                "block_multiple_of": 8,
                "layer_types": ["conv", "full_attention"],
            }))?;
            let config = config.into_config(false);
            let ids = ids(TOKENS, VOCABULARY, vb.device())?;
            let (dtype, device) = (vb.dtype(), vb.device().clone());
            let model = lfm2::Model::new(&config, vb)?;
            forward(move || {
                let mut cache = lfm2::Cache::new(true, dtype, &config, &device)?;
                model.forward(&ids, 0, &mut cache)
            })
        }),
        Case::new("mamba", |vb| {
            let config: mamba::Config = config(json!({
                "d_model": 32, "n_layer": 2, "pad_vocab_size_multiple": 8
            }))?;
            let (dtype, device) = (vb.dtype(), vb.device().clone());
            let ids = ids(STEPS, VOCABULARY, &device)?;
            let model = mamba::Model::new(&config, vb)?;
            forward(move || {
                let mut state = mamba::State::new(1, &config, dtype, &device)?;
                each(STEPS, |i| {
                    model.forward(&ids.narrow(1, i, 1)?.squeeze(1)?, &mut state)
                })
            })
        }),
        Case::new("mamba2", |vb| {
            let config: mamba2::Config = serde_json::from_value(json!({
                "d_model": 32,
                "n_layer": 2,
                "d_state": 8,
                "headdim": 16,
                "pad_vocab_size_multiple": 8,
                "vocab_size": VOCABULARY,
            }))?;
            let (dtype, device) = (vb.dtype(), vb.device().clone());
            let ids = ids(STEPS, VOCABULARY, &device)?;
            let model = mamba2::Model::new(&config, vb)?;
            Ok(Box::new(move || {
                let mut state = mamba2::State::new(1, &config, dtype, &device)?;
                let prefilled = model.forward_prefill(&ids, &mut state, 4)?;
                let next = ids.narrow(1, 0, 1)?.squeeze(1)?;
                Ok(vec![prefilled, model.forward(&next, &mut state)?])
            }))
        }),
        growing_decoder!("recurrent_gemma", recurrent_gemma::Model, {
            "attention_window_size": 16,
            "block_types": ["recurrent", "attention"],
            "conv1d_width": 4,
            "hidden_activation": "gelu_pytorch_tanh",
            "logits_soft_cap": 30.0,
            "partial_rotary_factor": 0.5
        }),
        Case::f32_only("rwkv_v5", |vb| {
            let config: rwkv_v5::Config = config(rwkv())?;
            let device = vb.device().clone();
            let ids = ids(STEPS, VOCABULARY, &device)?;
            let model = rwkv_v5::Model::new(&config, vb)?;
            forward(move || {
                let mut state = rwkv_v5::State::new(1, &config, &device)?;
                each(STEPS, |i| model.forward(&ids.narrow(1, i, 1)?, &mut state))
            })
        }),
        Case::f32_only("rwkv_v6", |vb| {
            let config: rwkv_v5::Config = config(rwkv())?;
            let device = vb.device().clone();
            let ids = ids(STEPS, VOCABULARY, &device)?;
            let model = rwkv_v6::Model::new(&config, vb)?;
            forward(move || {
                let mut state = rwkv_v5::State::new(1, &config, &device)?;
                each(STEPS, |i| model.forward(&ids.narrow(1, i, 1)?, &mut state))
            })
        }),
        Case::new("rwkv_v7 (V7)", |vb| rwkv_v7(vb, "V7")).by_hand(LORA),
        Case::new("rwkv_v7 (V7a)", |vb| rwkv_v7(vb, "V7a")).by_hand(LORA),
        Case::new("rwkv_v7 (V7b)", |vb| rwkv_v7(vb, "V7b")).by_hand(LORA),
    ]
}

/// One after the other, the outputs side by side.
fn each(
    tokens: usize,
    mut step: impl FnMut(usize) -> candle_core::Result<Tensor>,
) -> candle_core::Result<Tensor> {
    let outputs: Vec<_> = (0..tokens)
        .map(|i| step(i)?.flatten_all())
        .collect::<candle_core::Result<_>>()?;
    Tensor::cat(&outputs, 0)
}

fn rwkv() -> serde_json::Value {
    json!({
        "attention_hidden_size": 32,
        "head_size": 8,
        "intermediate_size": 48,
        "num_attention_heads": 8,
        "rescale_every": 6,
    })
}

/// The constructor asks for these without their shapes, to learn the ranks.
const LORA: &[(&str, &[usize])] = &[
    ("blocks.0.att.w1", &[32, 4]),
    ("blocks.0.att.a1", &[32, 5]),
    ("blocks.0.att.v1", &[32, 6]),
    ("blocks.0.att.g1", &[32, 7]),
];

fn rwkv_v7(vb: VarBuilder<'_>, version: &str) -> anyhow::Result<Forward> {
    let config: rwkv_v7::Config = config(json!({ "head_size": 8, "version": version }))?;
    let (dtype, device) = (vb.dtype(), vb.device().clone());
    let model = rwkv_v7::Model::new(&config, vb)?;
    forward(move || {
        let mut state = rwkv_v7::State::new_with_dtype(&config, &device, dtype)?;
        model.forward_seq(&[3, 10, 17], &mut state)
    })
}
