//! Convolutional image models.
//! Most have presets only: the smallest is used, on small images.

use anyhow::Result;
use candle_core::Module;
use candle_nn::VarBuilder;
use candle_transformers::models::{
    convmixer, convnext, efficientnet, efficientvit, fastvit, mobilenetv4, mobileone, repvgg,
    resnet,
};

use super::inputs::image;
use crate::harness::{Case, Forward, forward};

const CLASSES: usize = 10;

pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case::f32_only("convmixer", convmixer).slow(),
        Case::f32_only("convnext", convnext)
            .lacking(|name| name.contains(".grn."))
            .grouped(),
        Case::f32_only("convnext (v2)", convnext)
            .lacking(|name| name.ends_with(".gamma"))
            .grouped(),
        Case::f32_only("efficientnet::EfficientNet", efficientnet).grouped(),
        Case::f32_only("efficientvit", efficientvit).grouped(),
        Case::f32_only("fastvit", fastvit)
            .lacking(fastvit_lacks)
            .grouped(),
        Case::f32_only("mobilenetv4", mobilenetv4).grouped(),
        Case::f32_only("mobileone", mobileone)
            .lacking(|name| name.contains(".attn."))
            .grouped(),
        Case::f32_only("repvgg", repvgg).grouped(),
        Case::f32_only("resnet", resnet).grouped(),
    ]
}

fn convmixer(vb: VarBuilder<'static>) -> Result<Forward> {
    let input = image(28, &vb)?;
    let model = convmixer::c1024_20(CLASSES, vb)?;
    forward(move || model.forward(&input))
}

fn convnext(vb: VarBuilder<'static>) -> Result<Forward> {
    let input = image(32, &vb)?;
    let model = convnext::convnext(&convnext::Config::atto(), CLASSES, vb)?;
    forward(move || model.forward(&input))
}

fn efficientnet(vb: VarBuilder<'static>) -> Result<Forward> {
    let input = image(32, &vb)?;
    let blocks = efficientnet::MBConvConfig::b0();
    let model = efficientnet::EfficientNet::new(vb, blocks, CLASSES)?;
    forward(move || model.forward(&input))
}

fn efficientvit(vb: VarBuilder<'static>) -> Result<Forward> {
    let input = image(112, &vb)?;
    let model = efficientvit::efficientvit(&efficientvit::Config::m0(), CLASSES, vb)?;
    forward(move || model.forward(&input))
}

pub(crate) const FASTVIT: fastvit::Config = fastvit::Config {
    exp_ratio: 2,
    in_channels: 16,
    blocks: [1, 1, 1, 1],
    attn: true,
    lkc_use_act: true,
};

/// Branches that the model leaves out where their names are not there: a checkpoint has an identity where a block keeps
/// its shape, a scale where its kernel is larger than one, and so on.
pub(crate) fn fastvit_lacks(name: &str) -> bool {
    let has = |part: &str| name.contains(part);
    let pointwise = has("stem.2.") || has(".proj.1.");
    let keeps_shape = pointwise || has(".token_mixer.");
    has("stages.0.downsample.")
        || has(".pos_emb.") && !has("stages.3.")
        || has(".se.") && !has("final_conv.")
        || has(".norm.conv_")
        || has(".conv_scale.") && pointwise
        || has(".identity.") && !keeps_shape
}

fn fastvit(vb: VarBuilder<'static>) -> Result<Forward> {
    let input = image(64, &vb)?;
    let model = fastvit::fastvit(&FASTVIT, CLASSES, vb)?;
    forward(move || model.forward(&input))
}

fn mobilenetv4(vb: VarBuilder<'static>) -> Result<Forward> {
    let input = image(32, &vb)?;
    let model = mobilenetv4::mobilenetv4(&mobilenetv4::Config::small(), CLASSES, vb)?;
    forward(move || model.forward(&input))
}

fn mobileone(vb: VarBuilder<'static>) -> Result<Forward> {
    let input = image(32, &vb)?;
    let model = mobileone::mobileone(&mobileone::Config::s0(), CLASSES, vb)?;
    forward(move || model.forward(&input))
}

fn repvgg(vb: VarBuilder<'static>) -> Result<Forward> {
    let input = image(32, &vb)?;
    let model = repvgg::repvgg(&repvgg::Config::a0(), CLASSES, vb)?;
    forward(move || model.forward(&input))
}

fn resnet(vb: VarBuilder<'static>) -> Result<Forward> {
    let input = image(32, &vb)?;
    let model = resnet::resnet18(CLASSES, vb)?;
    forward(move || model.forward(&input))
}
