//! Talks with a Llama whose weights come from the cache, or with `--no-cache` from disk.
//! Text goes to standard output as it is made; times go to standard error.

mod chat;
mod dense;
mod errors;
#[cfg(feature = "nccl")]
mod nccl;
#[cfg(feature = "nccl")]
mod parallel;
mod quantized;
#[cfg(feature = "nccl")]
mod ranks;
mod sample;
mod tokenizer;
mod weights;

use std::io::{BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use candle_core::{DType, Device};
use candle_ipc_cache::IpcConfig;
use candle_transformers::generation::LogitsProcessor;
use clap::Parser;

use chat::{Chat, Manners};
use errors::told;
use sample::{Generator, Timing};
use weights::{Build, Weights};

/// Chat with a Llama that other processes share.
#[derive(Parser)]
struct Args {
    /// Entry in the cache, or path of a checkpoint
    #[arg(long)]
    model: String,
    /// Checkpoint that the entry must hold; without one, the files that it was loaded from are checked
    #[arg(long)]
    checkpoint: Option<PathBuf>,
    /// Read the checkpoint from disk
    #[arg(long)]
    no_cache: bool,
    /// Say this and leave; without it, lines are read from standard input
    #[arg(long)]
    prompt: Option<String>,
    /// What the model is told before the conversation, in place of its template's own words
    #[arg(long, conflicts_with = "raw")]
    system: Option<String>,
    /// Continue the text as it is, without a chat template
    #[arg(long)]
    raw: bool,
    /// Longest answer, in tokens
    #[arg(long, default_value_t = 512)]
    max_tokens: usize,
    /// 0 takes the likeliest token, more draws more freely
    #[arg(long, default_value_t = 0.0, value_parser = temperature)]
    temperature: f64,
    /// Draw from the likeliest tokens that together have this probability
    #[arg(long, value_parser = probability)]
    top_p: Option<f64>,
    /// Seed for drawing
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Where the model runs: cpu or cuda:N
    #[arg(long, default_value = "cpu", value_parser = Place::parse)]
    device: Place,
    /// Type of a dense model's weights: f32, bf16 or f16; f32 on the CPU, bf16 elsewhere
    #[arg(long, value_parser = dtype)]
    dtype: Option<DType>,
    /// Longest conversation, in tokens
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(2..))]
    context: u32,
    /// Folder of the daemon's socket
    #[arg(long, env = "CANDLE_CACHE_SOCKET_DIR")]
    socket_dir: Option<PathBuf>,
    /// Print numbers of tokens, one on a line, in place of text
    #[arg(long)]
    print_tokens: bool,
    /// Wait for a line on standard input after attaching, and again before leaving, so that memory can be looked at
    #[arg(long, requires = "prompt")]
    step: bool,
    /// Spread a dense model over so many GPUs, `--device` the first: the entry is a set that `candle-cache load --tp N` made
    #[arg(long, default_value_t = 1, conflicts_with_all = ["no_cache", "step"], value_parser = ranks_of)]
    tp: usize,
    /// Which of them this process is: for the program's own use
    #[arg(long, hide = true, default_value_t = 0)]
    rank: usize,
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("llama: {}", told(&error));
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let args = Args::parse();
    if args.tp > 1 {
        return spread(&args);
    }
    let device = args.device.open()?;
    let started = Instant::now();
    let weights = args.weights(&device)?;
    match weights.shared_bytes() {
        Some(bytes) => say(
            "attach",
            started.elapsed(),
            &format!("{:.1} MB shared", bytes as f64 / 1e6),
        ),
        None => say("open", started.elapsed(), "from disk"),
    }
    if args.step {
        wait()?;
    }
    let started = Instant::now();
    let (model, context) = weights.build(&Build {
        context: args.context as usize,
        dtype: args.dtype.unwrap_or(match device {
            Device::Cpu => DType::F32,
            _ => DType::BF16,
        }),
        device: &device,
    })?;
    say("build", started.elapsed(), "");
    let started = Instant::now();
    let manners = weights.manners()?;
    say("tokenizer", started.elapsed(), "");

    let sampler = LogitsProcessor::new(args.seed, Some(args.temperature), args.top_p);
    let mut engine = Engine {
        generator: Generator::new(model, sampler, context, &device),
        chat: Chat::new(args.system.as_deref()),
        manners,
        args: &args,
        before: Box::new(|_| Ok(())),
    };
    engine.speak()?;
    if args.step {
        wait()?;
    }
    Ok(())
}

#[cfg(not(feature = "nccl"))]
fn spread(args: &Args) -> Result<()> {
    bail!(
        "this program was built without NCCL: for --tp {} build it with `--features nccl`",
        args.tp
    )
}

