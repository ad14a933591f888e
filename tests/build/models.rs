//! Constructors of candle's models on configurations of a few kilobytes.

use candle_core::Result;
use candle_nn::{Activation, VarBuilder};
use candle_transformers::models::stable_diffusion::attention::{
    AttentionBlock, AttentionBlockConfig,
};
use candle_transformers::models::{
    bert, distilbert, falcon, llama, mixtral, modernbert, nomic_bert, snac, t5, vit,
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

fn config<T: DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("a configuration")
}

pub(crate) fn llama_config() -> llama::Config {
    llama::Config {
        hidden_size: 32,
        intermediate_size: 48,
        vocab_size: 40,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        use_flash_attn: false,
        rms_norm_eps: 1e-5,
        rope_theta: 1e4,
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling: None,
        max_position_embeddings: 32,
        tie_word_embeddings: false,
    }
}

pub(crate) fn llama(vb: VarBuilder<'_>) -> Result<llama::Llama> {
    llama::Llama::load(vb, &llama_config())
}

/// `model_type`: the prefix that the constructor tries when there is nothing without one.
pub(crate) fn bert(vb: VarBuilder<'_>, model_type: Option<&str>) -> Result<bert::BertModel> {
    let config: bert::Config = config(json!({
        "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 24, "hidden_act": "gelu", "hidden_dropout_prob": 0.0,
        "max_position_embeddings": 20, "type_vocab_size": 2, "initializer_range": 0.02,
        "layer_norm_eps": 1e-12, "pad_token_id": 0, "model_type": model_type,
    }));
    bert::BertModel::load(vb, &config)
}

pub(crate) fn distilbert(
    vb: VarBuilder<'_>,
    model_type: Option<&str>,
) -> Result<distilbert::DistilBertModel> {
    let config: distilbert::Config = config(json!({
        "vocab_size": 40, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "activation": "gelu",
        "max_position_embeddings": 20, "initializer_range": 0.02, "pad_token_id": 0, "model_type": model_type,
    }));
    distilbert::DistilBertModel::load(vb, &config)
}

pub(crate) fn nomic_bert(
    vb: VarBuilder<'_>,
    model_type: Option<&str>,
) -> Result<nomic_bert::NomicBertModel> {
    let config: nomic_bert::Config = config(json!({
        "vocab_size": 40, "n_embd": 16, "n_head": 2, "n_layer": 2, "n_inner": 24, "n_positions": 32,
        "type_vocab_size": 2, "layer_norm_epsilon": 1e-12, "rotary_emb_fraction": 1.0,
        "rotary_emb_base": 1000.0, "rotary_emb_interleaved": false, "qkv_proj_bias": false,
        "mlp_fc1_bias": false, "mlp_fc2_bias": false, "activation_function": "swiglu", "prenorm": false,
        "model_type": model_type,
    }));
    nomic_bert::NomicBertModel::load(vb, &config)
}

pub(crate) fn modernbert(vb: VarBuilder<'_>) -> Result<modernbert::ModernBert> {
    let config: modernbert::Config = config(json!({
        "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
        "intermediate_size": 24, "max_position_embeddings": 32, "layer_norm_eps": 1e-5, "pad_token_id": 0,
        "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_attention": 8,
        "local_rope_theta": 10000.0,
    }));
    modernbert::ModernBert::load(vb, &config)
}

pub(crate) fn falcon(vb: VarBuilder<'_>) -> Result<falcon::Falcon> {
    let config = falcon::Config {
        vocab_size: 40,
        hidden_size: 16,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        layer_norm_epsilon: 1e-5,
        initializer_range: 0.02,
        use_cache: false,
        bos_token_id: 1,
        eos_token_id: 1,
        hidden_dropout: 0.,
        attention_dropout: 0.,
        n_head_kv: None,
        alibi: false,
        new_decoder_architecture: false,
        multi_query: false,
        parallel_attn: false,
        bias: true,
    };
    falcon::Falcon::load(vb, config)
}

pub(crate) fn snac(vb: VarBuilder<'_>) -> Result<snac::Model> {
    let config: snac::Config = config(json!({
        "sampling_rate": 24000, "encoder_dim": 4, "encoder_rates": [2, 2], "decoder_dim": 16,
        "decoder_rates": [2, 2], "attn_window_size": null, "codebook_size": 8, "codebook_dim": 4,
        "vq_strides": [2, 1], "noise": true, "depthwise": true,
    }));
    snac::Model::new(&config, vb)
}

pub(crate) fn attention_block(vb: VarBuilder<'_>) -> Result<AttentionBlock> {
    let config = AttentionBlockConfig {
        num_groups: 4,
        ..AttentionBlockConfig::default()
    };
    AttentionBlock::new(vb.pp("mid_block.attentions.0"), 16, config)
}

pub(crate) fn t5(vb: VarBuilder<'_>) -> Result<t5::T5ForConditionalGeneration> {
    let config: t5::Config = config(json!({
        "vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
        "relative_attention_num_buckets": 8, "dropout_rate": 0.0, "layer_norm_epsilon": 1e-6,
        "initializer_factor": 1.0, "is_encoder_decoder": true, "pad_token_id": 0, "eos_token_id": 1,
        "tie_word_embeddings": false,
    }));
    t5::T5ForConditionalGeneration::load(vb, &config)
}

pub(crate) fn mixtral(vb: VarBuilder<'_>) -> Result<mixtral::Model> {
    let config: mixtral::Config = config(json!({
        "vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
        "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 16,
        "num_experts_per_tok": 2, "num_local_experts": 4, "use_flash_attn": false,
    }));
    mixtral::Model::new(&config, vb)
}

pub(crate) fn vit(vb: VarBuilder<'_>) -> Result<vit::Model> {
    let config = vit::Config {
        hidden_size: 16,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        intermediate_size: 24,
        hidden_act: Activation::Gelu,
        layer_norm_eps: 1e-12,
        image_size: 16,
        patch_size: 8,
        num_channels: 3,
        qkv_bias: true,
    };
    vit::Model::new(&config, 5, vb)
}
