//! Models that compare images with texts.

use anyhow::Result;
use candle_core::Module;
use candle_nn::{Activation, VarBuilder};
use candle_transformers::models::{chinese_clip, clip, mobileclip, openclip, siglip};

use super::convnet::{FASTVIT, fastvit_lacks};
use super::inputs::{image, outputs, tokens};
use crate::harness::{Case, Forward, forward};

/// CLIP's vision towers draw a class embedding where they find none: theirs is made by hand.
pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case::f32_only("chinese_clip::ChineseClipModel", chinese_clip).by_hand(&[
            ("vision_model.embeddings.class_embedding", &[32]),
            ("logit_scale", &[]),
        ]),
        Case::f32_only("clip::ClipModel", clip).by_hand(&[
            ("vision_model.embeddings.class_embedding", &[32]),
            ("logit_scale", &[]),
        ]),
        Case::f32_only("mobileclip::MobileClipModel", mobileclip)
            .lacking(fastvit_lacks)
            .grouped(),
        Case::new("openclip::text_model::OpenClipTextTransformer", openclip),
        Case::f32_only("siglip::Model", siglip),
    ]
}

fn chinese_clip(vb: VarBuilder<'static>) -> Result<Forward> {
    use chinese_clip::text_model::{ChineseClipTextConfig, PositionEmbeddingType};
    use chinese_clip::vision_model::ChineseClipVisionConfig;
    let picture = image(16, &vb)?;
    let config = chinese_clip::ChineseClipConfig {
        text_config: ChineseClipTextConfig {
            vocab_size: 40,
            hidden_size: 32,
            num_hidden_layers: 2,
            num_attention_heads: 2,
            intermediate_size: 64,
            max_position_embeddings: 16,
            position_embedding_type: PositionEmbeddingType::Absolute,
            ..Default::default()
        },
        vision_config: ChineseClipVisionConfig {
            hidden_size: 32,
            intermediate_size: 64,
            projection_dim: 16,
            num_hidden_layers: 2,
            num_attention_heads: 2,
            image_size: 16,
            patch_size: 4,
            ..Default::default()
        },
        projection_dim: 16,
        logit_scale_init_value: 2.6592,
        image_size: 16,
    };
    let prompt = tokens(&[1, 5, 9], vb.device())?;
    let model = chinese_clip::ChineseClipModel::new(vb, &config)?;
    outputs(move || {
        let (text, _) = model.forward(&picture, &prompt, None, None)?;
        Ok(vec![
            text,
            model.get_text_features(&prompt, None, None)?,
            model.get_image_features(&picture)?,
        ])
    })
}

pub(crate) fn clip_vision_config() -> clip::vision_model::ClipVisionConfig {
    clip::vision_model::ClipVisionConfig {
        embed_dim: 32,
        activation: clip::text_model::Activation::QuickGelu,
        intermediate_size: 64,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        projection_dim: 16,
        num_channels: 3,
        image_size: 16,
        patch_size: 4,
    }
}

fn clip(vb: VarBuilder<'static>) -> Result<Forward> {
    let picture = image(16, &vb)?;
    let config = clip::ClipConfig {
        text_config: clip::text_model::ClipTextConfig {
            vocab_size: 40,
            embed_dim: 32,
            activation: clip::text_model::Activation::QuickGelu,
            intermediate_size: 64,
            max_position_embeddings: 16,
            pad_with: None,
            num_hidden_layers: 2,
            num_attention_heads: 2,
            projection_dim: 16,
        },
        vision_config: clip_vision_config(),
        logit_scale_init_value: 2.6592,
        image_size: 16,
    };
    let prompt = tokens(&[1, 5, 39], vb.device())?;
    let model = clip::ClipModel::new(vb, &config)?;
    outputs(move || {
        let (text, _) = model.forward(&picture, &prompt)?;
        Ok(vec![
            text,
            model.get_text_features(&prompt)?,
            model.get_image_features(&picture)?,
        ])
    })
}

fn mobileclip(vb: VarBuilder<'static>) -> Result<Forward> {
    let picture = image(64, &vb)?;
    let config = mobileclip::MobileClipConfig {
        text_config: openclip::text_model::Config {
            projection_dim: 512,
            ..openclip_config()
        },
        vision_config: FASTVIT,
        image_size: 64,
    };
    let prompt = tokens(&[1, 5, 39], vb.device())?;
    let model = mobileclip::MobileClipModel::new(vb, &config)?;
    outputs(move || {
        let (text, _) = model.forward(&picture, &prompt)?;
        Ok(vec![
            text,
            model.get_text_features(&prompt)?,
            model.get_image_features(&picture)?,
        ])
    })
}

fn openclip_config() -> openclip::text_model::Config {
    openclip::text_model::Config {
        vocab_size: 40,
        embed_dim: 32,
        intermediate_size: 64,
        max_position_embeddings: 16,
        pad_with: None,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        projection_dim: 16,
    }
}

fn openclip(vb: VarBuilder<'static>) -> Result<Forward> {
    let prompt = tokens(&[1, 5, 39], vb.device())?;
    let model = openclip::text_model::OpenClipTextTransformer::new(vb, &openclip_config())?;
    forward(move || Module::forward(&model, &prompt))
}

pub(crate) fn siglip_vision_config() -> siglip::VisionConfig {
    siglip::VisionConfig {
        hidden_size: 32,
        intermediate_size: 64,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_channels: 3,
        image_size: 16,
        patch_size: 4,
        hidden_act: Activation::GeluPytorchTanh,
        layer_norm_eps: 1e-6,
    }
}

fn siglip(vb: VarBuilder<'static>) -> Result<Forward> {
    let picture = image(16, &vb)?;
    let config = siglip::Config {
        text_config: siglip::TextConfig {
            vocab_size: 40,
            hidden_size: 32,
            intermediate_size: 64,
            num_hidden_layers: 2,
            num_attention_heads: 2,
            max_position_embeddings: 16,
            hidden_act: Activation::GeluPytorchTanh,
            layer_norm_eps: 1e-6,
            pad_token_id: 1,
            bos_token_id: 38,
            eos_token_id: 39,
        },
        vision_config: siglip_vision_config(),
    };
    let prompt = tokens(&[1, 5, 39], vb.device())?;
    let model = siglip::Model::new(&config, vb)?;
    outputs(move || {
        let (text, _) = model.forward(&picture, &prompt)?;
        Ok(vec![
            text,
            model.get_text_features(&prompt)?,
            model.get_image_features(&picture)?,
        ])
    })
}
