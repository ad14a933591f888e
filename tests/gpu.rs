//! The bodies of the engine's tests with their weights on a GPU, and what only a GPU has: slabs and tensors over them.
//! Says "skipped: no GPU" where there is none. Without `--features cuda` only the slabs are tested.
#![allow(missing_docs, unreachable_pub, clippy::unwrap_used)]

use std::io::stdin;
use std::os::fd::AsFd;
use std::path::Path;

use candle_core::Device;
use candle_ipc_cache::manifest::Digest;
use candle_ipc_cache::slab::CHUNK;
use candle_ipc_cache::slab::cuda::{gpus, resolve};
use candle_ipc_cache::socket::Connection;

#[path = "common/bodies/mod.rs"]
mod bodies;
#[cfg(feature = "cli")]
#[path = "gpu/engines.rs"]
mod engines;
#[path = "common/place.rs"]
mod place;
#[path = "gpu/quantized.rs"]
mod quantized;
#[path = "gpu/slabs.rs"]
mod slabs;
#[path = "common/stand_in.rs"]
mod stand_in;
#[path = "gpu/support.rs"]
mod support;
#[path = "gpu/tensors.rs"]
mod tensors;
#[cfg(feature = "cli")]
#[path = "gpu/worker.rs"]
mod worker;

use support::*;

/// What tests/engine.rs runs on the host.
mod engine {
    use candle_ipc_cache::tensors::cuda::sweep;

    use crate::{bodies, place::Place, support};

    macro_rules! on_a_gpu {
        ($($topic:ident { $($body:ident)* })*) => {
            $($(
                #[test]
                fn $body() {
                    if let Some((_, device, _alone)) = support::engine() {
                        bodies::$topic::$body(&Place::gpu(device));
                        assert_eq!(sweep().tensors, 0, "something still reads shared memory");
                    }
                }
            )*)*
        };
    }
    bodies::each_body!(on_a_gpu);
}

/// Does nothing unless one of the other tests started it.
#[test]
fn a_child_process_plays_its_role() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let parent = Connection::from_fd(
        stdin().as_fd().try_clone_to_owned().unwrap(),
        Path::new("the parent"),
    );
    match role.as_str() {
        // Fills a slab, gives its descriptors away, and waits to be killed.
        "fill" => {
            let gpu = resolve("cuda").unwrap();
            let export = export(gpu.id, &[noise(3 * CHUNK + 5, 77)]);
            let mut fds = export.slabs;
            fds.extend(export.anchor);
            send(&parent, &[padded(3 * CHUNK as u64 + 5)], &fds);
            let _ = parent.receive::<Vec<u64>>(PATIENCE);
        }
        // Maps what comes, and answers with its digest.
        "read" => {
            let gpu = resolve("cuda").unwrap();
            let (lengths, fds) = receive(&parent);
            let mapping = map(&gpu, &fds[..lengths.len()], &lengths).unwrap();
            let digests: Vec<String> = (0..lengths.len())
                .map(|i| Digest::of(&read(&mapping, i, lengths[i])).to_string())
                .collect();
            parent.send(&digests, &[], PATIENCE).unwrap();
        }
        // Writes to a mapped tensor, and answers whether its GPU then refused to go on.
        "write" => {
            let device = Device::new_cuda(0).unwrap();
            let (lengths, slabs) = receive(&parent);
            let (mut entry, _) = square(gpus().unwrap()[0].id, 64);
            assert_eq!(entry.manifest.slabs, lengths);
            entry.export.slabs = slabs;
            let weights = entry.map(&device);
            let tensor = plain(&weights, 0, &device);
            let refused = tensor
                .zero_set()
                .and_then(|()| device.synchronize())
                .is_err();
            parent.send(&refused, &[], PATIENCE).unwrap();
            // Its context is dead: nothing can be given back in order.
            std::process::exit(0);
        }
        // Says which GPUs it sees, and what mapping a slab of another for its first one says.
        "elsewhere" => {
            let (lengths, fds) = receive(&parent);
            let seen: Vec<String> = gpus().unwrap().iter().map(|g| g.id.to_string()).collect();
            let answer = match map(&gpus().unwrap()[0], &fds, &lengths) {
                Ok(_) => "mapped".to_string(),
                Err(e) => e.to_string(),
            };
            parent.send(&(seen, answer), &[], PATIENCE).unwrap();
        }
        other => panic!("no such role: {other}"),
    }
}
