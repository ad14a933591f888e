//! How long an attach takes on host memory, from connect to a builder that is ready, by the number of tensors.
//! Prints a table of medians; the columns after `ready` are its parts. Run it with `cargo bench --bench attach_host`.

use std::time::{Duration, Instant};

use candle_core::{DType, Device};
use candle_ipc_cache::IpcCache;
use candle_ipc_cache::manifest::ElementType;

#[path = "../tests/common/stand_in.rs"]
#[allow(dead_code)] // the tests use more of it
mod stand_in;
use stand_in::{Model, StandIn};

const PARTS: [&str; 7] = ["q", "k", "v", "o", "gate_proj", "up_proj", "down_proj"];

/// A model with names as long as real ones have them, and one row of 32 elements a tensor.
fn model(tensors: usize, element: ElementType) -> Model {
    let bytes = (32 / element.block_elements() * element.block_bytes()) as usize;
    let mut model = Model::new("bench");
    for i in 0..tensors {
        let (layer, part) = (i / PARTS.len(), PARTS[i % PARTS.len()]);
        let name = format!("model.layers.{layer}.self_attn.{part}.weight");
        model = model.tensor(&name, element, &[1, 32], vec![0; bytes]);
    }
    model.per_slab = tensors.div_ceil(8);
    model
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64() * 1e3
}

fn main() {
    println!("host memory, medians in milliseconds");
    println!(
        "{:>8} {:>10} {:>9} {:>9} | {:>8} {:>8} {:>8} {:>8} {:>8}",
        "tensors",
        "builder",
        "attaches",
        "ready",
        "connect",
        "receive",
        "decode",
        "map",
        "identity"
    );
    for (tensors, attaches) in [(272, 50), (1_000, 50), (10_000, 50), (100_000, 15)] {
        for element in [ElementType::Q8_0, ElementType::F32] {
            let daemon = StandIn::serving(model(tensors, element).build());
            let config = daemon.config("bench");
            let (mut ready, mut took) = (Vec::new(), Vec::new());
            for _ in 0..attaches {
                let start = Instant::now();
                let cache = IpcCache::attach(&config, &Device::Cpu).expect("an attach");
                // Either builder is ready at once: tensors are made when they are asked for.
                let builders = (cache.quantized(), cache.var_builder(DType::F32));
                ready.push(start.elapsed());
                took.push(cache.report().took);
                drop(builders);
            }
            let part =
                |f: fn(&candle_ipc_cache::Took) -> Duration| median(took.iter().map(f).collect());
            println!(
                "{tensors:>8} {:>10} {attaches:>9} {:>9.2} | {:>8.2} {:>8.2} {:>8.2} {:>8.2} {:>8.2}",
                if element.is_quantized() {
                    "quantized"
                } else {
                    "plain"
                },
                median(ready.clone()),
                part(|t| t.connect),
                part(|t| t.receive),
                part(|t| t.decode),
                part(|t| t.map),
                part(|t| t.identity),
            );
        }
    }
}
