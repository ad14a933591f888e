//! What tensor names say: which are norms, embeddings, output heads, scales of others; and how GGUF and Hugging Face
//! spell the same one. Habits of the checkpoints in use, not rules of a format.

/// Words that stand between dots in a name.
fn words(name: &str) -> impl Iterator<Item = &str> {
    name.split('.')
}

fn any_word(name: &str, wanted: &[&str]) -> bool {
    words(name).any(|word| wanted.contains(&word))
}

/// The name's last two words, lower-case: what the tensor is, and of which layer.
fn end(name: &str) -> (String, String) {
    let mut words = name.rsplit('.').map(str::to_ascii_lowercase);
    let last = words.next().unwrap_or_default();
    (words.next().unwrap_or_default(), last)
}

/// Weights of a normalization, and what scales a residual stream.
pub(super) fn is_norm(name: &str) -> bool {
    let (layer, last) = end(name);
    let words = [
        "ln_f",
        "ln_1",
        "ln_2",
        "ln",
        "layer_scale",
        "scale_shift_table",
        "a_log",
    ];
    [layer, last]
        .iter()
        .any(|w| w.contains("norm") || words.contains(&w.as_str()))
}

/// A table of token embeddings.
pub(super) fn is_embedding(name: &str) -> bool {
    let (layer, last) = end(name);
    let words_of = [
        "embed_tokens",
        "embed_tokens_per_layer",
        "token_embd",
        "per_layer_token_embd",
        "wte",
        "word_embeddings",
        "tok_embeddings",
        "embed_in",
        "embedding",
        "embeddings",
        "emb",
    ];
    let is = |word: &str| words_of.contains(&word);
    is(&layer) || is(&last) || name == "shared.weight" || name.ends_with(".shared.weight")
}

/// The matrix that makes logits.
pub(super) fn is_head(name: &str) -> bool {
    let (layer, last) = end(name);
    let words_of = ["lm_head", "embed_out", "output_projection", "head"];
    let is = |word: &str| words_of.contains(&word);
    is(&layer) || is(&last) || name == "output.weight" || name == "model.output.weight"
}

/// Tables of positions, segments and relative distances, which are added and not multiplied.
pub(super) fn is_position(name: &str) -> bool {
    let lower = name.to_ascii_lowercase();
    let parts = [
        "position",
        "pos_emb",
        "rel_pos",
        "token_type",
        "relative_attention_bias",
        "cos_cached",
        "sin_cached",
        "inv_freq",
        "cls_token",
    ];
    parts.iter().any(|part| lower.contains(part)) || any_word(&lower, &["wpe", "rope_freqs"])
}

/// Numbers that are added, one an output.
pub(super) fn is_bias(name: &str) -> bool {
    end(name).1 == "bias"
}

/// The small matrix that chooses experts.
pub(super) fn is_router(name: &str) -> bool {
    let lower = name.to_ascii_lowercase();
    lower.contains("gate_inp") || any_word(&lower, &["gate", "router", "shared_expert_gate"])
}

/// A convolution's kernel.
pub(super) fn is_convolution(name: &str) -> bool {
    name.to_ascii_lowercase().contains("conv")
}

/// Whether the name is one of scales, or of other numbers without which a packed tensor means nothing.
pub(super) fn is_scale(name: &str) -> bool {
    let last = end(name).1;
    ["scale", "absmax", "zero", "g_idx"]
        .iter()
        .any(|part| last.contains(part))
}

/// What a tensor's neighbours have in common with it: the name up to its last word.
pub(super) fn parent(name: &str) -> &str {
    name.rsplit_once('.').map_or("", |(parent, _)| parent)
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
    fn scales_are_told_by_their_last_word() {
        for (name, scale) in [
            ("q.weight_scale", true),
            ("q.weight_scale_inv", true),
            ("wq.qscale_weight", true),
            ("q_proj.weight._scale", true),
            ("model.a.scales", true),
            ("mlp.gate_up_proj_scales", true),
            ("a.qzeros", true),
            ("a.weight", false),
            ("rescale.weight", false),
        ] {
            assert_eq!(is_scale(name), scale, "{name}");
        }
        assert_eq!(parent("a.b.weight"), "a.b");
        assert_eq!(parent("weight"), "");
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
