//! Where an engine's tensors come from: memory that it shares, or copies of its own.
//! To copy is to attach, clone everything, and leave again.

use std::sync::Arc;

use candle_core::Device;
use candle_core::quantized::QTensor;

use super::lease::Lease;
use super::report::HandOff;
use crate::manifest::Manifest;
use crate::protocol::{Reply, Request, STEP};
use crate::tensors::copied::CopiedWeights;
use crate::tensors::{Alive, MappedWeights, Plain, TensorError, TensorPart};

/// The weights behind a handle.
pub(super) enum Weights {
    Mapped(Box<dyn MappedWeights>),
    Copied(CopiedWeights),
}

impl Weights {
    /// Copies the mapped weights, and lets the mapping go.
    pub(super) fn copied(
        mapped: Box<dyn MappedWeights>,
        manifest: &Arc<Manifest>,
        device: &Device,
    ) -> Result<Self, TensorError> {
        let copies = CopiedWeights::of(&*mapped, manifest.clone(), device)?;
        Ok(Self::Copied(copies))
    }

    pub(super) fn plain(&self, index: usize, device: &Device) -> Result<Plain, TensorError> {
        match self {
            Self::Mapped(weights) => weights.plain(index, device),
            Self::Copied(weights) => weights.plain(index, device),
        }
    }

    pub(super) fn part(
        &self,
        index: usize,
        part: &TensorPart,
        device: &Device,
    ) -> Result<Plain, TensorError> {
        match self {
            Self::Mapped(weights) => weights.part(index, part, device),
            Self::Copied(weights) => weights.part(index, part, device),
        }
    }

    pub(super) fn quantized(&self, index: usize) -> Result<Arc<QTensor>, TensorError> {
        match self {
            Self::Mapped(weights) => weights.quantized(index),
            Self::Copied(weights) => weights.quantized(index),
        }
    }

    pub(super) fn bytes(&self, index: usize) -> Option<&[u8]> {
        match self {
            Self::Mapped(weights) => weights.bytes(index),
            Self::Copied(weights) => weights.bytes(index),
        }
    }

    /// Lets go of shared memory that nothing refers to, and says what still refers to some.
    pub(super) fn sweep(&self) -> Alive {
        match self {
            Self::Mapped(weights) => weights.sweep(),
            Self::Copied(_) => Alive::default(),
        }
    }

    /// Bytes that were served in place and that nobody refers to any more; `None` where that cannot be known.
    pub(super) fn let_go(&self) -> Option<u64> {
        match self {
            Self::Mapped(weights) => weights.let_go(),
            Self::Copied(_) => None,
        }
    }

    /// Bytes that were copied at attach, and since then to have a plain tensor as a quantized one.
    pub(super) fn copied_bytes(&self) -> u64 {
        match self {
            Self::Mapped(_) => 0,
            Self::Copied(weights) => weights.copied_bytes(),
        }
    }
}

/// Ends the lease on weights that have been copied, and has the entry unloaded where `unload` asks for it.
pub(super) fn leave(lease: Arc<Lease>, unload: Option<Request>) -> Option<HandOff> {
    // A mapping that could not be let go holds the lease too: it is still in use, and ends with that.
    let Some(lease) = Arc::into_inner(lease) else {
        tracing::warn!("the weights have been copied, but the shared memory is still mapped");
        let why = "the shared memory is still mapped here, so the daemon was not asked".into();
        return unload.map(|_| HandOff::Unknown { why });
    };
    let Some(unload) = unload else {
        if let Err(e) = lease.end(STEP) {
            tracing::debug!("saying goodbye to the daemon: {e}");
        }
        return None;
    };
    Some(match lease.end_and_ask(&unload, 2 * STEP) {
        Ok(Reply::Done) => HandOff::Unloaded,
        Ok(Reply::Refused { code, reason }) => HandOff::Kept { code, reason },
        Ok(other) => HandOff::Unknown {
            why: format!("the daemon answered {other:?}"),
        },
        Err(e) => HandOff::Unknown { why: e.to_string() },
    })
}
