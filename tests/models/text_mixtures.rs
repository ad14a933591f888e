//! Decoders whose feed-forward part is a mixture of experts.
//! Every token goes to all of them, so that no weight is without effect.

use candle_transformers::models::*;

use super::{decoder, growing_decoder};
use crate::harness::Case;

pub(crate) fn cases() -> Vec<Case> {
    vec![
        decoder!("deepseek2", deepseek2::DeepSeekV2, {
            "first_k_dense_replace": 1,
            "kv_lora_rank": 8,
            "moe_intermediate_size": 16,
            "n_group": 1,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "q_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "topk_group": 1,
            "v_head_dim": 8
        }),
        growing_decoder!(f32_only "mixtral", mixtral::Model, {
            "num_experts_per_tok": 4, "num_local_experts": 4, "sliding_window": 16
        }),
        decoder!("qwen2_moe", qwen2_moe::Model, {
            "decoder_sparse_step": 2,
            "max_window_layers": 2,
            "moe_intermediate_size": 16,
            "norm_topk_prob": false,
            "num_experts": 4,
            "num_experts_per_tok": 4,
            "shared_expert_intermediate_size": 24,
            "sliding_window": 16,
            "use_sliding_window": false
        }),
        growing_decoder!("qwen3_moe::Model", qwen3_moe::Model, {
            "decoder_sparse_step": 2,
            "max_window_layers": 2,
            "moe_intermediate_size": 16,
            "norm_topk_prob": true,
            "num_experts": 4,
            "num_experts_per_tok": 4,
            "use_sliding_window": false
        }),
        decoder!("qwen3_moe::ModelForCausalLM", qwen3_moe::ModelForCausalLM, {
            "decoder_sparse_step": 2,
            "max_window_layers": 2,
            "moe_intermediate_size": 16,
            "norm_topk_prob": true,
            "num_experts": 4,
            "num_experts_per_tok": 4,
            "use_sliding_window": false
        }),
    ]
}
