//! The driver's virtual memory management: allocations with descriptors, and address ranges to map them in.
//! Each object gives back in `drop` what it took.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use cudarc::driver::{CudaContext, DriverError, sys};

use super::driver::{check, failed};
use super::{CudaError, Gpu};

// The driver's structures, as its header lays them out. cudarc's copies change with the toolkit it
// was built for, and hold the location's kind as a Rust enum, which an unknown kind would break.
#[repr(C)]
#[derive(Clone, Copy)]
struct Location {
    kind: u32,
    id: c_int,
}

#[repr(C)]
struct AllocationProp {
    kind: u32,
    handle_types: u32,
    location: Location,
    win32: *mut c_void,
    flags: [u8; 8],
}

#[repr(C)]
struct AccessDesc {
    location: Location,
    flags: u32,
}

const _: () = {
    assert!(size_of::<AllocationProp>() == size_of::<sys::CUmemAllocationProp>());
    assert!(align_of::<AllocationProp>() == align_of::<sys::CUmemAllocationProp>());
    assert!(size_of::<AccessDesc>() == size_of::<sys::CUmemAccessDesc>());
    assert!(align_of::<AccessDesc>() == align_of::<sys::CUmemAccessDesc>());
};

const ALLOCATION_PINNED: u32 = 1;
const LOCATION_DEVICE: u32 = 1;
const POSIX_DESCRIPTOR: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// What the GPU may do with mapped memory.
#[derive(Clone, Copy, Debug)]
pub(super) enum Access {
    Read,
    ReadWrite,
}

/// Opens a GPU's primary context, the one that candle uses too, and makes it this thread's.
pub(super) fn context(gpu: &Gpu) -> Result<Arc<CudaContext>, CudaError> {
    CudaContext::new(gpu.ordinal).map_err(|e| failed(e, format!("opening {gpu}")))
}

/// Makes `context` this thread's.
pub(super) fn bind(context: &CudaContext) -> Result<(), CudaError> {
    context
        .bind_to_thread()
        .map_err(|e| failed(e, format!("turning to cuda:{}", context.ordinal())))
}

/// Waits for everything that any thread queued on the GPU from this process.
pub(super) fn synchronize(context: &CudaContext) -> Result<(), CudaError> {
    context
        .synchronize()
        .map_err(|e| failed(e, format!("waiting for cuda:{}", context.ordinal())))
}

/// One allocation of a GPU's memory.
#[derive(Debug)]
pub(super) struct Allocation(sys::CUmemGenericAllocationHandle);

impl Allocation {
    /// Takes memory on `gpu` that can be exported. Its content is not set.
    pub(super) fn new(gpu: &Gpu, bytes: u64) -> Result<Self, CudaError> {
        let prop = AllocationProp {
            kind: ALLOCATION_PINNED,
            handle_types: POSIX_DESCRIPTOR.0,
            location: location(gpu),
            win32: std::ptr::null_mut(),
            flags: [0; 8],
        };
        let mut handle = 0;
        // SAFETY: `prop` has the layout of the driver's structure, and both outlive the call.
        let code =
            unsafe { sys::cuMemCreate(&mut handle, bytes as usize, (&raw const prop).cast(), 0) };
        check(code, || format!("taking {bytes} bytes of {gpu}"))?;
        Ok(Self(handle))
    }

    /// Takes part in the allocation behind a descriptor that another process exported.
    pub(super) fn import(fd: BorrowedFd<'_>, what: &str) -> Result<Self, CudaError> {
        let mut handle = 0;
        // The driver wants the descriptor's number in place of a pointer.
        let os_handle = fd.as_raw_fd() as usize as *mut c_void;
        // SAFETY: the descriptor is open during the call; what it is, the driver checks.
        let code = unsafe {
            sys::cuMemImportFromShareableHandle(&mut handle, os_handle, POSIX_DESCRIPTOR)
        };
        check(code, || format!("importing {what}"))?;
        Ok(Self(handle))
    }

