//! Models that write about images and sounds.

use anyhow::Result;
use candle_core::{DType, Module, Tensor};
use candle_nn::{Activation, VarBuilder};
use candle_transformers::models::{
    blip, blip_text, colpali, gemma, gemma4, llama, llava, mistral, moondream, paddleocr_vl,
    paligemma, pixtral, qwen3_vl, trocr,
};
use serde_json::json;

use super::contrastive::{clip_vision_config, siglip_vision_config};
use super::inputs::{image, outputs, tokens};
use super::transformer::vit_config;
use crate::harness::{Case, Forward, forward, noise};

/// CLIP's vision tower draws a class embedding where it finds none: LLaVA's is made by hand.
pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case::f32_only("blip::BlipForConditionalGeneration", blip),
        Case::f32_only("colpali::Model", colpali),
        Case::f32_only("gemma4::Model", gemma4),
        Case::f32_only("llava::LLaVA", llava).by_hand(&[(
            "vision_tower.vision_model.embeddings.class_embedding",
            &[32],
        )]),
        Case::new("moondream::Model", moondream).grouped(),
        Case::f32_only("paddleocr_vl::PaddleOCRVLModel", paddleocr_vl),
        Case::f32_only("paligemma::Model", paligemma),
        Case::new("pixtral::llava::Model", pixtral),
        Case::f32_only("qwen3_vl::Qwen3VLModel", qwen3_vl).growing(),
        Case::f32_only("trocr::TrOCRModel", trocr),
    ]
}

fn blip(vb: VarBuilder<'static>) -> Result<Forward> {
    let picture = image(16, &vb)?;
    let config = blip::Config {
        text_config: blip_text::Config {
            vocab_size: 40,
            hidden_size: 32,
            encoder_hidden_size: 24,
            intermediate_size: 64,
            projection_dim: 32,
            num_hidden_layers: 2,
            num_attention_heads: 2,
            max_position_embeddings: 16,
            hidden_act: Activation::Gelu,
            layer_norm_eps: 1e-12,
            is_decoder: true,
        },
        vision_config: blip::VisionConfig {
            hidden_size: 24,
            intermediate_size: 48,
            projection_dim: 16,
            num_hidden_layers: 2,
            num_attention_heads: 2,
            image_size: 16,
            patch_size: 4,
            hidden_act: Activation::Gelu,
            layer_norm_eps: 1e-5,
        },
        projection_dim: 16,
        image_text_hidden_size: 16,
    };
    let (prompt, token) = (tokens(&[1, 5, 9], vb.device())?, tokens(&[7], vb.device())?);
    let mut model = blip::BlipForConditionalGeneration::new(&config, vb)?;
    outputs(move || {
        model.reset_kv_cache();
        let seen = model.vision_model().forward(&picture)?;
        let prefill = model.text_decoder().forward(&prompt, &seen)?;
        let next = model.text_decoder().forward(&token, &seen)?;
        Ok(vec![seen, prefill, next])
    })
}

fn paligemma_config() -> paligemma::Config {
    paligemma::Config {
        vision_config: siglip_vision_config(),
        text_config: gemma::Config {
            attention_bias: false,
            head_dim: 16,
            hidden_act: Some(Activation::GeluPytorchTanh),
            hidden_activation: None,
            hidden_size: 32,
            intermediate_size: 64,
            num_attention_heads: 2,
            num_hidden_layers: 2,
            num_key_value_heads: 1,
            rms_norm_eps: 1e-6,
            rope_theta: 10_000.,
            vocab_size: 40,
            max_position_embeddings: 64,
        },
        projection_dim: 32,
    }
}

fn colpali(vb: VarBuilder<'static>) -> Result<Forward> {
    let picture = image(16, &vb)?;
    let prompt = tokens(&[1, 5, 9], vb.device())?;
    let mut model = colpali::Model::new(&paligemma_config(), vb)?;
    outputs(move || {
        Ok(vec![
            model.forward_images(&picture, &prompt)?,
            model.forward_text(&prompt)?,
        ])
    })
}

