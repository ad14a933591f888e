//! candle-transformers' models on tiny configs: rebuilt from the cache, their outputs equal the original's to the bit.
//! `CANDLE_CACHE_TEST_DEVICE=cuda:0` runs them on a GPU, `CANDLE_CACHE_TEST_MODELS=llama` only those whose names
//! contain the text, and `CANDLE_CACHE_TEST_TABLE=docs/conformance.md` writes the table there.
#![allow(clippy::unwrap_used)]

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::Device;

#[path = "models/copies.rs"]
mod copies;
#[path = "models/harness.rs"]
mod harness;
#[path = "common/stand_in.rs"]
mod stand_in;
#[path = "models/table.rs"]
mod table;
#[path = "models/text.rs"]
mod text;
#[path = "models/toys.rs"]
mod toys;
#[path = "models/vision.rs"]
mod vision;

use harness::{Case, Row, outcome, run};

/// Models that are not run, and why.
type Excluded = &'static [(&'static str, &'static str)];

/// Models that candle must run for the test to say something: on a GPU it refuses some.
const LEAST: usize = 20;
/// Threads that run cases.
const THREADS: usize = 2;
/// Debug builds of deep models need more than the usual stack.
const STACK: usize = 64 << 20;

#[test]
fn every_model_rebuilt_from_the_cache_gives_the_original_s_outputs() {
    let Some(device) = device() else {
        return;
    };
    let mut cases = text::cases();
    cases.extend(vision::cases());
    let wanted = std::env::var("CANDLE_CACHE_TEST_MODELS").unwrap_or_default();
    cases.retain(|case| case.name.contains(&wanted));
    assert!(!cases.is_empty(), "no model's name contains `{wanted}`");
    // On a GPU what is still alive is counted for the whole process.
    let threads = if device.is_cpu() { THREADS } else { 1 };
    let rows = run_all(&cases, &device, threads);

    let excluded = [text::EXCLUDED, vision::EXCLUDED].concat();
    let (mut passed, mut failed) = (Vec::new(), Vec::new());
    for (case, row) in cases.iter().zip(rows) {
        match row {
            Ok(row) => passed.push(row),
            Err(why) => failed.push(format!("{}: {why}", case.name)),
        }
    }
    let table = table::markdown(&passed, &excluded, &device);
    println!("{table}");
    if let Some(path) = std::env::var_os("CANDLE_CACHE_TEST_TABLE") {
        std::fs::write(path, table).unwrap();
    }
    assert!(
        failed.is_empty(),
        "{} of {} models:\n{}",
        failed.len(),
        cases.len(),
        failed.join("\n")
    );
    let run = passed.iter().filter(|row| !row.dtypes.is_empty()).count();
    assert!(
        run >= LEAST || !wanted.is_empty(),
        "candle ran {run} models here, not {LEAST}"
    );
}

fn run_all(cases: &[Case], device: &Device, threads: usize) -> Vec<Result<Row, String>> {
    let next = AtomicUsize::new(0);
    let rows: Vec<Mutex<Option<_>>> = cases.iter().map(|_| Mutex::default()).collect();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            let each = || {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    let Some(case) = cases.get(i) else { return };
                    *rows[i].lock().unwrap() = Some(outcome(|| run(case, device)));
                }
            };
            let builder = std::thread::Builder::new().stack_size(STACK);
            builder.spawn_scoped(scope, each).unwrap();
        }
    });
    let row = |row: Mutex<Option<_>>| row.into_inner().unwrap().expect("each case ran");
    rows.into_iter().map(row).collect()
}

/// Where the cases run; `None`: on a GPU that is not there.
fn device() -> Option<Device> {
    let asked = std::env::var("CANDLE_CACHE_TEST_DEVICE").unwrap_or_else(|_| "cpu".into());
    if asked == "cpu" {
        return Some(Device::Cpu);
    }
    match candle_ipc_cache::slab::cuda::resolve(&asked) {
        Ok(_) if cfg!(not(feature = "cuda")) => {
            println!("skipped: candle was built without CUDA (--features cuda)");
        }
        Ok(gpu) => return Some(Device::new_cuda(gpu.ordinal).unwrap()),
        Err(e) => println!("skipped: no GPU ({e})"),
    }
    None
}
