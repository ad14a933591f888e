//! `--device`: host memory, a GPU by its number in this process, or a GPU by its UUID.
//! The daemon knows UUIDs only: numbers mean something else in a process with other visible GPUs.

use std::fmt;
use std::str::FromStr;

use candle_ipc_cache::slab::cuda::{self, CudaError};
use candle_ipc_cache::slab::{DeviceId, NoSuchDevice};

/// A device as the command line names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceArg {
    /// `host`, or a UUID.
    Id(DeviceId),
    /// `cuda:N`; `cuda` is the first.
    Ordinal(u32),
}

impl FromStr for DeviceArg {
    type Err = NoSuchDevice;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.strip_prefix("cuda") {
            Some("") => Ok(Self::Ordinal(0)),
            Some(rest) => rest
                .strip_prefix(':')
                .filter(|n| n.bytes().all(|b| b.is_ascii_digit()))
                .and_then(|n| n.parse().ok())
                .map(Self::Ordinal)
                .ok_or_else(|| NoSuchDevice(text.to_string())),
            None => text.parse().map(Self::Id),
        }
    }
}

impl fmt::Display for DeviceArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Id(id) => id.fmt(f),
            Self::Ordinal(n) => write!(f, "cuda:{n}"),
        }
    }
}

impl DeviceArg {
    /// The device's identity, for a question to the daemon: it may hold entries of a GPU that is not visible here.
    pub fn identity(self) -> Result<DeviceId, CudaError> {
        match self {
            Self::Id(id) => Ok(id),
            // A u32 fits into a usize on every system that has CUDA.
            Self::Ordinal(n) => Ok(cuda::gpu(n as usize)?.id),
        }
    }

    /// The device, seen to be one that this process can fill: a driver, a visible GPU, memory that can be shared.
    pub fn to_fill(self) -> Result<DeviceId, CudaError> {
        let gpu = match self {
            Self::Id(DeviceId::Host) => return Ok(DeviceId::Host),
            Self::Id(id) => cuda::find(id)?,
            Self::Ordinal(n) => cuda::gpu(n as usize)?,
        };
        gpu.check_support()?;
        Ok(gpu.id)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_device_is_host_a_number_or_a_uuid_and_nothing_else() {
        let uuid = "GPU-00112233-4455-6677-8899-aabbccddeeff";
        for (text, wanted) in [
            ("host", "host"),
            ("cpu", "host"),
            ("cuda", "cuda:0"),
            ("cuda:7", "cuda:7"),
            (uuid, uuid),
        ] {
            let device: DeviceArg = text.parse().unwrap();
            assert_eq!(device.to_string(), wanted);
        }
        for text in [
            "",
            "tpu",
            "cuda:",
            "cuda:+1",
            "cuda:-1",
            "cuda:x",
            "cuda0",
            "cuda:4294967296",
            "GPU-12",
        ] {
            let wrong = text.parse::<DeviceArg>().unwrap_err().to_string();
            assert!(
                wrong.starts_with(&format!("`{text}` is no device")),
                "{wrong}"
            );
        }
    }
}
