//! Models of candle's own over checkpoints that do not fit them: one error, and nothing in it that is not wrong.
//! Each model is tiny and made by candle itself; the daemon's side is played by `common/stand_in.rs`.
#![allow(clippy::unwrap_used)]

#[path = "build/checkpoint.rs"]
mod checkpoint;
#[path = "build/listing.rs"]
mod listing;
#[path = "build/models.rs"]
mod models;
#[path = "build/probing.rs"]
mod probing;
#[path = "build/records.rs"]
mod records;
#[path = "build/reload.rs"]
mod reload;
#[path = "build/requests.rs"]
mod requests;
#[path = "common/stand_in.rs"]
mod stand_in;