    /// A descriptor that keeps this memory alive and lets others import it. Close-on-exec.
    pub(super) fn export(&self, what: &str) -> Result<OwnedFd, CudaError> {
        let mut fd: c_int = -1;
        // SAFETY: for this handle type the driver writes one descriptor, a C int.
        let code = unsafe {
            sys::cuMemExportToShareableHandle((&raw mut fd).cast(), self.0, POSIX_DESCRIPTOR, 0)
        };
        check(code, || format!("exporting {what}"))?;
        // SAFETY: the call succeeded, so `fd` is a new descriptor that nobody else owns.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// The ordinal, in this process, of the GPU that the memory lies on; `None` where it lies on a
    /// GPU that this process does not see, or on no GPU.
    pub(super) fn ordinal(&self, what: &str) -> Result<Option<usize>, CudaError> {
        let mut prop = AllocationProp {
            kind: 0,
            handle_types: 0,
            location: Location { kind: 0, id: -1 },
            win32: std::ptr::null_mut(),
            flags: [0; 8],
        };
        // SAFETY: `prop` has the layout of the driver's structure, every bit pattern of it is valid,
        // and the handle is live.
        let code =
            unsafe { sys::cuMemGetAllocationPropertiesFromHandle((&raw mut prop).cast(), self.0) };
        check(code, || format!("asking where {what} lies"))?;
        if prop.location.kind != LOCATION_DEVICE {
            return Ok(None);
        }
        Ok(usize::try_from(prop.location.id).ok())
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: the handle is live and released once. Mappings and descriptors keep the memory.
        let code = unsafe { sys::cuMemRelease(self.0) };
        log(code, "releasing a slab");
    }
}

/// A reserved range of addresses, filled with mappings from its start.
#[derive(Debug)]
pub(super) struct Range {
    context: Arc<CudaContext>,
    base: sys::CUdeviceptr,
    reserved: usize,
    mapped: usize,
}

impl Range {
    /// Reserves `bytes` of addresses for `context`'s GPU.
    pub(super) fn reserve(context: Arc<CudaContext>, bytes: u64) -> Result<Self, CudaError> {
        bind(&context)?;
        let reserved = bytes as usize;
        let mut base = 0;
        // SAFETY: `base` outlives the call; the driver chooses the address.
        let code = unsafe { sys::cuMemAddressReserve(&mut base, reserved, 0, 0, 0) };
        check(code, || format!("reserving {bytes} bytes of addresses"))?;
        Ok(Self {
            context,
            base,
            reserved,
            mapped: 0,
        })
    }

    pub(super) fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// The first address.
    pub(super) fn base(&self) -> sys::CUdeviceptr {
        self.base
    }

    /// Bytes mapped, from the range's start.
    pub(super) fn mapped(&self) -> u64 {
        self.mapped as u64
    }

    /// Maps the first `bytes` of `allocation` after what is mapped already. Not accessible yet.
    pub(super) fn map(&mut self, allocation: &Allocation, bytes: u64) -> Result<(), DriverError> {
        let size = bytes as usize;
        if size > self.reserved - self.mapped {
            return Err(DriverError(sys::CUresult::CUDA_ERROR_INVALID_VALUE));
        }
        let at = self.base + self.mapped as u64;
        // SAFETY: [at, at + size) lies in our reservation, and nothing is mapped there.
        unsafe { sys::cuMemMap(at, size, 0, allocation.0, 0) }.result()?;
        self.mapped += size;
        Ok(())
    }

    /// Unmaps the last `bytes`, one whole mapping. Nothing may use them.
    pub(super) fn unmap_last(&mut self, bytes: u64) -> Result<(), CudaError> {
        let size = bytes as usize;
        let at = self.base + (self.mapped - size) as u64;
        // SAFETY: the caller mapped exactly these bytes last, and has given their address to nobody.
        let code = unsafe { sys::cuMemUnmap(at, size) };
        check(code, || format!("unmapping {bytes} bytes"))?;
        self.mapped -= size;
        Ok(())
    }

    /// Lets `gpu` read, or read and write, everything mapped.
    pub(super) fn allow(&self, gpu: &Gpu, access: Access) -> Result<(), CudaError> {
        let flags = match access {
            Access::Read => sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ,
            Access::ReadWrite => sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let desc = AccessDesc {
            location: location(gpu),
            flags: flags as u32,
        };
        // SAFETY: the range is mapped, and `desc` has the layout of the driver's structure.
        let code =
            unsafe { sys::cuMemSetAccess(self.base, self.mapped, (&raw const desc).cast(), 1) };
        check(code, || {
            format!("making {} bytes accessible to {gpu}", self.mapped)
        })
    }

    /// Unmaps and gives the addresses back. Nothing may use them any more.
    pub(super) fn close(mut self) -> Result<(), CudaError> {
        self.release()
    }

    fn release(&mut self) -> Result<(), CudaError> {
        if self.reserved == 0 {
            return Ok(());
        }
        bind(&self.context)?;
        if self.mapped > 0 {
            // SAFETY: this is the whole of what was mapped here, and whoever closes or drops the
            // range has seen to it that no queued work and no slice uses it.
            let code = unsafe { sys::cuMemUnmap(self.base, self.mapped) };
            check(code, || format!("unmapping {} bytes", self.mapped))?;
            self.mapped = 0;
        }
        // SAFETY: the reservation is ours and nothing is mapped in it.
        let code = unsafe { sys::cuMemAddressFree(self.base, self.reserved) };
        let reserved = std::mem::take(&mut self.reserved);
        check(code, || {
            format!("giving back {reserved} bytes of addresses")
        })
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        if let Err(e) = self.release() {
            tracing::error!("{e}");
        }
    }
}

fn location(gpu: &Gpu) -> Location {
    Location {
        kind: LOCATION_DEVICE,
        id: gpu.device,
    }
}

fn log(code: sys::CUresult, what: &str) {
    if let Err(e) = check(code, || what.to_string()) {
        tracing::error!("{e}");
    }
}
