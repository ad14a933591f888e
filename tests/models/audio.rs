//! Speech and audio models: codecs, recognition, synthesis.
//! Nothing here samples: codes come from the nearest entries of codebooks.

use anyhow::Result;
use candle_core::{Module, Tensor};
use candle_nn::{Activation, VarBuilder};
use candle_transformers::models::{
    dac, encodec, metavoice, mimi, parler_tts, snac, t5, voxtral, whisper,
};
use serde_json::json;

use super::inputs::{outputs, tokens};
use crate::harness::{Case, Forward, forward, noise};

pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case::new("dac (parts)", dac),
        Case::new("encodec::Model", encodec),
        Case::new(
            "metavoice::speaker_encoder::Model",
            metavoice_speaker_encoder,
        ),
        Case::new("metavoice::gpt::Model", metavoice_gpt),
        Case::new("metavoice::transformer::Model", metavoice_transformer),
        Case::new("mimi::Model", mimi),
        Case::new("parler_tts (parts)", parler_tts),
        Case::new("snac::Model", snac),
        Case::new("voxtral::VoxtralForConditionalGeneration", voxtral),
        Case::f32_only("whisper::model::Whisper", whisper),
    ]
}

/// `dac::Model` fixes widths of up to 1536; its parts take theirs as arguments.
fn dac(vb: VarBuilder<'static>) -> Result<Forward> {
    let sound = noise((1, 1, 64), &vb)?;
    let encoder = dac::Encoder::new(4, &[2, 2], 16, vb.pp("encoder"))?;
    let quantizer = dac::ResidualVectorQuantizer::new(16, 2, 16, 4, vb.pp("quantizer"))?;
    let decoder = dac::Decoder::new(16, 16, &[2, 2], 1, vb.pp("decoder"))?;
    let codes = Tensor::new(&[[[1u32, 7, 3, 15], [2, 0, 9, 4]]], vb.device())?;
    outputs(move || {
        let decoded = decoder.forward(&quantizer.from_codes(&codes)?)?;
        Ok(vec![encoder.forward(&sound)?, decoded])
    })
}

/// Two quantizers: 120 kbit/s in 6000 frames a second of 10 bits each.
fn encodec(vb: VarBuilder<'static>) -> Result<Forward> {
    let sound = noise((1, 1, 64), &vb)?;
    let config = encodec::Config {
        target_bandwidths: vec![120.0],
        hidden_size: 16,
        num_filters: 4,
        upsampling_ratios: vec![2, 2],
        codebook_size: 16,
        ..encodec::Config::default()
    };
    let model = encodec::Model::new(&config, vb)?;
    outputs(move || {
        let codes = model.encode(&sound)?;
        let decoded = model.decode(&codes)?;
        Ok(vec![codes, decoded])
    })
}

fn metavoice_speaker_encoder(vb: VarBuilder<'static>) -> Result<Forward> {
    let mel = (noise((1, 64, 64), &vb)? * 20.)?;
    let config = metavoice::speaker_encoder::Config {
        model_hidden_size: 64,
        model_embedding_size: 4,
        model_num_layers: 2,
        mel_n_channels: 64,
        ..metavoice::speaker_encoder::Config::cfg()
    };
    let model = metavoice::speaker_encoder::Model::new(config, vb)?;
    forward(move || model.forward(&mel))
}

/// The second stage: six codebooks from two.
fn metavoice_gpt(vb: VarBuilder<'static>) -> Result<Forward> {
    let config = metavoice::gpt::Config {
        n_layer: 2,
        n_head: 2,
        n_embd: 32,
        block_size: 16,
        vocab_sizes: vec![24, 20],
        target_vocab_sizes: vec![20, 20],
        ..metavoice::gpt::Config::cfg1b_v0_1()
    };
    let codes = Tensor::new(&[[[1u32, 5, 9, 3], [4, 0, 7, 2]]], vb.device())?;
    let model = metavoice::gpt::Model::new(config, vb)?;
    outputs(move || model.forward(&codes))
}

/// The first stage, on a sequence and one token more.
fn metavoice_transformer(vb: VarBuilder<'static>) -> Result<Forward> {
    let speaker = noise((1, 1, 16), &vb)?;
    let config = metavoice::transformer::Config {
        block_size: 16,
        vocab_size: 40,
        n_layer: 2,
        n_head: 2,
        dim: 32,
        speaker_emb_dim: 16,
        intermediate_size: Some(64),
        n_local_heads: Some(1),
        norm_eps: 1e-5,
    };
    let (prompt, token) = (
        tokens(&[1, 5, 9, 3], vb.device())?,
        tokens(&[7], vb.device())?,
    );
    let mut model = metavoice::transformer::Model::new(&config, vb)?;
    outputs(move || {
        model.clear_kv_cache();
        let prefill = model.forward(&prompt, &speaker, 0)?;
        let next = model.forward(&token, &speaker, 4)?;
        Ok(vec![prefill, next])
    })
}

fn mimi(vb: VarBuilder<'static>) -> Result<Forward> {
    let sound = noise((1, 1, 64), &vb)?;
    let preset = mimi::Config::v0_1(Some(3));
    let config = mimi::Config {
        frame_rate: 3000.,
        seanet: mimi::seanet::Config {
            dimension: 32,
            n_filters: 4,
            ratios: vec![2, 2],
            ..preset.seanet
        },
        transformer: mimi::transformer::Config {
            d_model: 32,
            num_heads: 2,
            num_layers: 2,
            context: 16,
            dim_feedforward: 64,
            max_seq_len: 64,
            ..preset.transformer
        },
        quantizer_bins: 16,
        quantizer_dim: 16,
        ..preset
    };
    let mut model = mimi::Model::new(config, vb)?;
    outputs(move || {
        model.reset_state();
        let latent = model.encode_pre_quantize(&sound)?;
        let codes = model.encode(&sound)?;
        let decoded = model.decode(&codes)?;
        Ok(vec![latent, codes, decoded])
    })
}

