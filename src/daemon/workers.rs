//! Workers that the daemon starts because a client asked for a load.
//! A worker is a child in a process group of its own; how it ended becomes the entry's reason.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::process::{Pid, Signal, getpgid, kill_process_group};
use tokio::io::AsyncReadExt;
use tokio::process::{Child, ChildStderr, Command};
use tokio::sync::watch;

use super::registry::Refused;
use super::{Limits, WorkerCommand, lock};
use crate::protocol::{EntryId, LoadRequest, MAX_ENTRY_NAME, MAX_TEXT, Refusal};

/// Bytes of a worker's last words that are kept.
const TAIL: usize = 4 << 10;
/// How long to wait for a dead worker's last words: a child of its own may hold the pipe open.
const LAST_WORDS: Duration = Duration::from_millis(500);
/// Variables for `load` that belong to the operator's own command line, not to a worker's.
const NOT_INHERITED: [&str; 17] = [
    "CANDLE_CACHE_MODEL",
    "CANDLE_CACHE_NAME",
    "CANDLE_CACHE_JSON",
    "CANDLE_CACHE_VARIANT",
    "CANDLE_CACHE_QUANTIZE",
    "CANDLE_CACHE_IMATRIX",
    "CANDLE_CACHE_ALLOW_NONFINITE",
    "CANDLE_CACHE_REQUANTIZE",
    "CANDLE_CACHE_ONLY",
    "CANDLE_CACHE_KEEP",
    "CANDLE_CACHE_TP",
    "CANDLE_CACHE_TP_RANK",
    "CANDLE_CACHE_PLAN",
    "CANDLE_CACHE_PP",
    "CANDLE_CACHE_DP",
    "CANDLE_CACHE_EP",
    "CANDLE_CACHE_STACK_EXPERTS",
];

/// Every worker that is running.
#[derive(Debug)]
pub(super) struct Workers {
    command: Option<WorkerCommand>,
    folder: PathBuf,
    limit: usize,
    running: Mutex<Vec<Running>>,
}

#[derive(Debug)]
struct Running {
    request: LoadRequest,
    group: Pid,
    state: watch::Sender<State>,
}

/// How far a worker has come.
#[derive(Clone, Debug, Default)]
pub(super) struct State {
    /// The entry that it announced, and the bytes of its slabs.
    pub(super) announced: Option<(EntryId, u64)>,
    /// How it ended: well, or why not.
    pub(super) ended: Option<Result<(), String>>,
}

impl Workers {
    pub(super) fn new(command: Option<WorkerCommand>, socket: &Path, limits: &Limits) -> Self {
        Self {
            command,
            folder: socket.parent().unwrap_or(Path::new("/")).to_path_buf(),
            limit: limits.workers,
            running: Mutex::default(),
        }
    }

    /// Starts a worker, or joins the one that is at it already.
    pub(super) fn start(
        self: &Arc<Self>,
        request: LoadRequest,
    ) -> Result<watch::Receiver<State>, Refused> {
        let Some(command) = &self.command else {
            return Err(Refused::new(
                Refusal::NotAllowed,
                "this daemon starts no workers: run `candle-cache load` yourself",
            ));
        };
        check(&request)?;
        let mut running = lock(&self.running);
        if let Some(same) = running.iter().find(|r| r.request == request) {
            return Ok(same.state.subscribe());
        }
        if running.len() >= self.limit {
            return Err(Refused::new(
                Refusal::Busy,
                format!(
                    "{} workers are running, the limit: try again later",
                    self.limit
                ),
            ));
        }
        let mut child = Command::new(&command.program)
            .args(&command.args)
            .arg(&request.model)
            .args(request.name.iter().map(|name| format!("--name={name}")))
            .arg(format!("--device={}", request.device))
            .arg(format!("--dtype={}", request.dtype))
            .args(request.quantize.iter().map(|r| format!("--quantize={r}")))
            .args(request.imatrix.iter().map(|i| format!("--imatrix={i}")))
            .args(request.allow_nonfinite.then_some("--allow-nonfinite"))
            .args(request.requantize.then_some("--requantize"))
            .args(part(&request))
            .arg("--socket-dir")
            .arg(&self.folder)
            .envs_removed(&NOT_INHERITED)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(|e| {
                Refused::new(
                    Refusal::LoadFailed,
                    format!("starting the worker {}: {e}", command.program.display()),
                )
            })?;
        let group = child
            .id()
            .and_then(|id| i32::try_from(id).ok())
            .and_then(Pid::from_raw);
        let Some(group) = group else {
            return Err(Refused::new(
                Refusal::LoadFailed,
                "the worker ended at once",
            ));
        };
        tracing::info!("worker {} loads {}", group.as_raw_nonzero(), request.model);
        let state = watch::Sender::new(State::default());
        let receiver = state.subscribe();
        let tail = child.stderr.take();
        running.push(Running {
            request,
            group,
            state,
        });
        tokio::spawn(self.clone().reap(group, child, tail));
        Ok(receiver)
    }

