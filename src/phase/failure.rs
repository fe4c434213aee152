//! Records the phase in which the current error arose.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

use super::Phase;
use crate::error::Result;

/// The innermost phase of the first error that has not been handled yet.
#[derive(Debug)]
pub(super) struct FirstFailure {
    phase: AtomicU8,
    num_recorded: AtomicU64,
}

impl FirstFailure {
    pub const fn new() -> Self {
        Self { phase: AtomicU8::new(u8::MAX), num_recorded: AtomicU64::new(0) }
    }

    /// Runs `work` as `phase`. If it fails, the phase is recorded, unless an inner one already was. If it succeeds although an error was recorded
    /// meanwhile, that error was handled inside and is forgotten. An error recorded before stays, because `work` may be cleaning up after it.
    pub fn watch<T>(&self, phase: Phase, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let before = self.num_recorded.load(Relaxed);
        let outcome = work();
        if outcome.is_err() {
            self.record(phase);
        } else if self.num_recorded.load(Relaxed) != before {
            self.forget();
        }
        outcome
    }

    /// Records `phase`, unless an earlier error is recorded.
    pub fn record(&self, phase: Phase) {
        if self.phase.compare_exchange(u8::MAX, phase as u8, Relaxed, Relaxed).is_ok() {
            self.num_recorded.fetch_add(1, Relaxed);
        }
    }

    /// Forgets the recorded error, because it was handled.
    pub fn forget(&self) {
        self.phase.store(u8::MAX, Relaxed);
    }

    /// The recorded phase, if there is an unhandled error.
    pub fn phase(&self) -> Option<Phase> {
        Phase::ALL.get(usize::from(self.phase.load(Relaxed))).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    fn fail() -> Result<()> {
        Err(Error::NonFinite { message: "a test".to_owned() })
    }

    #[test]
    fn the_innermost_phase_of_the_first_error_is_kept_during_unwinding() {
        let failure = FirstFailure::new();
        failure.watch(Phase::Generate, || failure.watch(Phase::Decode, fail)).unwrap_err();
        assert_eq!(failure.phase(), Some(Phase::Decode));
        failure.watch(Phase::Sleep, || Ok(())).unwrap();
        failure.watch(Phase::Checkpoint, fail).unwrap_err();
        assert_eq!(failure.phase(), Some(Phase::Decode), "cleaning up names no other phase");
    }

    #[test]
    fn a_recovered_error_does_not_set_the_phase_of_the_next_error() {
        let failure = FirstFailure::new();
        let retried = || failure.watch(Phase::Wake, fail).or_else(|_| failure.watch(Phase::Wake, || Ok(())));
        failure.watch(Phase::Generate, retried).unwrap();
        assert_eq!(failure.phase(), None);
        failure.watch(Phase::ForwardBackward, fail).unwrap_err();
        assert_eq!(failure.phase(), Some(Phase::ForwardBackward));

        failure.forget(); // the next step begins
        failure.watch(Phase::Optimizer, fail).unwrap_err();
        assert_eq!(failure.phase(), Some(Phase::Optimizer));
    }
}
