//! Encoders: each token is made sense of by what comes before and after it.

use candle_core::{DType, Tensor};
use candle_nn::{Module, VarBuilder};
use candle_transformers::models::*;
use serde_json::{Value, json};

use super::{TOKENS, VOCABULARY, config};
use crate::harness::{Case, Forward, forward, ids};

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = berts();
    cases.extend(debertas());
    cases.extend(modern());
    cases.extend(embedders());
    cases
}

/// Token ids, their types, and a mask that leaves all of them in.
fn inputs(vb: &VarBuilder<'_>) -> candle_core::Result<(Tensor, Tensor, Tensor)> {
    let ids = ids(TOKENS, VOCABULARY, vb.device())?;
    let (types, mask) = (ids.zeros_like()?, ids.ones_like()?);
    Ok((ids, types, mask))
}

fn bert() -> Value {
    json!({
        "attention_probs_dropout_prob": 0.0,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-5,
        "pad_token_id": 0,
        "position_embedding_type": "absolute",
        "type_vocab_size": 2,
    })
}

fn berts() -> Vec<Case> {
    vec![
        Case::f32_only("bert::BertModel", |vb| {
            let (ids, types, mask) = inputs(&vb)?;
            let model = bert::BertModel::load(vb, &config(bert())?)?;
            forward(move || model.forward(&ids, &types, Some(&mask)))
        }),
        Case::f32_only("bert::BertForMaskedLM", |vb| {
            let (ids, types, mask) = inputs(&vb)?;
            let model = bert::BertForMaskedLM::load(vb, &config(bert())?)?;
            forward(move || model.forward(&ids, &types, Some(&mask)))
        }),
        Case::f32_only("distilbert::DistilBertModel", |vb| {
            let (ids, hidden) = distilbert_inputs(&vb)?;
            let model = distilbert::DistilBertModel::load(vb, &config(distilbert())?)?;
            forward(move || model.forward(&ids, &hidden))
        }),
        Case::f32_only("distilbert::DistilBertForMaskedLM", |vb| {
            let (ids, hidden) = distilbert_inputs(&vb)?;
            let model = distilbert::DistilBertForMaskedLM::load(vb, &config(distilbert())?)?;
            forward(move || model.forward(&ids, &hidden))
        }),
        Case::new("xlm_roberta::XLMRobertaModel", |vb| {
            let (ids, types, mask) = inputs(&vb)?;
            let model = xlm_roberta::XLMRobertaModel::new(&config(bert())?, vb)?;
            forward(move || model.forward(&ids, &mask, &types, None, None, None))
        }),
        Case::new("xlm_roberta::XLMRobertaForMaskedLM", |vb| {
            let (ids, types, mask) = inputs(&vb)?;
            let model = xlm_roberta::XLMRobertaForMaskedLM::new(&config(bert())?, vb)?;
            forward(move || model.forward(&ids, &mask, &types, None, None, None))
        }),
        Case::new("xlm_roberta::XLMRobertaForSequenceClassification", |vb| {
            let (ids, types, mask) = inputs(&vb)?;
            let config = config(bert())?;
            let model = xlm_roberta::XLMRobertaForSequenceClassification::new(3, &config, vb)?;
            forward(move || model.forward(&ids, &mask, &types))
        }),
    ]
}

fn distilbert() -> Value {
    json!({
        "activation": "gelu",
        "dim": 32,
        "hidden_dim": 48,
        "initializer_range": 0.02,
        "n_heads": 4,
        "n_layers": 2,
        "pad_token_id": 0,
    })
}

/// Token ids, and a mask that hides none of them.
fn distilbert_inputs(vb: &VarBuilder<'_>) -> candle_core::Result<(Tensor, Tensor)> {
    let ids = ids(TOKENS, VOCABULARY, vb.device())?;
    let hidden = Tensor::zeros((TOKENS, TOKENS), DType::U8, vb.device())?;
    Ok((ids, hidden))
}

fn debertas() -> Vec<Case> {
    vec![
        Case::f32_only("debertav2::DebertaV2Model", |vb| {
            let (ids, types, mask) = inputs(&vb)?;
            let model = debertav2::DebertaV2Model::load(vb, &config(deberta())?)?;
            forward(move || model.forward(&ids, Some(types.clone()), Some(mask.clone())))
        }),
        Case::f32_only("debertav2::DebertaV2NERModel", |vb| {
            let (ids, types, mask) = inputs(&vb)?;
            let model = debertav2::DebertaV2NERModel::load(vb, &config(deberta())?, None)?;
            forward(move || model.forward(&ids, Some(types.clone()), Some(mask.clone())))
        }),
        Case::f32_only("debertav2::DebertaV2SeqClassificationModel", |vb| {
            let (ids, types, mask) = inputs(&vb)?;
            let config = config(deberta())?;
            let model = debertav2::DebertaV2SeqClassificationModel::load(vb, &config, None)?;
            forward(move || model.forward(&ids, Some(types.clone()), Some(mask.clone())))
        }),
    ]
}

