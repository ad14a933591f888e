//! What an attach found and took, and what serving tensors has cost since: [`Report`].

use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use candle_core::DType;

use super::identity::Proof;
use super::naming::Naming;
use crate::manifest::ElementType;
use crate::protocol::{EntryId, EpochId, Refusal};

/// An attach and its consequences so far. `Display` is one line for each thing worth knowing.
#[derive(Clone, Debug)]
pub struct Report {
    /// The entry.
    pub entry: EntryId,
    /// Its epoch.
    pub epoch: EpochId,
    /// The socket behind which the daemon answered.
    pub socket: PathBuf,
    /// How the engine knows that these are the weights that it means.
    pub identity: Proof,
    /// Whether all weights were hashed at attach.
    pub verified: bool,
    /// Tensors, aliases included.
    pub tensors: usize,
    /// Bytes that the entry takes from its device, for all engines together.
    pub memory_bytes: u64,
    /// What the attach took.
    pub took: Took,
    /// Whether the tensors are copies of this engine's own: no memory is shared, and no lease held.
    pub copy: bool,
    /// What came of asking the daemon to unload the entry; `None`: nobody asked.
    pub hand_off: Option<HandOff>,
    /// Bytes that were copied into this process's own memory to make tensors.
    pub copied_bytes: u64,
    /// Conversions from a stored type to another dtype.
    pub casts: Vec<Cast>,
    /// Blocks that were dequantized to answer plain requests.
    pub dequantized: Dequantized,
    /// How the names that are asked for become the checkpoint's.
    pub naming: Naming,
    /// Bytes of tensors that were served in place and that nobody refers to any more, counted when the report is
    /// made. After a model is built: what its constructor made something else of, or only looked at. After its first
    /// forward: that of the forward too.
    ///
    /// `None` where it cannot be known: on the host, where a plain tensor is a copy already ([`Report::copied_bytes`]),
    /// and of copies.
    pub let_go: Option<u64>,
    /// Tensors that nobody has asked for.
    pub unasked: Unasked,
}

/// Tensors that nobody has asked for by any of their names. Whether a name is there is no such question.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unasked {
    /// How many.
    pub tensors: usize,
    /// Their stored bytes.
    pub bytes: u64,
    /// The names of the first 16, sorted.
    pub names: Vec<String>,
}

/// What an attach took, part by part.
#[derive(Clone, Copy, Debug, Default)]
pub struct Took {
    /// Finding and reaching the daemon.
    pub connect: Duration,
    /// The exchange, waiting for a load included.
    pub receive: Duration,
    /// Mapping and decoding the manifest.
    pub decode: Duration,
    /// Mapping the slabs.
    pub map: Duration,
    /// Proving the identity.
    pub identity: Duration,
    /// Hashing the weights, where that was asked for.
    pub verify: Duration,
    /// Copying the weights and leaving, where that was asked for.
    pub copy: Duration,
    /// All of it.
    pub total: Duration,
}

/// What came of asking the daemon to unload an entry that was copied.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HandOff {
    /// The daemon holds it no more.
    Unloaded,
    /// The daemon keeps it.
    Kept {
        /// What kind of refusal: [`Refusal::InUse`] where somebody else holds it.
        code: Refusal,
        /// The daemon's reason.
        reason: String,
    },
    /// The daemon's answer did not come.
    Unknown {
        /// Why.
        why: String,
    },
}

impl fmt::Display for HandOff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unloaded => f.write_str("unloaded"),
            Self::Kept { reason, .. } => write!(f, "kept by the daemon: {reason}"),
            Self::Unknown { why } => write!(f, "not known: {why}"),
        }
    }
}

/// Conversions of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cast {
    /// The stored type.
    pub stored: ElementType,
    /// The dtype that was asked for.
    pub asked: DType,
    /// How often.
    pub tensors: u64,
    /// Stored bytes that were converted.
    pub bytes: u64,
}

