//! Image transformers: classifiers, encoders, segmentation and depth.
//! Some fix their image size in the source; there the width is what is small.

use std::sync::Arc;

use anyhow::Result;
use candle_core::Module;
use candle_nn::{Activation, VarBuilder};
use candle_transformers::models::{
    beit, depth_anything_v2, dinov2, dinov2reg4, eva2, hiera, segformer, segment_anything, vit,
};
use serde_json::json;

use super::inputs::{image, outputs};
use crate::harness::{Case, Forward, forward, noise};

const CLASSES: usize = 10;

pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case::f32_only("beit::BeitVisionTransformer", beit).grouped(),
        Case::f32_only("depth_anything_v2::DepthAnythingV2", depth_anything_v2).grouped(),
        Case::f32_only("dinov2::DinoVisionTransformer", dinov2),
        Case::f32_only("dinov2reg4::DinoVisionTransformer", dinov2reg4).grouped(),
        Case::f32_only("eva2::EVA2VisionTransformer", eva2).grouped(),
        Case::f32_only("hiera", hiera)
            .lacking(|name| name.starts_with("blocks.0.proj."))
            .grouped(),
        Case::f32_only("segformer::SemanticSegmentationModel", segformer),
        Case::f32_only("segformer::ImageClassificationModel", segformer_classifier),
        Case::f32_only("segment_anything::sam::Sam", segment_anything).slow(),
        Case::f32_only("segment_anything::tiny_vit::TinyViT", tiny_vit).slow(),
        Case::f32_only("vit::Model", vit),
    ]
}

fn beit(vb: VarBuilder<'static>) -> Result<Forward> {
    let input = image(384, &vb)?;
    let model = beit::BeitVisionTransformer::new(vb, 2, 32, 2)?;
    forward(move || model.forward(&input))
}

fn depth_anything_v2(vb: VarBuilder<'static>) -> Result<Forward> {
    let input = image(56, &vb)?;
    let encoder = dinov2::DinoVisionTransformer::new(vb.pp("pretrained"), 4, 32, 2)?;
    let config = depth_anything_v2::DepthAnythingV2Config::new(
        [8, 8, 16, 16],
        32,
        16,
        false,
        false,
        vec![0, 1, 2, 3],
        56,
        4,
    );
    let model = depth_anything_v2::DepthAnythingV2::new(Arc::new(encoder), config, vb)?;
    forward(move || model.forward(&input))
}

fn dinov2(vb: VarBuilder<'static>) -> Result<Forward> {
    let input = image(56, &vb)?;
    let model = dinov2::DinoVisionTransformer::new(vb, 2, 32, 2)?;
    forward(move || model.forward(&input))
}

fn dinov2reg4(vb: VarBuilder<'static>) -> Result<Forward> {
    let input = image(518, &vb)?;
    let model = dinov2reg4::DinoVisionTransformer::new(vb, 1, 32, 2)?;
    forward(move || model.forward(&input))
}

/// Its rotation table is 128 wide, so a head is 64.
fn eva2(vb: VarBuilder<'static>) -> Result<Forward> {
    let input = image(448, &vb)?;
    let model = eva2::EVA2VisionTransformer::new(vb, 1, 128, 2)?;
    forward(move || model.forward(&input))
}

fn hiera(vb: VarBuilder<'static>) -> Result<Forward> {
    let input = image(224, &vb)?;
    let config = json!({ "channels": 8, "heads": 1, "stages": [1, 1, 1, 1] });
    let config: hiera::Config = serde_json::from_value(config).unwrap();
    let model = hiera::hiera(&config, CLASSES, vb)?;
    forward(move || model.forward(&input))
}

fn segformer_config() -> segformer::Config {
    segformer::Config {
        id2label: Default::default(),
        num_channels: 3,
        num_encoder_blocks: 2,
        depths: vec![1, 1],
        sr_ratios: vec![2, 1],
        hidden_sizes: vec![16, 32],
        patch_sizes: vec![7, 3],
        strides: vec![4, 2],
        num_attention_heads: vec![1, 2],
        mlp_ratios: vec![2, 2],
        hidden_act: Activation::Gelu,
        layer_norm_eps: 1e-6,
        decoder_hidden_size: 32,
    }
}

fn segformer(vb: VarBuilder<'static>) -> Result<Forward> {
    let input = image(64, &vb)?;
    let model = segformer::SemanticSegmentationModel::new(&segformer_config(), CLASSES, vb)?;
    forward(move || model.forward(&input))
}

fn segformer_classifier(vb: VarBuilder<'static>) -> Result<Forward> {
    let input = image(64, &vb)?;
    let model = segformer::ImageClassificationModel::new(&segformer_config(), CLASSES, vb)?;
    forward(move || model.forward(&input))
}

fn segment_anything(vb: VarBuilder<'static>) -> Result<Forward> {
    let input = noise((3, 64, 64), &vb)?;
    let model = segment_anything::sam::Sam::new(32, 1, 2, &[], vb)?;
    outputs(move || {
        let embeddings = model.embeddings(&input)?;
        let points = [(0.25, 0.5, true), (0.75, 0.5, false)];
        let (mask, iou) = model.forward_for_embeddings(&embeddings, 64, 64, &points, true)?;
        Ok(vec![embeddings, mask, iou])
    })
}

/// Only a last width of 320 keeps the resolution that its end expects.
fn tiny_vit(vb: VarBuilder<'static>) -> Result<Forward> {
    let input = image(1024, &vb)?;
    let model = segment_anything::tiny_vit::TinyViT::new(
        &[8, 8, 16, 320],
        &[1, 1, 1, 1],
        &[1, 1, 2, 2],
        &[7, 7, 14, 7],
        CLASSES,
        vb,
    )?;
    forward(move || model.forward(&input))
}

pub(crate) fn vit_config() -> vit::Config {
    vit::Config {
        hidden_size: 32,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        intermediate_size: 64,
        hidden_act: Activation::Gelu,
        layer_norm_eps: 1e-12,
        image_size: 32,
        patch_size: 8,
        num_channels: 3,
        qkv_bias: true,
    }
}

fn vit(vb: VarBuilder<'static>) -> Result<Forward> {
    let input = image(32, &vb)?;
    let model = vit::Model::new(&vit_config(), CLASSES, vb)?;
    forward(move || model.forward(&input))
}