/// An image of four tokens, then a sound of four: the model puts either at the start of the prompt.
fn gemma4(vb: VarBuilder<'static>) -> Result<Forward> {
    const IMAGE: u32 = 38;
    const SOUND: u32 = 39;
    let picture = image(16, &vb)?;
    let mel = noise((1, 16, 16), &vb)?;
    let mel_mask = Tensor::zeros((1, 16), DType::F32, vb.device())?;
    let config = json!({
        "text_config": {
            "head_dim": 16, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
            "num_hidden_layers": 2, "num_key_value_heads": 1, "vocab_size": 40,
            "sliding_window": 8, "max_position_embeddings": 64, "global_head_dim": 32,
            "layer_types": ["sliding_attention", "full_attention"], "use_flash_attn": false,
            "final_logit_softcapping": 30.0
        },
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4,
            "position_embedding_size": 16, "pooling_kernel_size": 2, "default_output_length": 4,
            "standardize": true
        },
        "audio_config": {
            "input_feat_size": 16, "hidden_size": 32, "output_proj_dims": 24,
            "attention_chunk_size": 4, "attention_context_left": 5, "num_attention_heads": 2,
            "num_hidden_layers": 2, "subsampling_conv_channels": [4, 4]
        },
        "image_token_id": IMAGE,
        "audio_token_id": SOUND
    });
    let config: gemma4::config::Gemma4Config = serde_json::from_value(config).unwrap();
    let (of_image, of_sound) = (
        tokens(&[IMAGE, IMAGE, IMAGE, IMAGE, 1, 5, 9], vb.device())?,
        tokens(&[SOUND, SOUND, SOUND, SOUND, 1, 5, 9], vb.device())?,
    );
    let token = tokens(&[7], vb.device())?;
    let mut model = gemma4::Model::new(&config, vb)?;
    let pictures = [picture];
    outputs(move || {
        let mut logits = Vec::new();
        for (prompt, pictures, mel) in [
            (&of_image, Some(pictures.as_slice()), None),
            (&of_sound, None, Some(&mel)),
        ] {
            model.clear_kv_cache();
            logits.push(model.forward_multimodal(prompt, pictures, mel, Some(&mel_mask), 0)?);
            logits.push(model.forward(&token, prompt.dim(1)?)?);
        }
        Ok(logits)
    })
}

