//! The limits of a search, and constructors that would go on for ever.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{Result, Tensor};

use super::*;
use crate::loader::{Names, Naming, Terms};
use crate::manifest::{ElementType, Manifest};

fn table(tensors: &[(&str, ElementType, &[u64])]) -> Table {
    let manifest = Arc::new(Manifest::of_shapes(tensors));
    let names = Arc::new(Names::new(manifest.clone()));
    let terms = Terms {
        strict: false,
        dequantize: false,
    };
    Table::new(manifest, names, Naming::default(), terms)
}

fn one() -> Table {
    table(&[("a", ElementType::F32, &[1])])
}

fn search(table: Table, limits: Limits, build: &Constructor<'_>) -> Findings {
    trace(table, DType::F32, limits, build)
}

fn listed(findings: &Findings) -> Vec<String> {
    findings.faults.iter().map(|f| f.name.clone()).collect()
}

#[test]
fn tensors_that_nobody_makes_contiguous_cost_nothing() {
    // 64 MiB each, and 6 GiB together.
    let findings = search(one(), Limits::default(), &|vb| {
        for i in 0..100 {
            vb.get(16 << 20, &format!("t{i}"))?;
        }
        Ok(())
    });
    assert_eq!((findings.faults.len(), findings.incomplete), (100, None));
}

#[test]
fn a_missing_tensor_that_no_memory_could_hold_ends_the_search_and_not_the_process() {
    let findings = search(one(), Limits::default(), &|vb| {
        vb.get(1 << 40, "x")?.contiguous()?;
        vb.get(1, "y")?;
        Ok(())
    });
    assert_eq!(listed(&findings), ["x"]);
    let why = findings.incomplete.expect("a reason");
    assert!(why.contains("`x`") && why.contains("too large"), "{why}");
}

#[test]
fn a_builder_that_is_used_after_its_run_is_refused_and_does_not_panic() {
    let kept = std::sync::Mutex::new(Vec::new());
    search(one(), Limits::default(), &|vb| {
        kept.lock().expect("no panic").push(vb.clone());
        vb.get(1, "x").map(drop)
    });
    for vb in kept.into_inner().expect("no panic") {
        for name in ["x", "a", "y"] {
            drop(vb.get(1, name));
        }
    }
}

#[test]
fn a_constructor_that_makes_too_much_of_them_is_stopped() {
    let limits = Limits {
        bytes: 64 << 20,
        ..Limits::default()
    };
    let most = AtomicUsize::new(0);
    let findings = search(one(), limits, &|vb| {
        let mut made: Vec<Tensor> = Vec::new();
        for i in 0..1000 {
            // 8 MiB each, 8 GiB together.
            let tensor = vb.get(2 << 20, &format!("t{i}"))?;
            made.push((tensor.contiguous()? + 1.)?);
            most.fetch_max(made.len(), Ordering::Relaxed);
        }
        Ok(())
    });
    let why = findings.incomplete.unwrap();
    assert!(why.contains("67108864 bytes"), "{why}");
    // Another 64 MiB may have been asked for until that is seen, and other tests run beside this one.
    let most = most.load(Ordering::Relaxed);
    assert!(most < 40, "{most} tensors of 8 MiB were made");
    assert_eq!(findings.faults[0].name, "t0");
}

#[test]
fn a_constructor_that_asks_for_ever_is_stopped() {
    let limits = Limits {
        requests: 1000,
        ..Limits::default()
    };
    let requests = AtomicUsize::new(0);
    let findings = search(one(), limits, &|vb| {
        vb.get(1, "b")?;
        let mut i = 0;
        while vb.get(1, &format!("layers.{i}")).is_ok() {
            requests.fetch_add(1, Ordering::Relaxed);
            i += 1;
        }
        Ok(())
    });
    // Where it is told the truth about layers, it ends by itself.
    assert_eq!(
        (listed(&findings), findings.incomplete),
        (vec!["b".to_string()], None)
    );
    assert!(requests.load(Ordering::Relaxed) < 2000);

    let findings = search(one(), limits, &|vb| {
        loop {
            vb.get(1, "b")?;
        }
    });
    assert_eq!(listed(&findings), ["b"]);
    assert!(findings.incomplete.unwrap().contains("1000 requests"));
}

