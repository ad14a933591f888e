//! How far a phase has come, told about ten times a second.
//! The threads that do the work pay for one addition and one look at the clock.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::protocol::Progress;

use super::{Report, WorkerError};

const INTERVAL: Duration = Duration::from_millis(100);

/// One phase's meter.
pub(super) struct Meter<'a> {
    report: &'a Report<'a>,
    phase: &'static str,
    total: u64,
    done: AtomicU64,
    told: Mutex<Instant>,
}

impl<'a> Meter<'a> {
    /// Begins a phase of `total` bytes, and says so.
    pub(super) fn start(
        report: &'a Report<'a>,
        phase: &'static str,
        total: u64,
    ) -> Result<Self, WorkerError> {
        let meter = Self {
            report,
            phase,
            total,
            done: AtomicU64::new(0),
            told: Mutex::new(Instant::now()),
        };
        meter.tell(0)?;
        Ok(meter)
    }

    /// Counts `bytes`, and tells if the last word was long enough ago.
    ///
    /// # Errors
    /// When whoever listens wants the load to stop.
    pub(super) fn add(&self, bytes: u64) -> Result<(), WorkerError> {
        self.done.fetch_add(bytes, Ordering::Relaxed);
        // Held while telling: one thread at a time tells, and the others go on.
        let Ok(mut told) = self.told.try_lock() else {
            return Ok(());
        };
        if told.elapsed() < INTERVAL {
            return Ok(());
        }
        *told = Instant::now();
        self.tell(self.done.load(Ordering::Relaxed))
    }

    /// Ends the phase.
    pub(super) fn finish(self) -> Result<(), WorkerError> {
        self.tell(self.total)
    }

    fn tell(&self, done: u64) -> Result<(), WorkerError> {
        (self.report)(Progress {
            phase: self.phase.to_string(),
            done: done.min(self.total),
            total: self.total,
        })
    }
}
