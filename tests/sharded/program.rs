//! The real program: ranks loaded as one set, attached to by one id, replaced, killed, unloaded.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use candle_ipc_cache::protocol::Refusal;
use candle_ipc_cache::{AttachError, IpcCache, Trace, Wanted};
use candle_nn::var_builder::Shard;
use serde_json::Value;

use crate::common::{Daemon, assert_ok, program};
use crate::support::{floats, rules, write};

/// Guards against hangs; nothing here takes that long.
const PATIENCE: Duration = Duration::from_secs(60);

struct Model {
    folder: tempfile::TempDir,
    model: PathBuf,
    plan: PathBuf,
}

impl Model {
    /// Each tensor's values begin with `seed`.
    fn new(seed: u8) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("m.safetensors");
        let plan = rules(folder.path(), "[rules]\nup = 0\ndown = 1\n");
        let out = Self {
            folder,
            model,
            plan,
        };
        out.change(seed);
        out
    }

    fn change(&self, seed: u8) {
        write(
            &self.model,
            &[
                floats("up.weight", &[4, 2], seed),
                floats("down.weight", &[2, 4], seed),
                floats("norm.weight", &[2], seed),
            ],
        );
        // Of a file that was written within the same tick of the clock nobody can say later that it is the same.
        std::thread::sleep(Duration::from_millis(50));
    }

    fn load(&self, daemon: &Daemon, more: &[&str]) -> Output {
        let plan = self.plan.to_str().unwrap();
        let model = self.model.to_str().unwrap();
        let load = ["load", model, "--tp", "2", "--plan", plan];
        daemon.run(&[&load, more].concat())
    }
}

fn json(output: &Output) -> Value {
    assert_ok(output);
    serde_json::from_slice(&output.stdout).unwrap()
}

fn entries(daemon: &Daemon) -> Vec<Value> {
    let status = json(&daemon.run(&["status", "--json"]));
    status["entries"].as_array().unwrap().clone()
}

fn attach(daemon: &Daemon, rank: u16) -> IpcCache {
    let config = daemon.config("m").tensor_parallel(rank, 2);
    IpcCache::attach(&config.trust_name(true), &Device::Cpu).unwrap()
}

/// The rank's first value of `up`.
fn value(cache: &IpcCache, rank: usize) -> f32 {
    let hint = Shard {
        dim: 0,
        rank,
        world_size: 2,
    };
    let vb = cache.sharded(DType::F32);
    let slice: Tensor = vb.get_with_hints((), "up.weight", hint).unwrap();
    assert_eq!(slice.dims(), [2, 2]);
    slice.flatten_all().unwrap().to_vec1::<f32>().unwrap()[0]
}

/// What `floats` writes at `i`.
fn wanted(seed: u8, i: usize) -> f32 {
    ((i * 7 + seed as usize) % 64) as f32 / 4.
}

#[test]
fn all_ranks_are_loaded_as_one_set_and_attached_to_by_its_id() {
    let model = Model::new(1);
    let daemon = Daemon::start();
    let loaded = json(&model.load(&daemon, &["--json"]));
    let ranks = loaded.as_array().unwrap();
    assert_eq!(ranks.len(), 2);
    assert_eq!(ranks[0]["epoch"], ranks[1]["epoch"]);
    for (rank, entry) in entries(&daemon).iter().enumerate() {
        assert_eq!(entry["shard"], format!("tp {rank}/2"));
        assert_eq!(entry["ready"]["epoch"], ranks[0]["epoch"]);
        assert_eq!(entry["ready"]["ranks"], 2);
    }
    let table = daemon.run(&["status"]);
    let table = String::from_utf8_lossy(&table.stdout).into_owned();
    assert!(
        table.contains("SHARD") && table.contains("tp 1/2"),
        "{table}"
    );

    let first = attach(&daemon, 0);
    let second = daemon.config("m").option("tp", "1/2").unwrap();
    let second = second.option("epoch", &first.epoch().to_string()).unwrap();
    let second = IpcCache::attach(&second, &Device::Cpu).unwrap();
    assert_eq!(value(&first, 0), wanted(1, 0));
    assert_eq!(value(&second, 1), wanted(1, 4));
    let bytes = IpcCache::memory_bytes_of(&daemon.config("m").tensor_parallel(0, 2), &Device::Cpu);
    assert_eq!(bytes.unwrap(), first.memory_bytes());

    let again = model.load(&daemon, &[]);
    assert_ok(&again);
    let said = String::from_utf8_lossy(&again.stdout).into_owned();
    assert_eq!(said.matches("already loaded").count(), 2, "{said}");
    let forced = json(&model.load(&daemon, &["--force", "--json"]));
    assert_eq!(forced[0]["result"], "unchanged");

    let error = IpcCache::attach(&daemon.config("m"), &Device::Cpu).unwrap_err();
    match error {
        AttachError::Refused { code, reason, .. } => {
            assert_eq!(code, Refusal::OtherShard);
            assert!(reason.contains("(tp 0/2)"), "{reason}");
        }
        other => panic!("{other}"),
    }
    assert_eq!(daemon.run(&["unload", "m"]).status.code(), Some(4));
    drop((first, second));
    assert_ok(&daemon.run(&["unload", "m"]));
    assert!(entries(&daemon).is_empty());
}

