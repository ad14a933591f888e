//! Every file and folder input of tests/cases does what its manifest says.
//! Two other readers are asked as well: the safetensors crate and candle.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::quantized::gguf_file::Content;
use candle_ipc_cache::checkpoint::{Checkpoint, CheckpointError, Options};
use candle_ipc_cache::manifest::Digest;
use serde_json::{Value, json};

use crate::{bytes_of, cases, hex, open};

fn matches(pattern: &Value, message: &str) -> bool {
    let pattern = pattern.as_str().expect("a pattern");
    regex::RegexBuilder::new(pattern)
        .case_insensitive(true)
        .dot_matches_new_line(true)
        .build()
        .expect("a pattern that compiles")
        .is_match(message)
}

/// What is wrong with the product's answer to one input of the manifest; empty: nothing.
fn judge(entry: &Value, path: &Path) -> Vec<String> {
    let options = Options {
        variant: entry["args"]["variant"].as_str().map(Into::into),
    };
    let opened = Checkpoint::open(path, &options);
    let c = match (entry["expected"].as_str().expect("expected"), opened) {
        ("ok", Ok(c)) => c,
        ("error", Ok(_)) if entry["or_ok"] == true => return Vec::new(),
        ("error", Ok(_)) => return vec!["opened, and should be refused".into()],
        (expected, Err(e)) => return judge_error(entry, path, expected, &e.to_string()),
        (other, _) => panic!("expected {other}?"),
    };
    let mut wrong = Vec::new();
    if let Some(count) = entry["count"].as_u64()
        && count != c.tensors.len() as u64
    {
        wrong.push(format!("{} tensors, {count} are right", c.tensors.len()));
    }
    let none = serde_json::Map::new();
    let listed = entry["tensors"].as_object().unwrap_or(&none);
    if !listed.is_empty() && entry["more"] != true && listed.len() != c.tensors.len() {
        wrong.push(format!(
            "{} tensors, {} are right",
            c.tensors.len(),
            listed.len()
        ));
    }
    for (name, right) in listed {
        let Some(t) = c.tensors.iter().find(|t| t.name == *name) else {
            wrong.push(format!("no tensor {name}"));
            continue;
        };
        let found = json!({"dtype": t.element.as_str(), "shape": t.shape, "sha256": hex(&bytes_of(&c, name))});
        if found != *right {
            wrong.push(format!("{name}: {found}, right is {right}"));
        }
        if c.digest(t).expect("a digest") != Digest::of(&bytes_of(&c, name)) {
            wrong.push(format!("{name}: its digest is not that of its bytes"));
        }
    }
    for name in entry["absent"].as_array().into_iter().flatten() {
        if c.tensors.iter().any(|t| t.name == *name) {
            wrong.push(format!("serves {name}"));
        }
    }
    let small: BTreeMap<_, _> = c
        .small_files
        .iter()
        .map(|(n, b)| (n.as_str(), hex(b)))
        .collect();
    for (name, right) in entry["files"].as_object().unwrap_or(&none) {
        if small.get(name.as_str()).map(String::as_str) != right.as_str() {
            wrong.push(format!("file {name} does not come back byte for byte"));
        }
    }
    if let Err(e) = c.check_unchanged() {
        wrong.push(format!("unchanged, and yet: {e}"));
    }
    wrong
}

fn judge_error(entry: &Value, path: &Path, expected: &str, message: &str) -> Vec<String> {
    println!("{}/{}: {message}", entry["case"], entry["variant"]);
    let pattern = match expected {
        "error" => &entry["error"],
        _ => &entry["else_error"],
    };
    if pattern.is_null() {
        return vec![format!("should open: {message}")];
    }
    let mut wrong = Vec::new();
    if !matches(pattern, message) {
        wrong.push(format!("the message does not match {pattern}: {message}"));
    }
    let name = path
        .file_name()
        .expect("a name")
        .to_string_lossy()
        .into_owned();
    if !message.contains(&name) {
        wrong.push(format!("the message does not name {name}: {message}"));
    }
    wrong
}

#[test]
fn every_file_and_folder_of_the_cases_does_what_the_manifest_says() {
    let (dir, entries) = cases();
    let inputs: Vec<_> = entries.iter().filter(|e| !e["path"].is_null()).collect();
    // Counted in make_cases.py, so that a manifest that lost inputs does not pass.
    const INPUTS: usize = 101;
    let mut ran = 0;
    let mut failed = Vec::new();
    for entry in &inputs {
        let path = dir.path().join(entry["path"].as_str().expect("a path"));
        let what = format!("{}/{}", entry["case"], entry["variant"]);
        failed.extend(judge(entry, &path).iter().map(|w| format!("{what}: {w}")));
        ran += 1;
    }
    println!("{ran} inputs of {} entries", entries.len());
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    assert!(ran >= INPUTS, "{ran} inputs ran, there were {INPUTS}");
    let hub = entries.iter().filter(|e| !e["hub"].is_null()).count();
    assert_eq!(ran + hub, entries.len());
}

