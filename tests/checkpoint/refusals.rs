//! Folders, indexes and GGUF sets that do not hold together, and what is said of them.
//! Each message names the thing and the choices there are.

use std::path::Path;

use candle_ipc_cache::checkpoint::{Checkpoint, CheckpointError, Options};
use serde_json::{Value, json};

use crate::{bytes_of, gguf, gguf_at, open, tensors};

/// A folder with these files (name, bytes), and the error that opening it gives.
fn refused(files: &[(&str, Vec<u8>)], options: &Options) -> String {
    let dir = tempfile::tempdir().expect("a folder");
    for (name, bytes) in files {
        let path = dir.path().join(name);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        std::fs::write(path, bytes).expect("written");
    }
    Checkpoint::open(dir.path(), options)
        .expect_err("refused")
        .to_string()
}

#[test]
fn a_path_that_is_not_there_says_so_and_a_hub_id_says_that_it_would_be_one() {
    let e = open(Path::new("some-org/Some-Model-8B"))
        .expect_err("not there")
        .to_string();
    assert!(e.contains("hub ids are not supported"), "{e}");
    let e = open(Path::new("/nowhere/model.gguf")).expect_err("not there");
    assert!(matches!(e, CheckpointError::NoSuchPath { .. }), "{e}");
    assert!(e.to_string().contains("/nowhere/model.gguf"), "{e}");
}

#[test]
fn a_folder_that_does_not_say_which_file_is_the_model_is_refused_with_its_choices() {
    let st = || tensors(&[("a", &[1])]);
    let plain = Options::default();
    let fp8 = Options {
        variant: Some("fp8".into()),
    };
    for (files, options, wanted) in [
        (
            vec![("a.safetensors", st()), ("b.safetensors", st())],
            &plain,
            "a.safetensors, b.safetensors",
        ),
        (
            vec![("a.gguf", gguf("t", 4, &[])), ("b.gguf", gguf("t", 4, &[]))],
            &plain,
            "a.gguf, b.gguf",
        ),
        (
            vec![("model-00001-of-00002.safetensors", st())],
            &plain,
            "shards without their index",
        ),
        (
            vec![("model.fp16.safetensors", st())],
            &plain,
            "none was asked for; there are: fp16",
        ),
        (
            vec![("model.fp16.safetensors", st())],
            &fp8,
            "no weights of variant `fp8`; there are: fp16",
        ),
        (
            vec![("pytorch_model.bin", st())],
            &plain,
            "convert them to safetensors: pytorch_model.bin",
        ),
        (
            vec![("config.json", b"{}".to_vec())],
            &plain,
            "no weights there: looked for",
        ),
        (
            vec![("unet/x.safetensors", st())],
            &plain,
            "sub-folders hold weights, name one: unet",
        ),
    ] {
        let e = refused(&files, options);
        assert!(e.contains(wanted), "{e}\nshould say: {wanted}");
    }
}

#[test]
fn an_index_that_its_shards_do_not_fulfil_is_refused_with_every_tensor() {
    let index = |map: Value| json!({"weight_map": map}).to_string().into_bytes();
    let shard = ("s.safetensors", tensors(&[("a", &[1]), ("x", &[2])]));
    let map = json!({"a": "s.safetensors", "b": "s.safetensors", "c": "s.safetensors"});
    let e = refused(
        &[shard.clone(), ("model.safetensors.index.json", index(map))],
        &Options::default(),
    );
    assert!(
        e.contains("`b` (in s.safetensors), `c` (in s.safetensors)"),
        "{e}"
    );
    let twice = br#"{"weight_map": {"a": "s.safetensors", "a": "s.safetensors"}}"#.to_vec();
    let e = refused(
        &[shard.clone(), ("model.safetensors.index.json", twice)],
        &Options::default(),
    );
    assert!(e.contains("duplicate tensor `a` in weight_map"), "{e}");
    let e = refused(
        &[shard, ("model.safetensors.index.json", b"{}".to_vec())],
        &Options::default(),
    );
    assert!(e.contains("no weight_map"), "{e}");
}

#[test]
fn long_lists_in_errors_are_cut_with_a_count() {
    let map: serde_json::Map<_, _> = (0..5000)
        .map(|i| {
            (
                format!("t{i}"),
                json!(format!("model-{i:05}-of-05000.safetensors")),
            )
        })
        .collect();
    let index = json!({"weight_map": map}).to_string().into_bytes();
    let e = refused(
        &[("model.safetensors.index.json", index)],
        &Options::default(),
    );
    assert!(
        e.contains("5000 files of the model missing") && e.contains("and 4980 more"),
        "{e}"
    );
    assert!(e.len() < 2000, "{} bytes of message", e.len());
}

