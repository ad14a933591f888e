//! A Llama from the cache beside the same Llama from disk: logits to the bit, memory, and time per token.
//!
//! `decode --name NAME --checkpoint DIR [--device cuda:0|cpu] [--socket-dir DIR]` prints one table.

use std::path::{Path, PathBuf};
use std::time::Instant;

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
    /// Compute on a stream of one's own (`Device::new_cuda_with_stream`).
    #[arg(long)]
    stream: bool,
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

fn device(text: &str, stream: bool) -> Result<Device> {
    match text.strip_prefix("cuda:") {
        Some(n) if stream => Ok(Device::new_cuda_with_stream(n.parse()?)?),
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

    /// A new text for `model`, prefilled.
    fn start<'m>(&'m self, model: &'m Llama) -> Result<Text<'m>> {
        let vocab = self.config.vocab_size as u32;
        let prompt: Vec<u32> = (0..self.args.prefill as u32)
            .map(|i| (i * 7919 + 13) % vocab)
            .collect();
        let mut text = Text {
            model,
            device: &self.device,
            cache: Cache::new(true, self.dtype, &self.config, &self.device)?,
            next: prompt,
            at: 0,
            logits: Vec::new(),
        };
        text.step()?;
        Ok(text)
    }

    /// Logits of the prefill and of every decode step.
    fn generate(&self, model: &Llama) -> Result<Vec<Vec<f32>>> {
        let mut text = self.start(model)?;
        for _ in 0..self.args.decode {
            text.step()?;
        }
        Ok(text.logits)
    }

    /// Medians of the time that each of two models takes for a token, in milliseconds. They take turns token by
    /// token, and take turns in who begins: what the machine does meanwhile meets both.
    fn decode_in_turn(&self, models: [&Llama; 2]) -> Result<[f64; 2]> {
        let mut texts = [self.start(models[0])?, self.start(models[1])?];
        let mut times = [Vec::new(), Vec::new()];
        for token in 0..self.args.decode {
            for turn in 0..2 {
                let which = (token + turn) % 2;
                let start = Instant::now();
                texts[which].step()?;
                times[which].push(start.elapsed());
            }
        }
        Ok(times.map(|mut times| {
            times.sort();
            times[times.len() / 2].as_secs_f64() * 1e3
        }))
    }
}

/// A text that a model is writing.
struct Text<'m> {
    model: &'m Llama,
    device: &'m Device,
    cache: Cache,
    /// What the model has not seen yet.
    next: Vec<u32>,
    /// Tokens that it has seen.
    at: usize,
    logits: Vec<Vec<f32>>,
}

impl Text<'_> {
    /// Shows the model what it has not seen, and takes the likeliest token.
    fn step(&mut self) -> Result<()> {
        let input = Tensor::new(self.next.as_slice(), self.device)?.unsqueeze(0)?;
        let out = self.model.forward(&input, self.at, &mut self.cache)?;
        let out = out.squeeze(0)?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
        let best = out.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
        let best = best.map(|(i, _)| i as u32).context("no logits")?;
        self.logits.push(out);
        self.at += self.next.len();
        self.next = vec![best];
        Ok(())
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
    let first = run.generate(&model)?;
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
        let again = run.generate(&model)?;
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
    let device = device(&args.device, args.stream)?;
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
    let a = run.generate(&cached)?;
    let b = run.generate(&stock)?;
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

    run.decode_in_turn([&cached, &stock])?;
    let mut ratios = Vec::new();
    for round in 1..=args.rounds {
        let [cache_ms, disk_ms] = run.decode_in_turn([&cached, &stock])?;
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
