//! Reading checkpoints: every file and folder input of tests/cases, and what can happen to files meanwhile.
//! Real files, real links, real refusals by the system.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use candle_ipc_cache::checkpoint::{Checkpoint, CheckpointError, Options};
use candle_ipc_cache::manifest::Digest;
use proptest::prelude::*;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect()
}

fn open(path: &Path) -> Result<Checkpoint, CheckpointError> {
    Checkpoint::open(path, &Options::default())
}

fn bytes_of(c: &Checkpoint, name: &str) -> Vec<u8> {
    let t = c
        .tensors
        .iter()
        .find(|t| t.name == name)
        .expect("a tensor of that name");
    let mut bytes = vec![0; t.bytes as usize];
    c.read_at(t, 0, &mut bytes).expect("readable");
    bytes
}

/// A safetensors file of U8 tensors.
fn tensors(list: &[(&str, &[u8])]) -> Vec<u8> {
    let mut at = 0;
    let mut header = serde_json::Map::new();
    for (name, bytes) in list {
        let end = at + bytes.len();
        header.insert(
            name.to_string(),
            json!({"dtype": "U8", "shape": [bytes.len()], "data_offsets": [at, end]}),
        );
        at = end;
    }
    let header = Value::Object(header).to_string();
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(header.as_bytes());
    for (_, bytes) in list {
        out.extend_from_slice(bytes);
    }
    out
}

/// A GGUF file (version 3) with one F32 tensor of `n` elements, zero.
fn gguf(name: &str, n: u64, keys: &[(&str, u32, Vec<u8>)]) -> Vec<u8> {
    let text = |s: &str| [&(s.len() as u64).to_le_bytes()[..], s.as_bytes()].concat();
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend(1u64.to_le_bytes());
    out.extend((keys.len() as u64).to_le_bytes());
    for (key, kind, value) in keys {
        out.extend(text(key));
        out.extend(kind.to_le_bytes());
        out.extend(value);
    }
    out.extend(text(name));
    out.extend(1u32.to_le_bytes());
    out.extend(n.to_le_bytes());
    out.extend(0u32.to_le_bytes());
    out.extend(0u64.to_le_bytes());
    out.resize(out.len().next_multiple_of(32) + n as usize * 4, 0);
    out
}

fn cases() -> (tempfile::TempDir, Vec<Value>) {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases/make_cases.py");
    let made = Command::new("python3").arg(script).arg(dir.path()).status();
    assert!(made.expect("python3 runs").success());
    let manifest = std::fs::read(dir.path().join("manifest.json")).expect("a manifest");
    let manifest: Value = serde_json::from_slice(&manifest).expect("JSON");
    let entries = manifest["entries"].as_array().expect("entries").clone();
    (dir, entries)
}

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
    assert!(ran >= 90, "only {ran} inputs");
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
fn a_file_without_permission_is_named_with_its_mode_and_owner() {
    use std::os::unix::fs::PermissionsExt;
    const ASK: &str = "CHECKPOINT_TEST_DENIED";
    let check = |dir: &Path| {
        let file = open(&dir.join("model.safetensors")).expect_err("denied");
        assert!(matches!(file, CheckpointError::Denied { .. }), "{file}");
        let file = file.to_string();
        assert!(file.contains("model.safetensors"), "{file}");
        assert!(file.contains("mode 0000") && file.contains("uid"), "{file}");
        let inside = open(&dir.join("shut/model.safetensors"))
            .expect_err("denied")
            .to_string();
        assert!(inside.contains("shut has mode 0000"), "{inside}");
        let folder = open(&dir.join("shut")).expect_err("denied").to_string();
        assert!(folder.contains("shut has mode 0000"), "{folder}");
    };
    if let Some(dir) = std::env::var_os(ASK) {
        return check(Path::new(&dir));
    }
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("model.safetensors");
    let shut = dir.path().join("shut");
    std::fs::write(&file, tensors(&[("a", &[1])])).expect("written");
    std::fs::create_dir(&shut).expect("made");
    std::fs::copy(&file, shut.join("model.safetensors")).expect("copied");
    let mode = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("chmod")
    };
    mode(&file, 0);
    mode(&shut, 0);
    if std::fs::File::open(&file).is_err() {
        check(dir.path());
    } else {
        // Root may read anything, until it gives the capabilities up that say so.
        let caps = "-dac_override,-dac_read_search";
        let mut child = Command::new("setpriv");
        child
            .arg(format!("--bounding-set={caps}"))
            .arg(format!("--inh-caps={caps}"));
        child.arg(std::env::current_exe().expect("this program"));
        again(
            child,
            "a_file_without_permission_is_named_with_its_mode_and_owner",
            ASK,
            dir.path(),
        );
    }
    mode(&shut, 0o700);
}

