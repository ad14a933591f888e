//! Every file and folder that `tests/cases/make_cases.py` writes, through the real program: loaded by
//! `candle-cache load`, held by a daemon, attached to by an engine. The manifest says what should happen.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use candle_core::{DType, Device};
use candle_ipc_cache::IpcCache;
use common::{Daemon, assert_ok};
use regex::RegexBuilder;
use serde_json::Value;
use sha2::{Digest, Sha256};

fn matches(pattern: &str, text: &str) -> bool {
    let regex = RegexBuilder::new(pattern)
        .case_insensitive(true)
        .dot_matches_new_line(true)
        .build()
        .unwrap();
    regex.is_match(text)
}

fn sha(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect()
}

fn text(v: &Value) -> &str {
    v.as_str().unwrap_or_default()
}

/// The entry's own complaint, or none when it does as the manifest says.
fn check(root: &Path, daemon: &Daemon, case: &Value, name: &str) -> Result<(), String> {
    let path = root.join(text(&case["path"]));
    let mut args = vec!["load", path.to_str().unwrap(), "--name", name];
    if let Some(variant) = case["args"]["variant"].as_str() {
        args.extend(["--variant", variant]);
    }
    if let Some(recipe) = case["args"]["quantize"].as_str() {
        args.extend(["--quantize", recipe]);
    }
    let output = daemon.run(&args);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    let wanted_error = case["error"].as_str();
    match (text(&case["expected"]), output.status.code()) {
        ("ok", Some(0)) => engine(daemon, case, name),
        ("ok", Some(5))
            if case["else_error"]
                .as_str()
                .is_some_and(|e| matches(e, &message)) =>
        {
            Ok(())
        }
        ("error", Some(0)) if case["or_ok"] == true => Ok(()),
        ("error", Some(5)) => {
            let pattern = wanted_error.unwrap();
            if !matches(pattern, &message) {
                return Err(format!("the error should match {pattern:?}: {message}"));
            }
            let file = path.file_name().unwrap().to_str().unwrap();
            if !message.contains(file) {
                return Err(format!(
                    "the error names neither file nor folder: {message}"
                ));
            }
            if daemon
                .run(&["status", "--json"])
                .stdout
                .windows(7)
                .any(|w| w == b"\"ready\"")
                && IpcCache::attach(&daemon.config(name).wait(false), &Device::Cpu).is_ok()
            {
                return Err("a refused model was published".into());
            }
            Ok(())
        }
        (expected, code) => Err(format!(
            "expected {expected}, exit code {code:?}: {message}"
        )),
    }
}

fn engine(daemon: &Daemon, case: &Value, name: &str) -> Result<(), String> {
    let cache = IpcCache::attach(&daemon.config(name), &Device::Cpu).map_err(|e| e.to_string())?;
    let manifest = cache.manifest();
    let tensors = case["tensors"].as_object().cloned().unwrap_or_default();
    let count = case["count"].as_u64().unwrap_or(tensors.len() as u64);
    if manifest.names().count() as u64 != count {
        return Err(format!(
            "{} names, expected {count}",
            manifest.names().count()
        ));
    }
    for (tensor, want) in &tensors {
        let entry = &manifest.tensors[manifest
            .find(tensor)
            .ok_or(format!("{tensor} is missing"))?];
        let shape: Vec<u64> = want["shape"]
            .as_array()
            .unwrap()
            .iter()
            .map(|d| d.as_u64().unwrap())
            .collect();
        let found = (entry.element.as_str(), &entry.shape);
        if found != (text(&want["dtype"]), &shape) {
            return Err(format!(
                "{tensor} is {found:?}, expected {} {shape:?}",
                want["dtype"]
            ));
        }
        if sha(cache.raw(tensor).map_err(|e| e.to_string())?) != text(&want["sha256"]) {
            return Err(format!("{tensor} has other bytes"));
        }
        plain_agrees(&cache, tensor)?;
    }
    let element = |n: &Value| manifest.tensors[manifest.find(text(n)).unwrap()].element;
    for quantized in case["quantized"].as_array().into_iter().flatten() {
        if !element(quantized).is_quantized() {
            return Err(format!("{quantized} was not quantized"));
        }
    }
    for kept in case["kept"].as_array().into_iter().flatten() {
        if element(kept).is_quantized() {
            return Err(format!("{kept} was quantized"));
        }
    }
    for absent in case["absent"].as_array().into_iter().flatten() {
        if manifest.find(text(absent)).is_some() {
            return Err(format!("{absent} is served"));
        }
    }
    let place = |n: &Value| {
        let t = &manifest.tensors[manifest.find(text(n)).unwrap()];
        (t.slab, t.offset)
    };
    for pair in case["one_storage"].as_array().into_iter().flatten() {
        if place(&pair[0]) != place(&pair[1]) {
            return Err(format!("{pair} do not share one storage"));
        }
    }
    for pair in case["distinct_storage"].as_array().into_iter().flatten() {
        if place(&pair[0]) == place(&pair[1]) {
            return Err(format!("{pair} share one storage"));
        }
    }
    for (file, want) in case["files"].as_object().into_iter().flatten() {
        let bytes = cache.file(file).ok_or(format!("{file} did not travel"))?;
        if sha(bytes) != text(want) {
            return Err(format!("{file} has other bytes"));
        }
    }
    for query in case["queries"].as_array().into_iter().flatten() {
        ask(&cache, query)?;
    }
    Ok(())
}

