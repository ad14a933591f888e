//! One command, several processes: rank 0 is the program that was started, and it starts the others. Each has a GPU of
//! its own and attaches to its part of one set; they meet through NCCL and do the same in step.

use std::io::{BufRead, Write};
use std::process::{ChildStdin, Command, Stdio};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use candle_core::Tensor;
use candle_ipc_cache::protocol::EpochId;

use crate::nccl::{self, Nccl};
use crate::parallel::{Group, Parallel};
use crate::quantized::Config;
use crate::sample::Model;
use crate::weights::{Build, Weights};

/// How long a rank goes on after rank 0 has gone: in good order it is done by then.
const GRACE: Duration = Duration::from_secs(10);

/// Rank 0 has done what it was started for.
static DONE: AtomicBool = AtomicBool::new(false);

/// The other ranks, as rank 0 sees them. They end with it.
pub(crate) struct Others(Vec<ChildStdin>);

/// What rank 0 tells another rank first.
pub(crate) struct Meeting {
    /// The epoch that all ranks attach to: never two of different loads.
    pub(crate) epoch: EpochId,
    /// Where they meet.
    pub(crate) id: String,
}

impl Meeting {
    /// A new one, for ranks that attach to `epoch`.
    pub(crate) fn new(epoch: EpochId) -> Result<Self> {
        let id = nccl::new_id()?;
        Ok(Self { epoch, id })
    }

    /// Waits for the others there.
    pub(crate) fn join(
        &self,
        rank: usize,
        size: usize,
        device: &candle_core::Device,
    ) -> Result<Rc<dyn Group>> {
        Ok(Rc::new(Nccl::join(&self.id, rank, size, device)?))
    }
}

impl Others {
    /// Starts ranks 1 and on, with this program's own arguments.
    pub(crate) fn start(size: usize, meeting: &Meeting) -> Result<Self> {
        let mut inputs = Vec::new();
        for rank in 1..size {
            let mut child = Command::new(std::env::current_exe()?)
                .args(std::env::args_os().skip(1))
                .args(["--rank", &rank.to_string()])
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                .spawn()?;
            let mut input = child.stdin.take().context("it was piped")?;
            writeln!(input, "{} {}", meeting.epoch, meeting.id)?;
            inputs.push(input);
            // The others would wait for it in the next sum, for ever.
            std::thread::spawn(move || {
                let ended = child.wait();
                if !DONE.load(Ordering::Relaxed) {
                    match ended {
                        Ok(status) => eprintln!("rank {rank} ended: {status}"),
                        Err(error) => eprintln!("rank {rank} is lost: {error}"),
                    }
                    std::process::exit(1);
                }
            });
        }
        Ok(Self(inputs))
    }

    /// Has the others do what this rank is about to: answer `text`.
    pub(crate) fn tell(&mut self, text: &str) -> Result<()> {
        let line = serde_json::to_string(text)?;
        for input in &mut self.0 {
            writeln!(input, "{line}").context("another rank does not listen any more")?;
        }
        Ok(())
    }
}

impl Drop for Others {
    fn drop(&mut self) {
        DONE.store(true, Ordering::Relaxed);
    }
}

/// Rank 0, as another rank sees it.
pub(crate) struct Leader(Receiver<String>);

impl Leader {
    /// Listens to rank 0, and ends this process some time after it has gone.
    pub(crate) fn listen() -> Result<(Self, Meeting)> {
        let (lines, receiver) = channel();
        std::thread::spawn(move || {
            for line in std::io::stdin().lock().lines() {
                let Ok(line) = line else { break };
                if lines.send(line).is_err() {
                    return;
                }
            }
            drop(lines);
            std::thread::sleep(GRACE);
            std::process::exit(1);
        });
        let first = receiver.recv().context("rank 0 said nothing")?;
        let Some((epoch, id)) = first.split_once(' ') else {
            bail!("--rank is for the program's own use: start it with --tp alone")
        };
        let meeting = Meeting {
            epoch: epoch.parse().map_err(anyhow::Error::msg)?,
            id: id.to_string(),
        };
        Ok((Self(receiver), meeting))
    }

    /// What to answer next; `None`: nothing more.
    pub(crate) fn next(&self) -> Result<Option<String>> {
        match self.0.recv() {
            Ok(line) => Ok(Some(serde_json::from_str(&line)?)),
            Err(_) => Ok(None),
        }
    }
}

impl Weights {
    /// The load that these weights come from.
    pub(crate) fn epoch(&self) -> Result<EpochId> {
        match self {
            Self::Cache(cache) => Ok(cache.epoch()),
            _ => bail!("a model that is spread over GPUs comes from the cache"),
        }
    }

    /// Builds one rank's part of a model that is spread over `group`, and says for how many positions.
    pub(crate) fn build_part(
        &self,
        how: &Build,
        group: Rc<dyn Group>,
    ) -> Result<(Box<dyn Model>, usize)> {
        let Self::Cache(cache) = self else {
            bail!("a model that is spread over GPUs comes from the cache")
        };
        let config = cache.file("config.json");
        let config = Config::from_json(config.context("no config.json came with the entry")?)?;
        let context = how.context.min(config.context);
        let weights = cache.sharded(how.dtype);
        let model = Parallel::load(weights, &config, context, group)?;
        Ok((Box::new(model), context))
    }
}

impl Model for Parallel {
    fn forward(&mut self, tokens: &Tensor, position: usize) -> candle_core::Result<Tensor> {
        Parallel::forward(self, tokens, position)
    }
}
