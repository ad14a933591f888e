//! A Llama from the cache beside the same Llama from disk: logits to the bit, memory, and time per token.
//!
//! `decode --name NAME --checkpoint DIR [--device cuda:0|cpu] [--socket-dir DIR]` prints one table.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_ipc_cache::{FromIpcCache, IpcConfig};
use candle_nn::VarBuilder;
use candle_transformers::models::llama::{Cache, Config, Llama, LlamaConfig};
use clap::Parser;

#[derive(Parser)]
struct Args {
    /// Entry in the cache.
    #[arg(long)]
    name: String,
    /// The folder that the entry was loaded from.
    #[arg(long)]
    checkpoint: PathBuf,
    /// `cpu` or `cuda:N`.
    #[arg(long, default_value = "cuda:0")]
    device: String,
    /// Socket folder of the daemon.
    #[arg(long)]
    socket_dir: Option<PathBuf>,
    /// Alternating rounds.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Tokens to prefill.
    #[arg(long, default_value_t = 128)]
    prefill: usize,
    /// Tokens to decode in each round.
    #[arg(long, default_value_t = 32)]
    decode: usize,
    /// Measure what this process takes, from one source alone: `cache` or `disk`.
    #[arg(long)]
    memory: Option<String>,
    /// After `--memory`, stay until standard input ends.
    #[arg(long)]
    stay: bool,
    /// Given by `cargo bench`; ignored.
    #[arg(long, hide = true)]
    bench: bool,
}

fn device(text: &str) -> Result<Device> {
    match text.strip_prefix("cuda:") {
        Some(n) => Ok(Device::new_cuda(n.parse()?)?),
        None => Ok(Device::Cpu),
    }
}

fn shards(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files: Vec<_> = std::fs::read_dir(folder)?
        .map(|e| Ok(e?.path()))
        .collect::<Result<_>>()?;
    files.retain(|p| p.extension().is_some_and(|e| e == "safetensors"));
    files.sort();
    Ok(files)
}

struct Run<'a> {
    args: &'a Args,
    config: Config,
    dtype: DType,
    device: Device,
}

// Named after the constructors that they call.
#[expect(clippy::wrong_self_convention)]
impl Run<'_> {
    fn from_disk(&self) -> Result<Llama> {
        let files = shards(&self.args.checkpoint)?;
        // SAFETY: nobody writes to the checkpoint while the bench runs.
        let vb = unsafe { VarBuilder::from_mmaped_safetensors(&files, self.dtype, &self.device)? };
        Ok(Llama::load(vb, &self.config)?)
    }

    fn ipc(&self) -> IpcConfig {
        let config = IpcConfig::new(&self.args.name);
        match &self.args.socket_dir {
            Some(folder) => config.socket_dir(folder),
            None => config,
        }
    }

    fn from_cache(&self) -> Result<Llama> {
        let vb = VarBuilder::from_ipc_cache(&self.ipc(), self.dtype, &self.device)?;
        Ok(Llama::load(vb, &self.config)?)
    }

    /// Logits of the prefill and of every decode step, and the time of each decode step.
    fn generate(&self, model: &Llama) -> Result<(Vec<Vec<f32>>, Vec<Duration>)> {
        let mut cache = Cache::new(true, self.dtype, &self.config, &self.device)?;
        let vocab = self.config.vocab_size as u32;
        let prompt: Vec<u32> = (0..self.args.prefill as u32)
            .map(|i| (i * 7919 + 13) % vocab)
            .collect();
        let mut logits = Vec::new();
        let mut step = |tokens: &[u32], at: usize| -> Result<u32> {
            let input = Tensor::new(tokens, &self.device)?.unsqueeze(0)?;
            let out = model
                .forward(&input, at, &mut cache)?
                .squeeze(0)?
                .to_dtype(DType::F32)?
                .to_vec1::<f32>()?;
            let best = out
                .iter()
                .enumerate()
                .max_by(|a, b| a.1.total_cmp(b.1))
                .map(|(i, _)| i as u32);
            logits.push(out);
            best.context("no logits")
        };
        let mut next = step(&prompt, 0)?;
        let mut times = Vec::new();
        for i in 0..self.args.decode {
            let start = Instant::now();
            next = step(&[next], self.args.prefill + i)?;
            times.push(start.elapsed());
        }
        Ok((logits, times))
    }
}