fn deberta() -> Value {
    json!({
        "attention_probs_dropout_prob": 0.0,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "id2label": { "0": "a", "1": "b", "2": "c" },
        "initializer_range": 0.02,
        "label2id": { "a": 0, "b": 1, "c": 2 },
        "max_relative_positions": -1,
        "norm_rel_ebd": "layer_norm",
        "pad_token_id": 0,
        "pooler_dropout": 0.0,
        "pooler_hidden_act": "gelu",
        "pooler_hidden_size": 32,
        "pos_att_type": "p2c|c2p",
        "position_biased_input": false,
        "position_buckets": 8,
        "relative_attention": true,
        "share_att_key": true,
        "type_vocab_size": 0,
    })
}

fn modern() -> Vec<Case> {
    vec![
        Case::f32_only("modernbert::ModernBert", |vb| {
            let (ids, _, mask) = inputs(&vb)?;
            let model = modernbert::ModernBert::load(vb, &config(modernbert())?)?;
            forward(move || model.forward(&ids, &mask))
        }),
        Case::f32_only("modernbert::ModernBertForMaskedLM", |vb| {
            let (ids, _, mask) = inputs(&vb)?;
            let model = modernbert::ModernBertForMaskedLM::load(vb, &config(modernbert())?)?;
            forward(move || model.forward(&ids, &mask))
        }),
        Case::f32_only("modernbert::ModernBertForSequenceClassification", |vb| {
            let (ids, _, mask) = inputs(&vb)?;
            let config = config(modernbert())?;
            let model = modernbert::ModernBertForSequenceClassification::load(vb, &config)?;
            forward(move || model.forward(&ids, &mask))
        }),
        Case::new("nomic_bert", |vb| {
            let (ids, types, mask) = inputs(&vb)?;
            let config = nomic_bert::Config {
                vocab_size: VOCABULARY as usize,
                n_embd: 32,
                n_head: 4,
                n_layer: 2,
                n_inner: 48,
                n_positions: 32,
                ..nomic_bert::Config::default()
            };
            let model = nomic_bert::NomicBertModel::load(vb, &config)?;
            forward(move || model.forward(&ids, Some(&types), Some(&mask)))
        }),
        Case::f32_only("jina_bert", |vb| {
            let ids = ids(TOKENS, VOCABULARY, vb.device())?;
            let config = jina_bert::Config {
                vocab_size: VOCABULARY as usize,
                hidden_size: 32,
                num_hidden_layers: 2,
                num_attention_heads: 4,
                intermediate_size: 48,
                max_position_embeddings: 32,
                ..jina_bert::Config::v2_base()
            };
            let model = jina_bert::BertModel::new(vb, &config)?;
            forward(move || model.forward(&ids))
        }),
    ]
}

fn modernbert() -> Value {
    json!({
        "classifier_pooling": "mean",
        "global_attn_every_n_layers": 2,
        "global_rope_theta": 10000.0,
        "id2label": { "0": "a", "1": "b", "2": "c" },
        "label2id": { "a": "0", "b": "1", "c": "2" },
        "local_attention": 4,
        "local_rope_theta": 1000.0,
        "pad_token_id": 0,
    })
}

fn embedders() -> Vec<Case> {
    vec![
        Case::f32_only("nvembed_v2::embedding", |vb| {
            let ids = ids(TOKENS, VOCABULARY, vb.device())?;
            let mask = ids.ones_like()?.to_dtype(vb.dtype())?;
            let dtype = vb.dtype();
            let mut model = nvembed_v2::embedding::Model::new(&config(json!({}))?, vb)?;
            forward(move || model.forward(&mask, &ids, dtype))
        }),
        Case::new("stella_en_v5 (1.5B)", |vb| {
            let preset = stella_en_v5::Config::new_1_5_b_v5(stella_en_v5::EmbedDim::Dim256);
            stella(vb, preset, 2)
        }),
        Case::new("stella_en_v5 (400M)", |vb| {
            let preset = stella_en_v5::Config::new_400_m_v5(stella_en_v5::EmbedDim::Dim256);
            stella(vb, preset, 4)
        }),
    ]
}

fn stella(
    vb: VarBuilder<'_>,
    preset: stella_en_v5::Config,
    kv_heads: usize,
) -> anyhow::Result<Forward> {
    let config = stella_en_v5::Config {
        vocab_size: VOCABULARY as usize,
        hidden_size: 32,
        intermediate_size: 48,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: kv_heads,
        max_position_embeddings: 32,
        embed_head: stella_en_v5::EmbedHead {
            in_features: 32,
            out_features: 16,
        },
        ..preset
    };
    let ids = ids(TOKENS, VOCABULARY, vb.device())?;
    let mask = ids.ones_like()?;
    // The head takes activations in F32, whatever the rest computes in.
    let head = vb.pp("head").to_dtype(DType::F32);
    let mut model = stella_en_v5::EmbeddingModel::new(&config, vb.pp("base"), head)?;
    forward(move || model.forward(&ids, &mask))
}
