//! A daemon in a thread, small weights by hand, and the client's side of each exchange.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use candle_ipc_cache::daemon::{self, Config, Limits, Listener};
use candle_ipc_cache::key::Key;
use candle_ipc_cache::manifest::{Digest, ElementType, FORMAT_VERSION, Manifest, TensorEntry};
use candle_ipc_cache::protocol::{EntryId, EntryStatus, EpochId, Refusal, Reply, Request};
use candle_ipc_cache::shard::ShardId;
use candle_ipc_cache::slab::{DeviceId, host};
use candle_ipc_cache::socket::Connection;
use tokio::sync::oneshot;

/// Guards against hangs; nothing here takes that long.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A daemon in a thread of this process; it stops when dropped.
pub struct Daemon {
    pub socket: PathBuf,
    pub folder: tempfile::TempDir,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Daemon {
    pub fn start(config: Config) -> Self {
        Self::start_with(config, |_| {})
    }

    pub fn start_with(config: Config, prepare: impl FnOnce(&Listener)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("daemon.sock");
        let listener = Listener::bind(&socket).unwrap();
        prepare(&listener);
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build()
                .unwrap();
            let shutdown = async {
                let _ = stopped.await;
            };
            runtime
                .block_on(daemon::run(listener, config, shutdown))
                .unwrap();
        });
        Self {
            socket,
            folder,
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    pub fn connect(&self) -> Connection {
        Connection::connect(&self.socket, PATIENCE).unwrap()
    }

    pub fn publish(&self, name: &str, fill: u8) -> EpochId {
        let weights = Weights::new(name, fill);
        match weights.offer(&self.announced(name)) {
            Reply::Accepted { epoch, .. } => epoch,
            other => panic!("{other:?}"),
        }
    }

    /// A connection on which a load of `name` has been announced.
    pub fn announced(&self, name: &str) -> Connection {
        let connection = self.connect();
        let announce = Request::Announce {
            entry: entry(name),
            bytes: 1024,
            set: Vec::new(),
        };
        assert_eq!(ask(&connection, &announce), Reply::Done);
        connection
    }

    pub fn attach(&self, name: &str) -> Attached {
        attach(&self.socket, name).unwrap_or_else(|refused| panic!("{refused:?}"))
    }

    pub fn status(&self) -> Vec<EntryStatus> {
        match ask(&self.connect(), &Request::Status { after: None }) {
            Reply::Status {
                entries,
                more: false,
            } => entries,
            other => panic!("{other:?}"),
        }
    }

    pub fn leases(&self, name: &str) -> u64 {
        let entries = self.status();
        let found = entries.iter().find(|status| status.entry.name == name);
        found.unwrap().ready.as_ref().unwrap().leases
    }

    pub fn failed(&self, name: &str) -> Option<String> {
        let entries = self.status();
        let found = entries
            .into_iter()
            .find(|status| status.entry.name == name)?;
        found.failed
    }

    pub fn unload(&self, name: &str, force: bool) -> Reply {
        let unload = Request::Unload {
            name: name.into(),
            role: None,
            device: None,
            shard: None,
            epoch: None,
            force,
        };
        ask(&self.connect(), &unload)
    }

    /// Stops it, and gives the folder back.
    pub fn stop(mut self) -> tempfile::TempDir {
        self.end();
        let other = tempfile::tempdir().unwrap();
        std::mem::replace(&mut self.folder, other)
    }

    fn end(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let result = thread.join();
            assert!(std::thread::panicking() || result.is_ok());
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.end();
    }
}

/// Peers get little time, so that tests are quick.
pub fn quick() -> Config {
    Config {
        limits: Limits {
            step: Duration::from_secs(1),
            grace: Duration::from_millis(400),
            ..Limits::default()
        },
        ..Config::default()
    }
}

pub fn entry(name: &str) -> EntryId {
    EntryId::new(name, DeviceId::Host)
}

/// One question, one answer.
pub fn ask(connection: &Connection, request: &Request) -> Reply {
    connection.send(request, &[], PATIENCE).unwrap();
    connection.receive(PATIENCE).unwrap().0
}

/// A lease, and what came with it.
#[derive(Debug)]
pub struct Attached {
    pub connection: Connection,
    pub epoch: EpochId,
    pub fds: Vec<OwnedFd>,
    pub memory_bytes: u64,
}

/// Attaches without waiting for a load.
pub fn attach(socket: &Path, name: &str) -> Result<Attached, (Refusal, String)> {
    let connection = Connection::connect(socket, PATIENCE).unwrap();
    let request = attach_request(name, Duration::ZERO);
    connection.send(&request, &[], PATIENCE).unwrap();
    take_attached(connection)
}

pub fn attach_request(name: &str, wait: Duration) -> Request {
    Request::Attach {
        entry: entry(name),
        epoch: None,
        wait,
    }
}

/// Reads until the entry is there, and confirms it.
pub fn take_attached(connection: Connection) -> Result<Attached, (Refusal, String)> {
    loop {
        let (reply, fds) = connection.receive(PATIENCE).unwrap();
        match reply {
            Reply::Loading(_) => {}
            Reply::Attached {
                epoch,
                memory_bytes,
                ..
            } => {
                connection.send(&Request::Received, &[], PATIENCE).unwrap();
                return Ok(Attached {
                    connection,
                    epoch,
                    fds,
                    memory_bytes,
                });
            }
            Reply::Refused { code, reason } => return Err((code, reason)),
            other => panic!("{other:?}"),
        }
    }
}

/// A manifest and its slabs, ready to be offered or spoiled.
pub struct Weights {
    pub manifest: Manifest,
    pub bytes: Vec<u8>,
    pub slabs: Vec<OwnedFd>,
}

impl Weights {
    /// Two tensors in one slab of 1,024 bytes, each byte `fill`.
    pub fn new(name: &str, fill: u8) -> Self {
        Self::with_slabs(name, fill, 1)
    }