fn llava(vb: VarBuilder<'static>) -> Result<Forward> {
    const IMAGE: i64 = -200;
    let picture = image(16, &vb)?;
    let (dtype, device) = (vb.dtype(), vb.device().clone());
    let config = json!({
        "architectures": ["LlavaLlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
        "hidden_size": 32, "image_crop_resolution": 16, "image_grid_pinpoints": [],
        "image_split_resolution": 16, "intermediate_size": 64, "max_position_embeddings": 64,
        "mm_hidden_size": 32, "mm_projector_type": "mlp2x_gelu", "mm_use_im_start_end": false,
        "mm_vision_select_feature": "patch", "mm_vision_select_layer": -2,
        "mm_vision_tower": null, "model_type": "llava_llama", "num_attention_heads": 2,
        "num_hidden_layers": 2, "num_key_value_heads": 1, "pad_token_id": 0,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tokenizer_model_max_length": 64,
        "torch_dtype": "float32", "use_cache": true, "vocab_size": 40,
        "image_token_index": IMAGE, "hf": true, "tie_word_embeddings": null
    });
    let config: llava::config::LLaVAConfig = serde_json::from_value(config).unwrap();
    let model = llava::LLaVA::load(vb, &config, Some(clip_vision_config()))?;
    let prompt = Tensor::new(&[[1i64, IMAGE, 5, 9]], &device)?;
    let pictures = [picture];
    outputs(move || {
        let mut cache = llama::Cache::new(true, dtype, &config.to_llama_config(), &device)?;
        let embeds = model.prepare_inputs_labels_for_multimodal(&prompt, &pictures, &[(16, 16)])?;
        Ok(vec![model.forward(&embeds, 0, &mut cache)?, embeds])
    })
}

/// The width of its patch embedding, 1152, is in the source.
fn moondream(vb: VarBuilder<'static>) -> Result<Forward> {
    let picture = image(28, &vb)?;
    let config = json!({
        "phi_config": {
            "vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_inner": null,
            "n_head": 2, "rotary_dim": 8, "activation_function": "gelu",
            "layer_norm_epsilon": 1e-5, "tie_word_embeddings": false,
            "pad_vocab_size_multiple": 64
        },
        "vision_config": {
            "image_embedding_dim": 1152, "model_dim": 32, "hidden_dim": 64, "hidden_features": 64,
            "embed_len": 4, "embed_dim": 1152, "num_blocks": 1, "num_heads": 2,
            "act": "gelu_pytorch_tanh"
        }
    });
    let config: moondream::Config = serde_json::from_value(config).unwrap();
    let (bos, prompt) = (tokens(&[1], vb.device())?, tokens(&[5, 9], vb.device())?);
    let mut model = moondream::Model::new(&config, vb)?;
    outputs(move || {
        model.text_model().clear_kv_cache();
        let seen = model.vision_encoder().forward(&picture)?;
        let prefill = model.text_model().forward_with_img(&bos, &prompt, &seen)?;
        let next = model.text_model().forward(&bos)?;
        Ok(vec![seen, prefill, next])
    })
}

/// An image of sixteen patches, merged to four tokens.
fn paddleocr_vl(vb: VarBuilder<'static>) -> Result<Forward> {
    const IMAGE: u32 = 39;
    let picture = image(16, &vb)?;
    let grid = Tensor::new(&[[1u32, 4, 4]], vb.device())?;
    let config = paddleocr_vl::Config {
        vision_config: paddleocr_vl::VisionConfig {
            hidden_size: 32,
            intermediate_size: 64,
            num_hidden_layers: 2,
            num_attention_heads: 2,
            image_size: 16,
            patch_size: 4,
            ..Default::default()
        },
        vocab_size: 40,
        hidden_size: 32,
        intermediate_size: 64,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        max_position_embeddings: 64,
        head_dim: 16,
        image_token_id: IMAGE,
        rope_scaling: serde_json::from_value(json!({ "mrope_section": [2, 3, 3] })).unwrap(),
        ..Default::default()
    };
    let prompt = tokens(&[1, IMAGE, IMAGE, IMAGE, IMAGE, 5], vb.device())?;
    let token = tokens(&[9], vb.device())?;
    let mut model = paddleocr_vl::PaddleOCRVLModel::new(&config, vb)?;
    outputs(move || {
        model.clear_kv_cache();
        let prefill = model.forward(&prompt, Some(&picture), Some(&grid), 0)?;
        let next = model.forward(&token, None, None, 6)?;
        Ok(vec![prefill, next])
    })
}

fn paligemma(vb: VarBuilder<'static>) -> Result<Forward> {
    let picture = image(16, &vb)?;
    let (prompt, token) = (tokens(&[1, 5, 9], vb.device())?, tokens(&[7], vb.device())?);
    let mut model = paligemma::Model::new(&paligemma_config(), vb)?;
    outputs(move || {
        Ok(vec![
            model.setup(&picture, &prompt)?,
            model.forward(&token)?,
        ])
    })
}

/// Its vision tower asks for F32 whatever the builder's dtype is.
fn pixtral(vb: VarBuilder<'static>) -> Result<Forward> {
    let picture = image(16, &vb)?.to_dtype(DType::F32)?;
    let dtype = vb.dtype();
    let config = pixtral::llava::Config {
        projector_hidden_act: Activation::Gelu,
        text_config: mistral::Config {
            vocab_size: 40,
            hidden_size: 32,
            intermediate_size: 64,
            num_hidden_layers: 2,
            num_attention_heads: 2,
            head_dim: None,
            num_key_value_heads: 1,
            hidden_act: Activation::Silu,
            max_position_embeddings: 64,
            rms_norm_eps: 1e-5,
            rope_theta: 10_000.,
            sliding_window: None,
            use_flash_attn: false,
        },
        vision_config: pixtral::vision_model::Config {
            hidden_size: 32,
            num_channels: 3,
            image_size: 16,
            patch_size: 4,
            rope_theta: 10_000.,
            intermediate_size: 64,
            num_hidden_layers: 2,
            head_dim: None,
            num_attention_heads: 2,
            hidden_act: Activation::Silu,
        },
        image_token_index: 39,
        image_seq_length: 16,
    };
    let (prompt, token) = (tokens(&[1, 5, 9], vb.device())?, tokens(&[7], vb.device())?);
    let mut model = pixtral::llava::Model::new(&config, vb)?;
    outputs(move || {
        model.clear_kv_cache();
        let seen = model.encode_image(&picture)?;
        let text = model.language_model.embed_tokens().forward(&prompt)?;
        let embeds = Tensor::cat(&[seen.to_dtype(dtype)?, text], 1)?;
        let prefill = model.lm_forward_embeds(&embeds)?;
        let next = model.lm_forward(&token)?;
        Ok(vec![seen, prefill, next])
    })
}

/// Sixteen patches of two frames, merged to four tokens; the first vision block feeds the text's first.
fn qwen3_vl(vb: VarBuilder<'static>) -> Result<Forward> {
    const IMAGE: u32 = 39;
    let patches = noise((16, 3 * 2 * 4 * 4), &vb)?;
    let grid = Tensor::new(&[[1u32, 4, 4]], vb.device())?;
    let config = json!({
        "text_config": {
            "head_dim": 16, "vocab_size": 40, "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
            "hidden_act": "silu", "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": false, "rope_theta": 10000.0, "sliding_window": null
        },
        "vision_config": {
            "depth": 2, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 64,
            "num_heads": 2, "patch_size": 4, "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0]
        },
        "image_token_id": IMAGE, "video_token_id": 38, "vision_start_token_id": 37,
        "vision_end_token_id": 36
    });
    let config: qwen3_vl::Config = serde_json::from_value(config).unwrap();
    let prompt = tokens(&[1, IMAGE, IMAGE, IMAGE, IMAGE, 5], vb.device())?;
    let model = qwen3_vl::Qwen3VLModel::new(&config, vb)?;
    forward(move || {
        model.forward(
            &prompt,
            Some(patches.clone()),
            None,
            Some(grid.clone()),
            None,
            vec![6],
            vec![vec![(1, 5)]],
            vec![],
            &[0],
        )
    })
}

/// One token at a time: its mask goes into the attention to the image too.
fn trocr(vb: VarBuilder<'static>) -> Result<Forward> {
    let picture = image(32, &vb)?;
    let config = trocr::TrOCRConfig {
        vocab_size: 40,
        d_model: 32,
        cross_attention_hidden_size: 32,
        decoder_layers: 2,
        decoder_attention_heads: 2,
        decoder_ffn_dim: 64,
        max_position_embeddings: 16,
        decoder_vocab_size: Some(40),
        ..Default::default()
    };
    let (prompt, token) = (tokens(&[1], vb.device())?, tokens(&[7], vb.device())?);
    let mut model = trocr::TrOCRModel::new(&vit_config(), &config, vb)?;
    outputs(move || {
        model.reset_kv_cache();
        let seen = model.encoder().forward(&picture)?;
        let first = model.decode(&prompt, &seen, 0)?;
        let next = model.decode(&token, &seen, 1)?;
        Ok(vec![seen, first, next])
    })
}
