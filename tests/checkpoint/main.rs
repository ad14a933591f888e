//! Reading checkpoints. Here: what the tests share, files to start from above all.
//! Real files, real links, real refusals by the system.

use std::path::Path;
use std::process::{Command, Stdio};

use candle_ipc_cache::checkpoint::{Checkpoint, CheckpointError, Options};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

mod cases;
mod damage;
mod files;
mod refusals;

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
    gguf_at(&[(name, n, 0)], keys)
}

/// The same with several tensors: name, elements, offset.
fn gguf_at(tensors: &[(&str, u64, u64)], keys: &[(&str, u32, Vec<u8>)]) -> Vec<u8> {
    let text = |s: &str| [&(s.len() as u64).to_le_bytes()[..], s.as_bytes()].concat();
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((keys.len() as u64).to_le_bytes());
    for (key, kind, value) in keys {
        out.extend(text(key));
        out.extend(kind.to_le_bytes());
        out.extend(value);
    }
    let mut data = 0;
    for (name, n, offset) in tensors {
        out.extend(text(name));
        out.extend(1u32.to_le_bytes());
        out.extend(n.to_le_bytes());
        out.extend(0u32.to_le_bytes());
        out.extend(offset.to_le_bytes());
        data = data.max(offset + n * 4);
    }
    out.resize(out.len().next_multiple_of(32) + data as usize, 0);
    out
}

fn cases() -> (tempfile::TempDir, Vec<Value>) {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases/make_cases.py");
    let mut make = Command::new("python3");
    make.arg(script).arg(dir.path()).stdout(Stdio::null());
    assert!(make.status().expect("python3 runs").success());
    let manifest = std::fs::read(dir.path().join("manifest.json")).expect("a manifest");
    let manifest: Value = serde_json::from_slice(&manifest).expect("JSON");
    let entries = manifest["entries"].as_array().expect("entries").clone();
    (dir, entries)
}

/// Runs one test of this program again, in a process of its own.
fn again(mut command: Command, test: &str, variable: &str, value: &Path) {
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]);
    let out = command.env(variable, value).output().expect("starts");
    let text = String::from_utf8_lossy(&out.stdout);
    let errors = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{text}\n{errors}");
    assert!(text.contains("1 passed"), "{text}\n{errors}");
    if let Some((_, measured)) = text.split_once("measured: ") {
        println!("{}", measured.lines().next().unwrap_or_default());
    }
}
