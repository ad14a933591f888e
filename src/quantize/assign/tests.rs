//! What recipes make of small checkpoints, and which rules are refused.

use super::*;

fn tensor(name: &str, element: ElementType, shape: &[u64]) -> SourceTensor {
    SourceTensor {
        name: name.into(),
        element,
        shape: shape.to_vec(),
        file: 0,
        offset: 0,
        bytes: element.bytes(shape).expect("whole blocks"),
        slice: None,
    }
}

fn llama() -> Vec<SourceTensor> {
    vec![
        tensor("lm_head.weight", BF16, &[64, 256]),
        tensor("model.embed_tokens.weight", BF16, &[64, 256]),
        tensor("model.layers.0.input_layernorm.weight", BF16, &[256]),
        tensor("model.layers.0.mlp.down_proj.weight", BF16, &[256, 288]),
        tensor("model.layers.0.mlp.gate.weight", BF16, &[8, 256]),
        tensor("model.layers.0.mlp.up_proj.weight", BF16, &[288, 256]),
        tensor("model.layers.0.self_attn.q_proj.bias", BF16, &[256]),
        tensor("model.layers.0.self_attn.q_proj.weight", F32, &[256, 256]),
        tensor("model.rotary.steps", ElementType::I64, &[256, 256]),
    ]
}

fn by(recipe: &str, tensors: &[SourceTensor]) -> Result<Vec<String>, AssignError> {
    let how = Quantize::new(recipe.parse().expect(recipe));
    let assigned = assign(tensors, &how)?;
    let words = assigned.iter().map(|a| match a.target {
        Some(element) => element.to_string(),
        None => "-".to_string(),
    });
    Ok(words.collect())
}

fn refused(recipe: &str, tensors: &[SourceTensor]) -> String {
    by(recipe, tensors).expect_err(recipe).to_string()
}

#[test]
fn defaults_follow_the_habits_of_gguf_files() {
    assert_eq!(
        by("q4k", &llama()).expect("a plan"),
        ["Q6_K", "Q6_K", "-", "-", "-", "Q4_K", "-", "Q4_K", "-"]
    );
    assert_eq!(
        by("q4k/q5_0", &llama()).expect("a plan"),
        ["Q6_K", "Q6_K", "-", "Q5_0", "-", "Q4_K", "-", "Q4_K", "-"]
    );
    assert_eq!(
        by("q8_0", &llama()).expect("a plan"),
        ["Q8_0", "Q8_0", "-", "Q8_0", "-", "Q8_0", "-", "Q8_0", "-"]
    );
}

#[test]
fn rules_come_before_the_default_and_whole_names_before_patterns() {
    assert_eq!(
        by(
            "default=q4k,lm_head=q8_0,*_proj=q5k/q5_1,model.layers.0.mlp.up_proj=stored",
            &llama()
        )
        .expect("a plan"),
        ["Q8_0", "Q6_K", "-", "Q5_1", "-", "-", "-", "Q5_K", "-"]
    );
    assert_eq!(
        by("*q_proj*=q8_0", &llama()).expect("a plan"),
        ["-", "-", "-", "-", "-", "-", "-", "Q8_0", "-"],
        "a pattern leaves vectors alone, and without a default the rest stays"
    );
    assert_eq!(
        by("model.layers.0.self_attn.q_proj.bias=q8_0", &llama()).expect("a plan")[6],
        "Q8_0"
    );
}

#[test]
fn a_rule_that_cannot_be_followed_is_named() {
    for (recipe, wanted) in [
        ("q4k,", ""),
        ("default=q4k,lm_haed=q6k", "`lm_haed=q6k` names no tensor"),
        ("default=q4k,lm_haed=q6k", "nearest: `lm_head.weight`"),
        (
            "*up*=q4k,*proj=q5k/q8_0",
            "`*proj=q5k/q8_0` and `*up*=q4k` both name",
        ),
        (
            "*.down_proj=q5k",
            "288 elements, which are no whole blocks of 256",
        ),
        ("*.down_proj=q5k", "the rule `*.down_proj=q5k`"),
        ("model.rotary.steps=q8_0", "holds I64"),
        ("*layernorm=q8_0", "leaves as they are"),
    ] {
        if wanted.is_empty() {
            by(recipe, &llama()).expect("a trailing comma is no fault");
            continue;
        }
        let error = refused(recipe, &llama());
        assert!(error.contains(wanted), "{recipe}: {error}");
    }
}

#[test]
fn low_precision_with_scales_is_left_and_never_taken_for_plain_floats() {
    let tensors = [
        tensor("a.weight", F8E4M3, &[256, 256]),
        tensor("a.weight_scale_inv", F32, &[256, 256]),
        tensor("b.weight", F8E4M3, &[256, 256]),
        tensor("c.blocks", ElementType::U8, &[256, 256]),
        tensor("c.table", F16, &[256, 256]),
        tensor("d.qscale_weight", F32, &[256, 256]),
        tensor("d.weight", F8E4M3, &[256, 256]),
        tensor("e.weight._data", F8E4M3, &[256, 256]),
        tensor("e.weight._scale", F32, &[256, 256]),
    ];
    assert_eq!(
        by("q8_0", &tensors).expect("a plan"),
        ["-", "-", "Q8_0", "-", "-", "-", "-", "-", "-"]
    );
    let error = refused("a=q8_0", &tensors);
    assert!(
        error.contains("`a=q8_0`") && error.contains("`a.weight_scale_inv`"),
        "{error}"
    );
}

#[test]
fn importances_that_candle_could_not_sum_are_made_sound() {
    let arc = |v: &[f32]| -> Arc<[f32]> { v.into() };
    let usual = arc(&[0.5, 2.0, 1e6]);
    assert!(Arc::ptr_eq(&sound(&usual, 3), &usual), "others stay");
    assert_eq!(
        *sound(&arc(&[0.0, 0.0, 4.0, 0.0]), 2),
        [1.0, 1.0, 1.0, 1e-6]
    );
    assert_eq!(*sound(&arc(&[3e38, 3e30]), 2), [1.0, 1e-6]);
}

#[test]
fn a_head_that_is_tied_is_told() {
    let error = refused("lm_head=q6k", &llama()[1..2]);
    assert!(
        error.contains("`model.embed_tokens.weight`: name that"),
        "{error}"
    );
}

#[test]
fn blocks_are_quantized_again_only_when_told() {
    let tensors = [tensor("a.weight", ElementType::Q8_0, &[256, 256])];
    let error = refused("q4k", &tensors);
    assert!(
        error.contains("`a.weight`") && error.contains("--requantize"),
        "{error}"
    );
    let how = Quantize {
        requantize: true,
        ..Quantize::new("q4k".parse().expect("a recipe"))
    };
    let assigned = assign(&tensors, &how).expect("a plan");
    assert_eq!(assigned[0].target, Some(Q4K));
}
