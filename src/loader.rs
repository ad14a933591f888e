//! The engine's side: attach to an entry, and get candle tensors over the memory that the daemon holds.
//! [`IpcCache`] is the handle; [`FromIpcCache`] is the one line that an engine changes.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use candle_core::{DType, Device};
use candle_nn::VarBuilder;

use crate::manifest::{MAX_BYTES, Manifest, ManifestError};
use crate::protocol::{EntryId, EpochId, Request, STEP};
use crate::slab::DeviceId;
use crate::slab::host::HostMapping;
use crate::socket::SocketError;
use crate::tensors;

mod asked;
mod backend;
mod build;
mod config;
mod connect;
mod error;
mod fit;
mod identity;
mod lease;
mod maybe_quantized;
mod naming;
mod quantized;
mod reload;
mod report;
mod sharded;
mod size;
mod suggest;
mod wanted;
mod weights;

pub use build::{BuildError, Misshapen, Missing, Mistyped, Unmet};
pub use config::{IpcConfig, OPTIONS, OptionError};
pub use error::{AttachError, GetError, Tried};
pub use identity::{Mismatch, Proof};
pub use maybe_quantized::{
    MaybeQuantizedEmbedding, MaybeQuantizedLinear, MaybeQuantizedVarBuilder,
};
pub use naming::{Naming, Renaming};
pub use quantized::QuantizedVarBuilder;
pub use report::{Cast, Dequantized, HandOff, Report, Took, Unasked};
pub use sharded::{ShardedVarBuilder, ShardedWeights};
pub use wanted::Wanted;

pub(crate) use backend::Terms;
pub(crate) use suggest::Names;

use lease::Lease;
use weights::Weights;

/// Makes a builder from cached weights, as candle's own `from_*` constructors make one from files.
pub trait FromIpcCache: Sized {
    /// Attaches to the entry that `config` names and builds over it. The weights stay mapped, and the
    /// lease on them lasts, for as long as the builder or a tensor over shared memory lives.
    ///
    /// # Errors
    /// As [`IpcCache::attach`].
    fn from_ipc_cache(
        config: &IpcConfig,
        dtype: DType,
        device: &Device,
    ) -> Result<Self, AttachError>;
}

impl FromIpcCache for VarBuilder<'static> {
    fn from_ipc_cache(
        config: &IpcConfig,
        dtype: DType,
        device: &Device,
    ) -> Result<Self, AttachError> {
        Ok(IpcCache::attach(config, device)?.var_builder(dtype))
    }
}

impl FromIpcCache for MaybeQuantizedVarBuilder<'static> {
    fn from_ipc_cache(
        config: &IpcConfig,
        dtype: DType,
        device: &Device,
    ) -> Result<Self, AttachError> {
        Ok(IpcCache::attach(config, device)?.maybe_quantized(dtype))
    }
}

/// An entry's weights, mapped into this process, and the lease on them.
///
/// Tensors stay valid after the handle and the daemon are gone. When the last holder of shared memory
/// goes (this handle, a builder, a tensor over it), the lease ends in good order: on the host at once; on a
/// GPU, where nobody hears of a tensor's end, when the next handle is made, dropped or detached, or
/// when the daemon asks for memory back.
pub struct IpcCache {
    shared: Arc<Shared>,
}

/// What a handle and its builders have in common.
struct Shared {
    manifest: Arc<Manifest>,
    names: Arc<suggest::Names>,
    /// The manifest's own memory, for the small files in it.
    memory: HostMapping,
    /// Entries that more than one name stands for.
    aliased: HashSet<usize>,
    /// Before the weights, because it is dropped before them: what is in here may read them.
    kept: Mutex<HashMap<usize, Vec<backend::Kept>>>,
    weights: Weights,
    /// None for copies.
    lease: Option<Arc<Lease>>,
    device: Device,
    naming: Naming,
    terms: backend::Terms,
    asked: asked::Asked,
    tally: report::Tally,
    report: Report,
}

