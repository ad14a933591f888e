//! Messages between daemon, workers and engines, and their limits. Pure: no sockets here.
//! One packet is one message; descriptors travel beside it.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

pub use crate::shard::ShardId;
pub use crate::slab::DeviceId;

/// Version of the messages. Both sides must speak the same one.
pub const VERSION: u16 = 2;
/// Largest packet, in bytes.
pub const MAX_PACKET: usize = 64 << 10;
/// Most descriptors in one packet: the kernel's own limit.
pub const MAX_DESCRIPTORS: usize = 253;
/// Longest name of an entry, in bytes.
pub const MAX_ENTRY_NAME: usize = 512;
/// Longest reason, path or other text in a message, in bytes.
pub const MAX_TEXT: usize = 16 << 10;
/// How long a peer may take over one step of an exchange.
pub const STEP: Duration = Duration::from_secs(5);
/// Longest time that an engine may ask to wait for an entry that is loading.
pub const MAX_WAIT: Duration = Duration::from_secs(24 * 3600);
/// Most ranks of one set.
pub const MAX_RANKS: usize = 256;
/// Role of an entry that no role was named for.
pub const TARGET: &str = "target";

const MAGIC: [u8; 4] = *b"CIPC";
const HEADER: usize = 8;

/// Names one load of one entry, or of all ranks of a set: random, never used twice.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct EpochId(pub [u8; 16]);

impl fmt::Display for EpochId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl fmt::Debug for EpochId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for EpochId {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || format!("`{text}` is no epoch id: 32 hexadecimal digits");
        if text.len() != 32 || !text.is_ascii() {
            return Err(wrong());
        }
        let mut id = [0; 16];
        for (i, byte) in id.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).map_err(|_| wrong())?;
        }
        Ok(Self(id))
    }
}

/// What an entry is called, what it is for, where it lies, and which part of the model it is.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct EntryId {
    /// Name of the entry.
    pub name: String,
    /// `target`, `draft`, or another word of the operator's.
    pub role: String,
    /// Device that holds the memory.
    pub device: DeviceId,
    /// The part of the model.
    pub shard: ShardId,
}

impl EntryId {
    /// The entry `name` in the default role: all of the model.
    pub fn new(name: impl Into<String>, device: DeviceId) -> Self {
        Self {
            name: name.into(),
            role: TARGET.into(),
            device,
            shard: ShardId::default(),
        }
    }
}

/// One more rank of a set: the same name and role, another part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// The part.
    pub shard: ShardId,
    /// Device that holds its memory.
    pub device: DeviceId,
    /// Bytes of its slabs.
    pub bytes: u64,
}

