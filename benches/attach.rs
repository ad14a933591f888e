//! How long an attach takes, from connect to a builder that is ready and to every tensor in hand, by the number
//! of tensors. Every attach is a new process, as a restarted engine is. Prints one table of medians.
//!
//! Host: `cargo bench --bench attach`. GPU, beside what engines for PyTorch do with the same checkpoints:
//! `cargo bench --features cuda --bench attach -- --device cuda:0 --model DIR --model DIR --peer`.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use candle_core::quantized::{GgmlDType, QTensor, gguf_file};
use candle_core::{DType, Device, Tensor};
use candle_ipc_cache::{IpcCache, IpcConfig};
use clap::Parser;
use serde_json::{Value, json};

#[derive(Parser)]
struct Args {
    /// `cpu` or `cuda:N`.
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Checkpoints to attach to; none: some are made, of these many tensors.
    #[arg(long)]
    model: Vec<PathBuf>,
    /// Numbers of tensors.
    #[arg(long, value_delimiter = ',', default_value = "272,1000,10000,100000")]
    counts: Vec<usize>,
    /// Attaches to each.
    #[arg(long, default_value_t = 21)]
    attaches: usize,
    /// Attach to each `--model` a second time, quantized by this recipe.
    #[arg(long)]
    quantize: Option<String>,
    /// Also run benches/peers/torch_ipc.py on each `--model`: needs torch.
    #[arg(long)]
    peer: bool,
    /// The folder of torch_ipc.py.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/peers"))]
    peers: PathBuf,
    /// The candle-cache program.
    #[arg(long, default_value = env!("CARGO_BIN_EXE_candle-cache"))]
    program: PathBuf,
    /// One attach in this process, to the entry of this name.
    #[arg(long, hide = true)]
    once: Option<String>,
    #[arg(long, hide = true)]
    socket_dir: Option<PathBuf>,
    /// Given by `cargo bench`; ignored.
    #[arg(long, hide = true)]
    bench: bool,
}

/// A process that ends with the bench.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a process and waits for the line that says it is ready.
fn start(command: &mut Command) -> Result<Running> {
    let mut child = Running(command.stdout(Stdio::piped()).spawn()?);
    let stdout = child.0.stdout.take().context("it was piped")?;
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line)?;
    ensure!(!line.is_empty(), "{command:?} ended");
    Ok(child)
}

fn once(args: &Args, name: &str) -> Result<Value> {
    let device = match args.device.strip_prefix("cuda:") {
        Some(n) => Device::new_cuda(n.parse()?)?,
        None => Device::Cpu,
    };
    device.synchronize()?;
    let config =
        IpcConfig::new(name).socket_dir(args.socket_dir.as_deref().context("a socket folder")?);
    let begin = Instant::now();
    let cache = IpcCache::attach(&config, &device)?;
    let (plain, quantized) = (cache.var_builder(DType::F32), cache.quantized());
    let ready = begin.elapsed();
    let mut kept = (Vec::new(), Vec::new());
    for t in &cache.manifest().tensors {
        if t.element.is_quantized() {
            kept.0.push(quantized.get_no_shape(&t.name)?);
        } else {
            // As it is stored: a cast is not part of an attach.
            let dtype = t
                .element
                .as_str()
                .to_lowercase()
                .parse()
                .unwrap_or(DType::F32);
            kept.1.push(plain.get_unchecked_dtype(&t.name, dtype)?);
        }
    }
    let all = begin.elapsed();
    let took = cache.report().took;
    let ms = |d: Duration| d.as_secs_f64() * 1e3;
    Ok(json!({
        "tensors": cache.manifest().names().count(), "ready": ms(ready), "all": ms(all), "connect": ms(took.connect),
        "receive": ms(took.receive), "decode": ms(took.decode), "map": ms(took.map), "identity": ms(took.identity),
    }))
}

fn median(rounds: &[Value], part: &str) -> f64 {
    let mut times: Vec<f64> = rounds.iter().filter_map(|r| r[part].as_f64()).collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Checkpoints with names as long as real ones have them, and one row of 32 elements a tensor.
fn make(folder: &Path, count: usize, quantized: bool) -> Result<PathBuf> {
    const PARTS: [&str; 7] = ["q", "k", "v", "o", "gate_proj", "up_proj", "down_proj"];
    let name = |i: usize| {
        format!(
            "model.layers.{}.self_attn.{}.weight",
            i / PARTS.len(),
            PARTS[i % PARTS.len()]
        )
    };
    let row = |i: usize| Tensor::new(vec![i as f32; 32], &Device::Cpu)?.reshape((1, 32));
    if !quantized {
        let path = folder.join(format!("plain-{count}.safetensors"));
        let tensors = (0..count)
            .map(|i| Ok((name(i), row(i)?)))
            .collect::<Result<_>>()?;
        candle_core::safetensors::save(&tensors, &path)?;
        return Ok(path);
    }
    let path = folder.join(format!("q8_0-{count}.gguf"));
    let tensors: Vec<_> = (0..count)
        .map(|i| Ok((name(i), QTensor::quantize(&row(i)?, GgmlDType::Q8_0)?)))
        .collect::<Result<_>>()?;
    let tensors: Vec<_> = tensors.iter().map(|(name, t)| (name.as_str(), t)).collect();
    gguf_file::write(&mut std::fs::File::create(&path)?, &[], &tensors)?;
    Ok(path)
}

struct Bench<'a> {
    args: &'a Args,
    sockets: PathBuf,
}

