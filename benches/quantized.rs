//! A Llama whose weights the worker quantized, beside the same Llama over tensors that candle quantized in this process:
//! logits to the bit, and memory.
//!
//! `quantized --name NAME --checkpoint DIR --recipe RECIPE [--device cuda:0|cpu] [--socket-dir DIR]`.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use candle_ipc_cache::checkpoint::{Checkpoint, Options};
use candle_ipc_cache::quantize::{self, Quantize};
use candle_ipc_cache::tensors::{ggml_dtype, plain_dtype};
use candle_ipc_cache::{IpcCache, IpcConfig, QuantizedVarBuilder};
use clap::Parser;
use rayon::prelude::*;

// The example's model, which reads files too.
#[path = "../examples/llama/quantized.rs"]
#[allow(dead_code)]
mod quantized;

use quantized::{Config, Llama, Quantized};

#[derive(Parser)]
struct Args {
    /// Entry in the cache, loaded with `--recipe`.
    #[arg(long)]
    name: String,
    /// The folder that the entry was loaded from.
    #[arg(long)]
    checkpoint: PathBuf,
    /// The recipe.
    #[arg(long)]
    recipe: String,
    /// `cpu` or `cuda:N`.
    #[arg(long, default_value = "cuda:0")]
    device: String,
    /// Socket folder of the daemon.
    #[arg(long)]
    socket_dir: Option<PathBuf>,
    /// Tokens to prefill.
    #[arg(long, default_value_t = 128)]
    prefill: usize,
    /// Tokens to decode.
    #[arg(long, default_value_t = 32)]
    decode: usize,
    /// Measure what this process takes, with tensors from one source alone: `cache` or `own`.
    #[arg(long)]
    memory: Option<String>,
    /// Given by `cargo bench`; ignored.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Tensors that candle quantized here.
struct Own(HashMap<String, Arc<QTensor>>);

impl Quantized for Own {
    fn get(&self, name: &str) -> candle_core::Result<Arc<QTensor>> {
        let tensor = self.0.get(name).cloned();
        tensor
            .with_context(|| name.to_string())
            .map_err(candle_core::Error::wrap)
    }

    fn contains(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }
}

struct Cached(QuantizedVarBuilder);

impl Quantized for Cached {
    fn get(&self, name: &str) -> candle_core::Result<Arc<QTensor>> {
        self.0.get_no_shape(name)
    }

    fn contains(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }
}

/// Reads each tensor whole and lets candle quantize it whole, several at a time.
fn own(args: &Args, device: &Device) -> Result<Own> {
    let checkpoint = Checkpoint::open(&args.checkpoint, &Options::default())?;
    let assigned = quantize::assign(&checkpoint.tensors, &Quantize::new(args.recipe.parse()?))?;
    let make = |(source, assigned): (&_, &quantize::Assigned)| -> Result<(String, QTensor)> {
        let source: &candle_ipc_cache::checkpoint::SourceTensor = source;
        let mut bytes = vec![0; source.bytes as usize];
        checkpoint.read_at(source, 0, &mut bytes)?;
        let shape: Vec<usize> = source.shape.iter().map(|d| *d as usize).collect();
        let dtype = plain_dtype(source.element).context("a plain checkpoint")?;
        let tensor = Tensor::from_raw_buffer(&bytes, dtype, &shape, &Device::Cpu)?;
        let to = ggml_dtype(assigned.target.unwrap_or(source.element)).context("a GGML type")?;
        let made = QTensor::quantize(&tensor, to)?;
        Ok((source.name.clone(), made))
    };
    let pairs: Vec<_> = checkpoint.tensors.iter().zip(&assigned).collect();
    let made: Vec<(String, QTensor)> = pairs.into_par_iter().map(make).collect::<Result<_>>()?;
    // Onto the device one after the other, as a program that starts does it.
    let onto = |(name, tensor): (String, QTensor)| -> Result<(String, Arc<QTensor>)> {
        let data = tensor.data()?.into_owned();
        let storage =
            candle_core::quantized::QStorage::from_data(data.into(), device, tensor.dtype())?;
        Ok((
            name,
            Arc::new(QTensor::new(storage, tensor.shape().clone())?),
        ))
    };
    Ok(Own(made.into_iter().map(onto).collect::<Result<_>>()?))
}

struct Run<'a> {
    args: &'a Args,
    config: Config,
    device: Device,
}

