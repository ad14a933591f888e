//! The program through its command line: exit codes, JSON, environment variables, and what `doctor` says.
//! On a machine without a GPU; what a driver would change is skipped where there is one.
#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::HashMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use candle_ipc_cache::slab::cuda;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::Value;

mod common;

use common::{Daemon, program};

/// Guards against hangs; nothing here takes that long.
const PATIENCE: Duration = Duration::from_secs(60);

/// Writes a checkpoint of one F32 tensor of 64 elements, each `value`.
fn checkpoint(path: &Path, value: f32) {
    let bytes: Vec<u8> = std::iter::repeat_n(value.to_le_bytes(), 64)
        .flatten()
        .collect();
    let view = TensorView::new(Dtype::F32, vec![8, 8], &bytes).unwrap();
    let tensors = HashMap::from([("weight".to_string(), view)]);
    safetensors::serialize_to_file(tensors, None, path).unwrap();
    // Of a file that was written within the same tick of the clock nobody can say later that it is the same.
    std::thread::sleep(Duration::from_millis(50));
}

/// A folder with a checkpoint, and an empty one for the socket.
fn fresh() -> (tempfile::TempDir, PathBuf, PathBuf) {
    let temp = tempfile::tempdir().unwrap();
    let model = temp.path().join("tiny.safetensors");
    checkpoint(&model, 1.0);
    let folder = temp.path().join("socket");
    std::fs::create_dir(&folder).unwrap();
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o700)).unwrap();
    (temp, model, folder)
}

/// The program with nothing set but the folder.
fn clean(folder: &Path) -> Command {
    let mut command = program();
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("CANDLE_CACHE_") {
            command.env_remove(name);
        }
    }
    command
        .env("CANDLE_CACHE_SOCKET_DIR", folder)
        .stdin(Stdio::null());
    command
}

fn run(folder: &Path, args: &[&str]) -> Output {
    clean(folder).args(args).output().unwrap()
}

fn run_with(folder: &Path, args: &[&str], variables: &[(&str, &str)]) -> Output {
    clean(folder)
        .args(args)
        .envs(variables.iter().copied())
        .output()
        .unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

/// Standard output, which must be one JSON value and nothing else.
fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", said(output)))
}

fn fields(value: &Value) -> Vec<&str> {
    value
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn check<'a>(report: &'a Value, name: &str) -> &'a Value {
    let checks = report["checks"].as_array().unwrap();
    checks.iter().find(|c| c["check"] == name).unwrap()
}

fn has_driver() -> bool {
    let there = cuda::driver_version().is_ok();
    if there {
        println!("skipped: there is an NVIDIA driver here");
    }
    there
}

#[test]
fn every_exit_code_has_a_situation_of_its_own() {
    let (_temp, model, folder) = fresh();
    let model = text(&model);
    let expect = |wanted: i32, args: &[&str], words: &str| {
        let output = run(&folder, args);
        assert_eq!(code(&output), wanted, "{args:?}: {}", said(&output));
        assert!(said(&output).contains(words), "{args:?}: {}", said(&output));
    };
    for args in [
        &["status"][..],
        &["unload", "tiny"],
        &["stop"],
        &["load", model],
    ] {
        expect(3, args, "candle-cache serve");
    }
    expect(2, &["load"], "MODEL");
    expect(2, &["fly"], "fly");
    for device in ["tpu", "cuda:x", "cuda:-1", "GPU-12"] {
        for args in [&["load", model][..], &["unload", "tiny"]] {
            let args = [args, &["--device", device]].concat();
            expect(2, &args, "is no device: give `host`, `cuda:N`");
        }
    }
    expect(2, &["load", model, "--dtype", "int3"], "is no dtype");

    let daemon = Daemon::start_in(tempfile::tempdir_in(&folder).unwrap(), &[]);
    let folder = daemon.dir();
    let expect = |wanted: i32, args: &[&str], words: &str| {
        let output = run(folder, args);
        assert_eq!(code(&output), wanted, "{args:?}: {}", said(&output));
        assert!(said(&output).contains(words), "{args:?}: {}", said(&output));
    };
    expect(
        0,
        &["load", model],
        "`tiny` on host: loaded, 256 B in 1 tensors",
    );
    expect(0, &["load", model], "already loaded");
    expect(0, &["status"], "ready");
    expect(4, &["unload", "tinny"], "nearest: `tiny`");
    expect(4, &["serve"], "already serves on");
    expect(
        5,
        &["load", "/nowhere/at/all.safetensors"],
        "/nowhere/at/all.safetensors",
    );
    expect(0, &["unload", "tiny"], "unloaded tiny");
    expect(0, &["doctor"], "nothing is wrong");
    expect(0, &["stop"], "stopped");
}

