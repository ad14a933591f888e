//! What there is to say of the driver and of a GPU, for people who look for what is wrong.
//! All but the trial is asked without opening the GPU.

use std::fmt;
use std::os::fd::AsFd;

use cudarc::driver::{result, sys};

use super::driver::{check, failed, start};
use super::{CudaError, CudaMapping, CudaWriter, GRANULARITY, Gpu};
use crate::slab::{SlabError, SlabWriter};

/// A version of CUDA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// The number before the point.
    pub major: u32,
    /// The number behind it.
    pub minor: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Which processes may open a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ComputeMode {
    /// Any number of them.
    Shared,
    /// One at a time.
    Exclusive,
    /// None.
    Prohibited,
    /// A mode that the driver counts so.
    Other(i32),
}

/// What a GPU is, and what it can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Bytes of its memory.
    pub memory_bytes: u64,
    /// Whether it shares the host's memory.
    pub integrated: bool,
    /// Whether it is a slice of a GPU.
    pub mig: bool,
    /// Who may open it.
    pub compute_mode: ComputeMode,
    /// Whether it has virtual memory management.
    pub virtual_memory: bool,
    /// Whether its memory can be had as POSIX descriptors.
    pub descriptors: bool,
    /// Its place on the PCI bus, in lower case, where the driver tells.
    pub bus: Option<String>,
}

/// The newest CUDA that the driver speaks.
///
/// # Errors
/// When there is no usable driver.
pub fn driver_version() -> Result<Version, CudaError> {
    start()?;
    let mut number = 0;
    // SAFETY: the driver has been started, and `number` outlives the call.
    let code = unsafe { sys::cuDriverGetVersion(&mut number) };
    check(code, || "asking for the driver's version".into())?;
    let number = number.unsigned_abs();
    Ok(Version {
        major: number / 1000,
        minor: number % 1000 / 10,
    })
}

impl Gpu {
    /// What this GPU is, and what it can do. Does not open it.
    ///
    /// # Errors
    /// When the driver does not answer.
    pub fn facts(&self) -> Result<Facts, CudaError> {
        use sys::CUdevice_attribute_enum as Attribute;
        let ask = |attribute, what: &str| {
            // SAFETY: `device` is one that the driver gave.
            unsafe { result::device::get_attribute(self.device, attribute) }
                .map_err(|e| failed(e, format!("asking {self} for {what}")))
        };
        // SAFETY: `device` is one that the driver gave.
        let memory = unsafe { result::device::total_mem(self.device) }
            .map_err(|e| failed(e, format!("asking {self} for its memory")))?;
        let compute_mode = match ask(
            Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_MODE,
            "its compute mode",
        )? {
            0 => ComputeMode::Shared,
            2 => ComputeMode::Prohibited,
            3 => ComputeMode::Exclusive,
            other => ComputeMode::Other(other),
        };
        Ok(Facts {
            memory_bytes: memory as u64,
            integrated: ask(
                Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED,
                "what its memory is",
            )? != 0,
            mig: self.name.contains(" MIG "),
            compute_mode,
            virtual_memory: ask(
                Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED,
                "virtual memory management",
            )? != 0,
            descriptors: ask(
                Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                "memory as POSIX descriptors",
            )? != 0,
            bus: self.bus(),
        })
    }

    /// Does once, with one small slab, what serving does: takes, fills, exports, imports, maps, reads.
    /// Opens the GPU.
    ///
    /// # Errors
    /// The first step that fails.
    pub fn try_sharing(&self) -> Result<(), SlabError> {
        const PATTERN: [u8; 4096] = [0xa5; 4096];
        let writer = CudaWriter::new(self.id, &[GRANULARITY])?;
        let mut lane = writer.lane()?;
        lane.buffer()?[..PATTERN.len()].copy_from_slice(&PATTERN);
        lane.send(PATTERN.len(), 0, 0)?;
        drop(lane);
        let export = Box::new(writer).finish()?;
        let slabs: Vec<_> = export
            .slabs
            .iter()
            .map(|fd| (fd.as_fd(), GRANULARITY))
            .collect();
        let mapping = CudaMapping::map(self, &slabs)?;
        let mut read = [0; PATTERN.len()];
        mapping.read(0, 0, &mut read)?;
        mapping.unmap()?;
        if read == PATTERN {
            Ok(())
        } else {
            Err(SlabError::Device(format!(
                "memory of {self} did not come back as it was written"
            )))
        }
    }
}
