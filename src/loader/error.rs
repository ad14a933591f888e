//! What can go wrong between an engine and its weights: while attaching, and while asking for a tensor.
//! Both turn into candle's error at the seam where candle calls.

use std::path::PathBuf;
use std::time::Duration;

use candle_core::DType;
use candle_nn::var_builder::Shard;

use super::identity::Mismatch;
use crate::checkpoint::CheckpointError;
use crate::manifest::{ElementType, ManifestError};
use crate::protocol::{EntryId, EpochId, Progress, Refusal};
use crate::shard::{CutError, Part};
use crate::slab::{DeviceId, SlabError};
use crate::socket::SocketError;
use crate::socket::folder::FolderError;
use crate::tensors::TensorError;

/// A socket that was tried, and what came of it.
#[derive(Debug)]
pub struct Tried {
    /// The socket.
    pub path: PathBuf,
    /// What went wrong.
    pub error: SocketError,
}

/// Why an engine could not attach.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// Nobody listens on any of the sockets.
    #[error(
        "no daemon is running; tried {}: start one with `candle-cache serve`, or name its folder (CANDLE_CACHE_SOCKET_DIR, \
         `IpcConfig::socket_dir`)",
        tried.iter().map(|t| t.path.display().to_string()).collect::<Vec<_>>().join(", ")
    )]
    NoDaemon {
        /// The sockets, in the order in which they were tried.
        tried: Vec<Tried>,
    },
    /// There is a socket, but none that could be used.
    #[error("no daemon could be reached:{}", tried.iter().map(|t| format!("\n  {}", t.error)).collect::<String>())]
    Unreachable {
        /// The sockets, in the order in which they were tried.
        tried: Vec<Tried>,
    },
    /// The folder that should hold the socket cannot be used.
    #[error(transparent)]
    Folder(Box<FolderError>),
    /// The exchange with the daemon broke off.
    #[error("{step} at {}: {source}", path.display())]
    Socket {
        /// The socket.
        path: PathBuf,
        /// What the engine was doing.
        step: &'static str,
        /// What went wrong.
        source: Box<SocketError>,
    },
    /// The entry did not become ready in time.
    #[error(
        "{entry} was still loading after {waited:?} ({}, {} of {} bytes): give it longer (`IpcConfig::state_timeout`), \
         or see `candle-cache status`",
        progress.phase, progress.done, progress.total
    )]
    StillLoading {
        /// The entry.
        entry: EntryId,
        /// How long the engine waited.
        waited: Duration,
        /// How far the load had come.
        progress: Box<Progress>,
    },
    /// The daemon refused.
    #[error("{entry} was refused: {reason}")]
    Refused {
        /// The entry.
        entry: EntryId,
        /// What kind of refusal.
        code: Refusal,
        /// The daemon's reason.
        reason: String,
    },
    /// The daemon's answer does not hold together.
    #[error(
        "the daemon at {} gave an answer that does not hold: {what}; run the same release of candle-cache and of the engine",
        path.display()
    )]
    BadAnswer {
        /// The socket.
        path: PathBuf,
        /// What does not hold.
        what: String,
    },
    /// The daemon gave another epoch than the one asked for.
    #[error("epoch {wanted} was asked for, the daemon gave {found}")]
    OtherEpoch {
        /// The epoch asked for.
        wanted: EpochId,
        /// The epoch received.
        found: EpochId,
    },
    /// The manifest is not to be believed.
    #[error("the manifest of {entry}: {source}")]
    Manifest {
        /// The entry.
        entry: EntryId,
        /// What is wrong with it.
        source: Box<ManifestError>,
    },
    /// A received descriptor is no slab, or could not be mapped.
    #[error("the memory of {entry}: {source}")]
    Slab {
        /// The entry.
        entry: EntryId,
        /// What is wrong with it.
        source: Box<SlabError>,
    },
    /// The entry holds other weights than the engine means.
    #[error(transparent)]
    Mismatch(Box<Mismatch>),
    /// A file that the entry was loaded from has changed since.
    #[error("{} has changed since it was loaded: {mismatch}", file.display())]
    Stale {
        /// The file.
        file: PathBuf,
        /// In what it differs.
        mismatch: Box<Mismatch>,
    },
    /// A checkpoint that would have proved the entry's identity cannot be read.
    #[error(
        "{entry} cannot be compared with its checkpoint: {source}; name the right one (`IpcConfig::checkpoint`), pin \
         the root digest (`IpcConfig::root`), or trust the name (`IpcConfig::trust_name`)"
    )]
    Unproven {
        /// The entry.
        entry: EntryId,
        /// What is wrong with the checkpoint.
        source: Box<CheckpointError>,
    },
    /// The weights are damaged, or of no use as tensors.
    #[error(transparent)]
    Tensor(Box<TensorError>),
    /// That device cannot be attached on.
    #[error(transparent)]
    Device(Box<SlabError>),
}

