//! A weight cache for candle.

pub mod checkpoint;
#[cfg(feature = "cli")]
pub mod daemon;
pub mod key;
pub mod manifest;
pub mod protocol;
pub mod slab;
pub mod socket;
#[cfg(feature = "cli")]
pub mod worker;
