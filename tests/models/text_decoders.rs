//! Decoders of one kind: embeddings, blocks of attention and a feed-forward part, and a head.

use candle_transformers::models::*;
use serde_json::json;

use super::{TOKENS, VOCABULARY, config, decoder, growing_decoder};
use crate::harness::{Case, forward, ids};

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = plain();
    cases.extend(gemmas());
    cases.extend(glms());
    cases.extend(with_caches_of_their_own());
    cases.extend(with_forms_of_their_own());
    cases
}

fn plain() -> Vec<Case> {
    vec![
        decoder!("helium", helium::Model, {
            "bos_token_id": 1, "eos_token_id": 2, "mlp_bias": false
        }),
        decoder!("mistral", mistral::Model, { "sliding_window": 4 }),
        decoder!("olmo", olmo::Model, { "clip_qkv": 8.0 }),
        decoder!("olmo2", olmo2::Model, {}),
        decoder!("phi3", phi3::Model, {}),
        decoder!("qwen2::ModelForCausalLM", qwen2::ModelForCausalLM, {
            "max_window_layers": 2, "sliding_window": 16, "use_sliding_window": false
        }),
        decoder!("qwen3::ModelForCausalLM", qwen3::ModelForCausalLM, {
            "max_window_layers": 2, "use_sliding_window": false
        }),
        decoder!("qwen2::ModelForCausalLM (with a head)", qwen2::ModelForCausalLM, {
            "max_window_layers": 2, "sliding_window": 16, "use_sliding_window": false
        })
        .by_hand(&[("lm_head.weight", &[VOCABULARY as usize, 32])]),
        Case::new("qwen2::Model", |vb| {
            let config = config(json!({
                "max_window_layers": 2, "sliding_window": 16, "use_sliding_window": false
            }))?;
            let ids = ids(TOKENS, VOCABULARY, vb.device())?;
            let mut model = qwen2::Model::new(&config, vb)?;
            forward(move || {
                model.clear_kv_cache();
                model.forward(&ids, 0, None)
            })
        }),
        growing_decoder!("qwen3::Model", qwen3::Model, {
            "max_window_layers": 2, "use_sliding_window": false
        }),
        decoder!("smol::smollm3::Model", smol::smollm3::Model, {
            "no_rope_layer_interval": 2
        }),
        decoder!("smol::smollm3::ModelForCausalLM", smol::smollm3::ModelForCausalLM, {
            "no_rope_layer_interval": 2, "tie_word_embeddings": true
        }),
        growing_decoder!("stable_lm", stable_lm::Model, {
            "partial_rotary_factor": 0.5, "use_cache": true, "use_qkv_bias": true
        }),
        decoder!("starcoder2", starcoder2::Model, {
            "hidden_act": "gelu", "norm_epsilon": 1e-5, "use_bias": true, "sliding_window": 4
        }),
    ]
}

fn gemmas() -> Vec<Case> {
    vec![
        Case::new("gemma", |vb| {
            let config = config(json!({
                "hidden_act": null, "hidden_activation": "gelu_pytorch_tanh"
            }))?;
            let ids = ids(TOKENS, VOCABULARY, vb.device())?;
            let mut model = gemma::Model::new(false, &config, vb)?;
            forward(move || {
                model.clear_kv_cache();
                model.forward(&ids, 0)
            })
        }),
        Case::new("gemma2", |vb| {
            let config = config(json!({
                "hidden_activation": "gelu_pytorch_tanh",
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
                "query_pre_attn_scalar": 8,
                "sliding_window": 4,
            }))?;
            let ids = ids(TOKENS, VOCABULARY, vb.device())?;
            let mut model = gemma2::Model::new(false, &config, vb)?;
            forward(move || {
                model.clear_kv_cache();
                model.forward(&ids, 0)
            })
        }),
        Case::new("gemma3", |vb| {
            // With more heads of keys candle's cache refuses the values of a layer of full attention.
            let config = config(json!({
                "hidden_activation": "gelu_pytorch_tanh",
                "num_key_value_heads": 1,
                "query_pre_attn_scalar": 8,
                "rope_local_base_freq": 1000.0,
                "sliding_window": 4,
                "sliding_window_pattern": 2,
            }))?;
            let ids = ids(TOKENS, VOCABULARY, vb.device())?;
            let mut model = gemma3::Model::new(false, &config, vb)?;
            forward(move || {
                model.clear_kv_cache();
                model.forward(&ids, 0)
            })
        }),
        decoder!("gemma4::text", gemma4::text::TextModel, {
            "global_head_dim": 16,
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 4
        }),
    ]
}

