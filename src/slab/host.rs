//! Host slabs: sealed memfds.
//! Written with `pwrite`, sealed, then sent; mapped private and read-only, after the seals are checked.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use super::{CHUNK, DeviceId, Export, Lane, SlabError, SlabWriter};

const SEALS: SealFlags = SealFlags::WRITE
    .union(SealFlags::SHRINK)
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// `TMPFS_MAGIC` of linux/magic.h: what `statfs` says of a plain memory file.
const TMPFS: rustix::fs::FsWord = 0x0102_1994;

/// Host slabs that are being filled.
#[derive(Debug)]
pub struct HostWriter {
    slabs: Vec<(OwnedFd, u64)>,
}

impl HostWriter {
    /// Creates one memfd of each length. Pages are taken as they are written.
    ///
    /// # Errors
    /// When the system has no memory files or no descriptor left.
    pub fn new(slabs: &[u64]) -> Result<Self, SlabError> {
        let slabs = slabs
            .iter()
            .map(|bytes| {
                let fd = new_memfd("candle-ipc-cache slab")?;
                rustix::fs::ftruncate(&fd, *bytes)
                    .map_err(|e| SlabError::system(format!("sizing a slab of {bytes} bytes"), e))?;
                Ok((fd, *bytes))
            })
            .collect::<Result<_, SlabError>>()?;
        Ok(Self { slabs })
    }
}

impl SlabWriter for HostWriter {
    fn lane(&self) -> Result<Box<dyn Lane + '_>, SlabError> {
        Ok(Box::new(HostLane {
            writer: self,
            buffer: vec![0; CHUNK],
        }))
    }

    fn finish(self: Box<Self>) -> Result<Export, SlabError> {
        let slabs = self
            .slabs
            .into_iter()
            .map(|(fd, _)| seal(fd))
            .collect::<Result<_, _>>()?;
        Ok(Export {
            device: DeviceId::Host,
            slabs,
            anchor: None,
        })
    }
}

struct HostLane<'a> {
    writer: &'a HostWriter,
    buffer: Vec<u8>,
}

impl Lane for HostLane<'_> {
    fn buffer(&mut self) -> Result<&mut [u8], SlabError> {
        Ok(&mut self.buffer)
    }

    fn send(&mut self, len: usize, slab: usize, offset: u64) -> Result<(), SlabError> {
        let out_of_range = || SlabError::OutOfRange {
            slab,
            offset,
            bytes: len as u64,
        };
        let (fd, bytes) = self.writer.slabs.get(slab).ok_or_else(out_of_range)?;
        if offset
            .checked_add(len as u64)
            .is_none_or(|end| end > *bytes)
        {
            return Err(out_of_range());
        }
        write_all_at(fd.as_fd(), &self.buffer[..len], offset)
    }
}

/// Puts `bytes` into a new sealed memory file.
///
/// # Errors
/// When the system has no memory for it.
pub fn sealed(name: &str, bytes: &[u8]) -> Result<OwnedFd, SlabError> {
    let fd = new_memfd(name)?;
    write_all_at(fd.as_fd(), bytes, 0)?;
    seal(fd)
}

fn new_memfd(name: &str) -> Result<OwnedFd, SlabError> {
    rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .map_err(|e| SlabError::system("creating a memory file", e))
}

fn write_all_at(fd: BorrowedFd<'_>, mut bytes: &[u8], mut offset: u64) -> Result<(), SlabError> {
    while !bytes.is_empty() {
        match rustix::io::pwrite(fd, bytes, offset) {
            Ok(0) => {
                return Err(SlabError::system(
                    "writing a slab",
                    io::Error::from(io::ErrorKind::WriteZero),
                ));
            }
            Ok(n) => {
                bytes = &bytes[n..];
                offset += n as u64;
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => {
                return Err(SlabError::system(
                    format!("writing {} bytes to a slab", bytes.len()),
                    e,
                ));
            }
        }
    }
    Ok(())
}

fn seal(fd: OwnedFd) -> Result<OwnedFd, SlabError> {
    rustix::fs::fcntl_add_seals(&fd, SEALS).map_err(|e| SlabError::system("sealing a slab", e))?;
    Ok(fd)
}

/// Checks that `fd` is memory that nobody can change or cut any more, and returns its length.
///
/// # Errors
/// [`SlabError::NotSealed`] names the seals that are missing.
pub fn check_sealed(fd: BorrowedFd<'_>, what: &str) -> Result<u64, SlabError> {
    let not_sealed = |why: String| SlabError::NotSealed {
        what: what.to_string(),
        why,
    };
    let seals =
        rustix::fs::fcntl_get_seals(fd).map_err(|_| not_sealed("it takes no seals".into()))?;
    // Memory of huge pages takes the same seals, and a page that is not to be had is a SIGBUS to its reader.
    let filesystem =
        rustix::fs::fstatfs(fd).map_err(|e| SlabError::system(format!("examining {what}"), e))?;
    if filesystem.f_type != TMPFS {
        return Err(not_sealed("it is no memory file of plain pages".into()));
    }
    if !seals.contains(SEALS) {
        let missing: Vec<_> = (SEALS - seals)
            .iter_names()
            .map(|(name, _)| name.to_lowercase())
            .collect();
        return Err(not_sealed(format!("missing: {}", missing.join(", "))));
    }
    let stat =
        rustix::fs::fstat(fd).map_err(|e| SlabError::system(format!("examining {what}"), e))?;
    Ok(stat.st_size as u64)
}

/// One sealed memory file, mapped private and read-only until dropped.
#[derive(Debug)]
pub struct HostMapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is immutable for its whole life (sealed against writing and shrinking before
// it was mapped, and mapped without write permission), so any thread may read it.
unsafe impl Send for HostMapping {}
// SAFETY: as above.
unsafe impl Sync for HostMapping {}

impl HostMapping {
    /// Maps `fd` after checking its seals and, where given, its length.
    ///
    /// # Errors
    /// When the descriptor is not sealed memory, has another length, or cannot be mapped.
    pub fn map(fd: BorrowedFd<'_>, wanted: Option<u64>, what: &str) -> Result<Self, SlabError> {
        let found = check_sealed(fd, what)?;
        if let Some(wanted) = wanted.filter(|w| *w != found) {
            return Err(SlabError::WrongSize {
                what: what.to_string(),
                found,
                wanted,
            });
        }
        let bytes = usize::try_from(found).map_err(|_| {
            SlabError::Device(format!(
                "{what} of {found} bytes is too large for this machine"
            ))
        })?;
        if bytes == 0 {
            return Ok(Self {
                start: NonNull::dangling(),
                bytes,
            });
        }
        // SAFETY: a fresh private mapping at an address the kernel chooses aliases nothing of ours.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
                fd,
                0,
            )
        }
        .map_err(|e| SlabError::system(format!("mapping {what} of {bytes} bytes"), e))?;
        let start = NonNull::new(start.cast())
            .ok_or_else(|| SlabError::Device(format!("{what} was mapped at address 0")))?;
        Ok(Self { start, bytes })
    }

    /// The mapped bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `start` is valid for `bytes` bytes until drop, and the memory behind it is sealed
        // against writing and shrinking, so it neither changes nor goes away.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }
}

impl Drop for HostMapping {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: the range is exactly the one that `map` mapped, and every borrow of it has ended.
            let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
            if let Err(e) = unmapped {
                tracing::error!("unmapping {} bytes of shared memory: {e}", self.bytes);
            }
        }
    }
}