#[test]
fn parts_of_a_split_gguf_that_do_not_belong_together_are_refused() {
    let part = |name: &str, no: u16, of: u16| {
        let keys = [
            ("split.no", 2, no.to_le_bytes().to_vec()),
            ("split.count", 2, of.to_le_bytes().to_vec()),
        ];
        gguf(name, 4, &keys)
    };
    for (first, second, wanted) in [
        (
            part("a", 0, 2),
            part("b", 0, 2),
            "split.no is 0 (part 1), its name says part 2",
        ),
        (
            part("a", 0, 3),
            part("b", 1, 3),
            "split.count is 3, its name says 2 parts",
        ),
        (
            part("a", 0, 2),
            part("a", 1, 2),
            "duplicate tensor `a` (also in",
        ),
    ] {
        let files = [
            ("t-00001-of-00002.gguf", first),
            ("t-00002-of-00002.gguf", second),
        ];
        let e = refused(&files, &Options::default());
        assert!(e.contains(wanted), "{e}\nshould say: {wanted}");
    }
    let e = refused(&[("renamed.gguf", part("a", 0, 3))], &Options::default());
    assert!(e.contains("one of 3 parts"), "{e}");
}

#[test]
fn gguf_tensors_that_overlap_or_are_out_of_line_are_refused_and_any_integer_may_be_the_alignment() {
    let alignments: [(u32, Vec<u8>); 4] = [
        (0, vec![64]),
        (3, vec![64, 0]),
        (10, 64u64.to_le_bytes().into()),
        (11, 64i64.to_le_bytes().into()),
    ];
    for (kind, value) in alignments {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("x.gguf");
        let mut bytes = gguf("a", 64, &[("general.alignment", kind, value)]);
        bytes.resize(bytes.len() + 64, 0);
        std::fs::write(&path, bytes).expect("written");
        assert!(
            open(&path).expect("opens").tensors[0]
                .offset
                .is_multiple_of(64)
        );
    }
    for value in [0u32, 4, 24, 1 << 31] {
        let keys = [("general.alignment", 4, value.to_le_bytes().to_vec())];
        refused(&[("x.gguf", gguf("a", 64, &keys))], &Options::default());
    }
    for (second, wanted) in [
        (
            ("b", 8, 16),
            "`b`: its offset 16 is not a multiple of the alignment 32",
        ),
        (
            ("b", 8, 32),
            "`b`: it starts at byte 32 of the data, inside `a`, which ends at 64",
        ),
        (("b", 16, 0), "tensors `a` and `b` share bytes 0 to 64"),
        (
            ("b", 1 << 62, 64),
            "`b`: F32 of shape [4611686018427387904]",
        ),
    ] {
        let mut bytes = gguf_at(&[("a", 16, 0), ("b", 8, 64)], &[]);
        // After 24 bytes of counts and 33 of the first tensor: name, rank, dimension, type, offset.
        let dimension = 24 + 33 + (8 + 1) + 4;
        bytes[dimension..dimension + 8].copy_from_slice(&u64::to_le_bytes(second.1));
        bytes[dimension + 12..dimension + 20].copy_from_slice(&u64::to_le_bytes(second.2));
        let e = refused(&[("x.gguf", bytes)], &Options::default());
        assert!(e.contains(wanted), "{e}\nshould say: {wanted}");
    }
}

#[test]
fn a_tensor_that_the_index_does_not_name_is_not_loaded() {
    let dir = tempfile::tempdir().expect("a folder");
    let put = |name: &str, bytes: Vec<u8>| std::fs::write(dir.path().join(name), bytes);
    put("1.safetensors", tensors(&[("a", &[1]), ("b", &[9])])).expect("written");
    put("2.safetensors", tensors(&[("b", &[2]), ("c", &[3])])).expect("written");
    let map = json!({"weight_map": {"b": "2.safetensors", "a": "1.safetensors"}});
    let index = "model.safetensors.index.json";
    put(index, map.to_string().into_bytes()).expect("written");
    for path in [dir.path().to_path_buf(), dir.path().join(index)] {
        let c = open(&path).expect("opens");
        let names: Vec<_> = c.tensors.iter().map(|t| t.name.as_str()).collect();
        assert_eq!(names, ["a", "b"]);
        assert_eq!((bytes_of(&c, "a"), bytes_of(&c, "b")), (vec![1], vec![2]));
        assert!(c.small_files.is_empty(), "the index does not travel");
    }
}

#[test]
fn a_file_of_another_kind_is_called_what_it_is() {
    let zip = [&b"PK\x03\x04"[..], &[1; 200]].concat();
    let page = [&b"<!DOCTYPE html><html>"[..], &[b' '; 200]].concat();
    for (bytes, wanted) in [
        (zip, "a ZIP archive, as PyTorch writes them"),
        (page, "an HTML page"),
    ] {
        let e = refused(&[("model.safetensors", bytes)], &Options::default());
        assert!(e.contains("model.safetensors") && e.contains(wanted), "{e}");
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
    let e = open(&script).expect_err("no weights").to_string();
    assert!(e.contains("Cargo.toml: not a checkpoint"), "{e}");
    let variant = Options {
        variant: Some("fp16".into()),
    };
    let e = Checkpoint::open(&script, &variant)
        .expect_err("a file")
        .to_string();
    assert!(e.contains("variant `fp16`"), "{e}");
}
