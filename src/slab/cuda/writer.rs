//! GPU slabs under construction: allocated, zeroed, filled through pinned buffers, exported.
//! Each lane has a stream and two buffers, so that one is filled while the other is copied.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, result, sys};

use super::driver::failed;
use super::vmm::{Access, Allocation, Range, bind, context, synchronize};
use super::{CudaError, GRANULARITY, Gpu, find};
use crate::slab::{CHUNK, DeviceId, Export, Lane, SlabError, SlabWriter};

/// Slabs on a GPU that are being filled. Every byte that is not written stays 0.
#[derive(Debug)]
pub struct CudaWriter {
    gpu: Gpu,
    context: Arc<CudaContext>,
    anchor: Option<OwnedFd>,
    // Before the allocations, so that memory is unmapped before it is released.
    range: Range,
    slabs: Vec<Slab>,
}

#[derive(Debug)]
struct Slab {
    allocation: Allocation,
    start: u64,
    bytes: u64,
}

impl CudaWriter {
    /// Takes slabs of the given lengths on the GPU `device`, and fills them with zeros.
    ///
    /// Everything that can be checked before memory is taken is checked first: the driver, the GPU,
    /// what it supports, its device file, the lengths, and the room.
    ///
    /// # Errors
    /// [`CudaError`] says which of these it was.
    pub fn new(device: DeviceId, slabs: &[u64]) -> Result<Self, SlabError> {
        Ok(Self::create(find(device)?, slabs)?)
    }

    fn create(gpu: Gpu, lengths: &[u64]) -> Result<Self, CudaError> {
        gpu.check_support()?;
        let anchor = gpu.anchor()?;
        let wanted = total(lengths)?;
        let context = context(&gpu)?;
        check_room(&gpu, wanted)?;
        let mut range = Range::reserve(context.clone(), wanted)?;
        let mut slabs = Vec::with_capacity(lengths.len());
        for bytes in lengths {
            let allocation = Allocation::new(&gpu, *bytes)?;
            let start = range.base() + range.mapped();
            range
                .map(&allocation, *bytes)
                .map_err(|e| failed(e, format!("mapping {bytes} bytes of {gpu}")))?;
            slabs.push(Slab {
                allocation,
                start,
                bytes: *bytes,
            });
        }
        range.allow(&gpu, Access::ReadWrite)?;
        let writer = Self {
            gpu,
            context,
            anchor: Some(anchor),
            range,
            slabs,
        };
        writer.zero()?;
        Ok(writer)
    }

    /// candle's kernels read past the end of quantized tensors, and new memory holds what it held.
    fn zero(&self) -> Result<(), CudaError> {
        let bytes = self.range.mapped() as usize;
        // SAFETY: the whole range is mapped and writable, and nobody else knows of it yet.
        unsafe { result::memset_d8_async(self.range.base(), 0, bytes, std::ptr::null_mut()) }
            .map_err(|e| failed(e, format!("zeroing {bytes} bytes of {}", self.gpu)))?;
        synchronize(&self.context)
    }
}

fn total(lengths: &[u64]) -> Result<u64, CudaError> {
    let mut total = 0u64;
    for (i, bytes) in lengths.iter().enumerate() {
        let wrong = || CudaError::Length {
            what: format!("slab {i}"),
            bytes: *bytes,
        };
        if *bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
            return Err(wrong());
        }
        total = total.checked_add(*bytes).ok_or_else(wrong)?;
    }
    if total == 0 {
        return Err(CudaError::Length {
            what: "an entry without slabs".into(),
            bytes: 0,
        });
    }
    Ok(total)
}

fn check_room(gpu: &Gpu, wanted: u64) -> Result<(), CudaError> {
    let (free, total) = gpu.memory()?;
    if wanted > free {
        return Err(CudaError::NoRoom {
            gpu: gpu.clone(),
            wanted,
            free,
            total,
        });
    }
    Ok(())
}

impl SlabWriter for CudaWriter {
    fn lane(&self) -> Result<Box<dyn Lane + '_>, SlabError> {
        Ok(Box::new(CudaLane::new(self)?))
    }

    fn finish(mut self: Box<Self>) -> Result<Export, SlabError> {
        // Also brings the failure of any copy that was queued.
        synchronize(&self.context)?;
        let slabs = self
            .slabs
            .iter()
            .enumerate()
            .map(|(i, slab)| slab.allocation.export(&format!("slab {i}")))
            .collect::<Result<_, _>>()?;
        Ok(Export {
            device: self.gpu.id,
            slabs,
            anchor: self.anchor.take(),
        })
    }
}

impl Drop for CudaWriter {
    fn drop(&mut self) {
        // Copies may still be queued where a lane was given up.
        if let Err(e) = synchronize(&self.context) {
            tracing::error!("{e}");
        }
    }
}

struct CudaLane<'a> {
    writer: &'a CudaWriter,
    stream: Arc<CudaStream>,
    buffers: [Buffer; 2],
    current: usize,
}