#[test]
fn a_set_that_is_replaced_between_two_ranks_attaches_does_not_mix() {
    let model = Model::new(1);
    let daemon = Daemon::start();
    assert_ok(&model.load(&daemon, &[]));
    let first = attach(&daemon, 0);
    model.change(2);
    assert_ok(&model.load(&daemon, &[]));
    let of_set = daemon.config("m").tensor_parallel(1, 2).trust_name(true);
    let second = IpcCache::attach(&of_set.clone().epoch(first.epoch()), &Device::Cpu).unwrap();
    assert_eq!(second.epoch(), first.epoch());
    assert_eq!(value(&first, 0), wanted(1, 0));
    assert_eq!(value(&second, 1), wanted(1, 4));
    let newest = attach(&daemon, 0);
    assert_ne!(newest.epoch(), first.epoch());
    assert_eq!(value(&newest, 0), wanted(2, 0));

    // Without an engine that holds the old set, its id is refused.
    let old = first.epoch();
    let _ = first.detach().unwrap();
    let _ = second.detach().unwrap();
    let end = Instant::now() + PATIENCE;
    let error = loop {
        match IpcCache::attach(&of_set.clone().epoch(old), &Device::Cpu) {
            Ok(_) => assert!(Instant::now() < end, "the old set stays"),
            Err(e) => break e.to_string(),
        }
    };
    for id in [old, newest.epoch()] {
        assert!(error.contains(&id.to_string()), "{error}");
    }
}