/// GGML blocks that were served as plain tensors. They are counted neither as copied nor as casts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dequantized {
    /// How often.
    pub tensors: u64,
    /// Stored bytes that were dequantized.
    pub bytes: u64,
    /// Bytes of the tensors that came of them, in this engine's own memory.
    pub made_bytes: u64,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Took {
            connect,
            receive,
            decode,
            map,
            identity,
            verify,
            copy,
            total,
        } = self.took;
        writeln!(f, "entry     {}, epoch {}", self.entry, self.epoch)?;
        writeln!(f, "socket    {}", self.socket.display())?;
        write!(f, "identity  {}", self.identity)?;
        writeln!(
            f,
            "{}",
            if self.verified {
                "; all weights verified"
            } else {
                ""
            }
        )?;
        writeln!(
            f,
            "weights   {} tensors, {} bytes {}",
            self.tensors,
            self.memory_bytes,
            if self.copy {
                "at the daemon; copied, nothing is shared"
            } else {
                "shared"
            }
        )?;
        if !self.naming.is_empty() {
            writeln!(f, "names     {}", self.naming)?;
        }
        writeln!(
            f,
            "attach    {total:.1?}: connect {connect:.1?}, receive {receive:.1?}, decode {decode:.1?}, map {map:.1?}, \
             identity {identity:.1?}, verify {verify:.1?}, copy {copy:.1?}"
        )?;
        if let Some(hand_off) = &self.hand_off {
            writeln!(f, "hand-off  {hand_off}")?;
        }
        write!(f, "copied    {} bytes", self.copied_bytes)?;
        for Cast {
            stored,
            asked,
            tensors,
            bytes,
        } in &self.casts
        {
            write!(
                f,
                "\ncast      {tensors} tensors of {bytes} bytes from {stored} to {asked:?}"
            )?;
        }
        let Dequantized {
            tensors,
            bytes,
            made_bytes,
        } = self.dequantized;
        if tensors > 0 {
            write!(
                f,
                "\ndequant   {tensors} tensors of {bytes} bytes of blocks, to {made_bytes} bytes of this engine's own"
            )?;
        }
        if let Some(bytes) = self.let_go {
            write!(
                f,
                "\nlet go    {bytes} bytes that were served in place and are referred to no more"
            )?;
        }
        let Unasked {
            tensors,
            bytes,
            names,
        } = &self.unasked;
        if let Some(first) = names.first() {
            write!(
                f,
                "\nunasked   {tensors} tensors of {bytes} bytes: `{first}`"
            )?;
            for name in &names[1..] {
                write!(f, ", `{name}`")?;
            }
            if *tensors > names.len() {
                f.write_str(", ...")?;
            }
        }
        Ok(())
    }
}

/// Running counts. Any thread may add to them.
#[derive(Debug, Default)]
pub(super) struct Tally {
    copied: AtomicU64,
    casts: Mutex<Vec<Cast>>,
    dequantized: Mutex<Dequantized>,
}

impl Tally {
    pub(super) fn copied(&self, bytes: u64) {
        self.copied.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn cast(&self, stored: ElementType, asked: DType, bytes: u64) {
        let mut casts = lock(&self.casts);
        match casts
            .iter_mut()
            .find(|c| (c.stored, c.asked) == (stored, asked))
        {
            Some(cast) => {
                cast.tensors += 1;
                cast.bytes += bytes;
            }
            None => casts.push(Cast {
                stored,
                asked,
                tensors: 1,
                bytes,
            }),
        }
    }

    pub(super) fn dequantized(&self, bytes: u64, made_bytes: u64) {
        let mut sum = lock(&self.dequantized);
        sum.tensors += 1;
        sum.bytes += bytes;
        sum.made_bytes += made_bytes;
    }

    /// Writes the counts into a report.
    pub(super) fn fill(&self, report: &mut Report) {
        report.copied_bytes = self.copied.load(Ordering::Relaxed);
        report.casts.clone_from(&lock(&self.casts));
        report.dequantized = *lock(&self.dequantized);
    }
}

fn lock<T>(counts: &Mutex<T>) -> MutexGuard<'_, T> {
    counts.lock().unwrap_or_else(PoisonError::into_inner)
}