impl Shared {
    fn kept(&self) -> MutexGuard<'_, HashMap<usize, Vec<backend::Kept>>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What an engine still refers to after [`IpcCache::detach`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "it says what is still alive"]
pub struct Detached {
    /// Tensors that still read shared memory. They stay valid.
    pub tensors: usize,
    /// Bytes of shared memory that those tensors keep mapped.
    pub bytes: u64,
    /// Builders over the weights; while one lives, all of them stay mapped.
    pub builders: usize,
    /// The daemon was already gone.
    pub daemon_lost: bool,
}

impl fmt::Debug for IpcCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IpcCache")
            .field("entry", &self.shared.report.entry)
            .field("epoch", &self.shared.report.epoch)
            .finish_non_exhaustive()
    }
}

impl IpcCache {
    /// Attaches to the entry that `config` names, on the memory that `device` computes on.
    ///
    /// # Errors
    /// When no daemon answers in time, it refuses, what it gives does not hold together, or the entry
    /// holds other weights than the engine means.
    pub fn attach(config: &IpcConfig, device: &Device) -> Result<Self, AttachError> {
        let entry = EntryId {
            name: config.name.clone(),
            role: config.role.clone(),
            device: device_id(device)?,
            shard: config.shard,
        };
        let mut took = Took::default();
        let start = Instant::now();
        let end = start + config.connect_timeout;
        let connection = connect::connect(config, end)?;
        let socket = connection.path().to_path_buf();
        took.connect = start.elapsed();

        let step = Instant::now();
        let given = connect::request(connection, &entry, config, end)?;
        let lease = Arc::new(Lease::new(given.connection));
        took.receive = step.elapsed();

        let step = Instant::now();
        let manifest_error = |source| AttachError::Manifest {
            entry: entry.clone(),
            source: Box::new(source),
        };
        let slab_error = |source| AttachError::Slab {
            entry: entry.clone(),
            source: Box::new(source),
        };
        let memory =
            HostMapping::map(given.manifest.as_fd(), None, "the manifest").map_err(slab_error)?;
        let length = memory.as_slice().len() as u64;
        if length > MAX_BYTES {
            return Err(manifest_error(ManifestError::Limit {
                what: "bytes",
                found: length,
                limit: MAX_BYTES,
            }));
        }
        let manifest = Arc::new(Manifest::decode(memory.as_slice()).map_err(manifest_error)?);
        took.decode = step.elapsed();

        let step = Instant::now();
        let slabs = &manifest.slabs;
        let announced = (given.slabs.len(), given.memory_bytes);
        if announced != (slabs.len(), manifest.memory_bytes()) {
            let (slabs, bytes) = announced;
            return Err(AttachError::BadAnswer {
                path: socket,
                what: format!(
                    "it sent {slabs} slabs of {bytes} bytes, the manifest lists {} of {}",
                    manifest.slabs.len(),
                    manifest.memory_bytes()
                ),
            });
        }
        let mapped = tensors::map(manifest.clone(), &given.slabs, device, lease.clone())
            .map_err(slab_error)?;
        took.map = step.elapsed();

        let step = Instant::now();
        let proof = identity::prove(config, &entry, &manifest)?;
        took.identity = step.elapsed();

        if config.verify {
            let step = Instant::now();
            mapped.verify()?;
            took.verify = step.elapsed();
        }
        drop(given.slabs);

        let mut hand_off = None;
        let (weights, lease) = if config.copies() {
            let step = Instant::now();
            let copies = Weights::copied(mapped, &manifest, device)?;
            let unload = config.hand_off.then(|| Request::Unload {
                name: entry.name.clone(),
                role: Some(entry.role.clone()),
                device: Some(entry.device),
                shard: Some(entry.shard),
                epoch: Some(given.epoch),
                force: false,
            });
            hand_off = weights::leave(lease, unload);
            took.copy = step.elapsed();
            (copies, None)
        } else {
            lease.watch().map_err(|source| AttachError::Socket {
                path: socket.clone(),
                step: "listening to the daemon",
                source: Box::new(source),
            })?;
            (Weights::Mapped(mapped), Some(lease))
        };
        took.total = start.elapsed();
        let report = Report {
            entry,
            epoch: given.epoch,
            socket,
            identity: proof,
            verified: config.verify,
            tensors: manifest.tensors.len() + manifest.aliases.len(),
            memory_bytes: manifest.memory_bytes(),
            took,
            copy: config.copies(),
            hand_off,
            copied_bytes: 0,
            casts: Vec::new(),
            dequantized: Dequantized::default(),
            naming: config.naming.clone(),
            let_go: None,
            unasked: Unasked::default(),
        };
        tracing::info!(entry = %report.entry, epoch = %report.epoch, took = ?took.total, "attached");
        let aliased = manifest.aliases.iter().map(|a| a.tensor as usize);
        Ok(Self {
            shared: Arc::new(Shared {
                names: Arc::new(suggest::Names::new(manifest.clone())),
                asked: asked::Asked::new(&manifest),
                naming: config.naming.clone(),
                aliased: aliased.collect(),
                manifest,
                memory,
                weights,
                kept: Mutex::default(),
                lease,
                device: device.clone(),
                terms: backend::Terms {
                    strict: config.strict,
                    dequantize: config.dequantize,
                },
                tally: report::Tally::default(),
                report,
            }),
        })
    }