/// Runs one test of this program again, in a process of its own.
fn again(mut command: Command, test: &str, variable: &str, value: &Path) {
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]);
    let out = command.env(variable, value).output().expect("starts");
    let text = String::from_utf8_lossy(&out.stdout);
    let errors = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{text}\n{errors}");
    assert!(text.contains("1 passed"), "{text}\n{errors}");
    for line in text.lines().filter(|l| l.starts_with("measured")) {
        println!("{line}");
    }
}

#[test]
fn a_file_that_shrinks_between_open_and_read_is_an_error_with_both_sizes() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("model.safetensors");
    std::fs::write(&path, tensors(&[("a", &[1; 1000]), ("b", &[2; 1000])])).expect("written");
    let c = open(&path).expect("opens");
    let whole = c.files[0].receipt.bytes;
    let file = std::fs::File::options()
        .write(true)
        .open(&path)
        .expect("opens");
    file.set_len(whole - 500).expect("cut");
    assert_eq!(bytes_of(&c, "a"), [1; 1000]);
    let b = &c.tensors[1];
    let e = c.read_at(b, 0, &mut [0; 1000]).expect_err("cut");
    assert!(
        matches!(&e, CheckpointError::Shrunk { tensor, found, wanted, .. }
            if tensor == "b" && *found == whole - 500 && *wanted == whole),
        "{e}"
    );
    let text = e.to_string();
    assert!(
        text.contains("model.safetensors") && text.contains("shorter while it was read"),
        "{text}"
    );
    assert!(c.digest(b).is_err());
    let e = c.check_unchanged().expect_err("cut").to_string();
    assert!(
        e.contains(&format!("{whole} bytes, now {}", whole - 500)),
        "{e}"
    );
}

#[test]
fn a_file_that_is_written_after_it_was_opened_has_changed() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("model.safetensors");
    std::fs::write(&path, tensors(&[("a", &[1; 1000])])).expect("written");
    let c = open(&path).expect("opens");
    c.check_unchanged().expect("nobody wrote");
    // The clock that stamps files ticks every few milliseconds.
    std::thread::sleep(Duration::from_millis(50));
    std::fs::write(&path, tensors(&[("a", &[2; 1000])])).expect("written");
    let e = c.check_unchanged().expect_err("changed");
    assert!(matches!(e, CheckpointError::Changed { .. }), "{e}");
    assert!(e.to_string().contains("model.safetensors"), "{e}");
}

#[test]
fn a_path_that_is_replaced_does_not_change_what_was_opened() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("model.safetensors");
    std::fs::write(&path, tensors(&[("a", &[1; 1000])])).expect("written");
    let c = open(&path).expect("opens");
    std::thread::sleep(Duration::from_millis(50));
    let other = dir.path().join("other");
    std::fs::write(&other, tensors(&[("a", &[2; 1000])])).expect("written");
    std::fs::rename(&other, &path).expect("renamed");
    c.check_unchanged().expect("the open file is the old one");
    assert_eq!(bytes_of(&c, "a"), [1; 1000]);
}