fn glms() -> Vec<Case> {
    vec![
        Case::f32_only("chatglm", |vb| {
            let config = chatglm::Config {
                num_layers: 2,
                padded_vocab_size: VOCABULARY as usize,
                hidden_size: 32,
                ffn_hidden_size: 48,
                kv_channels: 8,
                num_attention_heads: 4,
                multi_query_group_num: 2,
                seq_length: 32,
                ..chatglm::Config::glm3_6b()
            };
            let ids = ids(TOKENS, VOCABULARY, vb.device())?;
            let mut model = chatglm::Model::new(&config, vb)?;
            forward(move || {
                model.reset_kv_cache();
                model.forward(&ids)
            })
        }),
        Case::new("codegeex4_9b", |vb| {
            let config = codegeex4_9b::Config {
                num_layers: 2,
                padded_vocab_size: VOCABULARY as usize,
                hidden_size: 32,
                ffn_hidden_size: 48,
                kv_channels: 8,
                num_attention_heads: 4,
                multi_query_group_num: 2,
                seq_length: 32,
                ..codegeex4_9b::Config::codegeex4()
            };
            let ids = ids(TOKENS, VOCABULARY, vb.device())?;
            let mut model = codegeex4_9b::Model::new(&config, vb)?;
            forward(move || {
                model.reset_kv_cache();
                model.forward(&ids)
            })
        }),
        Case::new("glm4", |vb| {
            let config = config(json!({
                "num_layers": 2,
                "padded_vocab_size": VOCABULARY,
                "ffn_hidden_size": 48,
                "kv_channels": 8,
                "seq_length": 32,
                "layernorm_epsilon": 1e-5,
                "rmsnorm": true,
                "apply_residual_connection_post_layernorm": false,
                "post_layer_norm": true,
                "add_bias_linear": false,
                "add_qkv_bias": true,
                "bias_dropout_fusion": true,
                "multi_query_attention": true,
                "multi_query_group_num": 2,
                "apply_query_key_layer_scaling": true,
                "attention_softmax_in_fp32": true,
                "fp32_residual_connection": false,
            }))?;
            let ids = ids(TOKENS, VOCABULARY, vb.device())?;
            let mut model = glm4::Model::new(&config, vb)?;
            forward(move || {
                model.reset_kv_cache();
                model.forward(&ids)
            })
        }),
        growing_decoder!("glm4_new::Model", glm4_new::Model, { "partial_rotary_factor": 0.5 }),
        decoder!("glm4_new::ModelForCausalLM", glm4_new::ModelForCausalLM, {
            "partial_rotary_factor": 0.5
        }),
    ]
}

