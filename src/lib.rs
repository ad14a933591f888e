//! A weight cache for candle: load a model once, attach to it from every process in milliseconds.
//! The front page is the README; [`IpcCache`] and [`FromIpcCache`] are what an engine uses.
#![doc = include_str!("../README.md")]

pub mod checkpoint;
#[cfg(feature = "cli")]
pub mod daemon;
#[cfg(feature = "cli")]
pub mod doctor;
pub mod key;
pub mod loader;
pub mod manifest;
mod meta_model;
#[cfg(feature = "cli")]
mod pattern;
pub mod protocol;
#[cfg(feature = "cli")]
pub mod quantize;
pub mod shard;
pub mod slab;
pub mod socket;
pub mod tensors;
pub mod trace;
#[cfg(feature = "cli")]
pub mod worker;

pub use loader::{
    AttachError, BuildError, Cast, Dequantized, Detached, FromIpcCache, GetError, HandOff,
    IpcCache, IpcConfig, MaybeQuantizedEmbedding, MaybeQuantizedLinear, MaybeQuantizedVarBuilder,
    Mismatch, Naming, OptionError, Proof, QuantizedVarBuilder, Renaming, Report, ShardedVarBuilder,
    ShardedWeights, Took, Unasked, Unmet, Wanted,
};
pub use trace::{Trace, TraceError};