    /// The weights as a candle `VarBuilder`. The stored dtype is served as it is; another is converted
    /// as candle would, and counted in [`IpcCache::report`]. GGML blocks are served only where
    /// [`IpcConfig::dequantize`] allows for it.
    pub fn var_builder(&self, dtype: DType) -> VarBuilder<'static> {
        let backend = Box::new(backend::Backend(self.shared.clone()));
        VarBuilder::from_backend(backend, dtype, self.shared.device.clone())
    }

    /// The weights as candle's tensor-parallel models ask for them: with a [`Shard`] of each tensor as a hint.
    ///
    /// Answers are those of candle's `ShardedSafeTensors`, from an entry that holds the whole model as well as from one
    /// that holds this rank's slices ([`IpcConfig::tensor_parallel`]). Such an entry serves its own rank alone; what
    /// it holds whole, it serves to any. A slice of a whole tensor is a view where it lies in one piece on a GPU, and
    /// otherwise a copy that [`IpcCache::report`] counts.
    ///
    /// [`Shard`]: candle_nn::var_builder::Shard
    pub fn sharded(&self, dtype: DType) -> ShardedVarBuilder<'static> {
        let backend = ShardedWeights(self.shared.clone());
        ShardedVarBuilder::new_with_args(backend, dtype, &self.shared.device)
    }

    /// The quantized weights, by the names and methods of candle's quantized `VarBuilder`.
    pub fn quantized(&self) -> QuantizedVarBuilder {
        QuantizedVarBuilder::new(self.shared.clone())
    }

    /// The weights for a model that takes them in either form: GGML blocks as quantized layers, everything else
    /// as plain ones in `dtype`.
    pub fn maybe_quantized(&self, dtype: DType) -> MaybeQuantizedVarBuilder<'static> {
        MaybeQuantizedVarBuilder::new(self.var_builder(dtype), self.quantized())
    }

    /// A tensor's bytes as they are stored, whatever its type.
    ///
    /// # Errors
    /// When there is no such tensor, it lies in memory that the processor cannot read, or it was copied into
    /// a tensor of candle's own.
    pub fn raw(&self, name: &str) -> Result<&[u8], GetError> {
        let shared = &self.shared;
        let held = shared.naming.held(name);
        let position = shared.manifest.position(&held).ok_or_else(|| {
            shared.asked.missed(&held);
            GetError::NoTensor(shared.names.hint(&held, name).to_string())
        })?;
        let index = shared.manifest.tensor_at(position);
        let bytes = shared.weights.bytes(index);
        let bytes = bytes.ok_or_else(|| GetError::NotReadable {
            name: name.into(),
            device: shared.report.entry.device,
        })?;
        shared.asked.note(position, asked::Way::Raw);
        Ok(bytes)
    }

    /// A small file that travels with the weights, for instance `config.json`, byte for byte.
    pub fn file(&self, name: &str) -> Option<&[u8]> {
        let files = &self.shared.manifest.files;
        let at = files.binary_search_by(|f| f.name.as_str().cmp(name)).ok()?;
        let start = files[at].offset as usize;
        self.shared
            .memory
            .as_slice()
            .get(start..start + files[at].bytes as usize)
    }

    /// The names of the small files, sorted.
    pub fn files(&self) -> impl Iterator<Item = &str> {
        self.shared.manifest.files.iter().map(|f| f.name.as_str())
    }

    /// A string that travels with the weights.
    pub fn attribute(&self, name: &str) -> Option<&str> {
        let attributes = &self.shared.manifest.attributes;
        let found = attributes.iter().find(|(key, _)| key == name)?;
        Some(&found.1)
    }

    /// Bytes that the entry takes from its device, for all engines together: the sum of its slabs.
    pub fn memory_bytes(&self) -> u64 {
        self.shared.manifest.memory_bytes()
    }

    /// What [`IpcCache::memory_bytes`] will be after an attach to the entry that `config` names, without
    /// attaching: exact to the slab, for the epoch that is ready now.
    ///
    /// # Errors
    /// When no daemon answers in time, or the entry is not ready on the memory that `device` computes on.
    pub fn memory_bytes_of(config: &IpcConfig, device: &Device) -> Result<u64, AttachError> {
        let entry = EntryId {
            name: config.name.clone(),
            role: config.role.clone(),
            device: device_id(device)?,
            shard: config.shard,
        };
        let end = Instant::now() + config.connect_timeout;
        size::memory_bytes(&connect::connect(config, end)?, &entry, config, end)
    }

    /// What the attach found and took, and what serving tensors has cost so far.
    pub fn report(&self) -> Report {
        let mut report = self.shared.report.clone();
        self.shared.tally.fill(&mut report);
        report.copied_bytes += self.shared.weights.copied_bytes();
        report.let_go = self.shared.weights.let_go();
        report.unasked = self.shared.asked.unasked(&self.shared.manifest);
        report
    }

    /// The table of tensors.
    pub fn manifest(&self) -> &Manifest {
        &self.shared.manifest
    }

    /// The epoch that this engine is attached to. Another engine can ask for the same.
    pub fn epoch(&self) -> EpochId {
        self.shared.report.epoch
    }

    /// Whether the daemon has gone. The weights stay valid; new engines will not find them there. Of no
    /// concern to a copy, which holds no lease: false.
    pub fn daemon_lost(&self) -> bool {
        self.shared.lease.as_ref().is_some_and(|l| l.daemon_lost())
    }

    /// Ends the lease now, whatever is still alive, and says what is. That stays valid, but the daemon
    /// no longer knows that it is in use.
    ///
    /// # Errors
    /// When the daemon does not take the goodbye in time. The lease has ended all the same.
    pub fn detach(self) -> Result<Detached, AttachError> {
        let shared = self.shared;
        let lease = shared.lease.as_ref();
        let daemon_lost = lease.is_some_and(|l| l.daemon_lost());
        match lease.map_or(Ok(()), |l| l.end(STEP)) {
            Ok(()) | Err(SocketError::Closed) => {}
            Err(source) => {
                return Err(AttachError::Socket {
                    path: shared.report.socket.clone(),
                    step: "saying goodbye to the daemon",
                    source: Box::new(source),
                });
            }
        }
        let builders = Arc::strong_count(&shared) - 1;
        if builders == 0 {
            // Nobody can ask for these any more.
            shared.kept().clear();
        }
        let alive = shared.weights.sweep();
        Ok(Detached {
            tensors: alive.tensors,
            bytes: alive.bytes,
            builders,
            daemon_lost,
        })
    }
}

/// The memory that `device` computes on.
fn device_id(device: &Device) -> Result<DeviceId, AttachError> {
    tensors::device_id(device).map_err(|source| AttachError::Device(Box::new(source)))
}
