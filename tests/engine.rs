//! What an engine sees: tensors equal to the checkpoint's, proof of identity, and errors that say what to do.
//! The daemon's side is played by `common/stand_in.rs`, because most of these daemons misbehave.
#![allow(clippy::unwrap_used)]

use candle_core::Device;
use candle_ipc_cache::{AttachError, IpcCache, IpcConfig};

#[path = "engine/answers.rs"]
mod answers;
#[path = "common/bodies/mod.rs"]
mod bodies;
#[path = "engine/copies.rs"]
mod copies;
#[path = "engine/identity.rs"]
mod identity;
#[path = "common/place.rs"]
mod place;
#[path = "common/stand_in.rs"]
mod stand_in;
#[path = "engine/waits.rs"]
mod waits;

use place::Place;
use stand_in::StandIn;

/// Runs every body with its weights in host memory.
macro_rules! on_the_host {
    ($($topic:ident { $($body:ident)* })*) => {
        $($(
            #[test]
            fn $body() {
                bodies::$topic::$body(&Place::host());
            }
        )*)*
    };
}
bodies::each_body!(on_the_host);

fn attach(daemon: &StandIn) -> IpcCache {
    Place::host().attach(daemon)
}

fn refused(config: &IpcConfig) -> AttachError {
    IpcCache::attach(config, &Device::Cpu).expect_err("this attach must be refused")
}