/// `parler_tts::Model` brings a whole DAC, whose widths are fixed; this is the rest of it.
fn parler_tts(vb: VarBuilder<'static>) -> Result<Forward> {
    let encoder: t5::Config = serde_json::from_value(json!({
        "vocab_size": 40, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1,
        "num_heads": 2, "relative_attention_num_buckets": 8, "dropout_rate": 0.1,
        "layer_norm_epsilon": 1e-6, "initializer_factor": 1.0,
        "feed_forward_proj": "gated-gelu", "is_encoder_decoder": true,
        "pad_token_id": 0, "eos_token_id": 1
    }))
    .unwrap();
    let decoder = parler_tts::DecoderConfig {
        vocab_size: 24,
        max_position_embeddings: 32,
        num_hidden_layers: 2,
        ffn_dim: 64,
        num_attention_heads: 2,
        num_key_value_heads: None,
        num_cross_attention_key_value_heads: None,
        activation_function: Activation::Gelu,
        hidden_size: 32,
        scale_embedding: false,
        num_codebooks: 2,
        pad_token_id: 22,
        bos_token_id: 23,
        eos_token_id: 22,
        tie_word_embeddings: false,
        rope_embeddings: false,
        rope_theta: 10_000.,
    };
    let mut encoder = t5::T5EncoderModel::load(vb.pp("text_encoder"), &encoder)?;
    let mut decoder = parler_tts::Decoder::new(&decoder, vb.pp("decoder"))?;
    let prompts = candle_nn::embedding(40, 32, vb.pp("embed_prompts"))?;
    let description = tokens(&[3, 8, 2, 1], vb.device())?;
    let prompt = tokens(&[5, 9], vb.device())?;
    let codes = Tensor::new(&[[[23u32], [23]]], vb.device())?;
    outputs(move || {
        encoder.clear_kv_cache();
        decoder.clear_kv_cache();
        let encoded = encoder.forward(&description)?;
        let prompt = prompts.forward(&prompt)?;
        let mut logits = decoder.forward(&codes, Some(&prompt), None, &encoded, None, 0)?;
        logits.push(encoded);
        Ok(logits)
    })
}

fn snac(vb: VarBuilder<'static>) -> Result<Forward> {
    let sound = noise((1, 1, 64), &vb)?;
    let config = snac::Config {
        sampling_rate: 24_000,
        encoder_dim: 16,
        encoder_rates: vec![2, 2],
        decoder_dim: 64,
        decoder_rates: vec![2, 2],
        attn_window_size: Some(4),
        codebook_size: 16,
        codebook_dim: 4,
        vq_strides: vec![2, 1],
        noise: false,
        depthwise: false,
    };
    let model = snac::Model::new(&config, vb)?;
    outputs(move || {
        let mut codes = model.encode(&sound)?;
        codes.push(model.decode(&codes.iter().collect::<Vec<_>>())?);
        Ok(codes)
    })
}

/// Eight frames of sound make the four audio tokens of the prompt.
fn voxtral(vb: VarBuilder<'static>) -> Result<Forward> {
    const AUDIO: u32 = 24;
    let mel = noise((1, 8, 16), &vb)?;
    let (dtype, device) = (vb.dtype(), vb.device().clone());
    let text_config = voxtral::VoxtralLlamaConfig {
        hidden_size: 32,
        intermediate_size: 64,
        vocab_size: 40,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: Some(16),
        use_flash_attn: false,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.,
        max_position_embeddings: 64,
        tie_word_embeddings: false,
    };
    let config = voxtral::VoxtralConfig {
        audio_config: voxtral::VoxtralEncoderConfig {
            hidden_size: 32,
            intermediate_size: 64,
            num_hidden_layers: 2,
            num_attention_heads: 2,
            num_key_value_heads: 2,
            head_dim: 16,
            num_mel_bins: 8,
            max_source_positions: 16,
            ..Default::default()
        },
        text_config,
        audio_token_id: AUDIO as usize,
        projector_hidden_act: "gelu".to_string(),
    };
    let model = voxtral::VoxtralForConditionalGeneration::new(&config, vb)?;
    let prompt = tokens(&[1, AUDIO, AUDIO, AUDIO, AUDIO, 7], &device)?;
    let token = tokens(&[9], &device)?;
    outputs(move || {
        let mut cache = voxtral::VoxtralCache::new(true, dtype, &config.text_config, &device)?;
        let prefill = model.forward(&prompt, Some(&mel), &mut cache, 0)?;
        let next = model.forward(&token, None, &mut cache, 6)?;
        Ok(vec![prefill, next])
    })
}

fn whisper(vb: VarBuilder<'static>) -> Result<Forward> {
    let mel = noise((1, 8, 16), &vb)?;
    let config = whisper::Config {
        num_mel_bins: 8,
        max_source_positions: 16,
        d_model: 32,
        encoder_attention_heads: 2,
        encoder_layers: 2,
        vocab_size: 40,
        max_target_positions: 16,
        decoder_attention_heads: 2,
        decoder_layers: 2,
        suppress_tokens: vec![],
    };
    let mut model = whisper::model::Whisper::load(&vb, config)?;
    let prompt = tokens(&[1, 5, 9], vb.device())?;
    outputs(move || {
        let encoded = model.encoder.forward(&mel, true)?;
        let decoded = model.decoder.forward(&prompt, &encoded, true)?;
        Ok(vec![model.decoder.final_linear(&decoded)?, encoded])
    })
}