    /// The same, as one rank's part of the model.
    pub fn of_rank(name: &str, fill: u8, shard: ShardId) -> Self {
        let mut weights = Self::new(name, fill);
        weights.manifest.key.shard = shard;
        weights.bytes = weights.manifest.encode(Vec::new()).unwrap();
        weights
    }

    /// The same in each of `slabs` slabs.
    pub fn with_slabs(name: &str, fill: u8, slabs: u32) -> Self {
        let stored = Digest::of(&[fill; 256]);
        let tensors = (0..slabs)
            .flat_map(|slab| {
                [0u64, 512].map(|offset| TensorEntry {
                    name: format!("layer.{slab:04}.{offset:03}"),
                    element: ElementType::F32,
                    shape: vec![8, 8],
                    cut: None,
                    slab,
                    offset,
                    bytes: 256,
                    source: stored,
                    stored,
                })
            })
            .collect();
        let mut manifest = Manifest {
            key: Key {
                model: name.into(),
                shard: Default::default(),
                selection: "all".into(),
                stacked: false,
                dtype: "stored".into(),
                recipe: "none".into(),
                format: FORMAT_VERSION,
                sources: Vec::new(),
            },
            root: Digest::default(),
            slabs: vec![1024; slabs as usize],
            tensors,
            aliases: Vec::new(),
            stacks: Vec::new(),
            attributes: Vec::new(),
            files: Vec::new(),
        };
        let bytes = manifest
            .encode(vec![("config.json".into(), b"{}".to_vec())])
            .unwrap();
        let slabs = (0..slabs)
            .map(|_| host::sealed("slab", &[fill; 1024]).unwrap())
            .collect();
        Self {
            manifest,
            bytes,
            slabs,
        }
    }

    pub fn manifest_fd(&self) -> OwnedFd {
        host::sealed("manifest", &self.bytes).unwrap()
    }

    /// Offers them on a connection that has announced them.
    pub fn offer(&self, connection: &Connection) -> Reply {
        offer(
            connection,
            false,
            self.slabs.len() as u32,
            &self.descriptors(),
        )
    }

    /// Manifest and slabs, duplicated.
    pub fn descriptors(&self) -> Vec<OwnedFd> {
        let slabs = self.slabs.iter().map(|fd| fd.try_clone().unwrap());
        std::iter::once(self.manifest_fd()).chain(slabs).collect()
    }

    /// Encodes a manifest, without its files and without the checks of [`Manifest::encode`].
    pub fn unchecked(manifest: &Manifest, version: u32) -> Vec<u8> {
        let manifest = &Manifest {
            files: Vec::new(),
            ..manifest.clone()
        };
        let codec = bincode::config::standard().with_fixed_int_encoding();
        let table = bincode::serde::encode_to_vec(manifest, codec).unwrap();
        let mut out = b"CNDLIPC\0".to_vec();
        out.extend_from_slice(&version.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&(table.len() as u64).to_le_bytes());
        out.extend_from_slice(&Digest::of(&table).0);
        out.resize(64, 0);
        out.extend_from_slice(&table);
        out
    }
}

pub fn offer(connection: &Connection, anchor: bool, slabs: u32, fds: &[OwnedFd]) -> Reply {
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    connection
        .send(&Request::Offer { anchor, slabs }, &fds, PATIENCE)
        .unwrap();
    connection.receive(PATIENCE).unwrap().0
}

pub fn refusal(reply: Reply) -> (Refusal, String) {
    match reply {
        Reply::Refused { code, reason } => (code, reason),
        other => panic!("{other:?}"),
    }
}

/// Waits for something that the daemon notices by itself.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < end, "still not: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
