//! Plans and traces that do not fit the model: refused before a tensor's byte is read or memory is taken.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use candle_ipc_cache::Trace;
use candle_ipc_cache::checkpoint::Checkpoint;
use candle_ipc_cache::trace::{Asked, ShardHint};
use candle_ipc_cache::worker::WorkerError;
use candle_ipc_cache::worker::select::{SelectError, Selection, ShardPlan};

use crate::support::{fill, open, options, planned, rules};

/// A checkpoint of a TiB that takes no room on the disk. What gets as far as looking for memory fails there.
fn huge(folder: &Path) -> Option<Checkpoint> {
    let side = 1u64 << 19;
    let shape = [side, side];
    let header = format!(
        "{{\"a.q_proj.weight\":{{\"dtype\":\"F32\",\"shape\":{shape:?},\"data_offsets\":[0,{}]}},\
         \"a.norm.weight\":{{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[{0},{}]}}}}",
        4 * side * side,
        4 * side * side + 24,
    );
    let path: PathBuf = folder.join("huge.safetensors");
    let mut file = File::create(&path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes())
        .unwrap();
    file.write_all(header.as_bytes()).unwrap();
    let end = 8 + header.len() as u64 + 4 * side * side + 24;
    if let Err(e) = file.set_len(end) {
        println!("skipped: no sparse file of {end} bytes here: {e}");
        return None;
    }
    Some(open(&path))
}

fn asked(name: &str, shape: Option<&[u64]>, cut: Option<u32>) -> Asked {
    Asked {
        name: name.into(),
        shape: shape.map(<[u64]>::to_vec),
        dtype: None,
        shard: cut.map(|dim| ShardHint {
            dim,
            rank: 0,
            size: 2,
        }),
    }
}

fn trace(asked: Vec<Asked>) -> Trace {
    Trace::new(asked, Vec::new())
}

#[test]
fn plans_that_do_not_fit_are_refused_before_a_tensor_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let Some(checkpoint) = huge(folder.path()) else {
        return;
    };
    let with = |selection, size| fill(&checkpoint, &options(selection, 0, size)).unwrap_err();
    let by_rules = |text: &str| {
        let plan = ShardPlan::read(&rules(folder.path(), text))?;
        Ok(Selection::default().plan(plan))
    };
    let plan = |text: &str| by_rules(text).unwrap_or_else(|e: SelectError| panic!("{e}"));

    // A plan that fits gets further: to the memory, which is not there.
    let error = with(plan("[rules]\n\"*.q_proj\" = 0\n"), 2);
    assert!(matches!(error, WorkerError::NoRoom { .. }), "{error}");

    for (text, size, said) in [
        (
            "[rules]\n\"*.k_proj\" = 0\n",
            2,
            &["the rule `*.k_proj` names no tensor", "a.q_proj.weight"][..],
        ),
        (
            "[rules]\n\"a.q_proj\" = 2\n",
            2,
            &["`a.q_proj=2`", "`a.q_proj.weight`", "no dimension 2"],
        ),
        (
            "[rules]\n\"*norm\" = 0\n",
            4,
            &[
                "`a.norm.weight`",
                "[6]",
                "dimension 0",
                "not divisible by 4",
            ],
        ),
        (
            "[rules]\n\"*q_proj\" = 0\n\"a.*\" = 1\n",
            2,
            &["`*q_proj=0`", "`a.*=1`", "`a.q_proj.weight`"],
        ),
        (
            "keep = [\"b.*\"]\n[rules]\n\"*q_proj\" = 0\n",
            2,
            &["pattern to keep `b.*` names no tensor"],
        ),
        ("[rules]\n\"*q_proj\" = 0\n", 1, &["plan.toml", "--tp"]),
    ] {
        let error = with(plan(text), size);
        assert!(matches!(error, WorkerError::Select(_)), "{error}");
        let error = error.to_string();
        for said in said {
            assert!(error.contains(said), "{text}: {error}");
        }
    }
    let error = with(Selection::default(), 2).to_string();
    assert!(
        error.contains("rank 0/2") && error.contains("--plan"),
        "{error}"
    );

    for (text, said) in [
        ("[rules]\n\"*\" = \"copy\"\n", "`*` = \"copy\""),
        ("[rules]\n\"*\" = -1\n", "`*` = -1"),
        ("[rules]\n\"*\" = [0]\n", "a array"),
        ("[rule]\n\"*\" = 0\n", "unknown field `rule`"),
        ("keep = 3\n", "plan.toml"),
    ] {
        let error = by_rules(text).unwrap_err().to_string();
        assert!(
            error.contains(said) && error.contains("plan.toml"),
            "{text}: {error}"
        );
    }
}

#[test]
fn a_trace_of_another_model_is_refused_with_all_that_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let Some(checkpoint) = huge(folder.path()) else {
        return;
    };
    let refused = |selection, size| {
        let error = fill(&checkpoint, &options(selection, 0, size)).unwrap_err();
        assert!(matches!(error, WorkerError::Select(_)), "{error}");
        error.to_string()
    };
    let other: Vec<Asked> = (0..40)
        .map(|i| asked(&format!("b.{i}.weight"), None, Some(0)))
        .chain([asked("a.norm.weight", Some(&[6]), None)])
        .collect();
    let other = trace(other);
    let only = |trace: &Trace| Selection::default().only(trace, "o.json").unwrap();
    for error in [refused(planned(&other), 2), refused(only(&other), 1)] {
        assert!(error.contains("40 of 41 tensors"), "{error}");
        for i in 0..40 {
            assert!(error.contains(&format!("`b.{i}.weight`")), "{error}");
        }
        assert!(error.contains(".json"), "{error}");
    }
    let misshapen = trace(vec![asked("a.norm.weight", Some(&[7]), None)]);
    let error = refused(only(&misshapen), 1);
    assert!(error.contains("[7]") && error.contains("[6]"), "{error}");
    // A model that tried two shapes was right with one.
    let tried = trace(vec![
        asked("a.norm.weight", Some(&[7]), None),
        asked("a.norm.weight", Some(&[6]), None),
    ]);
    let loaded = fill(&checkpoint, &options(only(&tried), 0, 1)).unwrap();
    assert_eq!(loaded.manifest.tensors.len(), 1);
    assert!(loaded.manifest.key.selection.starts_with("1 of 2 tensors"));

    let twice = trace(vec![
        asked("a.q_proj.weight", None, Some(0)),
        asked("a.q_proj.weight", None, Some(1)),
    ]);
    let error = ShardPlan::of_trace(&twice, "t.json").unwrap_err();
    assert!(error.to_string().contains("dimensions 0 and 1"), "{error}");

    let apart = only(&tried).keep(["*q_proj".to_string()]);
    let error = refused(apart, 1);
    assert!(error.contains("no tensor is left"), "{error}");
}
