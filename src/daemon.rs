//! The daemon: a registry of descriptors that never looks into the memory behind them.
//! `run(listener, config, shutdown)`: everything is given from outside, so a test starts a real one.

use std::ffi::OsString;
use std::future::Future;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::io::Errno;
use tokio::io::Interest;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

use crate::protocol::{self, LoadRequest, Refusal, Reply};
use crate::socket::folder::{self, FolderError};
use crate::socket::{self, Peer, SocketError, send_now};

mod anchor;
mod closer;
mod listener;
mod offer;
mod process;
mod registry;
mod session;
mod wire;
mod words;
mod workers;

pub use listener::Listener;

use registry::Registry;
use wire::{Wire, watch_fd};
use workers::Workers;

/// What a daemon may do, and for whom.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// The program that loads models when a client asks for it; none: nobody may ask.
    pub worker: Option<WorkerCommand>,
    /// Loads to begin with, one after the other.
    pub preload: Vec<LoadRequest>,
    /// Users that may connect besides the daemon's own.
    pub allow_uids: Vec<u32>,
    /// Limits.
    pub limits: Limits,
}

/// A program that loads a model and offers it. After `args` it is given the model and
/// `--name --device --dtype --socket-dir`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerCommand {
    /// The program.
    pub program: PathBuf,
    /// Its first arguments.
    pub args: Vec<OsString>,
}

/// Limits on what peers may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections at the same time. The limit on open files may lower it.
    pub connections: usize,
    /// Entries.
    pub entries: usize,
    /// Workers at the same time.
    pub workers: usize,
    /// How long a peer may take over one step of an exchange.
    pub step: Duration,
    /// How long a worker that has announced a load may say nothing.
    pub worker_silence: Duration,
    /// How long running exchanges may go on once the daemon is to stop.
    pub grace: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 4096,
            entries: 4096,
            workers: 8,
            step: protocol::STEP,
            worker_silence: Duration::from_secs(600),
            grace: Duration::from_secs(1),
        }
    }
}

/// Why a daemon cannot serve.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DaemonError {
    /// Another daemon serves there.
    #[error(
        "{who} already serves on {}: use that one, stop it with `candle-cache stop`, or choose another folder with \
         --socket-dir",
        path.display()
    )]
    Served {
        /// The socket.
        path: PathBuf,
        /// Process and user, as far as they can be seen.
        who: String,
    },
    /// Something that is not ours to remove lies where the socket should be.
    #[error("{} is {what}, and is not removed: {way_out}", path.display())]
    Occupied {
        /// The socket's path.
        path: PathBuf,
        /// What lies there.
        what: &'static str,
        /// What to do.
        way_out: &'static str,
    },
    /// The folder cannot be used.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// The socket cannot be used.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The system refused a call.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: String,
        /// The system's answer.
        source: std::io::Error,
    },
}

impl DaemonError {
    fn system(what: impl Into<String>, source: impl Into<std::io::Error>) -> Self {
        Self::System {
            what: what.into(),
            source: source.into(),
        }
    }
}

/// What every connection shares.
struct Context {
    registry: Arc<Registry>,
    workers: Arc<Workers>,
    allow_uids: Vec<u32>,
    limits: Limits,
    path: PathBuf,
    /// Becomes true once, when the daemon is to stop.
    stop: watch::Sender<bool>,
    /// Connections that asked the daemon to stop: their end says that nothing is left.
    parting: Mutex<Vec<Wire>>,
    /// Manifests are large: few are decoded at a time.
    checks: Semaphore,
    /// Offers that wait for that.
    waiting: std::sync::atomic::AtomicUsize,
    /// This process's limit on open files.
    descriptors: usize,
}

