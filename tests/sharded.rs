//! Ranks of tensor-parallel models: equal to what candle's own sharded loader gives, from whole entries and from entries
//! of one rank; plans that do not fit; sets of ranks through the real program.
#![allow(clippy::unwrap_used)]

#[path = "sharded/candle.rs"]
mod candle;
mod common;
#[path = "sharded/plans.rs"]
mod plans;
#[path = "sharded/program.rs"]
mod program;
#[path = "sharded/slices.rs"]
mod slices;
#[path = "sharded/stacks.rs"]
mod stacks;
#[path = "common/stand_in.rs"]
mod stand_in;
#[path = "sharded/support.rs"]
mod support;