/// One rank of a model that is spread over several GPUs. Rank 0 starts the others, talks, and shows; they do the same
/// in silence.
#[cfg(feature = "nccl")]
fn spread(args: &Args) -> Result<()> {
    use ranks::{Leader, Meeting, Others};

    let (rank, size) = (args.rank, args.tp);
    let Place::Cuda(first) = args.device else {
        bail!("--tp spreads a model over GPUs: give --device cuda:0, or the first of those to use")
    };
    SILENT.store(rank > 0, Ordering::Relaxed);
    let led = if rank > 0 {
        Some(Leader::listen()?)
    } else {
        None
    };
    let device = Place::Cuda(first + rank).open()?;
    let started = Instant::now();
    let (mut config, checkpoint) = args.ipc()?;
    config = config.tensor_parallel(rank as u16, size as u16);
    if let Some((_, meeting)) = &led {
        config = config.epoch(meeting.epoch);
    }
    let weights = Weights::attach(&config, checkpoint.as_deref(), &device)?;
    let bytes = weights.shared_bytes().unwrap_or(0);
    say(
        "attach",
        started.elapsed(),
        &format!("{:.1} MB of rank 0", bytes as f64 / 1e6),
    );
    let (leader, others, meeting) = match led {
        Some((leader, meeting)) => (Some(leader), None, meeting),
        None => {
            let meeting = Meeting::new(weights.epoch()?)?;
            let others = Others::start(size, &meeting)?;
            (None, Some(others), meeting)
        }
    };
    let started = Instant::now();
    let group = meeting.join(rank, size, &device)?;
    say("meeting", started.elapsed(), &format!("{size} ranks"));
    let started = Instant::now();
    let how = Build {
        context: args.context as usize,
        dtype: args.dtype.unwrap_or(DType::BF16),
        device: &device,
    };
    let (model, context) = weights.build_part(&how, group)?;
    say("build", started.elapsed(), "");
    let sampler = LogitsProcessor::new(args.seed, Some(args.temperature), args.top_p);
    let mut engine = Engine {
        generator: Generator::new(model, sampler, context, &device),
        chat: Chat::new(args.system.as_deref()),
        manners: weights.manners()?,
        args,
        before: match others {
            Some(mut others) => Box::new(move |text| others.tell(text)),
            None => Box::new(|_| Ok(())),
        },
    };
    let Some(leader) = leader else {
        return engine.speak();
    };
    while let Some(text) = leader.next()? {
        engine.turn(&text)?;
    }
    Ok(())
}

impl Args {
    fn weights(&self, device: &Device) -> Result<Weights> {
        if self.no_cache {
            return match self.path() {
                Some(path) => Weights::open(path, device),
                None => bail!(
                    "{} is not a file or folder: --no-cache needs one",
                    self.model
                ),
            };
        }
        let (config, checkpoint) = self.ipc()?;
        Weights::attach(&config, checkpoint.as_deref(), device)
    }

    /// The checkpoint, as far as it is known.
    fn path(&self) -> Option<&Path> {
        let path = Some(Path::new(&self.model)).filter(|path| path.exists());
        self.checkpoint.as_deref().or(path)
    }

    /// What to attach to, and the checkpoint that it must be.
    fn ipc(&self) -> Result<(IpcConfig, Option<PathBuf>)> {
        let path = Some(Path::new(&self.model)).filter(|path| path.exists());
        let name = match path {
            Some(path) => entry_name(path)?,
            None => self.model.clone(),
        };
        let mut config = IpcConfig::new(&name);
        if let Some(folder) = &self.socket_dir {
            config = config.socket_dir(folder);
        }
        if let Some(path) = self.path() {
            config = config.checkpoint(path);
        }
        Ok((config, self.path().map(Path::to_path_buf)))
    }
}

/// The name that `candle-cache load PATH` gives to an entry.
fn entry_name(path: &Path) -> Result<String> {
    let path = path.canonicalize()?;
    let name = match path.is_dir() {
        true => path.file_name(),
        false => path.file_stem(),
    };
    let name =
        name.context("the path has no name: say which entry with --model and --checkpoint")?;
    Ok(name.to_string_lossy().into_owned())
}

struct Engine<'a> {
    generator: Generator,
    chat: Chat,
    manners: Manners,
    args: &'a Args,
    /// Called with what is to be answered, before it is.
    before: Before,
}

type Before = Box<dyn FnMut(&str) -> Result<()>>;

