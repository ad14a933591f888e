//! CUDA slabs: memory of a GPU that travels as POSIX descriptors.
//! Filled by a worker through [`CudaWriter`], mapped read-only by an engine as a [`CudaMapping`].
//!
//! Only the driver is used, and it is looked for at run time: building needs no toolkit. A slab
//! lives as long as anybody holds its descriptor or a mapping of it; the process that filled it may
//! go. A mapping is read-only to the GPU itself, which guards against accidents: a process that holds
//! the descriptor could map it writable.

mod driver;
mod error;
mod facts;
mod gpu;
mod mapping;
mod vmm;
mod writer;

pub use error::{CudaError, Visible};
pub use facts::{ComputeMode, Facts, Version, driver_version};
pub use gpu::{Gpu, find, gpu, gpus, resolve};
pub use mapping::CudaMapping;
pub use writer::CudaWriter;

/// Slabs on a GPU are multiples of this many bytes.
pub const GRANULARITY: u64 = 2 << 20;
