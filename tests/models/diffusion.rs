//! Image generators: denoisers and autoencoders.
//! An autoencoder's `encode` draws from a normal distribution, so it only decodes; its encoder is a case of its own
//! where it is public.

use anyhow::Result;
use candle_core::{DType, Module, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{flux, mmdit, stable_diffusion, wuerstchen, z_image};
use flux::WithForward;
use serde_json::json;

use super::inputs::{image, outputs, scalar, tokens};
use crate::harness::{Case, Forward, forward, noise};

pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case::new("flux::model::Flux", flux),
        Case::f32_only("flux::autoencoder::AutoEncoder", flux_autoencoder).grouped(),
        Case::f32_only("flux::autoencoder::Encoder", flux_encoder).grouped(),
        Case::new("mmdit::model::MMDiT", mmdit),
        Case::new("mmdit::model::MMDiT (X)", mmdit)
            .by_hand(&[("joint_blocks.0.x_block.attn2.qkv.weight", &[96, 32])]),
        Case::f32_only(
            "stable_diffusion::unet_2d::UNet2DConditionModel",
            stable_diffusion_unet,
        )
        .grouped(),
        Case::f32_only("stable_diffusion::vae::AutoEncoderKL", stable_diffusion_vae).grouped(),
        Case::f32_only("wuerstchen::prior::WPrior", wuerstchen_prior),
        Case::f32_only("wuerstchen::paella_vq::PaellaVQ", paella_vq).grouped(),
        Case::new("z_image::ZImageTransformer2DModel", z_image),
        Case::new("z_image::ZImageTextEncoder", z_image_text_encoder),
        Case::f32_only("z_image::AutoEncoderKL", z_image_vae).grouped(),
        Case::f32_only("z_image::vae::Encoder", z_image_encoder).grouped(),
    ]
}

fn flux(vb: VarBuilder<'static>) -> Result<Forward> {
    let latent = noise((1, 4, 16), &vb)?;
    let text = noise((1, 3, 24), &vb)?;
    let pooled = noise((1, 20), &vb)?;
    let places = Tensor::new(
        &[[[0f32, 0., 0.], [0., 0., 1.], [0., 1., 0.], [0., 1., 1.]]],
        vb.device(),
    )?;
    let places = places.to_dtype(vb.dtype())?;
    let no_places = Tensor::zeros((1, 3, 3), vb.dtype(), vb.device())?;
    let time = scalar(0.5, &vb)?;
    let guidance = scalar(4., &vb)?;
    let config = flux::model::Config {
        in_channels: 16,
        vec_in_dim: 20,
        context_in_dim: 24,
        hidden_size: 32,
        mlp_ratio: 2.0,
        num_heads: 2,
        depth: 1,
        depth_single_blocks: 1,
        axes_dim: vec![4, 6, 6],
        theta: 10_000,
        qkv_bias: true,
        guidance_embed: true,
    };
    let model = flux::model::Flux::new(&config, vb)?;
    forward(move || {
        let guidance = Some(&guidance);
        model.forward(
            &latent, &places, &text, &no_places, &time, &pooled, guidance,
        )
    })
}

fn flux_autoencoder_config() -> flux::autoencoder::Config {
    flux::autoencoder::Config {
        resolution: 16,
        in_channels: 3,
        ch: 32,
        out_ch: 3,
        ch_mult: vec![1, 2],
        num_res_blocks: 1,
        z_channels: 4,
        scale_factor: 0.3611,
        shift_factor: 0.1159,
    }
}

fn flux_autoencoder(vb: VarBuilder<'static>) -> Result<Forward> {
    let latent = noise((1, 4, 8, 8), &vb)?;
    let model = flux::autoencoder::AutoEncoder::new(&flux_autoencoder_config(), vb)?;
    forward(move || model.decode(&latent))
}

fn flux_encoder(vb: VarBuilder<'static>) -> Result<Forward> {
    let picture = image(16, &vb)?;
    let model = flux::autoencoder::Encoder::new(&flux_autoencoder_config(), vb)?;
    forward(move || model.forward(&picture))
}

/// In F16, to which it casts its time embedding.
fn mmdit(vb: VarBuilder<'static>) -> Result<Forward> {
    let vb = vb.to_dtype(DType::F16);
    let latent = noise((1, 4, 8, 8), &vb)?;
    let pooled = noise((1, 20), &vb)?;
    let text = noise((1, 3, 24), &vb)?;
    let time = Tensor::new(&[500f32], vb.device())?;
    let config = mmdit::model::Config {
        patch_size: 2,
        in_channels: 4,
        out_channels: 4,
        depth: 2,
        head_size: 16,
        adm_in_channels: 20,
        pos_embed_max_size: 8,
        context_embed_size: 24,
        frequency_embedding_size: 32,
    };
    let model = mmdit::model::MMDiT::new(&config, false, vb)?;
    forward(move || model.forward(&latent, &time, &pooled, &text, None))
}