/// A dtype that candle has comes out as a tensor of the manifest's shape.
fn plain_agrees(cache: &IpcCache, name: &str) -> Result<(), String> {
    let entry = &cache.manifest().tensors[cache.manifest().find(name).unwrap()];
    let shape: Vec<usize> = entry.shape.iter().map(|d| *d as usize).collect();
    if entry.element.is_quantized() {
        let q = cache
            .quantized()
            .get(shape.as_slice(), name)
            .map_err(|e| e.to_string())?;
        return if q.data().map_err(|e| e.to_string())?.as_ref() == cache.raw(name).unwrap() {
            Ok(())
        } else {
            Err(format!("{name}: the QTensor has other bytes"))
        };
    }
    if ["F32", "BF16", "F16"].contains(&entry.element.as_str()) {
        let t = cache
            .var_builder(DType::F32)
            .get(shape.as_slice(), name)
            .map_err(|e| e.to_string())?;
        if t.dims() != shape {
            return Err(format!("{name} came as {:?}", t.dims()));
        }
    }
    Ok(())
}

fn ask(cache: &IpcCache, query: &Value) -> Result<(), String> {
    let name = text(&query["name"]);
    let dtype = match query["as"].as_str() {
        Some("U32") => DType::U32,
        _ => DType::F32,
    };
    let answer = cache.var_builder(dtype).get_unchecked(name);
    match (text(&query["expected"]), answer) {
        ("ok", Ok(_)) => Ok(()),
        ("error", Err(e)) => {
            let (pattern, message) = (text(&query["error"]), e.to_string());
            if matches(pattern, &message) {
                Ok(())
            } else {
                Err(format!(
                    "asking for {name} should say {pattern:?}: {message}"
                ))
            }
        }
        (expected, answer) => Err(format!(
            "asking for {name}: expected {expected}, got {answer:?}"
        )),
    }
}

#[test]
fn every_input_does_what_its_manifest_says() {
    let root = tempfile::tempdir().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases/make_cases.py");
    assert_ok(
        &Command::new("python3")
            .arg(script)
            .arg(root.path())
            .output()
            .unwrap(),
    );
    let manifest: Value =
        serde_json::from_slice(&std::fs::read(root.path().join("manifest.json")).unwrap()).unwrap();
    let daemon = Daemon::start();
    let keep = root.path().join("st-layout/odd_neighbours.safetensors");
    assert_ok(&daemon.load(&keep, "keep"));

    let (mut ran, mut elsewhere) = (
        BTreeMap::<String, usize>::new(),
        BTreeMap::<String, usize>::new(),
    );
    let mut wrong = Vec::new();
    for (i, case) in manifest["entries"].as_array().unwrap().iter().enumerate() {
        let id = text(&case["case"]).to_string();
        // Hub models have no path.
        if case["path"].is_null() {
            *elsewhere.entry(id).or_default() += 1;
            continue;
        }
        if let Err(e) = check(root.path(), &daemon, case, &format!("case-{i}")) {
            wrong.push(format!("{id}/{}: {e}", text(&case["variant"])));
        }
        *ran.entry(id).or_default() += 1;
        IpcCache::attach(&daemon.config("keep"), &Device::Cpu)
            .expect("the daemon serves its other entries");
    }
    println!("ran {} inputs: {ran:?}", ran.values().sum::<usize>());
    println!("not for files and folders as they are: {elsewhere:?}");
    assert!(
        wrong.is_empty(),
        "{} inputs go wrong:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    assert!(ran.values().sum::<usize>() >= 90);
}