impl Bench<'_> {
    fn load(&self, model: &Path, name: &str, recipe: Option<&str>) -> Result<()> {
        let device = if self.args.device == "cpu" {
            "host"
        } else {
            &self.args.device
        };
        let status = Command::new(&self.args.program)
            .arg("load")
            .arg(model)
            .args(["--name", name, "--device", device, "--socket-dir"])
            .arg(&self.sockets)
            .args(recipe.map(|r| format!("--quantize={r}")))
            .stderr(Stdio::null())
            .stdout(Stdio::null())
            .status()?;
        ensure!(status.success(), "loading {}: {status}", model.display());
        Ok(())
    }

    fn attach(&self, name: &str) -> Result<Vec<Value>> {
        let run = |_| {
            let output = Command::new(std::env::current_exe()?)
                .args([
                    "--once",
                    name,
                    "--device",
                    &self.args.device,
                    "--socket-dir",
                ])
                .arg(&self.sockets)
                .stderr(Stdio::inherit())
                .output()?;
            ensure!(
                output.status.success(),
                "attaching to {name}: {}",
                output.status
            );
            Ok(serde_json::from_slice(&output.stdout)?)
        };
        (0..self.args.attaches).map(run).collect()
    }

    /// Milliseconds of the peer's attaches to the same checkpoint.
    fn peer(&self, model: &Path) -> Result<f64> {
        let script = self.args.peers.join("torch_ipc.py");
        let socket = self.sockets.join("peer.sock");
        let _server = start(
            Command::new("python3")
                .arg(&script)
                .arg("serve")
                .arg(model)
                .arg(&socket),
        )?;
        let rounds = self.args.attaches.min(7).to_string();
        let output = Command::new("python3")
            .arg(&script)
            .arg("attach")
            .arg(&socket)
            .arg(rounds)
            .output()?;
        ensure!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let answer: Value = serde_json::from_slice(&output.stdout)?;
        let rounds: Vec<Value> = answer["ms"]
            .as_array()
            .context("times")?
            .iter()
            .map(|ms| json!({"ms": ms}))
            .collect();
        Ok(median(&rounds, "ms"))
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    if let Some(name) = &args.once {
        println!("{}", once(&args, name)?);
        return Ok(());
    }
    let work = tempfile::tempdir()?;
    let bench = Bench {
        args: &args,
        sockets: work.path().join("s"),
    };
    std::fs::create_dir(&bench.sockets)?;
    let _daemon = start(
        Command::new(&args.program)
            .args(["serve", "--socket-dir"])
            .arg(&bench.sockets),
    )?;
    let mut models: Vec<(String, PathBuf)> = args
        .model
        .iter()
        .map(|m| {
            (
                m.file_name()
                    .map_or_else(|| "model".into(), |n| n.to_string_lossy().into_owned()),
                m.clone(),
            )
        })
        .collect();
    if models.is_empty() {
        for count in &args.counts {
            for (kind, quantized) in [("quantized", true), ("plain", false)] {
                models.push((
                    format!("{kind}-{count}"),
                    make(work.path(), *count, quantized)?,
                ));
            }
        }
    }
    println!(
        "{}, medians of {} attaches, milliseconds; each attach is a new process",
        args.device, args.attaches
    );
    println!(
        "{:<18} {:>8} {:>8} {:>11} | {:>8} {:>8} {:>8} {:>8} {:>8} | {:>9} {:>7} {:>7}",
        "entry",
        "tensors",
        "ready",
        "all tensors",
        "connect",
        "receive",
        "decode",
        "map",
        "identity",
        "peer",
        "ratio",
        "all"
    );
    let mut entries: Vec<(String, &Path, Option<&str>)> = Vec::new();
    for (name, model) in &models {
        entries.push((name.clone(), model, None));
        if let Some(recipe) = &args.quantize {
            entries.push((format!("{name} {recipe}"), model, Some(recipe)));
        }
    }
    for (name, model, recipe) in &entries {
        bench.load(model, name, *recipe)?;
        let rounds = bench.attach(name)?;
        let of = |part| median(&rounds, part);
        let (ready, all) = (of("ready"), of("all"));
        let peer = if args.peer && recipe.is_none() {
            let peer = bench.peer(model)?;
            format!("{peer:>9.2} {:>6.1}x {:>6.1}x", peer / ready, peer / all)
        } else {
            format!("{:>9} {:>7} {:>7}", "-", "-", "-")
        };
        println!(
            "{name:<18} {:>8} {ready:>8.2} {all:>11.2} | {:>8.2} {:>8.2} {:>8.2} {:>8.2} {:>8.2} | {peer}",
            rounds[0]["tensors"],
            of("connect"),
            of("receive"),
            of("decode"),
            of("map"),
            of("identity")
        );
    }
    Ok(())
}