#[test]
fn a_search_without_time_lists_what_it_saw_and_says_so() {
    let build: &Constructor<'_> = &|vb| {
        let _ = vb.get(1, "norm.weight");
        vb.get(1, "b").map(drop)
    };
    let limits = Limits {
        runs: 1,
        ..Limits::default()
    };
    let findings = search(one(), limits, build);
    assert_eq!(
        (listed(&findings), findings.unsure),
        (vec!["norm.weight".to_string(), "b".into()], true)
    );
    let findings = search(one(), Limits::default(), build);
    assert_eq!(
        (listed(&findings), findings.unsure),
        (vec!["b".to_string()], false)
    );
}

#[test]
fn a_tensor_of_any_shape_is_given_that_of_one_like_it() {
    let held = table(&[
        ("blocks.0.w", ElementType::F32, &[2, 3]),
        ("blocks.2.w", ElementType::F32, &[2, 3]),
    ]);
    let findings = search(held, Limits::default(), &|vb| {
        for i in 0..3 {
            let width = vb.get_unchecked(&format!("blocks.{i}.w"))?.dim(1)?;
            vb.get(width, &format!("blocks.{i}.v"))?;
        }
        Ok(())
    });
    let names = ["blocks.0.v", "blocks.1.w", "blocks.1.v", "blocks.2.v"];
    assert_eq!(
        (listed(&findings), findings.incomplete),
        (names.map(String::from).to_vec(), None)
    );

    // There is none like this: the list ends there.
    let findings = search(one(), Limits::default(), &|vb| {
        vb.get(1, "b")?;
        vb.get_unchecked("w").map(drop)
    });
    assert_eq!(listed(&findings), ["b", "w"]);
    assert!(findings.incomplete.is_some());
}

#[test]
fn every_dtype_of_candle_has_a_tensor_without_values() {
    let findings = search(one(), Limits::default(), &|vb| {
        for dtype in [
            DType::U8,
            DType::U32,
            DType::I16,
            DType::I32,
            DType::I64,
            DType::BF16,
            DType::F16,
            DType::F32,
            DType::F64,
            DType::F8E4M3,
            DType::F6E2M3,
            DType::F6E3M2,
            DType::F4,
            DType::F8E8M0,
        ] {
            let tensor = vb.to_dtype(dtype).get((4, 8), &format!("{dtype:?}"))?;
            assert_eq!((tensor.dtype(), tensor.dims()), (dtype, &[4, 8][..]));
        }
        Ok(())
    });
    assert_eq!((findings.faults.len(), findings.incomplete), (14, None));
}

#[test]
fn a_shape_that_no_machine_can_count_is_an_error_and_not_a_panic() {
    let findings = search(one(), Limits::default(), &|vb| -> Result<()> {
        vb.get((1 << 40, 1 << 40), "b")?;
        Ok(())
    });
    let why = findings.incomplete.unwrap();
    assert!(why.contains("too large"), "{why}");
}

#[test]
fn a_cast_that_candle_does_not_do_is_found_without_the_values() {
    let held = table(&[
        ("e", ElementType::F8E8M0, &[4]),
        ("f", ElementType::F8E4M3, &[4]),
    ]);
    let findings = search(held, Limits::default(), &|vb| {
        vb.get(4, "f")?;
        vb.get(4, "e").map(drop)
    });
    assert_eq!(listed(&findings), ["e"]);
    let (stored, why) = findings.faults[0].mistyped.as_ref().unwrap();
    assert!(
        *stored == ElementType::F8E8M0 && why.contains("cannot be had as F32"),
        "{why}"
    );
}
