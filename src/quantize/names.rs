//! What tensor names say: which are norms, embeddings, output heads, scales of others; and how GGUF and Hugging Face
//! spell the same one. Habits of the checkpoints in use, not rules of a format.

/// Words that stand between dots in a name.
fn words(name: &str) -> impl Iterator<Item = &str> {
    name.split('.')
}

fn any_word(name: &str, wanted: &[&str]) -> bool {
    words(name).any(|word| wanted.contains(&word))
}

/// Weights of a normalization, and what scales a residual stream.
pub(super) fn is_norm(name: &str) -> bool {
    let lower = name.to_ascii_lowercase();
    lower.contains("norm") || any_word(&lower, &["ln_f", "ln_1", "ln_2", "ln", "layer_scale"])
}

/// A table of token embeddings.
pub(super) fn is_embedding(name: &str) -> bool {
    let words_of = [
        "embed_tokens",
        "token_embd",
        "wte",
        "word_embeddings",
        "tok_embeddings",
        "embed_in",
    ];
    any_word(name, &words_of)
        || (words(name).any(|w| w == "shared") && name.ends_with("shared.weight"))
}

/// The matrix that makes logits.
pub(super) fn is_head(name: &str) -> bool {
    any_word(name, &["lm_head", "embed_out", "output_projection"]) || name == "output.weight"
}

/// Tables of positions, segments and relative distances, which are added and not multiplied.
pub(super) fn is_position(name: &str) -> bool {
    let lower = name.to_ascii_lowercase();
    lower.contains("position")
        || lower.contains("pos_embed")
        || lower.contains("token_type")
        || lower.contains("token_types")
        || lower.contains("relative_attention_bias")
        || any_word(&lower, &["wpe", "rope_freqs"])
}

/// The small matrix that chooses experts.
pub(super) fn is_router(name: &str) -> bool {
    any_word(
        name,
        &["gate", "router", "ffn_gate_inp", "shared_expert_gate"],
    )
}

/// A convolution's kernel.
pub(super) fn is_convolution(name: &str) -> bool {
    name.to_ascii_lowercase().contains("conv")
}

/// Endings of tensors that scale a low-precision one beside them.
const SCALES: &[&str] = &[
    "scale",
    "scales",
    "scale_inv",
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "scale_weight",
    "input_scale",
    "output_scale",
    "act_scale",
    "absmax",
    "qzeros",
    "zeros",
    "zero_point",
    "g_idx",
];

/// Whether the name is one of scales, and of what: the part before.
pub(super) fn scaled_by(name: &str) -> Option<&str> {
    let (base, last) = name.rsplit_once('.').unwrap_or(("", name));
    if SCALES.contains(&last) {
        return Some(base);
    }
    // `w1_scale` beside `w1`, `gate_up_proj_scales` beside `gate_up_proj_blocks`.
    let endings = ["_scale", "_scales", "_scale_inv", "_scale_2"];
    endings.iter().find_map(|e| name.strip_suffix(e))
}

/// The Hugging Face name of a GGUF tensor of the Llama family: importance matrices are written with GGUF names.
pub(super) fn from_gguf(name: &str) -> Option<String> {
    let (base, ending) = name.rsplit_once('.')?;
    let spelled = match base {
        "token_embd" => "model.embed_tokens".to_string(),
        "output_norm" => "model.norm".to_string(),
        "output" => "lm_head".to_string(),
        _ => {
            let (layer, part) = base.strip_prefix("blk.")?.split_once('.')?;
            let part = match part {
                "attn_q" => "self_attn.q_proj",
                "attn_k" => "self_attn.k_proj",
                "attn_v" => "self_attn.v_proj",
                "attn_output" => "self_attn.o_proj",
                "attn_norm" => "input_layernorm",
                "ffn_norm" => "post_attention_layernorm",
                "ffn_gate" => "mlp.gate_proj",
                "ffn_up" => "mlp.up_proj",
                "ffn_down" => "mlp.down_proj",
                "ffn_gate_inp" => "mlp.gate",
                _ => return None,
            };
            format!("model.layers.{layer}.{part}")
        }
    };
    Some(format!("{spelled}.{ending}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_checkpoints_in_use_are_understood() {
        for (name, norm, embedding, head) in [
            ("model.norm.weight", true, false, false),
            ("model.layers.0.input_layernorm.weight", true, false, false),
            ("transformer.h.0.ln_1.weight", true, false, false),
            ("model.embed_tokens.weight", false, true, false),
            ("embed_tokens.weight", false, true, false),
            ("transformer.wte.weight", false, true, false),
            ("shared.weight", false, true, false),
            ("model.shared_expert.up_proj.weight", false, false, false),
            ("bert.embeddings.word_embeddings.weight", false, true, false),
            ("lm_head.weight", false, false, true),
            ("output.weight", false, false, true),
            ("encoder.layer.0.output.dense.weight", false, false, false),
            (
                "model.layers.0.self_attn.q_proj.weight",
                false,
                false,
                false,
            ),
        ] {
            let found = (is_norm(name), is_embedding(name), is_head(name));
            assert_eq!(found, (norm, embedding, head), "{name}");
        }
        assert!(is_router("model.layers.0.mlp.gate.weight"));
        assert!(!is_router("model.layers.0.mlp.gate_proj.weight"));
        assert!(is_position("bert.embeddings.position_embeddings.weight"));
    }

    #[test]
    fn scales_name_what_they_scale() {
        for (name, base) in [
            ("q.weight_scale", Some("q")),
            ("q.weight_scale_inv", Some("q")),
            ("model.a.scales", Some("model.a")),
            ("mlp.gate_up_proj_scales", Some("mlp.gate_up_proj")),
            ("a.weight", None),
            ("rescale.weight", None),
        ] {
            assert_eq!(scaled_by(name), base, "{name}");
        }
    }

    #[test]
    fn gguf_names_find_their_hugging_face_spelling() {
        assert_eq!(
            from_gguf("blk.11.ffn_down.weight").as_deref(),
            Some("model.layers.11.mlp.down_proj.weight")
        );
        assert_eq!(
            from_gguf("output.weight").as_deref(),
            Some("lm_head.weight")
        );
        assert_eq!(from_gguf("blk.0.ssm_in.weight"), None);
        assert_eq!(from_gguf("x"), None);
    }
}
