//! Models of text.

use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::Excluded;
use crate::harness::Case;

#[path = "text_decoders.rs"]
mod decoders;
#[path = "text_encoders.rs"]
mod encoders;
#[path = "text_mixtures.rs"]
mod mixtures;
#[path = "text_recurrent.rs"]
mod recurrent;
#[path = "text_translators.rs"]
mod translators;

pub(crate) const EXCLUDED: Excluded = &[
    (
        "mpt",
        "the fields of its config are private, and its only preset is a model of 3.3B parameters",
    ),
    (
        "nvembed_v2::model",
        "its constructor takes no config: it builds the model of 7B parameters; its `embedding` is run",
    ),
    ("persimmon", "the module holds a config and no model"),
    (
        "yi",
        "the fields of its config are private, and its presets are models of 6B and 34B parameters",
    ),
];

pub(crate) fn cases() -> Vec<Case> {
    [
        decoders::cases(),
        encoders::cases(),
        mixtures::cases(),
        recurrent::cases(),
        translators::cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Ids of a tiny vocabulary.
const VOCABULARY: u32 = 40;
/// Tokens of a forward pass.
const TOKENS: usize = 12;

/// A tiny config by the names that most `config.json` files have, with those in `more` instead or as well.
fn config<C: DeserializeOwned>(more: Value) -> anyhow::Result<C> {
    let mut all = json!({
        "attention_bias": false,
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 48,
        "layer_norm_eps": 1e-5,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": false,
        "use_flash_attn": false,
        "vocab_size": VOCABULARY,
    });
    let more = more.as_object().cloned().unwrap_or_default();
    all.as_object_mut().expect("an object").extend(more);
    Ok(serde_json::from_value(all)?)
}

/// A decoder of the usual form: `new(&config, vb)`, `forward(&ids, offset)` and `clear_kv_cache()`.
macro_rules! decoder {
    ($name:literal, $model:ty, {$($config:tt)*}) => {
        Case::new($name, decoder!(build $model, {$($config)*}))
    };
    (build $model:ty, {$($config:tt)*}) => {
        |vb| {
            let config = $crate::text::config(serde_json::json!({$($config)*}))?;
            let ids = $crate::harness::ids($crate::text::TOKENS, $crate::text::VOCABULARY, vb.device())?;
            let mut model = <$model>::new(&config, vb)?;
            $crate::harness::forward(move || {
                model.clear_kv_cache();
                model.forward(&ids, 0)
            })
        }
    };
}
use decoder;

/// The same without `clear_kv_cache()`: after the first pass each goes on by one token.
macro_rules! growing_decoder {
    ($name:literal, $model:ty, {$($config:tt)*}) => {
        Case::new($name, growing_decoder!(build $model, {$($config)*})).growing()
    };
    (f32_only $name:literal, $model:ty, {$($config:tt)*}) => {
        Case::f32_only($name, growing_decoder!(build $model, {$($config)*})).growing()
    };
    (build $model:ty, {$($config:tt)*}) => {
        |vb| {
            let config = $crate::text::config(serde_json::json!({$($config)*}))?;
            let ids = $crate::harness::ids($crate::text::TOKENS, $crate::text::VOCABULARY, vb.device())?;
            let mut model = <$model>::new(&config, vb)?;
            let mut past = 0;
            $crate::harness::forward(move || {
                let new = if past == 0 { ids.clone() } else { ids.narrow(1, 0, 1)? };
                let logits = model.forward(&new, past);
                past += new.dim(1)?;
                logits
            })
        }
    };
}
use growing_decoder;
