//! Why a load failed, in words for whoever asked for it.

use super::TargetDtype;
use super::select::SelectError;
use super::stack;
use crate::checkpoint::CheckpointError;
use crate::manifest::{ElementType, ManifestError};
use crate::protocol::{ProtocolError, Refusal};
use crate::quantize::AssignError;
use crate::shard::Part;
use crate::slab::SlabError;
use crate::socket::SocketError;

/// Why a load failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// The checkpoint cannot be read, or changed while it was read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The memory cannot be had, filled or sealed.
    #[error(transparent)]
    Slab(#[from] SlabError),
    /// The daemon cannot be talked to.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The checkpoint does not fit into a manifest.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// The daemon said no.
    #[error("the daemon refused: {reason}")]
    Refused {
        /// What kind of refusal.
        code: Refusal,
        /// The daemon's words.
        reason: String,
    },
    /// The daemon answered something that does not fit the question.
    #[error(
        "the daemon answered {what} with something else: run the same release of candle-cache on both sides"
    )]
    UnexpectedReply {
        /// What was asked.
        what: &'static str,
    },
    /// The daemon went away, or gave the load up, before it was finished.
    #[error(
        "the daemon closed the connection during the load: it was stopped, or the entry was unloaded; nothing was \
         published"
    )]
    DaemonGone,
    /// There is not enough memory.
    #[error(
        "the load needs {needs} bytes of host memory, {free} are free ({limit}): unload another entry \
         (`candle-cache unload`), store a smaller dtype, or raise the limit"
    )]
    NoRoom {
        /// Bytes of the slabs and of the worker's buffers.
        needs: u64,
        /// Bytes that can still be taken.
        free: u64,
        /// Which limit says so.
        limit: String,
    },
    /// The tensors' lengths add up to more than can be addressed.
    #[error("the tensors, stored as {dtype}, take more bytes than can be addressed (at `{name}`)")]
    TooLarge {
        /// What float tensors were to be stored as.
        dtype: TargetDtype,
        /// The tensor at which the sum became too large.
        name: String,
    },
    /// Two reads of one tensor gave different bytes.
    #[error(
        "tensor `{name}` changed while it was read: nothing was published; load again when the file is at rest"
    )]
    Changed {
        /// The tensor.
        name: String,
    },
    /// The selection does not fit this checkpoint.
    #[error(transparent)]
    Select(#[from] SelectError),
    /// The experts cannot be stacked.
    #[error(transparent)]
    Stack(#[from] stack::StackError),
    /// A slice whose rows are no whole blocks.
    #[error(
        "tensor `{name}`, cut along dimension {dim} for rank {part}, has rows of {row} elements, which are no whole {to} \
         blocks of {block}: quantize it to a type of smaller blocks (`{name}=q8_0` in the recipe has blocks of 32), leave it \
         as it is (`{name}=stored`), or cut it along another dimension"
    )]
    SliceRows {
        /// The tensor.
        name: String,
        /// The dimension along which it is cut.
        dim: usize,
        /// The rank.
        part: Part,
        /// Elements of a slice's row.
        row: u64,
        /// The type it was to be quantized to.
        to: ElementType,
        /// Elements of a block.
        block: u64,
    },
    /// The recipe cannot be followed on this checkpoint.
    #[error(transparent)]
    Recipe(#[from] AssignError),
    /// A value that quantization would silently turn into something else.
    #[error(
        "tensor `{name}` holds {value:e} at element {index} (counted from 0, row by row), which {to} {why}: say `{name}=stored` \
         or another type in the recipe, repair the checkpoint, or give --allow-nonfinite to quantize it all the same"
    )]
    Ruined {
        /// The tensor.
        name: String,
        /// The first such element.
        index: u64,
        /// Its value.
        value: f32,
        /// The type it was to be quantized to.
        to: ElementType,
        /// What is against it.
        why: &'static str,
    },
    /// candle could not convert a tensor.
    #[error("converting tensor `{name}` from {from} to {to}: {source}")]
    Convert {
        /// The tensor.
        name: String,
        /// Its type in the checkpoint.
        from: ElementType,
        /// The type it was to be stored as.
        to: ElementType,
        /// candle's answer.
        source: Box<candle_core::Error>,
    },
}

impl From<ProtocolError> for WorkerError {
    fn from(e: ProtocolError) -> Self {
        Self::Socket(e.into())
    }
}