    /// Process `pid` announced `entry`: which worker of ours was that?
    pub(super) fn announced(
        &self,
        pid: i32,
        entry: &EntryId,
        bytes: u64,
    ) -> Option<watch::Receiver<State>> {
        let group = getpgid(Some(Pid::from_raw(pid)?)).ok()?;
        let running = lock(&self.running);
        // The child has not been reaped while it stands in this list, so its number is still its own.
        let worker = running.iter().find(|r| r.group == group)?;
        worker
            .state
            .send_modify(|state| state.announced = Some((entry.clone(), bytes)));
        Some(worker.state.subscribe())
    }

    /// Kills the workers that are at `request`.
    pub(super) fn kill(&self, request: &LoadRequest) {
        for worker in lock(&self.running).iter().filter(|r| r.request == *request) {
            kill(worker.group);
        }
    }

    /// Kills every worker, and waits until they have ended.
    pub(super) async fn kill_all(&self) {
        let states: Vec<_> = lock(&self.running)
            .iter()
            .map(|worker| {
                kill(worker.group);
                worker.state.subscribe()
            })
            .collect();
        for mut state in states {
            let ended = state.wait_for(|s| s.ended.is_some());
            // A process in an uninterruptible call may outlast us.
            if tokio::time::timeout(LAST_WORDS * 4, ended).await.is_err() {
                tracing::warn!("a killed worker has not ended yet");
            }
        }
    }

    async fn reap(self: Arc<Self>, group: Pid, mut child: Child, stderr: Option<ChildStderr>) {
        let tail = Arc::new(Mutex::new(Vec::new()));
        let reading = tokio::spawn(read_tail(stderr, tail.clone()));
        let status = child.wait().await;
        let abort = reading.abort_handle();
        if tokio::time::timeout(LAST_WORDS, reading).await.is_err() {
            abort.abort();
        }
        let words = last_words(&lock(&tail));
        let mut running = lock(&self.running);
        let Some(i) = running.iter().position(|r| r.group == group) else {
            return;
        };
        let worker = running.swap_remove(i);
        drop(running);
        let bytes = worker.state.borrow().announced.as_ref().map(|a| a.1);
        let result = match status {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(reason(status, bytes, &words)),
            Err(e) => Err(format!("waiting for the worker: {e}")),
        };
        worker.state.send_modify(|state| state.ended = Some(result));
    }
}

trait EnvsRemoved {
    fn envs_removed(&mut self, names: &[&str]) -> &mut Self;
}

impl EnvsRemoved for Command {
    fn envs_removed(&mut self, names: &[&str]) -> &mut Self {
        for name in names {
            self.env_remove(name);
        }
        self
    }
}

fn kill(group: Pid) {
    // Its own error is of no use: a group that is gone needs no killing.
    let _ = kill_process_group(group, Signal::KILL);
}

