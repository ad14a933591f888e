//! Models of a few weights, whose faults and copies are known: the harness must find them.

use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::Result;
use candle_core::{Device, Tensor};
use candle_nn::VarBuilder;

use crate::harness::{Case, Forward, forward, outcome, run};

#[test]
fn copies_are_told_from_views() {
    let row = run(&Case::new("copier", copier), &Device::Cpu).unwrap();
    let copies = row.copies.unwrap();
    assert_eq!(copies.constructor, ["copied", "kept.and.copied"]);
    assert_eq!(copies.let_go, ["copied"]);
    assert_eq!(copies.first_forward, ["used.once"]);
    assert_eq!(copies.unused.unwrap(), ["unused"]);
    assert_eq!(row.asked_twice, ["viewed"]);
}

#[test]
fn copies_are_told_from_views_in_groups_too() {
    let row = run(&Case::new("copier", copier).grouped(), &Device::Cpu).unwrap();
    let copies = row.copies.unwrap();
    assert_eq!(copies.constructor, ["copied", "kept.and.copied"]);
    assert_eq!(copies.let_go, ["copied"]);
    assert_eq!(copies.first_forward, ["used.once"]);
    assert!(copies.unused.is_none());
}

fn copier(vb: VarBuilder<'_>) -> Result<Forward> {
    let (kept, viewed) = (vb.get((2, 3), "kept")?, vb.get((2, 3), "viewed")?.t()?);
    let viewed_again = vb.get((2, 3), "viewed")?.narrow(0, 0, 1)?;
    let (copied, both) = (vb.get(6, "copied")?, vb.get(6, "kept.and.copied")?);
    let copies = (copied.affine(2., 0.)? + both.sqr()?)?;
    let (once, _) = (vb.get(3, "used.once")?, vb.get(3, "unused")?);
    let mut made_once = None;
    forward(move || {
        let once = match &made_once {
            Some(once) => once,
            None => made_once.insert(once.sqr()?),
        };
        let own = (copies.sum_all()? + both.sum_all()?)?;
        let square = kept.matmul(&viewed)?.sum_all()?;
        square + viewed_again.sum_all()? + own + once.sum_all()?
    })
}

#[test]
fn a_model_with_other_outputs_fails() {
    let why = failure(Case::new("counter", counter));
    assert!(why.contains("outputs differ"), "{why}");
}

fn counter(vb: VarBuilder<'_>) -> Result<Forward> {
    static BUILT: AtomicU32 = AtomicU32::new(1);
    let weight = vb.get(3, "weight")?;
    let built = f64::from(BUILT.fetch_add(1, Ordering::Relaxed));
    forward(move || weight.affine(1., built))
}

#[test]
fn outputs_that_would_be_equal_whatever_the_weights_fail() {
    let why = failure(Case::new("zero", |vb| {
        let weight = vb.get(3, "weight")?;
        forward(move || weight.zeros_like())
    }));
    assert!(why.contains("all zero"), "{why}");
    let why = failure(Case::new("nan", |vb| {
        let weight = vb.get(3, "weight")?;
        forward(move || weight.affine(f64::NAN, 0.))
    }));
    assert!(why.contains("not finite"), "{why}");
}

#[test]
fn a_panic_and_a_missing_name_are_failures_of_their_case() {
    let why = failure(Case::new("panic", |_| panic!("of its own")));
    assert!(why.contains("of its own"), "{why}");
    let why = failure(Case::new("unknown", |vb| {
        let tensor: Tensor = vb.get_unchecked("no.such.tensor")?;
        forward(move || Ok(tensor.clone()))
    }));
    assert!(why.contains("no.such.tensor"), "{why}");
}

#[test]
fn a_model_that_runs_in_bf16_must_not_be_marked_f32_only() {
    let why = failure(Case::f32_only("modest", |vb| {
        let weight = vb.get(3, "weight")?;
        forward(move || weight.sqr())
    }));
    assert!(why.contains("runs in BF16"), "{why}");
}

fn failure(case: Case) -> String {
    match outcome(|| run(&case, &Device::Cpu)) {
        Ok(_) => panic!("`{}` passed", case.name),
        Err(why) => why,
    }
}
