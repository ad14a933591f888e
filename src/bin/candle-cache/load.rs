//! `candle-cache load`: runs the worker right here, and offers the result to the daemon.
//! Progress goes to standard error, the result to standard output.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use candle_ipc_cache::checkpoint::{self, Checkpoint};
use candle_ipc_cache::protocol::{EntryId, Progress};
use candle_ipc_cache::slab::DeviceId;
use candle_ipc_cache::socket;
use candle_ipc_cache::worker::{self, Held, LoadOptions, TargetDtype, WorkerError};
use clap::builder::FalseyValueParser;
use indicatif::{BinaryBytes, ProgressBar, ProgressStyle};
use serde_json::json;

use crate::client::{self, ClientError};
use crate::device::DeviceArg;
use crate::quantize::QuantizeArgs;
use crate::shard::ShardArgs;
use crate::{Global, exit};

/// Loads a model and publishes it.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Folder, `.safetensors` file, index file, or `.gguf` file.
    #[arg(env = "CANDLE_CACHE_MODEL")]
    model: PathBuf,
    /// Name of the entry [default: the file's stem or the folder's name].
    #[arg(long, env = "CANDLE_CACHE_NAME")]
    name: Option<String>,
    /// Where the memory is to lie: `host`, `cuda:N`, or a GPU's UUID; with --tp, one for all ranks or one for each:
    /// `cuda:0,cuda:1`.
    #[arg(
        long,
        env = "CANDLE_CACHE_DEVICE",
        default_value = "host",
        value_delimiter = ','
    )]
    device: Vec<DeviceArg>,
    /// What float tensors are stored as: `stored` (as they are), `bf16`, `f16` or `f32`.
    #[arg(long, env = "CANDLE_CACHE_DTYPE", default_value_t = TargetDtype::Stored)]
    dtype: TargetDtype,
    #[command(flatten)]
    quantize: QuantizeArgs,
    #[command(flatten)]
    shard: ShardArgs,
    /// Which variant of the files, for instance `fp16` for `model.fp16.safetensors`.
    #[arg(long, env = "CANDLE_CACHE_VARIANT")]
    variant: Option<String>,
    /// Bytes of a slab [default: 4 GiB, more for a large model].
    #[arg(long, env = "CANDLE_CACHE_SLAB_BYTES")]
    slab_bytes: Option<u64>,
    /// Threads that load [default: one a core, 16 at most].
    #[arg(long, env = "CANDLE_CACHE_THREADS")]
    threads: Option<usize>,
    /// Load although the daemon holds the same weights already.
    #[arg(long, env = "CANDLE_CACHE_FORCE", value_parser = FalseyValueParser::new())]
    force: bool,
}

/// Runs the command, and returns the exit code.
pub fn run(args: Args, global: &Global) -> u8 {
    match load(&args, global) {
        Ok(()) => exit::DONE,
        Err(e) => report(&e, global),
    }
}

fn report(e: &anyhow::Error, global: &Global) -> u8 {
    if let Some(client) = e.downcast_ref::<ClientError>() {
        return client.report(global);
    }
    let (exit, refusal) = match e.downcast_ref() {
        Some(WorkerError::Refused { code, .. }) => (exit::REFUSED, Some(format!("{code:?}"))),
        _ => (exit::FAILED, None),
    };
    eprintln!("candle-cache: {}", client::told(e));
    if global.json {
        let error = client::told(e);
        println!(
            "{}",
            json!({ "error": error, "refusal": refusal, "exit": exit })
        );
    }
    exit
}

fn load(args: &Args, global: &Global) -> anyhow::Result<()> {
    socket::raise_descriptor_limit();
    let shards = args.shard.shards()?;
    let devices = devices(&args.device, shards.len())?;
    anyhow::ensure!(
        args.model.to_str().is_some(),
        "the path {} is not UTF-8: load it by another path",
        args.model.display()
    );
    let variant = args.variant.clone();
    let checkpoint = Checkpoint::open(&args.model, &checkpoint::Options { variant })?;
    let options = LoadOptions {
        name: args.name.clone(),
        dtype: args.dtype,
        quantize: args.quantize.read()?,
        selection: args.shard.selection()?,
        stack_experts: args.shard.stack_experts,
        slab_bytes: args.slab_bytes,
        threads: args.threads,
        ..LoadOptions::default()
    };
    let entries: Vec<EntryId> = shards
        .into_iter()
        .zip(devices)
        .map(|(shard, device)| EntryId {
            shard,
            ..EntryId::new(options.entry_name(&checkpoint), device)
        })
        .collect();

    if !args.force
        && let Some(held) = held(&entries, &checkpoint, &options, global)?
    {
        let ranks = held.into_iter().map(|held| Rank {
            root: held.root.to_string(),
            tensors: held.tensors,
            aliases: held.aliases,
            memory_bytes: held.memory_bytes,
            epoch: held.epoch.to_string(),
        });
        print(
            &entries,
            "already loaded",
            &ranks.collect::<Vec<_>>(),
            0.0,
            global.json,
        );
        return Ok(());
    }

    let shown = Shown::new(global.json);
    let start = Instant::now();
    let connect = || Ok::<_, anyhow::Error>(client::connect(global)?);
    let tell = |p| shown.progress(&p);
    let published = worker::publish_set_over(connect, &entries, &checkpoint, &options, &tell);
    shown.end();
    let published = published?;
    let what = if published.iter().all(|p| p.unchanged) {
        "unchanged"
    } else {
        "loaded"
    };
    let ranks = published.into_iter().map(|p| Rank {
        root: p.root.to_string(),
        tensors: p.tensors,
        aliases: p.aliases,
        memory_bytes: p.memory_bytes,
        epoch: p.epoch.to_string(),
    });
    let seconds = start.elapsed().as_secs_f64();
    print(
        &entries,
        what,
        &ranks.collect::<Vec<_>>(),
        seconds,
        global.json,
    );
    Ok(())
}