impl Engine<'_> {
    /// Answers the prompt that was given, or lines from standard input.
    fn speak(&mut self) -> Result<()> {
        match &self.args.prompt {
            Some(prompt) => self.turn(prompt),
            None => self.talk(),
        }
    }

    /// Reads lines and answers each, until there are no more.
    fn talk(&mut self) -> Result<()> {
        let input = std::io::stdin();
        let prompts = input.is_terminal();
        loop {
            if prompts {
                eprint!("> ");
            }
            let mut line = String::new();
            if input.lock().read_line(&mut line)? == 0 {
                return Ok(());
            }
            if !line.trim().is_empty() {
                self.turn(line.trim_end_matches(['\r', '\n']))?;
            }
        }
    }

    fn turn(&mut self, text: &str) -> Result<()> {
        (self.before)(text)?;
        let prompt = match self.args.raw {
            true => tokenizer::encode(&self.manners.tokenizer, text, true)?,
            false => self.chat.ask(&self.manners, text)?,
        };
        let mut stream = tokenizer::Stream::new(&self.manners.tokenizer);
        let mut answer = String::new();
        let stops = &self.manners.stops;
        let only_numbers = self.args.print_tokens;
        let timing = self.generator.run(&prompt, self.args.max_tokens, |token| {
            if only_numbers {
                show(&format!("{token}\n"))?;
            }
            if stops.contains(&token) {
                return Ok(false);
            }
            let piece = stream.push(token)?;
            if !only_numbers {
                show(&piece)?;
            }
            answer.push_str(&piece);
            Ok(true)
        })?;
        let rest = stream.finish()?;
        if !only_numbers {
            show(&rest)?;
            show("\n")?;
        }
        answer.push_str(&rest);
        self.chat.answer(answer);
        report(&timing);
        Ok(())
    }
}

/// Whether this process keeps its times to itself.
static SILENT: AtomicBool = AtomicBool::new(false);

fn report(timing: &Timing) {
    if SILENT.load(Ordering::Relaxed) {
        return;
    }
    let prompt = format!("prompt of {} tokens", timing.prompt);
    say("first token", timing.first, &prompt);
    if let Some(rate) = timing.rate() {
        eprintln!(
            "speed        {rate:>9.1} tokens/s  {} tokens",
            timing.tokens
        );
    }
}

fn say(what: &str, took: Duration, more: &str) {
    if SILENT.load(Ordering::Relaxed) {
        return;
    }
    let line = format!("{what:<12} {:>9.1} ms  {more}", took.as_secs_f64() * 1e3);
    eprintln!("{}", line.trim_end());
}

fn show(text: &str) -> Result<()> {
    let mut output = std::io::stdout().lock();
    output.write_all(text.as_bytes())?;
    Ok(output.flush()?)
}

fn wait() -> Result<()> {
    eprintln!("waiting for a line");
    std::io::stdin().read_line(&mut String::new())?;
    Ok(())
}

#[derive(Clone, Copy)]
enum Place {
    Cpu,
    Cuda(usize),
}

impl Place {
    fn parse(text: &str) -> Result<Self, String> {
        if text == "cpu" {
            return Ok(Self::Cpu);
        }
        text.strip_prefix("cuda:")
            .and_then(|number| number.parse().ok())
            .map(Self::Cuda)
            .ok_or_else(|| "write cpu, or cuda:0 and so on".to_owned())
    }

    fn open(self) -> Result<Device> {
        Ok(match self {
            Self::Cpu => Device::Cpu,
            Self::Cuda(number) if cfg!(not(feature = "cuda")) => bail!(
                "this program was built without GPUs: for --device cuda:{number} build it with `--features cuda`"
            ),
            Self::Cuda(number) => Device::new_cuda(number)?,
        })
    }
}

fn dtype(text: &str) -> Result<DType, String> {
    match text {
        "f32" => Ok(DType::F32),
        "bf16" => Ok(DType::BF16),
        "f16" => Ok(DType::F16),
        _ => Err("write f32, bf16 or f16".to_owned()),
    }
}

fn ranks_of(text: &str) -> Result<usize, String> {
    let number = text.parse::<usize>().ok();
    let number = number.filter(|number| (1..=64).contains(number));
    number.ok_or_else(|| "write a number from 1 to 64".to_owned())
}

fn temperature(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok();
    let number = number.filter(|number| (0.0..=100.0).contains(number));
    number.ok_or_else(|| "write a number from 0 to 100".to_owned())
}

fn probability(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok();
    let number = number.filter(|number| *number > 0.0 && *number <= 1.0);
    number.ok_or_else(|| "write a number above 0 and up to 1".to_owned())
}
