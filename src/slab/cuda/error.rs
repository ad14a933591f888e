//! What can go wrong on the way to a GPU's memory.
//! A message names the GPU, what was wanted and what was found, and the way out.

use std::fmt;

use super::{GRANULARITY, Gpu};

/// The GPUs that this process sees, for messages.
#[derive(Clone, Debug)]
pub struct Visible {
    /// Every visible GPU.
    pub gpus: Vec<Gpu>,
    /// `CUDA_VISIBLE_DEVICES`, where it is set.
    pub variable: Option<String>,
}

impl Visible {
    pub(super) fn new(gpus: Vec<Gpu>) -> Self {
        let variable =
            std::env::var_os("CUDA_VISIBLE_DEVICES").map(|v| v.to_string_lossy().into_owned());
        Self { gpus, variable }
    }
}

impl fmt::Display for Visible {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.gpus.is_empty() {
            f.write_str("this process sees no GPU")?;
        } else {
            f.write_str("this process sees ")?;
            for (i, gpu) in self.gpus.iter().enumerate() {
                if i > 0 {
                    f.write_str(", ")?;
                }
                write!(f, "{gpu}")?;
            }
        }
        match &self.variable {
            Some(value) => write!(f, "; CUDA_VISIBLE_DEVICES is `{value}`"),
            None => f.write_str("; CUDA_VISIBLE_DEVICES is not set"),
        }
    }
}

/// What can go wrong with a GPU and its memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// There is no driver here.
    #[error(
        "no NVIDIA driver was found ({why}): install one, start the container with its GPUs (`--gpus all`), or \
         use `--device host`"
    )]
    NoDriver {
        /// What the system said about the driver's library.
        why: String,
    },
    /// The driver is older than its interface for this.
    #[error(
        "the NVIDIA driver speaks CUDA {}, at least CUDA {} is needed: install a newer driver",
        version(*found),
        version(*wanted)
    )]
    OldDriver {
        /// The version found, as the driver counts: 12040 is 12.4.
        found: i32,
        /// The version needed.
        wanted: i32,
    },
    /// The driver refused a call.
    #[error("{what}: {code} ({meaning})")]
    Driver {
        /// What was tried, with sizes.
        what: String,
        /// The driver's name for the failure.
        code: String,
        /// The driver's words for it.
        meaning: String,
    },
    /// No visible GPU is the one asked for.
    #[error("there is no {asked} here: {visible}")]
    NoSuchGpu {
        /// The GPU asked for.
        asked: String,
        /// What is there instead.
        visible: Visible,
    },
    /// The GPU or its driver lacks what memory needs to travel.
    #[error("{gpu} cannot share memory: its driver has no {what} here; use `--device host`")]
    Unsupported {
        /// The GPU.
        gpu: Gpu,
        /// What is missing.
        what: &'static str,
    },
    /// Not enough free memory.
    #[error(
        "{gpu} has {free} bytes free of {total}, the slabs need {wanted}: unload something \
         (`candle-cache status`), or choose another GPU"
    )]
    NoRoom {
        /// The GPU.
        gpu: Gpu,
        /// Bytes that the slabs take.
        wanted: u64,
        /// Bytes that are free.
        free: u64,
        /// Bytes that the GPU has.
        total: u64,
    },
    /// A slab's length is not one that a GPU can share.
    #[error(
        "{what} has {bytes} bytes: a slab on a GPU is a multiple of {GRANULARITY} bytes and not empty"
    )]
    Length {
        /// Which slab.
        what: String,
        /// Its length.
        bytes: u64,
    },
    /// A received slab's memory lies on another GPU than the engine's.
    #[error(
        "{what} lies on {found}, the engine runs on {wanted}: attach with that device, or load the model onto this one"
    )]
    Elsewhere {
        /// Which slab.
        what: String,
        /// The GPU that the engine asked for.
        wanted: Gpu,
        /// Where the memory lies.
        found: String,
    },
    /// A received slab is shorter or longer than the manifest says.
    #[error("{what} does not have the {wanted} bytes that the manifest says: it is {than}")]
    WrongSize {
        /// Which slab.
        what: String,
        /// Length that the manifest gives.
        wanted: u64,
        /// How it differs.
        than: &'static str,
    },
    /// The GPU's device file could not be opened.
    #[error(
        "the device file of {gpu} cannot be held open ({why}): without it the driver may drop shared memory; \
         pass /dev/nvidia* and /proc/driver/nvidia into the container"
    )]
    NoAnchor {
        /// The GPU.
        gpu: Gpu,
        /// What went wrong.
        why: String,
    },
}

fn version(v: i32) -> String {
    format!("{}.{}", v / 1000, v % 1000 / 10)
}
