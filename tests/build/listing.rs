//! Everything that is wrong, in one error: tensors that are not there, of another shape or type, and a prefix that is
//! off.

use candle_core::{DType, Result};
use candle_ipc_cache::manifest::ElementType;
use candle_ipc_cache::{BuildError, IpcCache, Renaming, Unmet};
use candle_nn::VarBuilder;

use crate::checkpoint::Checkpoint;
use crate::models;

/// What a build says is wrong.
#[track_caller]
pub(crate) fn unmet<M>(
    cache: &IpcCache,
    build: impl Fn(VarBuilder<'static>) -> Result<M>,
) -> Unmet {
    let error = cache.build(DType::F32, build).err().expect("an error");
    let text = error.to_string();
    let unmet = error.unmet().unwrap_or_else(|| panic!("{text}")).clone();
    // The text has every name of the structure, and candle's own first error.
    for name in names(&unmet) {
        assert!(text.contains(&format!("`{name}`")), "{name} in {text}");
    }
    for renaming in &unmet.fit {
        let told = text.contains(&renaming.to_string());
        assert!(told || text.contains("change that"), "{renaming} in {text}");
    }
    assert!(text.contains("candle's first error"), "{text}");
    assert!(std::error::Error::source(&error).is_some());
    assert_eq!(
        (unmet.incomplete.as_deref(), unmet.unsure),
        (None, false),
        "{text}"
    );
    unmet
}

pub(crate) fn names(unmet: &Unmet) -> Vec<&str> {
    let missing = unmet.missing.iter().map(|m| m.name.as_str());
    let misshapen = unmet.misshapen.iter().map(|m| m.name.as_str());
    let mistyped = unmet.mistyped.iter().map(|m| m.name.as_str());
    missing.chain(misshapen).chain(mistyped).collect()
}

/// What is done to a checkpoint: names as the model asks for them.
struct Damage {
    dropped: [&'static str; 2],
    transposed: &'static str,
    retyped: (&'static str, ElementType),
    fit: (&'static str, &'static str),
}

impl Damage {
    /// Builds over the damaged checkpoint, with the prefix off, and again with the one that the error offers.
    #[track_caller]
    fn check<M>(&self, build: impl Fn(VarBuilder<'static>) -> Result<M> + Copy) {
        let whole = Checkpoint::of(build);
        let (from, to) = self.fit;
        let count = whole.names().iter().filter(|n| n.starts_with(from)).count();
        let damaged = whole
            .drop(&self.dropped)
            .transpose(self.transposed)
            .retype(self.retyped.0, self.retyped.1)
            .rename(|name| match name.strip_prefix(from) {
                Some(rest) => format!("{to}{rest}"),
                None => name.to_string(),
            });
        let found = unmet(&damaged.clone().attach(), build);
        self.assert_lists(&found);
        let fit = Renaming {
            from: from.into(),
            to: to.into(),
        };
        assert_eq!(found.fit, [fit]);
        assert_eq!(found.fitted.len(), count - 2);
        let stored = format!("{to}{}", self.transposed.strip_prefix(from).unwrap());
        assert_eq!(found.misshapen[0].stored_name, stored);

        // As it says: what is left is the rest.
        let cache = damaged.attach_with(|config| config.rename(from, to));
        let found = unmet(&cache, build);
        self.assert_lists(&found);
        assert!(found.fit.is_empty() && found.fitted.is_empty());
    }

    #[track_caller]
    fn assert_lists(&self, found: &Unmet) {
        let mut missing: Vec<_> = found.missing.iter().map(|m| m.name.as_str()).collect();
        missing.sort_unstable();
        let mut dropped = self.dropped;
        dropped.sort_unstable();
        assert_eq!(missing, dropped);
        assert!(found.missing.iter().all(|m| !m.nearest.is_empty()));
        let misshapen: Vec<_> = found.misshapen.iter().collect();
        assert_eq!(
            (misshapen.len(), misshapen[0].name.as_str()),
            (1, self.transposed)
        );
        let mut held = misshapen[0].held.clone();
        held.reverse();
        let asked: Vec<u64> = misshapen[0].asked[0].iter().map(|d| *d as u64).collect();
        assert_eq!((misshapen[0].asked.len(), asked), (1, held));
        let mistyped: Vec<_> = found.mistyped.iter().collect();
        assert_eq!(
            (mistyped.len(), mistyped[0].name.as_str()),
            (1, self.retyped.0)
        );
        assert_eq!(
            (mistyped[0].stored, mistyped[0].asked),
            (self.retyped.1, DType::F32)
        );
    }
}

#[test]
fn of_a_llama_whose_names_lack_a_prefix() {
    Damage {
        dropped: ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"],
        transposed: "model.layers.0.mlp.down_proj.weight",
        retyped: ("model.layers.0.self_attn.q_proj.weight", ElementType::Q8_0),
        fit: ("", "language_model."),
    }
    .check(|vb| models::llama(vb));
}

#[test]
fn of_a_bert_under_another_models_prefix() {
    Damage {
        dropped: [
            "encoder.layer.0.attention.self.key.bias",
            "encoder.layer.1.output.LayerNorm.weight",
        ],
        transposed: "encoder.layer.1.intermediate.dense.weight",
        retyped: ("embeddings.position_embeddings.weight", ElementType::I8),
        fit: ("", "roberta."),
    }
    .check(|vb| models::bert(vb, Some("bert")));
}

#[test]
fn of_a_t5_inside_of_another_model() {
    Damage {
        dropped: [
            "decoder.block.1.layer.1.EncDecAttention.q.weight",
            "encoder.final_layer_norm.weight",
        ],
        transposed: "encoder.block.0.layer.1.DenseReluDense.wi.weight",
        retyped: ("lm_head.weight", ElementType::U64),
        fit: ("", "text_encoder."),
    }
    .check(|vb| models::t5(vb));
}

#[test]
fn of_a_mixtral_without_the_prefix_that_it_asks_with() {
    Damage {
        dropped: [
            "model.layers.0.block_sparse_moe.experts.3.w2.weight",
            "model.layers.1.input_layernorm.weight",
        ],
        transposed: "model.layers.1.block_sparse_moe.experts.0.w1.weight",
        retyped: (
            "model.layers.1.block_sparse_moe.experts.2.w3.weight",
            ElementType::Q4_0,
        ),
        fit: ("model.", ""),
    }
    .check(|vb| models::mixtral(vb));
}

#[test]
fn of_a_vit_with_another_prefix() {
    Damage {
        dropped: [
            "vit.encoder.layer.0.layernorm_before.bias",
            "vit.encoder.layer.1.attention.attention.key.weight",
        ],
        transposed: "vit.encoder.layer.0.intermediate.dense.weight",
        retyped: ("vit.embeddings.cls_token", ElementType::C64),
        fit: ("vit.", "model.vision_tower."),
    }
    .check(|vb| models::vit(vb));
}

#[test]
fn a_prefix_that_some_names_do_not_have_is_offered_for_the_others() {
    let moved = Checkpoint::of(models::llama).rename(|name| match name {
        "lm_head.weight" => name.to_string(),
        name => format!("text.{name}"),
    });
    let found = unmet(&moved.clone().attach(), |vb| models::llama(vb));
    assert_eq!(names(&found), [""; 0]);
    let offered = &found.fit[0];
    assert_eq!(
        (offered.from.as_str(), offered.to.as_str()),
        ("model.", "text.model.")
    );
    let cache = moved.attach_with(|config| config.rename(&offered.from, &offered.to));
    cache.build(DType::F32, |vb| models::llama(vb)).unwrap();
}

#[test]
fn two_prefixes_are_offered_together() {
    let moved = Checkpoint::of(models::t5).rename(|name| {
        if let Some(rest) = name.strip_prefix("encoder.") {
            format!("text.enc.{rest}")
        } else if let Some(rest) = name.strip_prefix("decoder.") {
            format!("text.dec.{rest}")
        } else {
            name.to_string()
        }
    });
    let found = unmet(&moved.clone().attach(), |vb| models::t5(vb));
    assert_eq!((names(&found), found.fit.len()), (vec![], 2));
    let cache = moved.attach_with(|config| {
        let renamed = found.fit.iter();
        renamed.fold(config, |config, r| config.rename(&r.from, &r.to))
    });
    cache.build(DType::F32, |vb| models::t5(vb)).unwrap();
}

#[test]
fn a_prefix_in_the_configuration_is_honoured_and_shown() {
    let moved = Checkpoint::of(models::llama).rename(|name| format!("a.{name}"));
    let cache = moved.clone().attach_with(|config| config.prefix("a."));
    cache.build(DType::F32, |vb| models::llama(vb)).unwrap();
    assert!(cache.report().to_string().contains("names     prefix `a.`"));
    let vb = cache.var_builder(DType::F32);
    assert!(vb.contains_tensor("model.norm.weight") && !vb.contains_tensor("a.model.norm.weight"));
    assert!(cache.raw("model.norm.weight").is_ok() && cache.raw("a.model.norm.weight").is_err());
    assert!(cache.quantized().contains_key("model.norm.weight"));
    let quantized = cache.quantized().pp("model.norm").get(32, "weight");
    assert_eq!(quantized.unwrap().shape().dims(), [32]);
    let error = vb.get(1, "model.norm.weigth").unwrap_err().to_string();
    assert!(
        error.contains("`a.model.norm.weigth` (asked for as `model.norm.weigth`)"),
        "{error}"
    );
    let error = vb.get(1, "model.norm.weight").unwrap_err().to_string();
    assert!(
        error.contains("`a.model.norm.weight` in the cache"),
        "{error}"
    );
    let error = cache.raw("nothing").unwrap_err().to_string();
    assert!(error.contains("asked for as `nothing`"), "{error}");

    let wrong = moved.attach_with(|config| config.prefix("b."));
    let found = unmet(&wrong, |vb| models::llama(vb));
    assert_eq!(
        (found.fit[0].from.as_str(), found.fit[0].to.as_str()),
        ("b.", "a.")
    );
    assert!(
        found
            .to_string()
            .contains("after what is set (prefix `b.`); change that: what comes to begin with `b.` begins with `a.`"),
        "{found}"
    );
}

#[test]
fn every_tensor_of_a_wrong_width_is_listed() {
    let whole = Checkpoint::of(models::llama);
    let narrow = whole
        .names()
        .into_iter()
        .map(String::from)
        .collect::<Vec<_>>();
    let narrow = narrow.iter().fold(whole, |checkpoint, name| {
        let mut shape = checkpoint.0[name].1.clone();
        *shape.last_mut().unwrap() -= 1;
        checkpoint.reshape(name, &shape)
    });
    let count = narrow.0.len();
    let found = unmet(&narrow.attach(), |vb| models::llama(vb));
    assert_eq!((found.misshapen.len(), names(&found).len()), (count, count));
}

#[test]
fn a_tensor_of_another_shape_and_type_is_listed_as_both() {
    let both = "model.layers.0.mlp.down_proj.weight";
    let damaged = Checkpoint::of(models::llama)
        .transpose(both)
        .retype(both, ElementType::Q8_0);
    let found = unmet(&damaged.attach(), |vb| models::llama(vb));
    assert_eq!(names(&found), [both, both]);
    assert!(
        found.mistyped[0].why.contains("dequantize(true)"),
        "{found}"
    );
}

#[test]
fn what_strict_mode_refuses_is_listed_too() {
    let cache = Checkpoint::of(models::llama).attach_with(|config| config.strict(true));
    let error = cache
        .build(DType::BF16, |vb| models::llama(vb))
        .err()
        .unwrap();
    let found = error.unmet().expect("casts");
    assert_eq!(found.mistyped.len(), cache.manifest().tensors.len());
    assert!(found.mistyped[0].why.contains("strict mode"), "{found}");
    cache.build(DType::F32, |vb| models::llama(vb)).unwrap();
}

#[test]
fn a_missing_head_is_said_to_be_tied_in_models_that_tie_it() {
    let headless = Checkpoint::of(models::llama).drop(&["lm_head.weight"]);
    let found = unmet(&headless.attach(), |vb| models::llama(vb));
    let tied = found.missing[0].tied.as_deref();
    assert_eq!(tied, Some("model.embed_tokens.weight"));
    assert!(found.to_string().contains("tie_word_embeddings"), "{found}");
}

#[test]
fn a_constructor_that_fails_by_itself_is_not_blamed_on_the_weights() {
    let cache = Checkpoint::of(models::llama).attach();
    let error = cache.build(DType::F32, |vb| -> Result<()> {
        models::llama(vb)?;
        candle_core::bail!("no such device")
    });
    let error = error.expect_err("its own error");
    assert!(matches!(error, BuildError::Constructor { .. }) && error.unmet().is_none());
    assert!(error.to_string().contains("no such device"), "{error}");
    assert!(
        candle_core::Error::from(error)
            .to_string()
            .contains("no such device")
    );
}

#[test]
fn what_makes_a_constructor_panic_is_listed_and_its_own_panics_stay_panics() {
    // candle's Llama unwraps its layers.
    let up = "model.layers.1.mlp.up_proj.weight";
    let cache = Checkpoint::of(models::llama).drop(&[up]).attach();
    let found = unmet(&cache, |vb| models::llama(vb));
    assert_eq!(names(&found), [up]);
    let own = std::panic::catch_unwind(|| {
        let cache = Checkpoint::of(models::llama).attach();
        let panics = |vb| -> Result<()> {
            models::llama(vb)?;
            panic!("not today")
        };
        drop(cache.build(DType::F32, panics));
    });
    let said = own.expect_err("a panic");
    assert_eq!(said.downcast_ref::<&str>(), Some(&"not today"));
}

#[test]
fn what_was_found_before_a_panic_is_listed_as_incomplete() {
    let cache = Checkpoint::of(models::llama)
        .drop(&["model.norm.weight"])
        .attach();
    let error = cache.build(DType::F32, |vb| {
        let embeddings = vb.get((40, 32), "model.embed_tokens.weight")?;
        vb.get(32, "model.norm.weight")?;
        // Over zeros alone: the real run ends before this.
        let row = embeddings.get(0)?.to_vec1::<f32>()?;
        assert!(row.iter().any(|v| *v != 0.), "these are no embeddings");
        Ok(())
    });
    let error = error.expect_err("a missing tensor");
    let found = error.unmet().expect("a list");
    assert_eq!(names(found), ["model.norm.weight"]);
    let why = found.incomplete.as_deref().expect("a panic");
    assert!(why.contains("these are no embeddings"), "{why}");
    assert!(error.to_string().contains("may be incomplete"), "{error}");
}
