//! A model made by hand, and a daemon that answers as it is told: on real sockets, with real descriptors.
//! It can also lie, which the real daemon will not.
#![allow(dead_code, reason = "each test binary uses a part of this")]

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use candle_ipc_cache::key::{Key, Receipt};
use candle_ipc_cache::loader::IpcConfig;
use candle_ipc_cache::manifest::{
    ALIGNMENT, Alias, Digest, ElementType, FORMAT_VERSION, Manifest, TensorEntry,
};
use candle_ipc_cache::protocol::{EpochId, Reply, Request, ShardId};
use candle_ipc_cache::slab::cuda::GRANULARITY;
use candle_ipc_cache::slab::{self, DeviceId, Export, Lane, SlabWriter, host};
use candle_ipc_cache::socket::Connection;
use rustix::net::{AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType};

/// A wait that no test reaches unless something hangs.
pub(crate) const HANG: Duration = Duration::from_secs(20);

/// Tensors, names and files from which an entry is made.
#[derive(Default)]
pub(crate) struct Model {
    pub(crate) name: String,
    pub(crate) tensors: Vec<(String, ElementType, Vec<u64>, Vec<u8>)>,
    pub(crate) aliases: Vec<(String, String)>,
    pub(crate) attributes: Vec<(String, String)>,
    pub(crate) files: Vec<(String, Vec<u8>)>,
    pub(crate) sources: Vec<Receipt>,
    /// Which part of the model this is, and along which dimension tensors were cut for it.
    pub(crate) shard: ShardId,
    pub(crate) cuts: Vec<(String, u32)>,
    /// Tensors that go into one slab; zero: all of them.
    pub(crate) per_slab: usize,
}

/// An entry, ready to be sent.
pub(crate) struct Entry {
    pub(crate) epoch: EpochId,
    pub(crate) manifest: Manifest,
    pub(crate) manifest_fd: OwnedFd,
    pub(crate) slabs: Vec<OwnedFd>,
}

impl Model {
    pub(crate) fn new(name: &str) -> Self {
        Self {
            name: name.into(),
            ..Self::default()
        }
    }

    pub(crate) fn tensor(
        mut self,
        name: &str,
        element: ElementType,
        shape: &[u64],
        bytes: Vec<u8>,
    ) -> Self {
        self.tensors
            .push((name.into(), element, shape.to_vec(), bytes));
        self
    }

    /// A tensor of F32 values.
    pub(crate) fn floats(self, name: &str, shape: &[u64], values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.tensor(name, ElementType::F32, shape, bytes)
    }

    pub(crate) fn alias(mut self, name: &str, of: &str) -> Self {
        self.aliases.push((name.into(), of.into()));
        self
    }

    /// The manifest of this model on `device`, and the tensors of each slab.
    fn plan(&mut self, device: DeviceId) -> (Manifest, Vec<Vec<usize>>) {
        self.tensors.sort_by(|a, b| a.0.cmp(&b.0));
        self.aliases.sort();
        let per_slab = match self.per_slab {
            0 => self.tensors.len(),
            n => n,
        };
        let (mut slabs, mut members, mut entries) = (Vec::new(), Vec::new(), Vec::new());
        for (i, (name, element, shape, bytes)) in self.tensors.iter().enumerate() {
            if i % per_slab == 0 {
                slabs.push(0u64);
                members.push(Vec::new());
            }
            let slab = slabs.len() - 1;
            let offset = slabs[slab].next_multiple_of(ALIGNMENT);
            slabs[slab] = offset + bytes.len() as u64 + tail(device, *element);
            members[slab].push(i);
            let digest = Digest::of(bytes);
            // An empty tensor lies nowhere.
            let (slab, offset) = if bytes.is_empty() {
                (0, 0)
            } else {
                (slab, offset)
            };
            entries.push(TensorEntry {
                name: name.clone(),
                element: *element,
                shape: shape.clone(),
                cut: (self.cuts.iter().find(|(cut, _)| cut == name)).map(|(_, dim)| *dim),
                slab: slab as u32,
                offset,
                bytes: bytes.len() as u64,
                source: digest,
                stored: digest,
            });
        }
        let aliases = self
            .aliases
            .iter()
            .map(|(name, of)| {
                let tensor = self.tensors.iter().position(|t| t.0 == *of);
                Alias {
                    name: name.clone(),
                    tensor: tensor.expect("an alias of a tensor of the model") as u32,
                }
            })
            .collect();
        let slabs = slabs.into_iter().map(|n| slab_bytes(device, n)).collect();
        let key = Key {
            model: self.name.clone(),
            shard: self.shard,
            selection: "all".into(),
            stacked: false,
            dtype: "stored".into(),
            recipe: "none".into(),
            format: FORMAT_VERSION,
            sources: self.sources.clone(),
        };
        let manifest = Manifest {
            key,
            root: Digest::default(),
            slabs,
            tensors: entries,
            aliases,
            stacks: Vec::new(),
            attributes: self.attributes.clone(),
            files: Vec::new(),
        };
        (manifest, members)
    }

