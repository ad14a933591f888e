//! Constructors that try one thing and then another: no error where one of them is there, and where none is, no name
//! that was merely tried.

use candle_core::{DType, Result};
use candle_ipc_cache::manifest::ElementType;
use candle_nn::VarBuilder;

use crate::checkpoint::Checkpoint;
use crate::listing::{names, unmet};
use crate::models;

/// That the model is built, and that of each damaged form of the checkpoint just these names are found to be wrong.
#[track_caller]
fn check<M>(
    checkpoint: &Checkpoint,
    build: impl Fn(VarBuilder<'static>) -> Result<M> + Copy,
    dropped: &[&[&str]],
) {
    let cache = checkpoint.clone().attach();
    cache.build(DType::F32, build).map(drop).unwrap();
    for dropped in dropped {
        let found = unmet(&checkpoint.clone().drop(dropped).attach(), build);
        let mut listed = names(&found);
        listed.sort_unstable();
        assert_eq!(listed, *dropped, "{found}");
        assert!(found.fit.is_empty(), "{found}");
    }
}

#[test]
fn modernbert_goes_on_without_a_norm() {
    let whole = Checkpoint::of(models::modernbert);
    let published = whole.drop(&["model.layers.0.attn_norm.weight"]);
    let build = |vb: VarBuilder<'static>| models::modernbert(vb);
    let (first, last) = ("model.embeddings.norm.weight", "model.final_norm.weight");
    let wi = "model.layers.1.mlp.Wi.weight";
    check(&published, build, &[&[first], &[last], &[first, wi]]);
    // Nor does it miss any of the others.
    let without = published.drop(&["model.layers.2.attn_norm.weight"]);
    check(&without, build, &[&[first, wi]]);
}

#[test]
fn bert_tries_its_models_prefix() {
    let build = |vb: VarBuilder<'static>| models::bert(vb, Some("bert"));
    let published = Checkpoint::of(build).rename(|name| format!("bert.{name}"));
    let word = "bert.embeddings.word_embeddings.weight";
    let norm = "bert.encoder.layer.1.output.LayerNorm.bias";
    check(&published, build, &[&[word], &[norm], &[word, norm]]);
}

#[test]
fn bert_without_its_models_prefix_is_offered_it() {
    let published = Checkpoint::of(|vb| models::bert(vb, None));
    let published = published.rename(|name| format!("bert.{name}"));
    let found = unmet(&published.attach(), |vb| models::bert(vb, None));
    assert_eq!(
        (names(&found).len(), found.fit[0].to.as_str()),
        (0, "bert.")
    );
}

#[test]
fn distilbert_tries_its_models_prefix() {
    let build = |vb: VarBuilder<'static>| models::distilbert(vb, Some("distilbert"));
    let published = Checkpoint::of(build).rename(|name| format!("distilbert.{name}"));
    let word = "distilbert.embeddings.word_embeddings.weight";
    let lin = "distilbert.transformer.layer.0.ffn.lin1.weight";
    check(&published, build, &[&[word], &[lin], &[word, lin]]);
}

#[test]
fn nomic_bert_tries_its_models_prefix() {
    let build = |vb: VarBuilder<'static>| models::nomic_bert(vb, Some("nomic_bert"));
    let published = Checkpoint::of(build).rename(|name| format!("nomic_bert.{name}"));
    let word = "nomic_bert.embeddings.word_embeddings.weight";
    let fc2 = "nomic_bert.encoder.layers.1.mlp.fc2.weight";
    check(&published, build, &[&[word], &[fc2], &[word, fc2]]);
}

#[test]
fn falcon_tries_the_old_names_of_norms() {
    let build = |vb: VarBuilder<'static>| models::falcon(vb);
    let whole = Checkpoint::of(build);
    let old = whole.clone().rename(|name| {
        let norm = name.contains("layernorm") || name.contains("ln_f");
        if !norm {
            return name.to_string();
        }
        name.replace(".weight", ".gamma").replace(".bias", ".beta")
    });
    let embeddings = "transformer.word_embeddings.weight";
    let beta = "transformer.h.1.post_attention_layernorm.beta";
    check(&old, build, &[&[embeddings], &[beta], &[beta, embeddings]]);
    let bias = "transformer.h.1.post_attention_layernorm.bias";
    check(&whole, build, &[&[bias], &[bias, embeddings]]);
}

#[test]
fn snac_tries_two_shapes() {
    let build = |vb: VarBuilder<'static>| models::snac(vb);
    let whole = Checkpoint::of(build);
    let convolutions: Vec<String> = whole.names().into_iter().map(String::from).collect();
    let is_depthwise = |name: &&String| {
        name.starts_with("encoder.") && name.ends_with("parametrizations.weight.original1")
    };
    let convolutions: Vec<&String> = convolutions.iter().filter(is_depthwise).collect();
    assert!(convolutions.len() > 3);
    let depthwise = convolutions.iter().fold(whole, |checkpoint, name| {
        let mut shape = checkpoint.0[*name].1.clone();
        shape[1] = 1;
        checkpoint.reshape(name, &shape)
    });
    let codebook = "quantizer.quantizers.1.codebook.weight";
    let first = convolutions[0].as_str();
    check(
        &depthwise,
        build,
        &[&[codebook], &[first], &[first, codebook]],
    );

    // A shape that is neither: both are said.
    let mut shape = depthwise.0[first].1.clone();
    shape[2] -= 1;
    let found = unmet(&depthwise.reshape(first, &shape).attach(), build);
    assert_eq!(names(&found), [first]);
    let shapes = &found.misshapen[0].asked;
    assert!(
        shapes.iter().any(|s| s[1] == 1) && shapes.len() <= 2,
        "{found}"
    );
}

#[test]
fn stable_diffusion_tries_old_names_and_convolutions() {
    let build = |vb: VarBuilder<'static>| models::attention_block(vb);
    let at = "mid_block.attentions.0";
    let old = Checkpoint::of(build);
    let names_of = |kind: &str| format!("{at}.{kind}.weight");
    let convolutions = ["query", "key", "value", "proj_attn"];
    let old = convolutions.iter().fold(old, |old, kind| {
        old.reshape(&names_of(kind), &[16, 16, 1, 1])
    });
    let key = names_of("key");
    let norm = format!("{at}.group_norm.bias");
    check(&old, build, &[&[&key], &[&norm], &[&norm, &key]]);
    let new = old.rename(|name| {
        let name = name.replace("query", "to_q").replace("key", "to_k");
        let name = name.replace("value", "to_v");
        name.replace("proj_attn", "to_out.0")
    });
    // Without `to_q.weight` it takes the new names to be old ones: one tensor is what it takes to mend that.
    let (to_q, to_v) = (names_of("to_q"), names_of("to_v"));
    check(&new, build, &[&[&to_v], &[&to_q], &[&to_q, &to_v]]);
}

#[test]
fn a_tensor_of_a_type_that_is_tried_and_done_without_is_not_listed() {
    let norm = "model.layers.1.attn_norm.weight";
    let blocks = Checkpoint::of(models::modernbert).retype(norm, ElementType::I8);
    let build = |vb: VarBuilder<'static>| models::modernbert(vb);
    check(&blocks, build, &[&["model.final_norm.weight"]]);
}