#[test]
fn pipes_sockets_devices_and_folders_are_refused_without_waiting() {
    let dir = tempfile::tempdir().expect("a folder");
    let pipe = dir.path().join("pipe.safetensors");
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0)
        .expect("a pipe");
    let socket = dir.path().join("socket.gguf");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).expect("a socket");
    let device = dir.path().join("null.gguf");
    std::os::unix::fs::symlink("/dev/null", &device).expect("a link");
    for (path, kind) in [
        (&pipe, "a pipe"),
        (&socket, "a socket"),
        (&device, "a device"),
    ] {
        let e = open(path).expect_err("refused");
        assert!(matches!(e, CheckpointError::NotAFile { .. }), "{e}");
        assert!(e.to_string().contains(kind), "{e}");
    }
    // As part of a folder: weights are refused, a small file is left out.
    let model = dir.path().join("m");
    std::fs::create_dir(&model).expect("made");
    std::fs::rename(&pipe, model.join("config.json")).expect("moved");
    std::fs::write(model.join("model.safetensors"), tensors(&[("a", &[1])])).expect("written");
    assert!(open(&model).expect("opens").small_files.is_empty());
    std::fs::rename(model.join("config.json"), model.join("model.safetensors")).expect("moved");
    assert!(
        open(&model)
            .expect_err("refused")
            .to_string()
            .contains("a pipe")
    );
    std::fs::remove_file(model.join("model.safetensors")).expect("removed");
    std::fs::create_dir(model.join("model-00001-of-00001.safetensors")).expect("made");
    let index = json!({"weight_map": {"a": "model-00001-of-00001.safetensors"}}).to_string();
    std::fs::write(model.join("model.safetensors.index.json"), index).expect("written");
    assert!(
        open(&model)
            .expect_err("refused")
            .to_string()
            .contains("a folder")
    );
}

#[test]
fn a_folder_of_ten_thousand_files_is_opened_and_only_some_small_files_travel() {
    let dir = tempfile::tempdir().expect("a folder");
    for i in 0..10_000 {
        let ending = ["json", "txt", "safetensors.tmp", "log"][i % 4];
        std::fs::write(dir.path().join(format!("{i:05}.{ending}")), [b'x'; 10]).expect("written");
    }
    std::fs::write(dir.path().join("tokenizer.json"), "{}").expect("written");
    std::fs::write(
        dir.path().join("model.safetensors"),
        tensors(&[("a", &[1])]),
    )
    .expect("written");
    let c = open(dir.path()).expect("opens");
    assert_eq!(c.tensors.len(), 1);
    assert_eq!(c.small_files.len(), 256);
    assert!(c.small_files.iter().any(|(n, _)| n == "tokenizer.json"));
    let alone = open(&dir.path().join("model.safetensors")).expect("opens");
    let names: Vec<_> = alone.small_files.iter().map(|(n, _)| n.as_str()).collect();
    assert_eq!(names, ["tokenizer.json"]);
}

#[test]
fn a_small_file_over_its_limit_is_left_out_and_the_model_loads() {
    let dir = tempfile::tempdir().expect("a folder");
    let large = std::fs::File::create(dir.path().join("large.json")).expect("made");
    large.set_len((64 << 20) + 1).expect("sparse");
    for i in 0..9 {
        let file = std::fs::File::create(dir.path().join(format!("{i}.txt"))).expect("made");
        file.set_len(64 << 20).expect("sparse");
    }
    std::fs::write(
        dir.path().join("model.safetensors"),
        tensors(&[("a", &[1])]),
    )
    .expect("written");
    let c = open(dir.path()).expect("opens");
    let total: usize = c.small_files.iter().map(|(_, b)| b.len()).sum();
    assert_eq!((c.small_files.len(), total), (8, 512 << 20));
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
        let content =
            candle_core::quantized::gguf_file::Content::read(&mut std::io::Cursor::new(header));
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
fn assert_same(c: &Checkpoint, content: &candle_core::quantized::gguf_file::Content) {
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
        e.contains("5000 are not there") && e.contains("and 4980 more"),
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
    let mut bytes = gguf("a", 64, &[]);
    let offset = bytes
        .windows(12)
        .rposition(|w| w == [0; 12])
        .map(|_| 24 + 8 + 1 + 4 + 8 + 4);
    let offset = offset.expect("an offset");
    bytes[offset] = 16;
    let e = refused(&[("x.gguf", bytes)], &Options::default());
    assert!(
        e.contains("`a`") && e.contains("not a multiple of the alignment 32"),
        "{e}"
    );
}

/// Files to start from, and how to tell whether others take what we take.
fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let keys = [
        (
            "general.architecture",
            8,
            [&5u64.to_le_bytes()[..], b"llama"].concat(),
        ),
        ("general.alignment", 4, 32u32.to_le_bytes().to_vec()),
        (
            "list",
            9,
            [&5u32.to_le_bytes()[..], &2u64.to_le_bytes(), &[0; 8]].concat(),
        ),
        (
            "words",
            9,
            [
                &8u32.to_le_bytes()[..],
                &1u64.to_le_bytes(),
                &1u64.to_le_bytes(),
                b"w",
            ]
            .concat(),
        ),
        ("yes", 7, vec![1]),
    ];
    vec![
        ("x.gguf", gguf("blk.0.w", 32, &keys)),
        (
            "x.safetensors",
            tensors(&[("a", &[1; 16]), ("b", &[2; 3]), ("empty", &[])]),
        ),
    ]
}