    /// Fills slabs on `device`. The manifest's root is not set before it is encoded.
    pub(crate) fn fill(&mut self, device: DeviceId) -> (Manifest, Export) {
        let (manifest, members) = self.plan(device);
        let writer = slab::writer(device, &manifest.slabs).expect("memory for slabs");
        {
            let mut lane: Box<dyn Lane> = writer.lane().expect("a lane");
            for (slab, members) in members.iter().enumerate() {
                for i in members {
                    let mut offset = manifest.tensors[*i].offset;
                    for chunk in self.tensors[*i].3.chunks(slab::CHUNK) {
                        lane.buffer().expect("a buffer")[..chunk.len()].copy_from_slice(chunk);
                        lane.send(chunk.len(), slab, offset).expect("a write");
                        offset += chunk.len() as u64;
                    }
                }
            }
        }
        let export = SlabWriter::finish(writer).expect("finished slabs");
        (manifest, export)
    }

    /// The entry of this model in host memory.
    pub(crate) fn build(self) -> Entry {
        self.build_on(DeviceId::Host)
    }

    /// The entry of this model in the memory of `device`.
    pub(crate) fn build_on(mut self, device: DeviceId) -> Entry {
        let (mut manifest, export) = self.fill(device);
        let bytes = manifest.encode(self.files).expect("a manifest");
        Entry {
            epoch: EpochId([7; 16]),
            manifest,
            manifest_fd: host::sealed("manifest", &bytes).expect("a sealed manifest"),
            slabs: export.slabs,
        }
    }
}

/// Bytes that stay zero behind a tensor: candle's CUDA kernels read 512 elements past the end of blocks.
fn tail(device: DeviceId, element: ElementType) -> u64 {
    match device {
        DeviceId::Cuda(_) if element.is_quantized() => {
            512 * element.block_bytes() / element.block_elements()
        }
        _ => 0,
    }
}

/// The length of a slab on `device` that has room for `bytes`.
pub(crate) fn slab_bytes(device: DeviceId, bytes: u64) -> u64 {
    match device {
        DeviceId::Host => bytes,
        DeviceId::Cuda(_) => bytes.max(1).next_multiple_of(GRANULARITY),
    }
}

impl Entry {
    /// The honest answer to an attach.
    pub(crate) fn reply(&self) -> Reply {
        Reply::Attached {
            epoch: self.epoch,
            anchor: false,
            slabs: self.slabs.len() as u32,
            memory_bytes: self.manifest.memory_bytes(),
        }
    }

    /// Sends `reply` with this entry's descriptors.
    pub(crate) fn send(&self, connection: &Connection, reply: &Reply) {
        let mut fds = vec![self.manifest_fd.as_fd()];
        fds.extend(self.slabs.iter().map(AsFd::as_fd));
        // The engine may have gone: that is for the test to see, not for the stand-in.
        if let Err(e) = connection.send(reply, &fds, HANG) {
            eprintln!("the stand-in could not answer: {e}");
        }
    }
}

