//! Slabs: memory that travels as file descriptors.
//! A worker fills them through a [`SlabWriter`]; a loader maps them read-only.

use std::fmt;
use std::os::fd::OwnedFd;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

pub mod cuda;
pub mod host;

/// Bytes that a [`Lane`]'s buffer holds.
pub const CHUNK: usize = 8 << 20;

/// Where an entry's memory lies.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum DeviceId {
    /// Host memory: sealed memfds.
    Host,
    /// A GPU, by the UUID that `cuDeviceGetUuid_v2` reports for it.
    Cuda([u8; 16]),
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Cuda(u) => {
                f.write_str("GPU-")?;
                for (i, byte) in u.iter().enumerate() {
                    if matches!(i, 4 | 6 | 8 | 10) {
                        f.write_str("-")?;
                    }
                    write!(f, "{byte:02x}")?;
                }
                Ok(())
            }
        }
    }
}

/// A text that names no device.
#[derive(Debug, thiserror::Error)]
#[error(
    "`{0}` is no device: give `host`, `cuda:N`, or a GPU's UUID (GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx)"
)]
pub struct NoSuchDevice(pub String);

impl FromStr for DeviceId {
    type Err = NoSuchDevice;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "host" || text == "cpu" {
            return Ok(Self::Host);
        }
        let wrong = || NoSuchDevice(text.to_string());
        let hex = text
            .strip_prefix("GPU-")
            .or_else(|| text.strip_prefix("MIG-"))
            .ok_or_else(wrong)?;
        let hex: Vec<u8> = hex.bytes().filter(|b| *b != b'-').collect();
        if hex.len() != 32 || !hex.is_ascii() {
            return Err(wrong());
        }
        let mut uuid = [0; 16];
        for (byte, pair) in uuid.iter_mut().zip(hex.chunks(2)) {
            let pair = std::str::from_utf8(pair).map_err(|_| wrong())?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| wrong())?;
        }
        Ok(Self::Cuda(uuid))
    }
}

/// Slabs under construction. Dropping one gives its memory back.
pub trait SlabWriter: Send + Sync {
    /// A way in for one thread. Lanes write disjoint ranges side by side.
    ///
    /// # Errors
    /// When its buffers cannot be had.
    fn lane(&self) -> Result<Box<dyn Lane + '_>, SlabError>;

    /// Waits for every write, makes the slabs immutable, and returns their descriptors.
    ///
    /// # Errors
    /// When the device reports a failed write, or a slab cannot be sealed or exported.
    fn finish(self: Box<Self>) -> Result<Export, SlabError>;
}

/// One thread's way into the slabs: fill the buffer, send it, fill the next.
pub trait Lane {
    /// The buffer to fill next, of [`CHUNK`] bytes. Waits until its last content has left it.
    ///
    /// # Errors
    /// When an earlier write failed.
    fn buffer(&mut self) -> Result<&mut [u8], SlabError>;

    /// Writes the buffer's first `len` bytes to `offset` in slab number `slab`.
    ///
    /// # Errors
    /// When the range does not lie in the slab, or the device refuses.
    fn send(&mut self, len: usize, slab: usize, offset: u64) -> Result<(), SlabError>;
}

/// Finished slabs, in order, and what keeps their device alive.
#[derive(Debug)]
pub struct Export {
    /// Where the memory lies.
    pub device: DeviceId,
    /// One descriptor a slab, in the manifest's order.
    pub slabs: Vec<OwnedFd>,
    /// An open device file whose hang-up says that the GPU is gone; none for host slabs.
    pub anchor: Option<OwnedFd>,
}

/// What can go wrong with slabs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SlabError {
    /// The system refused a call.
    #[error("{what}: {source}")]
    System {
        /// What was tried, with sizes.
        what: String,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A received descriptor is not an immutable memory file.
    #[error(
        "{what} is not sealed memory ({why}): refused, because its owner could still change or cut it"
    )]
    NotSealed {
        /// Which descriptor.
        what: String,
        /// What is missing.
        why: String,
    },
    /// A received descriptor has another length than the manifest says.
    #[error("{what} has {found} bytes, the manifest says {wanted}")]
    WrongSize {
        /// Which descriptor.
        what: String,
        /// Length found.
        found: u64,
        /// Length the manifest gives.
        wanted: u64,
    },
    /// A range that does not lie in its slab.
    #[error("{bytes} bytes at {offset} do not lie in slab {slab}")]
    OutOfRange {
        /// The slab's index.
        slab: usize,
        /// The range's start.
        offset: u64,
        /// The range's length.
        bytes: u64,
    },
    /// The device reported a failure, or cannot be used.
    #[error("{0}")]
    Device(String),
    /// A GPU or its driver.
    #[error(transparent)]
    Cuda(Box<cuda::CudaError>),
}

impl From<cuda::CudaError> for SlabError {
    fn from(e: cuda::CudaError) -> Self {
        Self::Cuda(Box::new(e))
    }
}

impl SlabError {
    pub(crate) fn system(what: impl Into<String>, source: impl Into<std::io::Error>) -> Self {
        Self::System {
            what: what.into(),
            source: source.into(),
        }
    }
}

/// The device that a user means: `host`, `cuda:N` as this process numbers its GPUs, or a GPU's UUID.
///
/// # Errors
/// When this process sees no such GPU: the error lists those that it sees.
pub fn resolve(text: &str) -> Result<DeviceId, SlabError> {
    if let Ok(DeviceId::Host) = text.parse() {
        return Ok(DeviceId::Host);
    }
    Ok(cuda::resolve(text)?.id)
}

/// Opens a writer for slabs of the given lengths on `device`.
///
/// # Errors
/// When the device cannot be used from here, or has no room.
pub fn writer(device: DeviceId, slabs: &[u64]) -> Result<Box<dyn SlabWriter>, SlabError> {
    match device {
        DeviceId::Host => Ok(Box::new(host::HostWriter::new(slabs)?)),
        DeviceId::Cuda(_) => Ok(Box::new(cuda::CudaWriter::new(device, slabs)?)),
    }
}