#[test]
fn one_rank_alone_and_one_device_for_each_rank() {
    let model = Model::new(1);
    let daemon = Daemon::start();
    let refused = |args: &[&str], code: i32, said: &str| {
        let output = model.load(&daemon, args);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{error}");
        assert!(error.contains(said), "{error}");
    };
    refused(&["--tp-rank", "2"], 5, "run from 0 to 1");
    let (file, plan) = (model.model.to_str().unwrap(), model.plan.to_str().unwrap());
    let many = daemon.run(&["load", file, "--tp", "257", "--plan", plan]);
    assert!(String::from_utf8_lossy(&many.stderr).contains("at most 256 ranks"));
    refused(&["--device", "host,host,host"], 5, "3 devices for 2 ranks");
    refused(&["--pp", "0/2"], 5, "give --keep");
    refused(&["--pp", "2/2"], 2, "`2/2` is no rank");
    let output = daemon.run(&["load", file, "--tp", "2"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(entries(&daemon).is_empty());

    assert_ok(&model.load(&daemon, &["--tp-rank", "1", "--device", "host"]));
    let held = entries(&daemon);
    assert_eq!(held.len(), 1);
    assert_eq!(held[0]["shard"], "tp 1/2");
    assert_eq!(held[0]["ready"]["ranks"], 1);
    let alone = held[0]["ready"]["epoch"].clone();
    assert_ok(&model.load(&daemon, &["--device", "host,host"]));
    let held = entries(&daemon);
    assert_eq!(held.len(), 2);
    assert!(held.iter().all(|entry| entry["ready"]["epoch"] != alone));
}

#[test]
fn a_worker_that_is_killed_leaves_the_old_set_whole() {
    let model = Model::new(1);
    let daemon = Daemon::start();
    assert_ok(&model.load(&daemon, &[]));
    let old = attach(&daemon, 0).epoch();
    // Half a GiB for each rank takes long enough to be killed at.
    let large = model.folder.path().join("large.safetensors");
    sparse(&large, 1 << 30);
    let plan = rules(model.folder.path(), "[rules]\nup = 0\n");
    let mut worker = program()
        .args([
            "load",
            large.to_str().unwrap(),
            "--name",
            "m",
            "--threads",
            "1",
        ])
        .args(["--tp", "2", "--plan", plan.to_str().unwrap()])
        .arg("--socket-dir")
        .arg(daemon.dir())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let end = Instant::now() + PATIENCE;
    while !entries(&daemon).iter().all(|e| e["loading"].is_object()) {
        assert!(Instant::now() < end, "it never loads");
    }
    worker.kill().unwrap();
    assert_eq!(worker.wait().unwrap().signal(), Some(9));
    while entries(&daemon).iter().any(|e| e["failed"].is_null()) {
        assert!(Instant::now() < end, "nobody hears of it");
    }
    for (rank, entry) in entries(&daemon).iter().enumerate() {
        assert_eq!(entry["ready"]["epoch"], old.to_string());
        assert!(entry["loading"].is_null());
        let cache = attach(&daemon, rank as u16);
        assert_eq!(value(&cache, rank), wanted(1, 4 * rank));
    }
}

/// A checkpoint of one tensor of zeros that take no room on the disk.
fn sparse(path: &Path, bytes: u64) {
    use std::io::Write;
    let header = format!(
        "{{\"up.weight\":{{\"dtype\":\"U8\",\"shape\":[{bytes}],\"data_offsets\":[0,{bytes}]}}}}"
    );
    let mut file = std::fs::File::create(path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes())
        .unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len(8 + header.len() as u64 + bytes).unwrap();
}

#[test]
fn only_what_a_trace_asked_for_is_loaded_and_a_strange_trace_is_refused() {
    let model = Model::new(1);
    let daemon = Daemon::start();
    let path = model.folder.path().join("trace.json");
    let record = |names: &[&str]| {
        let asked = names.iter().map(|name| candle_ipc_cache::trace::Asked {
            name: name.to_string(),
            shape: None,
            dtype: None,
            shard: None,
        });
        Trace::new(asked.collect(), Vec::new())
            .write(&path)
            .unwrap();
    };
    let file = model.model.to_str().unwrap();
    let only = ["load", file, "--only", path.to_str().unwrap()];
    record(&["up.weight", "x.weight", "y.weight"]);
    let output = daemon.run(&only);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(5), "{error}");
    assert!(error.contains("`x.weight`, `y.weight`"), "{error}");
    assert!(entries(&daemon).is_empty());

    record(&["up.weight", "norm.weight"]);
    assert_ok(&daemon.run(&only));
    assert_eq!(entries(&daemon)[0]["ready"]["tensors"], 2);
    let cache = IpcCache::attach(&daemon.config("m"), &Device::Cpu).unwrap();
    let vb = cache.var_builder(DType::F32);
    assert!(vb.get(2, "norm.weight").is_ok());
    assert!(vb.get((2, 4), "down.weight").is_err());
    // What was left out is no difference to the file, whose tensors are hashed again when it was touched.
    drop((vb, cache));
    let file = std::fs::File::options().append(true).open(&model.model);
    file.unwrap()
        .set_modified(std::time::SystemTime::now())
        .unwrap();
    let cache = IpcCache::attach(&daemon.config("m"), &Device::Cpu).unwrap();
    assert_eq!(
        cache.report().identity,
        candle_ipc_cache::Proof::SourcesHashed
    );
}

#[test]
fn the_trace_of_one_rank_on_the_whole_model_is_the_plan_for_all_ranks() {
    let model = Model::new(1);
    let daemon = Daemon::start();
    let file = model.model.to_str().unwrap();
    assert_ok(&daemon.run(&["load", file, "--name", "m"]));
    let hint = |dim, rank| Shard {
        dim,
        rank,
        world_size: 2,
    };
    // What a tensor-parallel model asks for, as one of its ranks.
    let build = |cache: &IpcCache, rank| {
        let vb = cache.sharded(DType::F32);
        let up = vb.get_with_hints((), "up.weight", hint(0, rank)).unwrap();
        let down = vb.get_with_hints((), "down.weight", hint(1, rank)).unwrap();
        let norm = vb.get(2, "norm.weight").unwrap();
        assert!(!vb.contains_tensor("up.bias"));
        [up, down, norm].map(|t| t.flatten_all().unwrap().to_vec1::<f32>().unwrap())
    };
    let whole = IpcCache::attach(&daemon.config("m"), &Device::Cpu).unwrap();
    let wanted = [build(&whole, 0), build(&whole, 1)];
    let recorded = IpcCache::attach(&daemon.config("m"), &Device::Cpu).unwrap();
    build(&recorded, 0);
    let path = model.folder.path().join("trace.json");
    let trace = recorded.trace();
    trace.write(&path).unwrap();
    assert_eq!(trace.tensors.len(), 3);

    let path = path.to_str().unwrap();
    let args = ["load", file, "--tp", "2", "--plan", path, "--only", path];
    assert_ok(&daemon.run(&args));
    for (rank, wanted) in wanted.iter().enumerate() {
        let cache = attach(&daemon, rank as u16);
        assert_eq!(build(&cache, rank), *wanted);
        assert!(cache.memory_bytes() < whole.memory_bytes());
        // A trace of the rank itself cuts the same.
        let cut = |trace: &Trace| -> Vec<_> {
            let shards = trace.tensors.iter();
            shards
                .map(|t| (t.name.clone(), t.shard.map(|s| s.dim)))
                .collect()
        };
        assert_eq!(cut(&cache.trace()), cut(&trace));
    }
}

#[test]
fn a_plan_is_shown_tensor_by_tensor() {
    let model = Model::new(1);
    let (file, plan) = (model.model.to_str().unwrap(), model.plan.to_str().unwrap());
    let args = ["plan", file, "--tp", "2", "--plan", plan];
    let shown = program().args(args).arg("--json").output().unwrap();
    let shown = json(&shown);
    assert_eq!(shown["shard"], "tp 0/2");
    let rows: Vec<_> = shown["tensors"].as_array().unwrap().iter().collect();
    let row = |name: &str| *rows.iter().find(|r| r["name"] == name).unwrap();
    assert_eq!(row("up.weight")["shape"], serde_json::json!([2, 2]));
    assert_eq!(row("up.weight")["cut"], 0);
    assert_eq!(row("down.weight")["cut"], 1);
    assert!(row("norm.weight")["cut"].is_null());
    let table = program().args(args).output().unwrap();
    let table = String::from_utf8_lossy(&table.stdout).into_owned();
    assert!(table.contains("slice along dimension 1"), "{table}");
}

#[test]
fn an_engine_has_the_daemon_load_its_own_slices_where_nothing_is_there() {
    let model = Model::new(1);
    let daemon = Daemon::start();
    let asked = |name: &str, dim: Option<u32>| candle_ipc_cache::trace::Asked {
        name: name.into(),
        shape: None,
        dtype: None,
        shard: dim.map(|dim| candle_ipc_cache::trace::ShardHint {
            dim,
            rank: 1,
            size: 2,
        }),
    };
    let trace = vec![asked("up.weight", Some(0)), asked("norm.weight", None)];
    let wanted = Wanted::new(&model.model).trace(Trace::new(trace, Vec::new()));
    let config = daemon.config("m").tensor_parallel(1, 2);
    let load = || IpcCache::attach_or_load(&config, &Device::Cpu, &wanted);
    let first = load().unwrap();
    let names: Vec<&str> = first.manifest().names().collect();
    assert_eq!(
        names,
        ["norm.weight", "up.weight"],
        "nothing else was loaded"
    );
    let hint = Shard {
        dim: 0,
        rank: 1,
        world_size: 2,
    };
    let vb = first.sharded(DType::F32);
    let mine = vb.get_with_hints((), "up.weight", hint).unwrap();
    let whole = candle_core::safetensors::load(&model.model, &Device::Cpu).unwrap();
    let wanted_values = whole["up.weight"].narrow(0, 2, 2).unwrap();
    assert_eq!(
        mine.to_vec2::<f32>().unwrap(),
        wanted_values.to_vec2::<f32>().unwrap()
    );
    assert_eq!(load().unwrap().epoch(), first.epoch(), "it is there now");
    // The trace's file went with the request.
    let left = std::fs::read_dir(daemon.dir()).unwrap();
    let left = left.map(|e| e.unwrap().file_name().into_string().unwrap());
    assert!(left.into_iter().all(|name| !name.starts_with("trace-")));

    let all = Wanted::new(&model.model).quantize("f16");
    let cache = IpcCache::attach_or_load(&daemon.config("all"), &Device::Cpu, &all).unwrap();
    assert_eq!(cache.manifest().key.recipe, "f16");
    for (config, wanted, says) in [
        (
            daemon.config("x"),
            Wanted::new("/nowhere/at/all"),
            "/nowhere/at/all",
        ),
        (
            daemon.config("x"),
            all.clone().quantize("q9k"),
            "no type `q9k`",
        ),
        (
            daemon.config("x").tensor_parallel(0, 2),
            Wanted::new(&model.model),
            "give a trace",
        ),
    ] {
        let error = IpcCache::attach_or_load(&config, &Device::Cpu, &wanted).unwrap_err();
        assert!(error.to_string().contains(says), "{says}: {error}");
    }
}
