//! Received GPU slabs, mapped one after the other into one range, read-only to the GPU itself.
//! Unmapped by [`CudaMapping::unmap`] alone: dropping one leaves it mapped.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use cudarc::driver::{CudaContext, result, sys};

use super::driver::failed;
use super::vmm::{Access, Allocation, Range, bind, context, synchronize};
use super::{CudaError, GRANULARITY, Gpu, gpu};
use crate::slab::SlabError;

/// One entry's slabs in this process's view of a GPU.
///
/// The addresses it gives are plain numbers. Whoever makes something of one that the GPU reads keeps
/// the mapping until that is gone: only [`CudaMapping::unmap`] ends it.
#[derive(Debug)]
pub struct CudaMapping {
    gpu: Gpu,
    /// `None` once unmapped.
    range: Option<Range>,
    slabs: Vec<Place>,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    /// Bytes from the range's start.
    start: u64,
    bytes: u64,
}

impl CudaMapping {
    /// Maps slabs, in order, for `gpu`: each a descriptor and the length that the manifest gives.
    ///
    /// # Errors
    /// [`CudaError::Elsewhere`] when a slab lies on another GPU (the import itself would succeed),
    /// [`CudaError::WrongSize`] when its length is another. Nothing stays mapped then.
    pub fn map(gpu: &Gpu, slabs: &[(BorrowedFd<'_>, u64)]) -> Result<Self, SlabError> {
        Ok(Self::import(gpu, slabs)?)
    }

    fn import(gpu: &Gpu, slabs: &[(BorrowedFd<'_>, u64)]) -> Result<Self, CudaError> {
        gpu.check_support()?;
        let mut total = 0u64;
        for (i, (_, bytes)) in slabs.iter().enumerate() {
            let wrong = || CudaError::Length {
                what: format!("slab {i}"),
                bytes: *bytes,
            };
            if *bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
                return Err(wrong());
            }
            // One granule more than the slabs: see `map_exactly`.
            total = total
                .checked_add(*bytes)
                .filter(|t| t.checked_add(GRANULARITY).is_some())
                .ok_or_else(wrong)?;
        }
        if slabs.is_empty() {
            return Err(CudaError::Length {
                what: "an entry without slabs".into(),
                bytes: 0,
            });
        }
        let mut range = Range::reserve(context(gpu)?, total + GRANULARITY)?;
        let mut places = Vec::with_capacity(slabs.len());
        for (i, (fd, bytes)) in slabs.iter().enumerate() {
            let what = format!("slab {i}");
            let allocation = Allocation::import(*fd, &what)?;
            check_location(&allocation, gpu, &what)?;
            places.push(Place {
                start: range.mapped(),
                bytes: *bytes,
            });
            map_exactly(&mut range, &allocation, *bytes, &what)?;
        }
        range.allow(gpu, Access::Read)?;
        Ok(Self {
            gpu: gpu.clone(),
            range: Some(range),
            slabs: places,
        })
    }

    /// The GPU whose memory this is.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Bytes mapped: the sum of the slabs.
    pub fn bytes(&self) -> u64 {
        self.slabs.iter().map(|s| s.bytes).sum()
    }

    /// The GPU address of a part of slab number `slab`.
    ///
    /// # Errors
    /// When the part does not lie in the slab.
    pub fn address(&self, slab: usize, offset: u64, bytes: u64) -> Result<u64, SlabError> {
        let out_of_range = || SlabError::OutOfRange {
            slab,
            offset,
            bytes,
        };
        let place = self.slabs.get(slab).ok_or_else(out_of_range)?;
        let range = self.range.as_ref().ok_or_else(out_of_range)?;
        if offset
            .checked_add(bytes)
            .is_none_or(|end| end > place.bytes)
        {
            return Err(out_of_range());
        }
        Ok(range.base() + place.start + offset)
    }

    /// Copies a part of a slab to the host.
    ///
    /// # Errors
    /// When the part does not lie in the slab, or the copy fails.
    pub fn read(&self, slab: usize, offset: u64, to: &mut [u8]) -> Result<(), SlabError> {
        let address = self.address(slab, offset, to.len() as u64)?;
        if to.is_empty() {
            return Ok(());
        }
        bind(self.context()?)?;
        // SAFETY: the address is mapped and readable for `to.len()` bytes, and its content is final.
        unsafe { result::memcpy_dtoh_sync(to, address) }
            .map_err(|e| failed(e, format!("reading {} bytes of slab {slab}", to.len())))?;
        Ok(())
    }

    /// Waits for everything queued on the GPU, then unmaps. Whatever used an address of this mapping
    /// must be gone.
    ///
    /// # Errors
    /// When the GPU reports a failure. Memory then stays mapped until the process ends.
    pub fn unmap(mut self) -> Result<(), SlabError> {
        self.synchronize()?;
        if let Some(range) = self.range.take() {
            range.close()?;
        }
        Ok(())
    }

    /// Waits for everything that any thread of this process has queued on the GPU.
    ///
    /// # Errors
    /// When the GPU reports a failure, or a stream is being captured.
    pub fn synchronize(&self) -> Result<(), SlabError> {
        Ok(synchronize(self.context()?)?)
    }

    fn context(&self) -> Result<&Arc<CudaContext>, CudaError> {
        match &self.range {
            Some(range) => Ok(range.context()),
            None => Err(CudaError::Driver {
                what: "using slabs".into(),
                code: "unmapped".into(),
                meaning: "they have been unmapped".into(),
            }),
        }
    }
}

impl Drop for CudaMapping {
    fn drop(&mut self) {
        // Kernels may be queued, and tensors alive, that read these addresses.
        if let Some(range) = self.range.take() {
            tracing::debug!(
                "{} bytes of {} stay mapped until this process ends",
                range.mapped(),
                self.gpu
            );
            std::mem::forget(range);
        }
    }
}

/// The driver imports memory of any GPU, visible or not, and kernels would read it over the link
/// between them.
fn check_location(allocation: &Allocation, wanted: &Gpu, what: &str) -> Result<(), CudaError> {
    let found = match allocation.ordinal(what)? {
        Some(ordinal) if ordinal == wanted.ordinal => return Ok(()),
        Some(ordinal) => match gpu(ordinal) {
            Ok(found) => found.to_string(),
            Err(_) => format!("cuda:{ordinal}"),
        },
        None => "a GPU that this process does not see (CUDA_VISIBLE_DEVICES)".into(),
    };
    Err(CudaError::Elsewhere {
        what: what.to_string(),
        wanted: wanted.clone(),
        found,
    })
}

/// An allocation's length cannot be asked for. One granule too many must be refused, the length
/// itself must not.
fn map_exactly(
    range: &mut Range,
    allocation: &Allocation,
    bytes: u64,
    what: &str,
) -> Result<(), CudaError> {
    let wrong = |than| CudaError::WrongSize {
        what: what.to_string(),
        wanted: bytes,
        than,
    };
    if range.map(allocation, bytes + GRANULARITY).is_ok() {
        range.unmap_last(bytes + GRANULARITY)?;
        return Err(wrong("longer"));
    }
    range.map(allocation, bytes).map_err(|e| match e.0 {
        // Both were seen for lengths that the allocation does not have.
        sys::CUresult::CUDA_ERROR_INVALID_VALUE | sys::CUresult::CUDA_ERROR_NOT_SUPPORTED => {
            wrong("of another length")
        }
        _ => failed(e, format!("mapping {bytes} bytes of {what}")),
    })
}