impl<'a> CudaLane<'a> {
    fn new(writer: &'a CudaWriter) -> Result<Self, CudaError> {
        let stream = writer
            .context
            .new_stream()
            .map_err(|e| failed(e, format!("opening a stream on {}", writer.gpu)))?;
        let buffers = [Buffer::new(&stream)?, Buffer::new(&stream)?];
        Ok(Self {
            writer,
            stream,
            buffers,
            current: 0,
        })
    }

    fn copy(&mut self, len: usize, address: u64) -> Result<(), CudaError> {
        bind(&self.writer.context)?;
        let buffer = &mut self.buffers[self.current];
        // SAFETY: `address` and `len` lie in one of the writer's slabs, which are mapped writable for
        // its whole life. The buffer is neither touched nor freed before its event has passed.
        let queued = unsafe {
            result::memcpy_htod_async(address, &buffer.bytes()[..len], self.stream.cu_stream())
        };
        queued.map_err(|e| failed(e, format!("copying {len} bytes to {}", self.writer.gpu)))?;
        buffer.mark(&self.stream)?;
        self.current = 1 - self.current;
        Ok(())
    }
}

impl Lane for CudaLane<'_> {
    fn buffer(&mut self) -> Result<&mut [u8], SlabError> {
        bind(&self.writer.context)?;
        Ok(self.buffers[self.current].reuse()?)
    }

    fn send(&mut self, len: usize, slab: usize, offset: u64) -> Result<(), SlabError> {
        let out_of_range = || SlabError::OutOfRange {
            slab,
            offset,
            bytes: len as u64,
        };
        let place = self.writer.slabs.get(slab).ok_or_else(out_of_range)?;
        if len > CHUNK
            || offset
                .checked_add(len as u64)
                .is_none_or(|end| end > place.bytes)
        {
            return Err(out_of_range());
        }
        if len == 0 {
            return Ok(());
        }
        Ok(self.copy(len, place.start + offset)?)
    }
}

/// A host buffer of [`CHUNK`] bytes that the GPU reads from, and the event that says it has.
struct Buffer {
    memory: Memory,
    copied: CudaEvent,
    stream: Arc<CudaStream>,
}

enum Memory {
    /// Taken from the driver: copies run beside the host.
    Pinned(NonNull<u8>),
    /// Where the driver pins no more: copies wait for a staging buffer of its own.
    Pageable(Vec<u8>),
}

// SAFETY: the buffer is owned memory, reached only through the one `Buffer` that owns it.
unsafe impl Send for Memory {}

impl Buffer {
    fn new(stream: &Arc<CudaStream>) -> Result<Self, CudaError> {
        let context = stream.context();
        let copied = context
            .new_event(Some(blocking_event()))
            .map_err(|e| failed(e, "creating an event".into()))?;
        // Not write-combined: the worker hashes what it has read.
        // SAFETY: the memory is set just below, before anybody reads it.
        let memory = match unsafe { result::malloc_host(CHUNK, 0) } {
            Ok(start) => match NonNull::new(start.cast::<u8>()) {
                Some(start) => {
                    // SAFETY: the driver gave CHUNK bytes here.
                    unsafe { start.write_bytes(0, CHUNK) };
                    Memory::Pinned(start)
                }
                None => Memory::Pageable(vec![0; CHUNK]),
            },
            Err(e) => {
                tracing::warn!("pinning {CHUNK} bytes of host memory: {e}; copying without");
                Memory::Pageable(vec![0; CHUNK])
            }
        };
        Ok(Self {
            memory,
            copied,
            stream: stream.clone(),
        })
    }

    fn bytes(&self) -> &[u8] {
        match &self.memory {
            // SAFETY: CHUNK bytes, set at the start, ours until `drop`.
            Memory::Pinned(start) => unsafe { std::slice::from_raw_parts(start.as_ptr(), CHUNK) },
            Memory::Pageable(bytes) => bytes,
        }
    }

    /// Remembers that a copy out of this buffer is queued on `stream`.
    fn mark(&self, stream: &CudaStream) -> Result<(), CudaError> {
        self.copied
            .record(stream)
            .map_err(|e| failed(e, "recording an event".into()))
    }

    /// Waits until the last copy has left the buffer.
    fn reuse(&mut self) -> Result<&mut [u8], CudaError> {
        self.copied
            .synchronize()
            .map_err(|e| failed(e, "copying to the GPU".into()))?;
        Ok(match &mut self.memory {
            // SAFETY: CHUNK bytes, set at the start, ours until `drop`, and borrowed by `&mut self`;
            // the GPU has read what it was to read.
            Memory::Pinned(start) => unsafe {
                std::slice::from_raw_parts_mut(start.as_ptr(), CHUNK)
            },
            Memory::Pageable(bytes) => bytes,
        })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // The stream, not the event: a copy may be queued whose event could not be recorded.
        if let Err(e) = self.stream.synchronize() {
            tracing::error!("waiting for a copy to the GPU: {e}");
        }
        if let Memory::Pinned(start) = self.memory {
            // SAFETY: the driver gave this memory, no copy reads it any more, and it is freed once.
            if let Err(e) = unsafe { result::free_host(start.as_ptr().cast()) } {
                tracing::error!("freeing pinned memory: {e}");
            }
        }
    }
}

/// Waiting on it sleeps instead of spinning.
fn blocking_event() -> sys::CUevent_flags {
    sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC
}