impl fmt::Display for EntryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`", self.name)?;
        if self.role != TARGET {
            write!(f, " in role `{}`", self.role)?;
        }
        if !self.shard.is_whole() {
            write!(f, " ({})", self.shard)?;
        }
        write!(f, " on {}", self.device)
    }
}

/// What a client says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// An engine wants an entry's descriptors, and a lease on them for as long as it stays connected.
    Attach {
        /// The entry.
        entry: EntryId,
        /// This epoch and no other. Of a set that was replaced, every rank can be had in this way for as long as
        /// an engine holds one of them.
        epoch: Option<EpochId>,
        /// How long to wait for an entry that is loading; zero: not at all. The daemon sends
        /// [`Reply::Loading`] meanwhile.
        wait: Duration,
    },
    /// The descriptors of [`Reply::Attached`] have arrived. Not answered.
    Received,
    /// The lease ends, in good order. Not answered.
    Goodbye,
    /// What does the daemon hold? Entries after this one, in order of their ids; `None`: from the first.
    Status {
        /// The last entry that was seen.
        after: Option<EntryId>,
    },
    /// Remove an entry. Engines that have it mapped keep it.
    Unload {
        /// The entry's name.
        name: String,
        /// The role; `None`: every role.
        role: Option<String>,
        /// The device; `None`: every device.
        device: Option<DeviceId>,
        /// The part of the model; `None`: every part.
        shard: Option<ShardId>,
        /// This epoch; `None`: whichever is there. One that was replaced meanwhile is not removed.
        epoch: Option<EpochId>,
        /// Remove it although engines hold leases. Without this they are sent [`Reply::Sweep`] and get
        /// half a [`STEP`] to let go.
        force: bool,
    },
    /// Stop the daemon.
    Stop,
    /// Start a worker that loads a model.
    Load(LoadRequest),
    /// A worker begins to load an entry, or a set of ranks that are to be published together. Answered with
    /// [`Reply::Done`]; a refusal may follow at any time, when the entry is unloaded meanwhile.
    Announce {
        /// The entry; of a set, its first rank.
        entry: EntryId,
        /// Bytes of its slabs.
        bytes: u64,
        /// The other ranks of the set, fewer than [`MAX_RANKS`].
        #[serde(deserialize_with = "crate::manifest::capped::<_, _, MAX_RANKS>")]
        set: Vec<Member>,
    },
    /// How far the announced load has come. Not answered.
    Progress(Progress),
    /// The announced load is finished: `[manifest, anchor where `anchor`, slab…]` travel beside this. The ranks of a
    /// set are offered in the order in which they were announced. Each but the last is answered with
    /// [`Reply::Done`] and set aside; with the last, all of them are published at once.
    Offer {
        /// Whether an anchor travels too.
        anchor: bool,
        /// How many slabs travel.
        slabs: u32,
    },
    /// The announced load failed.
    Failed {
        /// Why, and the way out.
        reason: String,
    },
}

/// A load that the daemon is asked to start a worker for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadRequest {
    /// Folder or file, absolute.
    pub model: String,
    /// The entry to make; `None`: named after the model.
    pub name: Option<String>,
    /// `host`, `cuda:N` or a UUID, as the command line takes it.
    pub device: String,
    /// `stored`, `bf16`, `f16` or `f32`.
    pub dtype: String,
    /// The recipe to quantize by, as the command line takes it; `None`: not quantized.
    pub quantize: Option<String>,
    /// The importance matrix to quantize with: a file, absolute.
    pub imatrix: Option<String>,
    /// Quantize values that no block can hold into whatever comes out.
    pub allow_nonfinite: bool,
    /// Quantize again what is quantized already.
    pub requantize: bool,
    /// Take only the tensors that this trace names, cut for the rank as it says: a file, absolute.
    pub only: Option<String>,
    /// Which part to make; one of several tensor-parallel ranks needs a trace.
    pub shard: ShardId,
}

/// How far a load has come.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Progress {
    /// What the worker is doing: `plan`, `load`, `seal`.
    pub phase: String,
    /// Bytes done in this phase.
    pub done: u64,
    /// Bytes to do in this phase.
    pub total: u64,
}

/// What the daemon says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// `[manifest, anchor where `anchor`, slab…]` travel beside this. Answer with [`Request::Received`].
    Attached {
        /// The epoch.
        epoch: EpochId,
        /// Whether an anchor travels too.
        anchor: bool,
        /// How many slabs travel.
        slabs: u32,
        /// Bytes that the entry takes from its device: the sum of its slabs.
        memory_bytes: u64,
    },
    /// Not yet; more of these follow until the entry is ready, failed, or the wait is over.
    Loading(Progress),
    /// One page of entries.
    Status {
        /// Entries, in order of their ids.
        entries: Vec<EntryStatus>,
        /// Whether there are more after the last of these.
        more: bool,
    },
    /// The offer is published under this id.
    Accepted {
        /// The epoch; an older one where the very same weights were already held.
        epoch: EpochId,
        /// The daemon held the same weights already, and kept those.
        unchanged: bool,
    },
    /// Done, as asked.
    Done,
    /// Not done.
    Refused {
        /// What kind of refusal.
        code: Refusal,
        /// The thing, both values, and the way out.
        reason: String,
    },
    /// Said on a connection that holds a lease, at any time: the memory is wanted back. An engine that
    /// has dropped its weights unmaps them now and ends the lease; one that uses them goes on. Not
    /// answered.
    Sweep,
}

/// Kinds of refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Refusal {
    /// No entry of that name.
    NoEntry,
    /// The entry exists, but on another device.
    OtherDevice,
    /// The entry exists, but another part of the model.
    OtherShard,
    /// The entry exists, but the epoch asked for is gone.
    NoEpoch,
    /// The entry is still loading, and the wait is over.
    StillLoading,
    /// The last load of the entry failed.
    LoadFailed,
    /// Engines hold leases on it.
    InUse,
    /// Another worker is loading that entry.
    AlreadyLoading,
    /// The offer does not hold together.
    BadOffer,
    /// The request makes no sense here, or breaks a limit.
    BadRequest,
    /// The peer may not.
    NotAllowed,
    /// The daemon is at one of its limits.
    Busy,
    /// The daemon is stopping.
    Stopping,
}

/// State of one entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntryStatus {
    /// The entry.
    pub entry: EntryId,
    /// What is ready to be attached to.
    pub ready: Option<ReadyStatus>,
    /// A load that is under way, beside what is ready.
    pub loading: Option<Progress>,
    /// Why the last load failed.
    pub failed: Option<String>,
    /// Bytes of unloaded or replaced epochs that engines still hold, and of replaced ranks that are kept because
    /// engines hold other ranks of their set.
    pub retired_bytes: u64,
}

/// A published epoch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadyStatus {
    /// The epoch.
    pub epoch: EpochId,
    /// Ranks that were published with it, itself included.
    pub ranks: u32,
    /// The root over its tensors, in hexadecimal.
    pub root: String,
    /// What float tensors were stored as: `stored`, `bf16`, `f16` or `f32`.
    pub dtype: String,
    /// The recipe that it was quantized by, its first 256 characters; `none`.
    pub recipe: String,
    /// Tensors, aliases included.
    pub tensors: u64,
    /// Bytes of its slabs.
    pub memory_bytes: u64,
    /// Leases on it: one per attached engine.
    pub leases: u64,
    /// Processes that hold leases, as the daemon's own namespace numbers them (0: not visible), at
    /// most 64. For people to read; never a proof of life.
    pub holders: Vec<i32>,
    /// Seconds since it was published.
    pub age_seconds: u64,
}

/// Why a packet is not a message.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// The bytes do not start as ours do.
    #[error(
        "{0} bytes that are no message of candle-ipc-cache: is something else listening on this socket?"
    )]
    Foreign(usize),
    /// The peer speaks another version.
    #[error(
        "the peer speaks protocol version {theirs}, this build speaks version {ours}: run the same release on \
         both sides and restart the daemon"
    )]
    Version {
        /// This build's version.
        ours: u16,
        /// The peer's version.
        theirs: u16,
    },
    /// The message does not decode.
    #[error("a message that does not decode: {0}")]
    Codec(String),
    /// The message is larger than a packet may be.
    #[error("a message of {0} bytes, the limit is {MAX_PACKET}")]
    TooLarge(usize),
}

/// Most bytes of memory that a decoded packet may take. A page of short entries takes many times its packet.
const MAX_DECODED: usize = 64 * MAX_PACKET;

fn codec() -> impl bincode::config::Config {
    bincode::config::standard().with_limit::<MAX_DECODED>()
}

/// Encodes a message into one packet.
///
/// # Errors
/// When it is larger than [`MAX_PACKET`].
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, ProtocolError> {
    let mut out = empty();
    bincode::serde::encode_into_std_write(message, &mut out, codec())
        .map_err(|e| ProtocolError::Codec(e.to_string()))?;
    if out.len() > MAX_PACKET {
        return Err(ProtocolError::TooLarge(out.len()));
    }
    Ok(out)
}

/// A packet without a message. It tells a peer of another version which one this side speaks.
pub fn empty() -> Vec<u8> {
    let mut out = Vec::with_capacity(256);
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&[0, 0]);
    out
}

/// Decodes one packet.
///
/// # Errors
/// When the packet is foreign, of another version, or not exactly one message.
pub fn decode<T: DeserializeOwned>(packet: &[u8]) -> Result<T, ProtocolError> {
    if packet.len() < HEADER || packet[..4] != MAGIC {
        return Err(ProtocolError::Foreign(packet.len()));
    }
    let theirs = u16::from_le_bytes([packet[4], packet[5]]);
    if theirs != VERSION {
        return Err(ProtocolError::Version {
            ours: VERSION,
            theirs,
        });
    }
    let body = &packet[HEADER..];
    let (message, read) = bincode::serde::decode_from_slice(body, codec())
        .map_err(|e| ProtocolError::Codec(e.to_string()))?;
    if read != body.len() {
        return Err(ProtocolError::Codec(format!(
            "{} bytes left over",
            body.len() - read
        )));
    }
    Ok(message)
}

/// Cuts a text to [`MAX_TEXT`] bytes, at a character.
pub fn clip(text: &str) -> String {
    if text.len() <= MAX_TEXT {
        return text.to_string();
    }
    let mut end = MAX_TEXT - '…'.len_utf8();
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}…", &text[..end])
}
