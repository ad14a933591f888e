//! The llama example and stock models over the cache, with a real model, a real daemon and real engines.
//! The same from files is in llama.rs.

#[allow(dead_code, reason = "the example uses all of it")]
#[path = "../examples/llama/quantized.rs"]
mod quantized;
mod support;
#[allow(dead_code, reason = "the example uses all of it")]
#[path = "../examples/llama/tokenizer.rs"]
mod tokenizer;

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use candle_core::quantized::QTensor;
use candle_core::{DType, Device};
use candle_ipc_cache::{FromIpcCache, IpcCache, IpcConfig, QuantizedVarBuilder};
use candle_nn::VarBuilder;
use quantized::{Config, Llama, Quantized};
use support::{COUNT, PROMPT};

/// Guards against a hang; nothing here should take near as long.
const PATIENCE: Duration = Duration::from_secs(60);

/// A daemon in its own folder. It ends with the test.
struct Daemon {
    child: Child,
    folder: tempfile::TempDir,
}

impl Daemon {
    fn start() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let child = Command::new(env!("CARGO_BIN_EXE_candle-cache"))
            .arg("serve")
            .env("CANDLE_CACHE_SOCKET_DIR", folder.path())
            .stdin(Stdio::null())
            .spawn()?;
        Ok(Self { child, folder })
    }

    /// Loads a checkpoint, as soon as the daemon answers.
    fn load(&self, name: &str, checkpoint: &Path) -> Result<()> {
        self.load_with(name, checkpoint, &[])
    }

    fn load_with(&self, name: &str, checkpoint: &Path, args: &[&str]) -> Result<()> {
        const NO_DAEMON: i32 = 3;
        let started = Instant::now();
        loop {
            let status = Command::new(env!("CARGO_BIN_EXE_candle-cache"))
                .arg("load")
                .arg(checkpoint)
                .args(["--name", name])
                .args(args)
                .env("CANDLE_CACHE_SOCKET_DIR", self.folder.path())
                .stdin(Stdio::null())
                .status()?;
            if status.success() {
                return Ok(());
            }
            ensure!(
                status.code() == Some(NO_DAEMON) && started.elapsed() < PATIENCE,
                "load: {status}"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn config(&self, name: &str, checkpoint: &Path) -> IpcConfig {
        IpcConfig::new(name)
            .socket_dir(self.folder.path())
            .checkpoint(checkpoint)
    }

    /// Starts the example on an entry.
    fn engine(&self, name: &str, args: &[&str]) -> Result<Engine> {
        let mut child = Command::new(support::example()?)
            .args(["--model", name, "--prompt", PROMPT, "--raw"])
            .arg("--socket-dir")
            .arg(self.folder.path())
            .args(args)
            // Several engines on few cores would spend their time waiting for each other's threads.
            .env("RAYON_NUM_THREADS", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        Ok(Engine {
            input: child.stdin.take().context("it was piped")?,
            output: BufReader::new(child.stdout.take().context("it was piped")?),
            notes: BufReader::new(child.stderr.take().context("it was piped")?),
            child,
        })
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Killing one that has ended already is an error of no interest.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A running example program. It ends with the test.
struct Engine {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    notes: BufReader<std::process::ChildStderr>,
}

impl Engine {
    /// Waits until the program waits, under `--step`.
    fn waits(&mut self) -> Result<()> {
        let mut line = String::new();
        while self.notes.read_line(&mut line)? > 0 {
            if line.trim_end() == "waiting for a line" {
                return Ok(());
            }
            eprint!("  {line}");
            line.clear();
        }
        anyhow::bail!("the engine ended: {}", self.child.wait()?)
    }

    fn goes_on(&mut self) -> Result<()> {
        Ok(self.input.write_all(b"\n")?)
    }

    /// Everything that it still says, until it ends.
    fn rest(&mut self) -> Result<String> {
        let mut text = String::new();
        self.output.read_to_string(&mut text)?;
        Ok(text)
    }

    fn token(&mut self) -> Result<Option<u32>> {
        let mut line = String::new();
        match self.output.read_line(&mut line)? {
            0 => Ok(None),
            _ => Ok(Some(line.trim_end().parse()?)),
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Quantized for QuantizedVarBuilder {
    fn get(&self, name: &str) -> candle_core::Result<Arc<QTensor>> {
        self.get_no_shape(name)
    }

    fn contains(&self, name: &str) -> bool {
        self.contains_key(name)
    }
}

#[test]
fn a_quantized_model_from_the_cache_answers_as_stock_candle_from_the_file() -> Result<()> {
    let daemon = Daemon::start()?;
    let gguf = support::gguf()?;
    daemon.load("smollm2", &gguf)?;
    let cache = IpcCache::attach(&daemon.config("smollm2", &gguf), &Device::Cpu)?;
    let config = Config::from_gguf(&support::header()?)?;
    let mut model = Llama::load(&cache.quantized(), &config, 4096, &Device::Cpu)?;
    let answer = support::greedy(COUNT, |tokens, position| model.forward(tokens, position))?;
    let (tokens, logits) = support::stock_quantized()?;
    assert_eq!(&answer.0, tokens);
    assert!(&answer.1 == logits, "logits differ in some bit");
    Ok(())
}

#[test]
fn stock_llama_from_the_cache_answers_as_from_mapped_safetensors() -> Result<()> {
    let daemon = Daemon::start()?;
    let folder = support::dense_folder()?;
    daemon.load("dense", &folder)?;
    let config = daemon.config("dense", &folder);
    let weights = VarBuilder::from_ipc_cache(&config, DType::F32, &Device::Cpu)?;
    let shared = support::stock_dense(weights, &folder)?;

    let path = folder.join("model.safetensors");
    // SAFETY: nobody writes to the file; it is replaced by renaming alone.
    let weights =
        unsafe { VarBuilder::from_mmaped_safetensors(&[path], DType::F32, &Device::Cpu)? };
    assert_eq!(shared, support::stock_dense(weights, &folder)?);
    assert_eq!(shared, support::stock_quantized()?.0);
    Ok(())
}

#[test]
fn an_engine_answers_to_the_end_after_its_daemon_was_killed() -> Result<()> {
    let mut daemon = Daemon::start()?;
    daemon.load("smollm2", &support::gguf()?)?;
    let mut engine = daemon.engine("smollm2", &["--print-tokens", "--max-tokens", "64"])?;
    let mut tokens = Vec::from_iter(engine.token()?);
    daemon.child.kill()?;
    daemon.child.wait()?;
    assert!(
        engine.child.try_wait()?.is_none(),
        "the engine was to be killed under, but had already ended"
    );
    while let Some(token) = engine.token()? {
        tokens.push(token);
    }
    assert!(engine.child.wait()?.success());
    assert_eq!(tokens, support::stock_quantized()?.0);
    Ok(())
}

/// What a process holds, in bytes: all of it, and shared memory alone. Pages of several processes are split among them.
fn held(process: u32) -> Result<(u64, u64)> {
    let text = std::fs::read_to_string(format!("/proc/{process}/smaps_rollup"))?;
    let field = |name: &str| -> Result<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let number = line.and_then(|line| line.split_whitespace().next());
        let kilobytes: u64 = number.with_context(|| name.to_owned())?.parse()?;
        Ok(kilobytes << 10)
    };
    Ok((field("Pss:")?, field("Pss_Shmem:")?))
}

fn total_held(daemon: &Daemon, engines: &[Engine]) -> Result<(u64, u64)> {
    let engines = engines.iter().map(|engine| engine.child.id());
    let mut sum = (0, 0);
    for process in engines.chain([daemon.child.id()]) {
        let (all, shared) = held(process)?;
        sum = (sum.0 + all, sum.1 + shared);
    }
    Ok(sum)
}

#[test]
fn four_engines_and_the_daemon_hold_one_copy_of_the_weights() -> Result<()> {
    const MB: u64 = 1_000_000;
    let daemon = Daemon::start()?;
    let gguf = support::gguf()?;
    daemon.load("smollm2", &gguf)?;
    let copy = std::fs::metadata(&gguf)?.len();
    let mut engines = Vec::new();
    for _ in 0..4 {
        engines.push(daemon.engine("smollm2", &["--step", "--max-tokens", "4"])?);
    }
    engines.iter_mut().try_for_each(Engine::waits)?;
    let (attached, _) = total_held(&daemon, &engines)?;
    eprintln!(
        "held after attaching, by 4 engines and the daemon: {} MB",
        attached / MB
    );
    assert!(
        attached <= copy + 4 * 30 * MB,
        "{} MB for a model of {} MB",
        attached / MB,
        copy / MB
    );

    engines.iter_mut().try_for_each(Engine::goes_on)?;
    engines.iter_mut().try_for_each(Engine::waits)?;
    let (all, shared) = total_held(&daemon, &engines)?;
    eprintln!(
        "held after a forward pass: {} MB, of it {} MB shared memory",
        all / MB,
        shared / MB
    );
    // The forward pass has read all weights by now, so that a second copy would show; and had they been copied
    // to be read, the shared pages would not have been touched.
    assert!(shared <= copy + MB, "{} MB of shared memory", shared / MB);
    assert!(
        shared >= copy * 8 / 10,
        "{} MB of shared memory",
        shared / MB
    );
    engines.iter_mut().try_for_each(Engine::goes_on)?;
    for mut engine in engines {
        assert!(engine.child.wait()?.success());
    }
    Ok(())
}

/// Quantized by the worker from floats under Hugging Face names, and run by the example.
#[test]
fn a_dense_model_that_the_worker_quantized_answers_sensibly_from_one_shared_copy() -> Result<()> {
    const MB: u64 = 1_000_000;
    let daemon = Daemon::start()?;
    let folder = support::dense_folder()?;
    for recipe in ["q8_0", "q4_0"] {
        daemon.load_with(recipe, &folder, &["--quantize", recipe])?;
        let cache = IpcCache::attach(&daemon.config(recipe, &folder), &Device::Cpu)?;
        // The small files travel in shared memory too.
        let files = cache.files().filter_map(|name| cache.file(name));
        let copy = cache.memory_bytes() + files.map(|f| f.len() as u64).sum::<u64>();
        drop(cache);
        let mut engines = Vec::new();
        for _ in 0..3 {
            engines.push(daemon.engine(recipe, &["--step", "--max-tokens", "12"])?);
        }
        engines.iter_mut().try_for_each(Engine::waits)?;
        let (before, _) = total_held(&daemon, &engines)?;
        engines.iter_mut().try_for_each(Engine::goes_on)?;
        engines.iter_mut().try_for_each(Engine::waits)?;
        let (after, shared) = total_held(&daemon, &engines)?;
        eprintln!(
            "{recipe}: {} MB; 3 engines and the daemon hold {} MB before a forward pass and {} MB after, of it {} MB \
             shared memory",
            copy / MB,
            before / MB,
            after / MB,
            shared / MB
        );
        assert!(shared <= copy + MB, "{} MB of shared memory", shared / MB);
        assert!(
            shared >= copy * 8 / 10,
            "{} MB of shared memory",
            shared / MB
        );
        engines.iter_mut().try_for_each(Engine::goes_on)?;
        let answers: Vec<String> = engines
            .iter_mut()
            .map(Engine::rest)
            .collect::<Result<_>>()?;
        eprintln!("{recipe}: {PROMPT}{}", answers[0]);
        assert!(
            answers[0].contains("7, 8, 9, 10"),
            "{recipe}: {:?}",
            answers[0]
        );
        assert!(answers.iter().all(|a| *a == answers[0]), "{answers:?}");
        let unloaded = Command::new(env!("CARGO_BIN_EXE_candle-cache"))
            .args(["unload", recipe, "--force"])
            .env("CANDLE_CACHE_SOCKET_DIR", daemon.folder.path())
            .status()?;
        ensure!(unloaded.success(), "unload: {unloaded}");
    }
    Ok(())
}
