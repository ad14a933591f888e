//! Work spread over a few threads, each with a state of its own. The first error wins, and the others stop.
//! Parallel iterators within a piece of work share the same threads: one that has run out of pieces helps the others.

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
/// in the numbers' order. `state` is called once for each thread that has something to do. `work` returns `None` only after [`Halt::told`].
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
            let mut mine_alone = None;
            while !halt.told() {
                let item = next.fetch_add(1, Ordering::Relaxed);
                if item >= items {
                    break;
                }
                let state = match &mut mine_alone {
                    Some(state) => state,
                    none => none.insert(state()?),
                };
                match work(state, item, &halt)? {
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
        match crew(threads) {
            // Each thread takes pieces until there are none; then it is free to help within those of others.
            Some(crew) => drop(crew.broadcast(|_| run())),
            None => run(),
        }
    }

    if let Some(e) = lock(&failed).take() {
        return Err(e);
    }
    let mut results = std::mem::take(&mut *lock(&results));
    results.sort_unstable_by_key(|(item, _)| *item);
    Ok(results.into_iter().map(|(_, result)| result).collect())
}

/// The threads, or fewer where the system gives no more; `None`: the caller's alone.
fn crew(threads: usize) -> Option<rayon::ThreadPool> {
    let mut wanted = threads.max(1);
    loop {
        let build = rayon::ThreadPoolBuilder::new()
            .num_threads(wanted)
            .thread_name(|i| format!("worker {i}"))
            .build();
        match build {
            Ok(crew) => return Some(crew),
            Err(e) => tracing::warn!("going on with fewer threads than {wanted}: {e}"),
        }
        if wanted == 1 {
            return None;
        }
        wanted /= 2;
    }
}

/// A thread that panicked takes the whole scope down with it, so nobody sees what it left behind.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}
