//! Writes a GGUF Llama as a Hugging Face folder: F32 safetensors under HF names, config.json and the tokenizer.
//! Values are those that candle dequantizes, so that the dense model is the quantized one without rounding of activations.

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context, Result};
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{Device, Tensor, safetensors};
use serde_json::json;

use crate::quantized::Config;
use crate::tokenizer;

/// Writes the model of `gguf` into `folder`, over what is there.
pub(crate) fn write(gguf: &Path, folder: &Path) -> Result<()> {
    let mut file = std::fs::File::open(gguf)?;
    let content = Content::read(&mut file)?;
    let config = Config::from_gguf(&content)?;
    let mut tensors = HashMap::new();
    for name in content.tensor_infos.keys() {
        let tensor = content.tensor(&mut file, name, &Device::Cpu)?;
        let tensor = tensor.dequantize(&Device::Cpu)?;
        let (name, heads) = hugging_face_name(name, &config)?;
        let tensor = match heads {
            Some(heads) => halves_from_pairs(&tensor, heads)?,
            None => tensor,
        };
        tensors.insert(name, tensor);
    }
    let embedding = &tensors["model.embed_tokens.weight"];
    let tied = !tensors.contains_key("lm_head.weight");
    let number = |key: &str| -> Result<u64> {
        let value = content.metadata.get(key);
        Ok(value.with_context(|| key.to_owned())?.to_u64()?)
    };
    let described = json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.width,
        "intermediate_size": number("llama.feed_forward_length")?,
        "vocab_size": embedding.dim(0)?,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_heads,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_base,
        "max_position_embeddings": config.context,
        "bos_token_id": number("tokenizer.ggml.bos_token_id")?,
        "eos_token_id": number("tokenizer.ggml.eos_token_id")?,
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
    });
    let tokenizer = tokenizer::from_gguf(&content)?;
    let spelled = |key: &str| -> Result<String> {
        let id = number(key)? as u32;
        tokenizer.id_to_token(id).context("a token without a name")
    };
    let about = json!({
        "bos_token": spelled("tokenizer.ggml.bos_token_id")?,
        "eos_token": spelled("tokenizer.ggml.eos_token_id")?,
        "chat_template": match content.metadata.get("tokenizer.chat_template") {
            Some(Value::String(template)) => Some(template),
            _ => None,
        },
    });
    std::fs::create_dir_all(folder)?;
    std::fs::write(folder.join("config.json"), described.to_string())?;
    std::fs::write(folder.join("tokenizer_config.json"), about.to_string())?;
    let saved = tokenizer.save(folder.join("tokenizer.json"), false);
    saved.map_err(|error| anyhow::anyhow!("tokenizer.json: {error}"))?;
    // Renamed into place: who has the old file mapped keeps it.
    let unfinished = folder.join("model.safetensors.part");
    safetensors::save(&tensors, &unfinished)?;
    std::fs::rename(unfinished, folder.join("model.safetensors"))?;
    Ok(())
}

/// The HF name of a GGUF tensor, and its number of heads when its rows are to be put in another order.
fn hugging_face_name(name: &str, config: &Config) -> Result<(String, Option<usize>)> {
    let whole = match name {
        "token_embd.weight" => Some("model.embed_tokens.weight"),
        "output_norm.weight" => Some("model.norm.weight"),
        "output.weight" => Some("lm_head.weight"),
        _ => None,
    };
    if let Some(whole) = whole {
        return Ok((whole.to_owned(), None));
    }
    let parts: Vec<&str> = name.split('.').collect();
    let ["blk", layer, part, "weight"] = parts[..] else {
        anyhow::bail!("{name} is no name of a Llama's tensor")
    };
    let (part, heads) = match part {
        "attn_norm" => ("input_layernorm", None),
        "attn_q" => ("self_attn.q_proj", Some(config.heads)),
        "attn_k" => ("self_attn.k_proj", Some(config.key_heads)),
        "attn_v" => ("self_attn.v_proj", None),
        "attn_output" => ("self_attn.o_proj", None),
        "ffn_norm" => ("post_attention_layernorm", None),
        "ffn_gate" => ("mlp.gate_proj", None),
        "ffn_up" => ("mlp.up_proj", None),
        "ffn_down" => ("mlp.down_proj", None),
        _ => anyhow::bail!("{name} is no name of a Llama's tensor"),
    };
    Ok((format!("model.layers.{layer}.{part}.weight"), heads))
}

/// GGUF rotates neighbouring rows of a head, HF a row and the one half a head further.
fn halves_from_pairs(tensor: &Tensor, heads: usize) -> Result<Tensor> {
    let (rows, columns) = tensor.dims2()?;
    Ok(tensor
        .reshape((heads, rows / heads / 2, 2, columns))?
        .transpose(1, 2)?
        .contiguous()?
        .reshape((rows, columns))?)
}