fn mutate(bytes: &mut Vec<u8>, at: prop::sample::Index, kind: u8, value: u64) {
    let i = at.index(bytes.len());
    match kind {
        0 => bytes[i] ^= 1 << (value % 8),
        1 => bytes[i] = value as u8,
        2 => bytes.truncate(i),
        3 => bytes.insert(i, value as u8),
        4 => drop(bytes.remove(i)),
        5 => {
            let digits = value.to_string();
            bytes.splice(i..i, digits.bytes());
        }
        _ => {
            let end = bytes.len().min(i + 8);
            bytes[i..end].copy_from_slice(&value.to_le_bytes()[..end - i]);
        }
    }
    if bytes.is_empty() {
        bytes.push(value as u8);
    }
}

/// Whatever the bytes, opening ends in a checkpoint or an error, and what opens is what others see too.
fn open_mutated(dir: &Path, name: &str, bytes: &[u8]) {
    let path = dir.join(name);
    let mut file = std::fs::File::create(&path).expect("made");
    file.write_all(bytes).expect("written");
    drop(file);
    let c = match open(&path) {
        Ok(c) => c,
        Err(e) => {
            let e = e.to_string();
            assert!(e.contains(name) && e.len() < 4000, "{e}");
            return;
        }
    };
    for t in &c.tensors {
        assert!(t.offset + t.bytes <= bytes.len() as u64);
        assert_eq!(t.element.bytes(&t.shape), Some(t.bytes));
        assert_eq!(
            bytes_of(&c, &t.name),
            bytes[t.offset as usize..(t.offset + t.bytes) as usize]
        );
    }
    if name.ends_with(".gguf") {
        let content =
            candle_core::quantized::gguf_file::Content::read(&mut std::io::Cursor::new(bytes));
        assert_same(&c, &content.expect("candle takes what we take"));
    } else {
        safetensors::SafeTensors::read_metadata(bytes).expect("the reference takes what we take");
    }
}

/// Most address space this process has ever taken, in bytes.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("a status");
    let line = status
        .lines()
        .find_map(|l| l.strip_prefix("VmPeak:"))
        .expect("a peak");
    let kib = line
        .trim()
        .trim_end_matches(" kB")
        .parse::<u64>()
        .expect("a number");
    kib << 10
}

#[test]
fn damaged_headers_never_panic_and_never_take_memory_they_do_not_need() {
    const ASK: &str = "CHECKPOINT_TEST_DAMAGE";
    if std::env::var_os(ASK).is_none() {
        // In a process of its own, so that the memory it takes is this test's alone.
        let dir = tempfile::tempdir().expect("a folder");
        let child = Command::new(std::env::current_exe().expect("this program"));
        let test = "damaged_headers_never_panic_and_never_take_memory_they_do_not_need";
        return again(child, test, ASK, dir.path());
    }
    let dir = PathBuf::from(std::env::var_os(ASK).expect("set above"));
    let seeds = seeds();
    for (name, bytes) in &seeds {
        open_mutated(&dir, name, bytes);
        open(&dir.join(name)).expect("the seeds are whole");
    }
    let before = peak();
    let numbers = prop_oneof![
        any::<u64>(),
        0u64..300,
        Just(u64::MAX),
        (0u32..64).prop_map(|b| 1 << b)
    ];
    let changes = prop::collection::vec((any::<prop::sample::Index>(), 0u8..7, numbers), 1..4);
    let config = ProptestConfig {
        cases: 4000,
        failure_persistence: None,
        ..Default::default()
    };
    let mut runner = proptest::test_runner::TestRunner::new(config);
    let ran = runner.run(&(0..seeds.len(), changes), |(seed, changes)| {
        let (name, mut bytes) = seeds[seed].clone();
        for (at, kind, value) in changes {
            mutate(&mut bytes, at, kind, value);
        }
        open_mutated(&dir, name, &bytes);
        Ok(())
    });
    ran.expect("every case holds");
    let grown = peak() - before;
    println!("measured: {grown} bytes of address space more after 4000 damaged files");
    assert!(grown < 64 << 20, "{grown} bytes more");
}