#[cfg(feature = "cuda")]
fn free_bytes() -> u64 {
    candle_core::cuda_backend::cudarc::driver::result::mem_get_info()
        .map_or(0, |(free, _)| free as u64)
}

#[cfg(not(feature = "cuda"))]
fn free_bytes() -> u64 {
    0
}

fn mib(from: u64, to: u64) -> f64 {
    (from as f64 - to as f64) / f64::from(1 << 20)
}

/// How many values differ in some bit.
fn differing(a: &[Vec<f32>], b: &[Vec<f32>]) -> usize {
    a.iter()
        .flatten()
        .zip(b.iter().flatten())
        .filter(|(x, y)| x.to_bits() != y.to_bits())
        .count()
}

fn memory(run: &Run<'_>, source: &str) -> Result<()> {
    run.device.synchronize()?;
    let before = free_bytes();
    let model = if source == "cache" {
        run.from_cache()?
    } else {
        run.from_disk()?
    };
    run.device.synchronize()?;
    let built = free_bytes();
    let (first, _) = run.generate(&model)?;
    run.device.synchronize()?;
    let after = free_bytes();
    println!(
        "memory from {source}: build {:.1} MiB, forward {:.1} MiB, both {:.1} MiB",
        mib(before, built),
        mib(built, after),
        mib(before, after)
    );
    if run.args.stay {
        std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
        let (again, _) = run.generate(&model)?;
        println!(
            "logits after what happened meanwhile: {} of {} differ",
            differing(&first, &again),
            first.len() * first[0].len()
        );
    }
    Ok(())
}

fn main() -> Result<()> {
    let args = Args::parse();
    let config: LlamaConfig =
        serde_json::from_slice(&std::fs::read(args.checkpoint.join("config.json"))?)?;
    let device = device(&args.device)?;
    let dtype = if device.is_cuda() {
        DType::BF16
    } else {
        DType::F32
    };
    let run = Run {
        args: &args,
        config: config.into_config(false),
        dtype,
        device,
    };
    if let Some(source) = &args.memory {
        return memory(&run, source);
    }

    let start = Instant::now();
    let cached = run.from_cache()?;
    let attach = start.elapsed();
    let start = Instant::now();
    let stock = run.from_disk()?;
    run.device.synchronize()?;
    let load = start.elapsed();
    println!(
        "model ready: cache {:.1} ms, disk {:.1} ms",
        attach.as_secs_f64() * 1e3,
        load.as_secs_f64() * 1e3
    );

    // Kernels are compiled in the first round; it is checked and not timed. Another lets the clocks settle.
    let (a, _) = run.generate(&cached)?;
    let (b, _) = run.generate(&stock)?;
    let different = differing(&a, &b);
    println!(
        "logits: {} steps, {} values, {different} differ",
        a.len(),
        a.len() * a[0].len()
    );
    ensure!(
        a.len() == args.decode + 1 && a.iter().flatten().all(|x| x.is_finite()),
        "logits are not finite"
    );
    ensure!(different == 0, "logits differ");

    run.generate(&cached)?;
    run.generate(&stock)?;
    let mut ratios = Vec::new();
    for round in 1..=args.rounds {
        // In turn, twice, in the order A B B A: clocks that rise or fall meanwhile favour neither. The median of the
        // tokens: a hiccup of the machine favours neither, too.
        let mut times = [Vec::new(), Vec::new()];
        for which in [0, 1, 1, 0] {
            let which = (which + round) % 2;
            times[which].extend(run.generate([&cached, &stock][which])?.1);
        }
        let [cache_ms, disk_ms] = times.map(|mut times| {
            times.sort();
            times[times.len() / 2].as_secs_f64() * 1e3
        });
        ratios.push(cache_ms / disk_ms);
        println!(
            "round {round}: cache {cache_ms:.3} ms a token, disk {disk_ms:.3}, ratio {:.3}",
            cache_ms / disk_ms
        );
    }
    ratios.sort_by(f64::total_cmp);
    println!(
        "decode ratio, median of {}: {:.3}",
        args.rounds,
        ratios[ratios.len() / 2]
    );
    Ok(())
}