/// Refuses what a command line could take for something else.
fn check(request: &LoadRequest) -> Result<(), Refused> {
    let fields = [
        ("model", Some(&request.model), MAX_TEXT),
        ("name", request.name.as_ref(), MAX_ENTRY_NAME),
        ("device", Some(&request.device), 128),
        ("dtype", Some(&request.dtype), 128),
        ("recipe", request.quantize.as_ref(), MAX_TEXT),
        ("importance matrix", request.imatrix.as_ref(), MAX_TEXT),
        ("trace", request.only.as_ref(), MAX_TEXT),
    ];
    for (what, value, limit) in fields {
        let Some(value) = value else { continue };
        if value.is_empty() || value.len() > limit || value.chars().any(char::is_control) {
            return Err(Refused::new(
                Refusal::BadRequest,
                format!("the {what} must have 1 to {limit} bytes and no control characters"),
            ));
        }
    }
    let bad = |reason| Err(Refused::new(Refusal::BadRequest, reason));
    for path in std::iter::once(&request.model).chain(&request.only) {
        if !path.starts_with('/') {
            return bad(format!("`{path}` is not an absolute path"));
        }
    }
    if !request.shard.is_possible() {
        return bad(format!("there is no part {}", request.shard));
    }
    if !request.shard.is_whole() && request.only.is_none() {
        return bad(format!(
            "nothing says what is in part {}: give a trace of what its engine asks for",
            request.shard
        ));
    }
    Ok(())
}

/// The flags that say which part of a model is loaded.
fn part(request: &LoadRequest) -> Vec<String> {
    let mut flags = Vec::new();
    let shard = request.shard;
    if let Some(only) = &request.only {
        flags.push(format!("--only={only}"));
        if !shard.tp.is_whole() {
            flags.push(format!("--plan={only}"));
            flags.push(format!("--tp={}", shard.tp.size));
            flags.push(format!("--tp-rank={}", shard.tp.rank));
        }
    }
    for (flag, part) in [("pp", shard.pp), ("dp", shard.dp), ("ep", shard.ep)] {
        if !part.is_whole() {
            flags.push(format!("--{flag}={part}"));
        }
    }
    flags
}

async fn read_tail(stderr: Option<ChildStderr>, tail: Arc<Mutex<Vec<u8>>>) {
    let Some(mut stderr) = stderr else { return };
    let mut chunk = [0; 1024];
    while let Ok(read @ 1..) = stderr.read(&mut chunk).await {
        let mut tail = lock(&tail);
        tail.extend_from_slice(&chunk[..read]);
        let surplus = tail.len().saturating_sub(TAIL);
        tail.drain(..surplus);
    }
}

/// The last lines of a worker's standard error.
fn last_words(tail: &[u8]) -> String {
    let text = String::from_utf8_lossy(tail);
    let lines: Vec<&str> = text.lines().filter(|l| !l.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(8)..].join("\n")
}

fn reason(status: ExitStatus, bytes: Option<u64>, words: &str) -> String {
    let mut reason = match (status.signal(), status.code()) {
        (Some(9), _) => {
            let mut text = "the worker was killed by signal 9, probably out of memory".to_string();
            if let Some(bytes) = bytes {
                text.push_str(&format!(": its slabs need {bytes} bytes"));
            }
            if let Some(limit) = memory_limit() {
                text.push_str(&format!(", the control group's limit is {limit}"));
            }
            text
        }
        (Some(signal), _) => format!("the worker was killed by signal {signal}"),
        (None, code) => format!(
            "the worker ended with exit code {}",
            code.unwrap_or_default()
        ),
    };
    if !words.is_empty() {
        reason.push_str("; it said: ");
        reason.push_str(words);
    }
    reason
}

/// Bytes that this control group may use, where there is a limit that can be seen.
fn memory_limit() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let group = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let file = Path::new("/sys/fs/cgroup").join(group).join("memory.max");
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}
