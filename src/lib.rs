//! A weight cache for candle.

pub mod checkpoint;
#[cfg(feature = "cli")]
pub mod daemon;
#[cfg(feature = "cli")]
pub mod doctor;
pub mod key;
pub mod loader;
pub mod manifest;
pub mod protocol;
pub mod slab;
pub mod socket;
pub mod tensors;
#[cfg(feature = "cli")]
pub mod worker;

pub use loader::{
    AttachError, Cast, Detached, FromIpcCache, GetError, IpcCache, IpcConfig, Mismatch, OptionError, Proof,
    QuantizedVarBuilder, Report, Took,
};
