//! Work spread over a few threads, each with a state of its own.
//! The first error wins, and the others stop.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::WorkerError;

/// Tells a piece of work that its result is no longer wanted.
pub(super) struct Halt(AtomicBool);

impl Halt {
    /// Whether to stop.
    pub(super) fn told(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Runs `work` on the numbers below `items`, in about that order, on up to `threads` threads, and returns the results
/// in the numbers' order. `state` is called once a thread. `work` returns `None` only after [`Halt::told`].
pub(super) fn map<S, T: Send>(
    threads: usize,
    items: usize,
    state: impl Fn() -> Result<S, WorkerError> + Sync,
    work: impl Fn(&mut S, usize, &Halt) -> Result<Option<T>, WorkerError> + Sync,
) -> Result<Vec<T>, WorkerError> {
    let halt = Halt(AtomicBool::new(false));
    let next = AtomicUsize::new(0);
    let results: Mutex<Vec<(usize, T)>> = Mutex::new(Vec::with_capacity(items));
    let failed: Mutex<Option<WorkerError>> = Mutex::new(None);

    let run = || {
        let mut mine = Vec::new();
        let outcome = (|| {
            let mut state = state()?;
            while !halt.told() {
                let item = next.fetch_add(1, Ordering::Relaxed);
                if item >= items {
                    break;
                }
                match work(&mut state, item, &halt)? {
                    Some(result) => mine.push((item, result)),
                    None => break,
                }
            }
            Ok(())
        })();
        match outcome {
            Ok(()) => lock(&results).append(&mut mine),
            Err(e) => {
                halt.0.store(true, Ordering::Relaxed);
                lock(&failed).get_or_insert(e);
            }
        }
    };
    if items > 0 {
        std::thread::scope(|scope| {
            for _ in 1..threads.min(items) {
                let thread = std::thread::Builder::new().name("worker".into());
                if let Err(e) = thread.spawn_scoped(scope, run) {
                    tracing::warn!("going on with fewer threads: {e}");
                    break;
                }
            }
            run();
        });
    }

    if let Some(e) = lock(&failed).take() {
        return Err(e);
    }
    let mut results = std::mem::take(&mut *lock(&results));
    results.sort_unstable_by_key(|(item, _)| *item);
    Ok(results.into_iter().map(|(_, result)| result).collect())
}

/// A thread that panicked takes the whole scope down with it, so nobody sees what it left behind.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}
