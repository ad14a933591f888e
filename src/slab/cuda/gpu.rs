//! Which GPUs there are, by ordinal and UUID, what they can do, and their device files.
//! UUIDs come from `cuDeviceGetUuid_v2`, so that a MIG instance has its own and every process agrees.

use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::os::fd::OwnedFd;

use cudarc::driver::{result, sys};

use super::driver::{check, failed, start};
use super::vmm::context;
use super::{CudaError, Visible};
use crate::slab::DeviceId;

/// A GPU that this process sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Its number in this process, as in `cuda:N`. `CUDA_VISIBLE_DEVICES` chooses and orders these.
    pub ordinal: usize,
    /// Its product name.
    pub name: String,
    /// Its identity, the same in every process.
    pub id: DeviceId,
    pub(super) device: sys::CUdevice,
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cuda:{} ({}, {})", self.ordinal, self.name, self.id)
    }
}

/// Every GPU that this process sees, by ordinal.
///
/// # Errors
/// When there is no usable driver. No GPU at all is an empty list.
pub fn gpus() -> Result<Vec<Gpu>, CudaError> {
    start()?;
    let mut count = 0;
    // SAFETY: the driver has been started, and `count` outlives the call.
    let code = unsafe { sys::cuDeviceGetCount(&mut count) };
    if matches!(
        code,
        sys::CUresult::CUDA_ERROR_NO_DEVICE | sys::CUresult::CUDA_ERROR_NOT_INITIALIZED
    ) {
        return Ok(Vec::new());
    }
    check(code, || "counting GPUs".into())?;
    (0..count).map(describe).collect()
}

/// The GPU with this ordinal.
///
/// # Errors
/// [`CudaError::NoSuchGpu`] lists those that are visible.
pub fn gpu(ordinal: usize) -> Result<Gpu, CudaError> {
    let mut gpus = gpus()?;
    if ordinal < gpus.len() {
        return Ok(gpus.swap_remove(ordinal));
    }
    Err(CudaError::NoSuchGpu {
        asked: format!("cuda:{ordinal}"),
        visible: Visible::new(gpus),
    })
}

/// The GPU with this identity.
///
/// # Errors
/// [`CudaError::NoSuchGpu`] lists those that are visible.
pub fn find(id: DeviceId) -> Result<Gpu, CudaError> {
    let gpus = gpus()?;
    match gpus.iter().find(|g| g.id == id) {
        Some(gpu) => Ok(gpu.clone()),
        None => Err(CudaError::NoSuchGpu {
            asked: id.to_string(),
            visible: Visible::new(gpus),
        }),
    }
}

/// The GPU that a text means: `cuda`, `cuda:N`, or a UUID as `nvidia-smi -L` prints it.
///
/// # Errors
/// [`CudaError::NoSuchGpu`] lists those that are visible.
pub fn resolve(text: &str) -> Result<Gpu, CudaError> {
    let ordinal = match text.strip_prefix("cuda") {
        Some("") => Some(0),
        Some(rest) => rest.strip_prefix(':').and_then(|n| n.parse().ok()),
        None => None,
    };
    if let Some(ordinal) = ordinal {
        return gpu(ordinal);
    }
    match text.parse() {
        Ok(id @ DeviceId::Cuda(_)) => find(id),
        _ => Err(CudaError::NoSuchGpu {
            asked: format!("GPU `{text}`"),
            visible: Visible::new(gpus()?),
        }),
    }
}

fn describe(ordinal: c_int) -> Result<Gpu, CudaError> {
    let device = result::device::get(ordinal)
        .map_err(|e| failed(e, format!("opening GPU number {ordinal}")))?;
    let name = result::device::get_name(device)
        .map_err(|e| failed(e, format!("asking for the name of cuda:{ordinal}")))?;
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: `device` is one that the driver gave, and `uuid` outlives the call.
    let code = unsafe { sys::cuDeviceGetUuid_v2(&mut uuid, device) };
    check(code, || format!("asking for the UUID of cuda:{ordinal}"))?;
    Ok(Gpu {
        // The driver counts from 0 upwards.
        ordinal: ordinal as usize,
        name,
        id: DeviceId::Cuda(uuid.bytes.map(|b| b as u8)),
        device,
    })
}