/// What a forward pass keeps is given to it.
fn with_caches_of_their_own() -> Vec<Case> {
    vec![
        Case::new("granite", |vb| {
            let config: granite::GraniteConfig = config(json!({}))?;
            let config = config.into_config(false);
            let ids = ids(TOKENS, VOCABULARY, vb.device())?;
            let (dtype, device) = (vb.dtype(), vb.device().clone());
            let model = granite::Granite::load(vb, &config)?;
            forward(move || {
                let mut cache = granite::Cache::new(true, dtype, &config, &device)?;
                model.forward(&ids, 0, &mut cache)
            })
        }),
        Case::new("llama", |vb| {
            let config: llama::LlamaConfig = config(json!({}))?;
            let config = config.into_config(false);
            let ids = ids(TOKENS, VOCABULARY, vb.device())?;
            let (dtype, device) = (vb.dtype(), vb.device().clone());
            let model = llama::Llama::load(vb, &config)?;
            forward(move || {
                let mut cache = llama::Cache::new(true, dtype, &config, &device)?;
                model.forward(&ids, 0, &mut cache)
            })
        }),
        Case::f32_only("llama2_c", |vb| {
            let config = llama2_c::Config {
                dim: 32,
                hidden_dim: 48,
                n_layers: 2,
                n_heads: 4,
                n_kv_heads: 2,
                vocab_size: VOCABULARY as usize,
                seq_len: 32,
                norm_eps: 1e-5,
            };
            let ids = ids(TOKENS, VOCABULARY, vb.device())?;
            let cache = llama2_c::Cache::new(true, &config, vb.pp("rot"))?;
            let model = llama2_c::Llama::load(vb, config)?;
            forward(move || model.forward(&ids, 0, &mut cache.clone()))
        }),
    ]
}

fn with_forms_of_their_own() -> Vec<Case> {
    vec![
        Case::f32_only("bigcode", |vb| {
            let config = bigcode::Config {
                vocab_size: VOCABULARY as usize,
                max_position_embeddings: 32,
                num_hidden_layers: 2,
                hidden_size: 32,
                n_inner: Some(48),
                num_attention_heads: 4,
                use_cache: false,
                ..bigcode::Config::starcoder_1b()
            };
            let ids = ids(TOKENS, VOCABULARY, vb.device())?;
            let mut model = bigcode::GPTBigCode::load(vb, config)?;
            forward(move || model.forward(&ids, 0))
        }),
        Case::new("falcon", |vb| {
            let config = falcon::Config {
                vocab_size: VOCABULARY as usize,
                hidden_size: 32,
                num_hidden_layers: 2,
                num_attention_heads: 4,
                bias: true,
                ..falcon::Config::falcon7b()
            };
            let ids = ids(TOKENS, VOCABULARY, vb.device())?;
            let mut model = falcon::Falcon::load(vb, config)?;
            forward(move || {
                model.clear_kv_cache();
                model.forward(&ids)
            })
        }),
        Case::new("mixformer (new)", |vb| {
            let config = config(mixformer())?;
            let ids = ids(TOKENS, VOCABULARY, vb.device())?;
            let mut model = mixformer::MixFormerSequentialForCausalLM::new(&config, vb)?;
            forward(move || {
                model.clear_kv_cache();
                model.forward(&ids)
            })
        }),
        Case::new("mixformer (new_v2), moondream's text", |vb| {
            let config = config(mixformer())?;
            let ids = ids(TOKENS, VOCABULARY, vb.device())?;
            let mut model = mixformer::MixFormerSequentialForCausalLM::new_v2(&config, vb)?;
            forward(move || {
                model.clear_kv_cache();
                model.forward(&ids)
            })
        }),
        Case::f32_only("phi", |vb| {
            let config = config(json!({
                "hidden_act": "gelu", "partial_rotary_factor": 0.5, "qk_layernorm": false
            }))?;
            let ids = ids(TOKENS, VOCABULARY, vb.device())?;
            let mut model = phi::Model::new(&config, vb)?;
            forward(move || {
                model.clear_kv_cache();
                model.forward(&ids)
            })
        }),
    ]
}

fn mixformer() -> serde_json::Value {
    json!({
        "activation_function": "gelu",
        "n_embd": 32,
        "n_head": 4,
        "n_inner": 48,
        "n_layer": 2,
        "n_positions": 32,
        "pad_vocab_size_multiple": 8,
        "rotary_dim": 4,
    })
}