fn stable_diffusion_unet(vb: VarBuilder<'static>) -> Result<Forward> {
    use stable_diffusion::unet_2d::{
        BlockConfig, UNet2DConditionModel, UNet2DConditionModelConfig,
    };
    let latent = noise((1, 4, 8, 8), &vb)?;
    let text = noise((1, 3, 24), &vb)?;
    let block = |use_cross_attn| BlockConfig {
        out_channels: 32,
        use_cross_attn,
        attention_head_dim: 2,
    };
    let config = UNet2DConditionModelConfig {
        blocks: vec![block(Some(1)), block(None)],
        layers_per_block: 1,
        norm_num_groups: 8,
        cross_attention_dim: 24,
        ..Default::default()
    };
    let model = UNet2DConditionModel::new(vb, 4, 4, false, config)?;
    forward(move || model.forward(&latent, 500., &text))
}

fn stable_diffusion_vae(vb: VarBuilder<'static>) -> Result<Forward> {
    use stable_diffusion::vae::{AutoEncoderKL, AutoEncoderKLConfig};
    let latent = noise((1, 4, 8, 8), &vb)?;
    let config = AutoEncoderKLConfig {
        block_out_channels: vec![16, 32],
        layers_per_block: 1,
        norm_num_groups: 8,
        ..Default::default()
    };
    let model = AutoEncoderKL::new(vb, 3, 3, config)?;
    forward(move || model.decode(&latent))
}

fn wuerstchen_prior(vb: VarBuilder<'static>) -> Result<Forward> {
    let latent = noise((1, 4, 4, 4), &vb)?;
    let text = noise((1, 3, 24), &vb)?;
    let time = scalar(0.5, &vb)?;
    let model = wuerstchen::prior::WPrior::new(4, 32, 24, 16, 2, 2, false, vb)?;
    forward(move || model.forward(&latent, &time, &text))
}

fn paella_vq(vb: VarBuilder<'static>) -> Result<Forward> {
    let picture = image(16, &vb)?;
    let model = wuerstchen::paella_vq::PaellaVQ::new(vb)?;
    outputs(move || {
        let latent = model.encode(&picture)?;
        Ok(vec![model.decode(&latent)?, latent])
    })
}

fn z_image(vb: VarBuilder<'static>) -> Result<Forward> {
    let latent = noise((1, 4, 1, 8, 8), &vb)?;
    let text = noise((1, 3, 24), &vb)?;
    let mask = Tensor::ones((1, 3), vb.dtype(), vb.device())?;
    let time = scalar(0.5, &vb)?;
    let config = json!({
        "in_channels": 4, "dim": 32, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 2,
        "n_kv_heads": 2, "cap_feat_dim": 24, "axes_dims": [4, 6, 6], "axes_lens": [32, 16, 16],
        "use_accelerated_attn": false
    });
    let config: z_image::Config = serde_json::from_value(config).unwrap();
    let model = z_image::ZImageTransformer2DModel::new(&config, vb)?;
    forward(move || model.forward(&latent, &time, &text, &mask))
}

fn z_image_text_encoder(vb: VarBuilder<'static>) -> Result<Forward> {
    let config = json!({
        "vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "max_position_embeddings": 32
    });
    let config: z_image::TextEncoderConfig = serde_json::from_value(config).unwrap();
    let prompt = tokens(&[3, 8, 2, 1], vb.device())?;
    let model = z_image::ZImageTextEncoder::new(&config, vb)?;
    forward(move || model.forward(&prompt))
}

fn z_image_vae_config() -> z_image::VaeConfig {
    z_image::VaeConfig {
        latent_channels: 4,
        block_out_channels: vec![16, 32],
        layers_per_block: 1,
        norm_num_groups: 8,
        ..z_image::VaeConfig::z_image()
    }
}

fn z_image_vae(vb: VarBuilder<'static>) -> Result<Forward> {
    let latent = noise((1, 4, 8, 8), &vb)?;
    let model = z_image::AutoEncoderKL::new(&z_image_vae_config(), vb)?;
    forward(move || model.decode(&latent))
}

fn z_image_encoder(vb: VarBuilder<'static>) -> Result<Forward> {
    let picture = image(16, &vb)?;
    let model = z_image::vae::Encoder::new(&z_image_vae_config(), vb)?;
    forward(move || model.forward(&picture))
}