impl Gpu {
    /// Checks that this GPU's memory can travel between processes.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] says what is missing.
    pub fn check_support(&self) -> Result<(), CudaError> {
        use sys::CUdevice_attribute_enum as Attribute;
        let wanted = [
            (
                Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED,
                "virtual memory management",
            ),
            (
                Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                "memory as POSIX descriptors",
            ),
        ];
        for (attribute, what) in wanted {
            // SAFETY: `device` is one that the driver gave.
            let has = unsafe { result::device::get_attribute(self.device, attribute) }
                .map_err(|e| failed(e, format!("asking {self} for {what}")))?;
            if has == 0 {
                return Err(CudaError::Unsupported {
                    gpu: self.clone(),
                    what,
                });
            }
        }
        Ok(())
    }

    /// Bytes of memory free now, and in all. Opens the GPU, which itself takes some.
    ///
    /// # Errors
    /// When the GPU cannot be opened.
    pub fn memory(&self) -> Result<(u64, u64), CudaError> {
        let (free, total) = context(self)?
            .mem_get_info()
            .map_err(|e| failed(e, format!("asking {self} for its free memory")))?;
        Ok((free as u64, total as u64))
    }

    /// Opens this GPU's device file. Held open it keeps the GPU's memory alive where persistence
    /// mode is off; its hang-up says that the GPU is gone. Takes no memory of the GPU.
    ///
    /// # Errors
    /// When the file cannot be found or opened.
    pub fn anchor(&self) -> Result<OwnedFd, CudaError> {
        let no_anchor = |why: String| CudaError::NoAnchor {
            gpu: self.clone(),
            why,
        };
        let minor = match self.minor() {
            Some(minor) => minor,
            // Where /proc/driver/nvidia is hidden, a container usually shows one GPU's file.
            None => match device_files()[..] {
                [only] => only,
                [] => return Err(no_anchor("there is no /dev/nvidia0 or the like".into())),
                _ => return Err(no_anchor("/proc/driver/nvidia does not tell which".into())),
            },
        };
        let path = format!("/dev/nvidia{minor}");
        std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path)
            .map(OwnedFd::from)
            .map_err(|e| no_anchor(format!("{path}: {e}")))
    }

    /// The number in this GPU's device file's name.
    fn minor(&self) -> Option<u32> {
        let bus = self.bus()?;
        let text =
            std::fs::read_to_string(format!("/proc/driver/nvidia/gpus/{bus}/information")).ok()?;
        parse_minor(&text)
    }

    /// This GPU's place on the PCI bus, in lower case.
    pub(super) fn bus(&self) -> Option<String> {
        let mut bus: [c_char; 32] = [0; 32];
        // SAFETY: the driver writes at most 32 bytes, with a final zero, into a buffer of 32.
        let code = unsafe { sys::cuDeviceGetPCIBusId(bus.as_mut_ptr(), 32, self.device) };
        code.result().ok()?;
        bus[31] = 0;
        // SAFETY: the buffer ends with a zero.
        let bus = unsafe { CStr::from_ptr(bus.as_ptr()) };
        Some(bus.to_str().ok()?.to_lowercase())
    }
}

fn parse_minor(information: &str) -> Option<u32> {
    information
        .lines()
        .find_map(|line| line.strip_prefix("Device Minor:"))?
        .trim()
        .parse()
        .ok()
}

fn device_files() -> Vec<u32> {
    let Ok(files) = std::fs::read_dir("/dev") else {
        return Vec::new();
    };
    files
        .flatten()
        .filter_map(|f| f.file_name().to_str()?.strip_prefix("nvidia")?.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::parse_minor;

    #[test]
    fn a_device_files_number_is_read_from_the_drivers_page() {
        let page = "Model: \t\t NVIDIA H200\nIRQ:   \t\t 256\nGPU UUID: \t GPU-1\nBus Type: \t PCIe\n\
                    Device Minor: \t 3\nGPU Excluded:\t No\n";
        assert_eq!(parse_minor(page), Some(3));
        assert_eq!(parse_minor("Model: \t NVIDIA H200\n"), None);
        assert_eq!(parse_minor("Device Minor: \t many\n"), None);
    }
}