impl From<FolderError> for AttachError {
    fn from(e: FolderError) -> Self {
        Self::Folder(Box::new(e))
    }
}

impl From<TensorError> for AttachError {
    fn from(e: TensorError) -> Self {
        Self::Tensor(Box::new(e))
    }
}

impl From<AttachError> for candle_core::Error {
    fn from(e: AttachError) -> Self {
        Self::wrap(e)
    }
}

/// Why the cache did not give a tensor, beside [`TensorError`] and candle's own errors.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GetError {
    /// A conversion was needed, and the engine asked for none.
    #[error(
        "tensor `{name}` is stored as {stored} and was asked for as {asked:?}; strict mode converts nothing: ask for the \
         stored dtype, or load the model with `--dtype`"
    )]
    Strict {
        /// The tensor.
        name: String,
        /// Its stored type.
        stored: ElementType,
        /// The dtype asked for.
        asked: DType,
    },
    /// A dequantized tensor was asked for in another dtype than F32, and the engine asked for no conversions.
    #[error(
        "tensor `{name}` is stored as {stored} blocks, which are dequantized to F32, and was asked for as {asked:?}; \
         strict mode converts nothing after that: ask for F32, or for the blocks (`IpcCache::quantized()`, \
         `IpcCache::maybe_quantized()`)"
    )]
    StrictDequantized {
        /// The tensor.
        name: String,
        /// Its stored type.
        stored: ElementType,
        /// The dtype asked for.
        asked: DType,
    },
    /// candle could not convert it.
    #[error("tensor `{name}`, stored as {stored}, cannot be had as {asked:?}: {source}")]
    Cast {
        /// The tensor.
        name: String,
        /// Its stored type.
        stored: ElementType,
        /// The dtype asked for.
        asked: DType,
        /// candle's answer.
        source: candle_core::Error,
    },
    /// The slice of another rank, or of another number of ranks.
    #[error(
        "the cache holds tensor `{name}` as the slice of rank {held} along dimension {dim}, and it was asked for as the slice \
         of rank {}/{} along dimension {}: attach to that rank's entry (`IpcConfig::tensor_parallel`), or to one of the whole \
         model, which serves every rank",
        asked.rank, asked.world_size, asked.dim
    )]
    OtherRank {
        /// The tensor.
        name: String,
        /// The dimension along which it was cut.
        dim: usize,
        /// The rank whose slice is held.
        held: Part,
        /// What was asked for.
        asked: Shard,
    },
    /// A slice that the tensor does not have.
    #[error("tensor `{name}` has no such slice: {source}")]
    Cut {
        /// The tensor.
        name: String,
        /// What stands against it.
        source: CutError,
    },
    /// No tensor of that name.
    #[error("{0}")]
    NoTensor(String),
    /// The tensor's bytes cannot be read in place.
    #[error(
        "the bytes of tensor `{name}` on {device} cannot be read in place, because they lie in a GPU's memory or in a \
         copy that is candle's own: ask for the tensor"
    )]
    NotReadable {
        /// The tensor.
        name: String,
        /// Where it lies.
        device: DeviceId,
    },
}

impl From<GetError> for candle_core::Error {
    fn from(e: GetError) -> Self {
        Self::wrap(e)
    }
}