#[test]
fn what_the_reference_implementation_says_of_a_safetensors_file_we_say_too() {
    let (dir, entries) = cases();
    let mut compared = 0;
    for (name, _) in entries
        .iter()
        .filter_map(|e| e["reference"].as_object())
        .flatten()
    {
        let path = dir.path().join(name);
        let bytes = std::fs::read(&path).expect("a file");
        let theirs = safetensors::SafeTensors::read_metadata(&bytes);
        match open(&path) {
            Ok(ours) => {
                let (_, theirs) = theirs.expect("what we open is valid");
                assert_eq!(ours.tensors.len(), theirs.tensors().len(), "{name}");
            }
            // They take a file without tensors, and the last of two equal keys.
            Err(CheckpointError::NoTensors { .. } | CheckpointError::Duplicate { .. }) => {}
            Err(e) => assert!(theirs.is_err(), "{name}: only we refuse it: {e}"),
        }
        compared += 1;
    }
    assert!(compared > 30, "only {compared} files");
}

#[test]
fn a_hub_snapshot_is_read_through_its_links_and_an_interrupted_download_is_named() {
    let (dir, _) = cases();
    let snapshot = |case: &str| {
        let repo = dir
            .path()
            .join(case)
            .join("models--example--tiny/snapshots");
        let mut found = std::fs::read_dir(repo).expect("snapshots");
        found.next().expect("a snapshot").expect("readable").path()
    };
    let c = open(&snapshot("hf-layouts/symlinks")).expect("opens");
    assert_eq!(c.tensors.len(), 2);
    assert!(c.small_files.iter().any(|(n, _)| n == "config.json"));
    assert!(
        c.files[0]
            .receipt
            .path
            .parent()
            .expect("a folder")
            .ends_with("blobs")
    );

    let half = open(&snapshot("hf-half-download/half")).expect_err("half a model");
    let half = half.to_string();
    assert!(half.contains("model-00002-of-00002.safetensors"), "{half}");
    assert!(
        half.contains(".incomplete") && half.contains("interrupted"),
        "{half}"
    );

    let none = open(&snapshot("hf-half-download/only_config")).expect_err("no weights");
    let none = none.to_string();
    assert!(
        none.contains("no weights") && none.contains(".incomplete"),
        "{none}"
    );
}

#[test]
fn a_gguf_header_travels_verbatim_and_candle_reads_it() {
    let (dir, entries) = cases();
    let mut read = 0;
    for entry in entries.iter().filter(|e| e["expected"] == "ok") {
        let Some(path) = entry["path"].as_str().filter(|p| p.ends_with(".gguf")) else {
            continue;
        };
        let path = dir.path().join(path);
        let c = open(&path).expect("opens");
        let (_, header) = c
            .small_files
            .iter()
            .find(|(n, _)| n == "gguf.header")
            .expect("a header");
        let whole = std::fs::read(&c.files[0].receipt.path).expect("a file");
        assert_eq!(whole[..header.len()], header[..]);
        let content = Content::read(&mut std::io::Cursor::new(header));
        let content = content.expect("candle reads it");
        assert_eq!(
            content.tensor_data_offset,
            header.len() as u64,
            "{}",
            path.display()
        );
        if c.files.len() == 1 {
            assert_same(&c, &content);
        }
        read += 1;
    }
    assert!(read > 15, "only {read} files");
}

/// Both readers see the same tensors in the same places.
pub(crate) fn assert_same(c: &Checkpoint, content: &Content) {
    assert_eq!(c.tensors.len(), content.tensor_infos.len());
    for t in &c.tensors {
        let theirs = &content.tensor_infos[&t.name];
        let shape: Vec<_> = theirs.shape.dims().iter().map(|d| *d as u64).collect();
        assert_eq!(
            (&t.shape, t.offset),
            (&shape, content.tensor_data_offset + theirs.offset)
        );
        let block = (
            theirs.ggml_dtype.block_size() as u64,
            theirs.ggml_dtype.type_size() as u64,
        );
        assert_eq!(
            (t.element.block_elements(), t.element.block_bytes()),
            block,
            "{}",
            t.name
        );
    }
}

#[test]
fn entries_are_named_after_the_file_the_set_or_the_folder() {
    let (dir, _) = cases();
    for (path, name) in [
        ("gg-split/m/tiny-00002-of-00003.gguf", "tiny"),
        ("gg-split/m", "m"),
        ("gg-versions/v2.gguf", "v2"),
        ("idx-numbers/no_metadata", "no_metadata"),
        ("idx-numbers/no_metadata/.", "no_metadata"),
        (
            "idx-numbers/no_metadata/model.safetensors.index.json",
            "no_metadata",
        ),
        ("st-layout/odd_neighbours.safetensors", "odd_neighbours"),
    ] {
        assert_eq!(open(&dir.path().join(path)).expect(path).name, name);
    }
}

#[test]
fn strings_of_the_header_become_attributes() {
    let (dir, _) = cases();
    let c = open(&dir.path().join("gg-versions/v3.gguf")).expect("opens");
    let right = [("general.architecture", "llama"), ("general.name", "tiny")];
    assert_eq!(
        c.attributes,
        right.map(|(a, b)| (a.to_string(), b.to_string()))
    );
    let c = open(&dir.path().join("st-layout/pretty_header.safetensors")).expect("opens");
    assert_eq!(c.attributes, [("format".to_string(), "pt".to_string())]);
}