/// What the stand-in does with an attach request. The connection stays open afterwards.
pub(crate) type Answer = Box<dyn Fn(&Connection, &Request) + Send + Sync>;

/// A connection, and the thread that listens on it.
type Open = (Weak<Connection>, JoinHandle<()>);

/// A daemon's side of the socket, on threads of this process.
pub(crate) struct StandIn {
    folder: tempfile::TempDir,
    listener: Arc<OwnedFd>,
    heard: Mutex<Receiver<Request>>,
    open: Arc<Mutex<Vec<Open>>>,
    accepting: Option<JoinHandle<()>>,
}

impl StandIn {
    /// Answers every attach with `entry`.
    pub(crate) fn serving(entry: Entry) -> Self {
        Self::answering(Box::new(move |c, _| entry.send(c, &entry.reply())))
    }

    /// Answers every attach by `answer`.
    pub(crate) fn answering(answer: Answer) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let listener = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .expect("a socket");
        let address = SocketAddrUnix::new(folder.path().join("daemon.sock")).expect("a short path");
        rustix::net::bind(&listener, &address).expect("a free path");
        rustix::net::listen(&listener, 128).expect("a listener");
        let listener = Arc::new(listener);
        let (hear, heard) = channel();
        let open = Arc::new(Mutex::new(Vec::new()));
        let accepting = {
            let (listener, open) = (listener.clone(), open.clone());
            let path = folder.path().join("daemon.sock");
            std::thread::spawn(move || accept(&listener, &path, &Arc::new(answer), &hear, &open))
        };
        Self {
            folder,
            listener,
            heard: Mutex::new(heard),
            open,
            accepting: Some(accepting),
        }
    }

    /// The folder of the socket.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// A configuration that finds this daemon.
    pub(crate) fn config(&self, name: &str) -> IpcConfig {
        IpcConfig::new(name).socket_dir(self.folder())
    }

    /// The next message that any engine sent.
    pub(crate) fn next(&self) -> Option<Request> {
        let heard = self.heard.lock().expect("one test, one listener");
        heard.recv_timeout(HANG).ok()
    }

    /// Whether an engine has sent something that [`StandIn::next`] has not returned yet.
    pub(crate) fn quiet_for(&self, time: Duration) -> bool {
        let heard = self.heard.lock().expect("one test, one listener");
        heard.recv_timeout(time).is_err()
    }
}

fn accept(
    listener: &OwnedFd,
    path: &Path,
    answer: &Arc<Answer>,
    hear: &Sender<Request>,
    open: &Mutex<Vec<Open>>,
) {
    loop {
        let fd = match rustix::net::accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(fd) => fd,
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => return,
        };
        let connection = Arc::new(Connection::from_fd(fd, path));
        let weak = Arc::downgrade(&connection);
        let (answer, hear) = (answer.clone(), hear.clone());
        let listening = std::thread::spawn(move || {
            while let Ok((request, _)) = connection.receive::<Request>(HANG) {
                if matches!(request, Request::Attach { .. }) {
                    answer(&connection, &request);
                }
                if hear.send(request).is_err() {
                    return;
                }
            }
        });
        let mut open = open.lock().expect("no panic while it is held");
        open.retain(|(_, listening)| !listening.is_finished());
        open.push((weak, listening));
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        let _ = rustix::net::shutdown(&*self.listener, Shutdown::Both);
        if let Some(accepting) = self.accepting.take() {
            let _ = accepting.join();
        }
        // Joined, so that no descriptor outlives the stand-in.
        let mut open = self.open.lock().expect("no panic while it is held");
        for (connection, listening) in open.drain(..) {
            if let Some(connection) = connection.upgrade() {
                let _ = rustix::net::shutdown(connection.as_fd(), Shutdown::Both);
            }
            let _ = listening.join();
        }
    }
}