#[test]
fn a_gpu_without_a_driver_is_refused_with_the_way_out() {
    if has_driver() {
        return;
    }
    let daemon = Daemon::start();
    let (_temp, model, _) = fresh();
    let uuid = "GPU-00112233-4455-6677-8899-aabbccddeeff";
    for device in ["cuda", "cuda:0", uuid] {
        let output = run(
            daemon.dir(),
            &["load", text(&model), "--device", device, "--json"],
        );
        assert_eq!(code(&output), 5, "{}", said(&output));
        let error = json(&output);
        assert_eq!(error["exit"], 5);
        let error = error["error"].as_str().unwrap();
        assert!(error.contains("no NVIDIA driver was found"), "{error}");
        assert!(error.contains("--device host"), "{error}");
    }
    let output = run(daemon.dir(), &["unload", "tiny", "--device", "cuda:0"]);
    assert_eq!(code(&output), 5, "{}", said(&output));
    // The daemon may hold entries of GPUs that are not seen from here, so a UUID is asked for as it is.
    let output = run(daemon.dir(), &["unload", "tiny", "--device", uuid]);
    assert_eq!(code(&output), 4, "{}", said(&output));
    assert!(said(&output).contains(uuid), "{}", said(&output));
    assert_eq!(
        json(&run(daemon.dir(), &["status", "--json"]))["entries"],
        Value::Array(Vec::new())
    );
}

#[test]
fn a_model_that_serve_was_to_load_on_a_missing_gpu_does_not_stop_it() {
    if has_driver() {
        return;
    }
    let (_temp, model, _) = fresh();
    let daemon = Daemon::start_in(
        tempfile::tempdir().unwrap(),
        &[text(&model), "--device", "cuda:0"],
    );
    assert_eq!(code(&run(daemon.dir(), &["load", text(&model)])), 0);
}