impl Run<'_> {
    fn source(&self, which: &str) -> Result<Box<dyn Quantized>> {
        let start = Instant::now();
        let source: Box<dyn Quantized> = match which {
            "cache" => {
                let mut config = IpcConfig::new(&self.args.name);
                if let Some(folder) = &self.args.socket_dir {
                    config = config.socket_dir(folder);
                }
                Box::new(Cached(IpcCache::attach(&config, &self.device)?.quantized()))
            }
            "own" => Box::new(own(self.args, &self.device)?),
            other => bail!("`{other}`: give cache or own"),
        };
        println!(
            "tensors from {which}: {:.1} ms",
            start.elapsed().as_secs_f64() * 1e3
        );
        Ok(source)
    }

    fn model(&self, source: &dyn Quantized) -> Result<Llama> {
        let context = self.args.prefill + self.args.decode + 1;
        Ok(Llama::load(source, &self.config, context, &self.device)?)
    }

    /// Logits of the prefill and of every decode step.
    fn generate(&self, model: &mut Llama, vocab: u32) -> Result<Vec<Vec<f32>>> {
        let prefill = self.args.prefill as u32;
        let mut next: Vec<u32> = (0..prefill).map(|i| (i * 7919 + 13) % vocab).collect();
        let (mut at, mut logits) = (0, Vec::new());
        for _ in 0..=self.args.decode {
            let input = Tensor::new(next.as_slice(), &self.device)?.unsqueeze(0)?;
            let out = model
                .forward(&input, at)?
                .squeeze(0)?
                .to_dtype(DType::F32)?;
            let out = out.to_vec1::<f32>()?;
            let best = out.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
            at += next.len();
            next = vec![best.map(|(i, _)| i as u32).context("no logits")?];
            logits.push(out);
        }
        Ok(logits)
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

fn main() -> Result<()> {
    let args = Args::parse();
    let json = std::fs::read(args.checkpoint.join("config.json"))?;
    let vocab: serde_json::Value = serde_json::from_slice(&json)?;
    let vocab = vocab["vocab_size"].as_u64().context("vocab_size")? as u32;
    let device = match args.device.strip_prefix("cuda:") {
        Some(n) => Device::new_cuda(n.parse()?)?,
        None => Device::Cpu,
    };
    let run = Run {
        args: &args,
        config: Config::from_json(&json)?,
        device,
    };
    let mib = |from: u64, to: u64| (from as f64 - to as f64) / f64::from(1 << 20);
    if let Some(which) = &args.memory {
        run.device.synchronize()?;
        let before = free_bytes();
        let source = run.source(which)?;
        let mut model = run.model(&*source)?;
        run.device.synchronize()?;
        let built = free_bytes();
        run.generate(&mut model, vocab)?;
        run.device.synchronize()?;
        let after = free_bytes();
        println!(
            "memory, quantized, from {which}: build {:.1} MiB, forward {:.1} MiB, both {:.1} MiB",
            mib(before, built),
            mib(built, after),
            mib(before, after)
        );
        return Ok(());
    }
    let (cached, own) = (run.source("cache")?, run.source("own")?);
    let mut types: HashMap<GgmlDType, usize> = HashMap::new();
    let logits = [cached, own].map(|source| -> Result<_> {
        let mut model = run.model(&*source)?;
        *types
            .entry(source.get("lm_head.weight")?.dtype())
            .or_default() += 1;
        run.generate(&mut model, vocab)
    });
    let [cached, own] = logits;
    let (cached, own) = (cached?, own?);
    let pairs = cached.iter().flatten().zip(own.iter().flatten());
    let differ = pairs.filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    println!(
        "quantized logits: {} steps, {} values, {differ} differ; head {types:?}",
        cached.len(),
        cached.len() * cached[0].len()
    );
    ensure!(
        cached.iter().flatten().all(|x| x.is_finite()),
        "logits are not finite"
    );
    ensure!(differ == 0, "logits differ");
    Ok(())
}