/// A device for each rank.
fn devices(given: &[DeviceArg], ranks: usize) -> anyhow::Result<Vec<DeviceId>> {
    anyhow::ensure!(
        given.len() == 1 || given.len() == ranks,
        "{} devices for {ranks} ranks: give one for all, or one for each",
        given.len()
    );
    let filled: Vec<DeviceId> = given
        .iter()
        .map(|device| device.to_fill())
        .collect::<Result<_, _>>()?;
    Ok(filled.into_iter().cycle().take(ranks).collect())
}

/// What the daemon holds already, where that is all of it and one set.
fn held(
    entries: &[EntryId],
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    global: &Global,
) -> anyhow::Result<Option<Vec<Held>>> {
    let mut all: Vec<Held> = Vec::with_capacity(entries.len());
    for entry in entries {
        let connect = || Ok::<_, anyhow::Error>(client::connect(global)?);
        match worker::already_held_over(connect, entry, checkpoint, options)? {
            Some(held) if all.first().is_none_or(|first| first.epoch == held.epoch) => {
                all.push(held);
            }
            _ => return Ok(None),
        }
    }
    Ok(Some(all))
}

/// What came of one rank, or of the whole model.
struct Rank {
    epoch: String,
    root: String,
    tensors: usize,
    aliases: usize,
    memory_bytes: u64,
}

/// Prints what came of it; for a set of ranks, a line or a value for each.
fn print(entries: &[EntryId], what: &str, ranks: &[Rank], seconds: f64, as_json: bool) {
    let line = |(entry, rank): (&EntryId, &Rank)| {
        json!({
            "result": what,
            "name": entry.name,
            "role": entry.role,
            "device": entry.device.to_string(),
            "shard": entry.shard.to_string(),
            "epoch": rank.epoch,
            "root": rank.root,
            "tensors": rank.tensors,
            "aliases": rank.aliases,
            "memory_bytes": rank.memory_bytes,
            "seconds": seconds,
        })
    };
    let lines = entries.iter().zip(ranks);
    if as_json {
        let values: Vec<_> = lines.map(line).collect();
        match values.as_slice() {
            [one] => println!("{one}"),
            all => println!("{}", json!(all)),
        }
        return;
    }
    for (entry, rank) in lines {
        let size = BinaryBytes(rank.memory_bytes);
        print!("{entry}: {what}, {size} in {} tensors", rank.tensors);
        match rank.aliases {
            0 => {}
            1 => print!(" and 1 alias"),
            n => print!(" and {n} aliases"),
        }
        if seconds > 0.0 && ranks.len() == 1 {
            let rate = rank.memory_bytes as f64 / seconds;
            print!(", {seconds:.2} s, {}/s", BinaryBytes(rate as u64));
        }
        println!(", epoch {}", rank.epoch);
    }
    if seconds > 0.0 && ranks.len() > 1 {
        let bytes: u64 = ranks.iter().map(|rank| rank.memory_bytes).sum();
        let rate = BinaryBytes((bytes as f64 / seconds) as u64);
        println!(
            "{} ranks as one set: {}, {seconds:.2} s, {rate}/s",
            ranks.len(),
            BinaryBytes(bytes)
        );
    }
}

/// Progress, for people.
enum Shown {
    Bar(ProgressBar),
    Lines(Mutex<Line>),
    Nothing,
}

/// When the last line was written, and when the phase began.
struct Line {
    last: Instant,
    phase: String,
    began: Instant,
}

impl Shown {
    fn new(json: bool) -> Self {
        if json {
            return Self::Nothing;
        }
        if !std::io::stderr().is_terminal() {
            let now = Instant::now();
            return Self::Lines(Mutex::new(Line {
                last: now,
                phase: String::new(),
                began: now,
            }));
        }
        let bar = ProgressBar::new(0);
        let template =
            "{msg:5} {wide_bar} {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        Self::Bar(bar)
    }

    fn progress(&self, p: &Progress) {
        match self {
            Self::Nothing => {}
            Self::Bar(bar) => {
                if bar.message() != p.phase {
                    bar.reset();
                    bar.set_message(p.phase.clone());
                }
                bar.set_length(p.total);
                bar.set_position(p.done);
            }
            Self::Lines(line) => {
                // A thread that panicked while it wrote a line leaves nothing that matters.
                let mut line = line
                    .lock()
                    .unwrap_or_else(std::sync::PoisonError::into_inner);
                line.progress(p);
            }
        }
    }

    fn end(&self) {
        if let Self::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}

impl Line {
    fn progress(&mut self, p: &Progress) {
        if self.phase != p.phase {
            self.phase.clone_from(&p.phase);
            self.began = Instant::now();
        }
        if self.last.elapsed() < Duration::from_secs(1) {
            return;
        }
        self.last = Instant::now();
        let rate = p.done as f64 / self.began.elapsed().as_secs_f64().max(1e-3);
        eprintln!(
            "{}: {} of {}, {}/s",
            p.phase,
            BinaryBytes(p.done),
            BinaryBytes(p.total),
            BinaryBytes(rate as u64)
        );
    }
}