#[test]
fn every_command_prints_its_promised_json() {
    let (_temp, model, folder) = fresh();
    let none = run(&folder, &["status", "--json"]);
    assert_eq!(fields(&json(&none)), ["error", "exit", "refusal"]);
    assert_eq!(json(&none)["exit"], 3);

    let mut serve = clean(&folder)
        .args(["serve", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let out = serve.stdout.as_mut().unwrap();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut line).unwrap();
    let line: Value = serde_json::from_str(&line).unwrap();
    assert_eq!(line["pid"], serve.id());
    assert_eq!(line["socket"], text(&folder.join("daemon.sock")));

    let loaded = json(&run(&folder, &["load", text(&model), "--json"]));
    let promised = [
        "aliases",
        "device",
        "epoch",
        "memory_bytes",
        "name",
        "result",
        "role",
        "root",
        "seconds",
        "shard",
        "tensors",
    ];
    assert_eq!(fields(&loaded), promised);
    assert_eq!(loaded["result"], "loaded");
    assert_eq!(loaded["device"], "host");
    assert_eq!(loaded["memory_bytes"], 256);

    let status = json(&run(&folder, &["status", "--json"]));
    assert_eq!(fields(&status), ["entries", "socket"]);
    let entry = &status["entries"][0];
    assert_eq!(
        fields(entry),
        [
            "device",
            "failed",
            "loading",
            "name",
            "ready",
            "retired_bytes",
            "role",
            "shard"
        ]
    );
    let promised = [
        "age_seconds",
        "dtype",
        "epoch",
        "holders",
        "leases",
        "memory_bytes",
        "ranks",
        "recipe",
        "root",
        "tensors",
    ];
    assert_eq!(fields(&entry["ready"]), promised);
    assert_eq!(entry["ready"]["epoch"], loaded["epoch"]);
    assert_eq!(entry["ready"]["root"], loaded["root"]);

    let refused = run(&folder, &["unload", "other", "--json"]);
    assert_eq!(code(&refused), 4);
    assert_eq!(json(&refused)["refusal"], "NoEntry");
    assert_eq!(
        json(&run(&folder, &["unload", "tiny", "--json"]))["unloaded"],
        "tiny"
    );

    let report = json(&run(&folder, &["doctor", "--json"]));
    assert_eq!(fields(&report), ["checks", "ok", "warnings", "wrong"]);
    for check in report["checks"].as_array().unwrap() {
        assert_eq!(
            fields(check),
            ["check", "facts", "found", "state", "way_out"]
        );
        let state = check["state"].as_str().unwrap();
        assert!(["ok", "warning", "wrong"].contains(&state), "{state}");
    }
    assert_eq!(check(&report, "daemon")["facts"]["pid"], serve.id());

    assert_eq!(json(&run(&folder, &["stop", "--json"]))["stopped"], true);
    assert_eq!(serve.wait().unwrap().code(), Some(0));
}

#[test]
fn every_flag_of_load_and_unload_is_a_variable_too() {
    let daemon = Daemon::start();
    let folder = daemon.dir();
    let (temp, model, _) = fresh();
    let load = |variables: &[(&str, &str)]| {
        let variables = [
            &[
                ("CANDLE_CACHE_JSON", "1"),
                ("CANDLE_CACHE_MODEL", text(&model)),
            ],
            variables,
        ]
        .concat();
        run_with(folder, &["load"], &variables)
    };
    let as_asked = [
        ("CANDLE_CACHE_NAME", "small"),
        ("CANDLE_CACHE_DTYPE", "f16"),
        ("CANDLE_CACHE_DEVICE", "host"),
        ("CANDLE_CACHE_SLAB_BYTES", "4096"),
        ("CANDLE_CACHE_THREADS", "1"),
    ];
    let loaded = json(&load(&as_asked));
    assert_eq!(loaded["name"], "small", "{loaded}");
    assert_eq!(loaded["memory_bytes"], 128);
    assert_eq!(json(&load(&as_asked))["result"], "already loaded");
    let forced = [&as_asked[..], &[("CANDLE_CACHE_FORCE", "1")]].concat();
    assert_eq!(json(&load(&forced))["result"], "unchanged");
    for (name, value) in [
        ("CANDLE_CACHE_DEVICE", "tpu"),
        ("CANDLE_CACHE_DTYPE", "int3"),
        ("CANDLE_CACHE_SLAB_BYTES", "many"),
        ("CANDLE_CACHE_THREADS", "many"),
    ] {
        let output = load(&[(name, value)]);
        assert_eq!(code(&output), 2, "{name}: {}", said(&output));
        assert!(said(&output).contains(value), "{}", said(&output));
    }
    let variants = temp.path().join("variants");
    std::fs::create_dir(&variants).unwrap();
    checkpoint(&variants.join("model.safetensors"), 2.0);
    checkpoint(&variants.join("model.fp16.safetensors"), 3.0);
    let of = |variant: &[(&str, &str)]| {
        let output = run_with(folder, &["load", text(&variants), "--json"], variant);
        assert_eq!(code(&output), 0, "{}", said(&output));
        json(&output)["root"].clone()
    };
    assert_ne!(of(&[]), of(&[("CANDLE_CACHE_VARIANT", "fp16")]));

    let unload = |variables: &[(&str, &str)]| {
        let variables = [&[("CANDLE_CACHE_NAME", "small")], variables].concat();
        run_with(folder, &["unload"], &variables)
    };
    let drafted = unload(&[("CANDLE_CACHE_ROLE", "draft")]);
    assert_eq!(code(&drafted), 4);
    assert!(
        said(&drafted).contains("in role `draft`"),
        "{}",
        said(&drafted)
    );
    let uuid = "GPU-00112233-4455-6677-8899-aabbccddeeff";
    let elsewhere = unload(&[("CANDLE_CACHE_DEVICE", uuid)]);
    assert!(said(&elsewhere).contains(uuid), "{}", said(&elsewhere));
    let unloaded = unload(&[("CANDLE_CACHE_FORCE", "1"), ("CANDLE_CACHE_DEVICE", "host")]);
    assert_eq!(code(&unloaded), 0, "{}", said(&unloaded));
    // A flag beats its variable.
    let output = run_with(
        Path::new("/nowhere"),
        &["status", "--socket-dir", text(folder)],
        &[],
    );
    assert_eq!(code(&output), 0, "{}", said(&output));
}

#[test]
fn every_flag_of_serve_is_a_variable_too() {
    let (_temp, model, folder) = fresh();
    let nobody = run_with(&folder, &["serve"], &[("CANDLE_CACHE_ALLOW_UID", "65534")]);
    assert_eq!(code(&nobody), 2, "{}", said(&nobody));
    let mut serve = clean(&folder)
        .arg("serve")
        .env("CANDLE_CACHE_SERVE", &model)
        .env("CANDLE_CACHE_DTYPE", "f16")
        .env("CANDLE_CACHE_DEVICE", "host")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let end = Instant::now() + PATIENCE;
    let bytes = loop {
        let output = run(&folder, &["status", "--json"]);
        if code(&output) == 0
            && let Some(bytes) = json(&output)["entries"][0]["ready"]["memory_bytes"].as_u64()
        {
            break bytes;
        }
        assert!(Instant::now() < end, "still not loaded: {}", said(&output));
        std::thread::sleep(Duration::from_millis(50));
    };
    assert_eq!(bytes, 128);
    assert_eq!(code(&run(&folder, &["stop"])), 0);
    assert_eq!(serve.wait().unwrap().code(), Some(0));
}

#[test]
fn doctor_without_a_gpu_warns_and_finds_nothing_wrong() {
    if has_driver() {
        return;
    }
    let (_temp, _, folder) = fresh();
    let output = run_with(
        &folder,
        &["doctor", "--json"],
        &[("CUDA_VISIBLE_DEVICES", "3,1")],
    );
    assert_eq!(code(&output), 0, "{}", said(&output));
    let report = json(&output);
    assert_eq!(report["ok"], true);
    let driver = check(&report, "driver");
    assert_eq!(driver["state"], "warning");
    let found = driver["found"].as_str().unwrap();
    assert!(found.contains("GPU entries cannot be used"), "{found}");
    assert!(found.contains("no NVIDIA driver was found"), "{found}");
    let gpus = &check(&report, "GPUs")["facts"];
    assert_eq!(gpus["count"], 0);
    assert_eq!(gpus["cuda_visible_devices"], "3,1");
    assert_eq!(check(&report, "sealed memory")["state"], "ok");
    assert_eq!(
        check(&report, "socket folder")["facts"]["folder"],
        text(&folder)
    );
    let daemon = check(&report, "daemon");
    assert_eq!(daemon["state"], "warning");
    assert!(
        daemon["way_out"]
            .as_str()
            .unwrap()
            .contains("candle-cache serve")
    );
    // It looks, and leaves nothing behind.
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
}

#[test]
fn doctor_says_last_what_is_wrong_and_fails() {
    let (_temp, _, folder) = fresh();
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o777)).unwrap();
    let output = run(&folder, &["doctor"]);
    assert_eq!(code(&output), 5, "{}", said(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<&str> = text.lines().rev().take(2).collect();
    assert!(lines[0].starts_with("1 thing is wrong"), "{text}");
    assert!(lines[1].starts_with("WRONG    socket folder"), "{text}");
    assert!(lines[1].contains("chmod go-w"), "{text}");
    assert!(text.starts_with("ok "), "{text}");
}

#[test]
fn doctor_names_a_socket_that_is_another_programs() {
    let (_temp, _, folder) = fresh();
    let _theirs = std::os::unix::net::UnixListener::bind(folder.join("daemon.sock")).unwrap();
    let output = run(&folder, &["doctor", "--json"]);
    assert_eq!(code(&output), 5, "{}", said(&output));
    assert_eq!(check(&json(&output), "daemon")["state"], "wrong");
}

#[test]
fn doctor_finds_a_limit_that_is_too_low() {
    let (_temp, _, folder) = fresh();
    let doctor = |limit: &str| {
        let program = clean(&folder);
        Command::new("prlimit")
            .arg(format!("--nofile={limit}:{limit}"))
            .arg(program.get_program())
            .args(["doctor", "--json", "--socket-dir", text(&folder)])
            .output()
            .unwrap()
    };
    let low = doctor("200");
    assert_eq!(code(&low), 5, "{}", said(&low));
    let report = json(&low);
    let descriptors = check(&report, "descriptors");
    assert_eq!(descriptors["state"], "wrong");
    assert_eq!(descriptors["facts"]["hard"], 200);
    assert!(
        descriptors["way_out"]
            .as_str()
            .unwrap()
            .contains("ulimit -Hn")
    );
    let some = doctor("1000");
    assert_eq!(check(&json(&some), "descriptors")["state"], "warning");
}

#[test]
fn doctor_finds_the_toolkit_that_cuda_home_names() {
    let (temp, _, folder) = fresh();
    let bin = temp.path().join("bin");
    std::fs::create_dir(&bin).unwrap();
    let nvcc = bin.join("nvcc");
    std::fs::write(
        &nvcc,
        "#!/bin/sh\necho 'Cuda compilation tools, release 11.8, V11.8.89'\n",
    )
    .unwrap();
    std::fs::set_permissions(&nvcc, std::fs::Permissions::from_mode(0o755)).unwrap();
    let home = text(temp.path());
    let output = run_with(&folder, &["doctor", "--json"], &[("CUDA_HOME", home)]);
    let report = json(&output);
    let toolkit = check(&report, "toolkit");
    assert_eq!(toolkit["facts"]["cuda"], "11.8");
    assert_eq!(toolkit["facts"]["nvcc"], text(&nvcc));
}