/// Serves until `shutdown` is ready or a client asks the daemon to stop, then drains, and removes
/// the socket.
///
/// # Errors
/// When the listening socket fails.
pub async fn run(
    listener: Listener,
    config: Config,
    shutdown: impl Future<Output = ()>,
) -> Result<(), DaemonError> {
    let files = socket::raise_descriptor_limit();
    // A lease takes two descriptors: half of the limit stays for the slabs.
    let room = usize::try_from(files / 4).unwrap_or(usize::MAX);
    let limits = Limits {
        connections: config.limits.connections.min(room.max(16)),
        ..config.limits
    };
    let registry = Arc::new(Registry::new(limits.entries));
    let workers = Workers::new(config.worker, listener.path(), &limits);
    let context = Arc::new(Context {
        registry,
        workers: Arc::new(workers),
        allow_uids: config.allow_uids,
        limits,
        path: listener.path().to_path_buf(),
        stop: watch::Sender::new(false),
        parting: Mutex::default(),
        checks: Semaphore::new(2),
        waiting: std::sync::atomic::AtomicUsize::new(0),
        descriptors: usize::try_from(files).unwrap_or(usize::MAX),
    });
    let mut sessions = JoinSet::new();
    if !config.preload.is_empty() {
        sessions.spawn(preload(context.clone(), config.preload));
    }
    let mut stopped = context.stop.subscribe();
    let result = tokio::select! {
        result = accept(&listener, &context, &mut sessions) => result,
        () = shutdown => Ok(()),
        _ = stopped.wait_for(|stop| *stop) => Ok(()),
    };
    context.stop.send_replace(true);
    let drained = tokio::time::timeout(context.limits.grace, async {
        while sessions.join_next().await.is_some() {}
    });
    if drained.await.is_err() {
        sessions.shutdown().await;
    }
    context.workers.kill_all().await;
    drop(listener);
    lock(&context.parting).clear();
    result
}

async fn accept(
    listener: &Listener,
    context: &Arc<Context>,
    sessions: &mut JoinSet<()>,
) -> Result<(), DaemonError> {
    let watching = |e| DaemonError::system("watching the listening socket", e);
    let waiting = listener
        .duplicate()
        .and_then(|fd| watch_fd(fd, Interest::READABLE))
        .map_err(watching)?;
    let mut exhausted = false;
    loop {
        let mut ready = waiting.readable().await.map_err(watching)?;
        while sessions.try_join_next().is_some() {}
        match listener.accept() {
            Ok(connection) => {
                exhausted = false;
                admit(connection, context, sessions);
            }
            Err(Errno::AGAIN) => ready.clear_ready(),
            Err(Errno::INTR | Errno::CONNABORTED) => {}
            Err(e @ (Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)) => {
                // The connection stays in the backlog and the socket readable: without a pause
                // this would spin.
                if !exhausted {
                    tracing::error!(
                        "accepting a connection: {e}; raise the limit on open files (LimitNOFILE=)"
                    );
                }
                exhausted = true;
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Err(e) => return Err(DaemonError::system("accepting a connection", e)),
        }
    }
}

fn admit(connection: std::os::fd::OwnedFd, context: &Arc<Context>, sessions: &mut JoinSet<()>) {
    use std::os::fd::AsFd;
    let limit = context.limits.connections;
    if sessions.len() >= limit {
        let reply = Reply::Refused {
            code: Refusal::Busy,
            reason: format!("the daemon has {limit} connections, its limit: try again later"),
        };
        if let Ok(packet) = protocol::encode(&reply) {
            // If it does not fit now, the end of the connection says enough.
            let _ = send_now(connection.as_fd(), &packet, &[]);
        }
        wire::discard(connection.as_fd());
        return;
    }
    let peer = match Peer::of(&connection) {
        Ok(peer) => peer,
        Err(e) => return tracing::warn!("{e}"),
    };
    let allowed = folder::peer_allowed(&peer, &context.allow_uids, &context.path);
    match Wire::new(connection) {
        Ok(wire) => {
            sessions.spawn(session::serve(wire, peer, allowed, context.clone()));
        }
        Err(e) => tracing::warn!("watching a connection: {e}"),
    }
}

async fn preload(context: Arc<Context>, requests: Vec<LoadRequest>) {
    let mut stop = context.stop.subscribe();
    for request in requests {
        let model = request.model.clone();
        let mut state = match context.workers.start(request) {
            Ok(state) => state,
            Err(refused) => {
                tracing::error!("loading {model}: {}", refused.reason);
                continue;
            }
        };
        let ended = tokio::select! {
            ended = state.wait_for(|s| s.ended.is_some()) => ended,
            _ = stop.wait_for(|stop| *stop) => return,
        };
        match ended.as_deref() {
            Ok(workers::State {
                ended: Some(Err(reason)),
                ..
            }) => tracing::error!("loading {model}: {reason}"),
            _ => tracing::info!("loaded {model}"),
        }
    }
}

/// Locks a mutex of plain tables. They are never left half changed, so a panic elsewhere does not
/// spoil them.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
