//! A clock that stops while this process is stopped. If a run is suspended as a whole (Slurm's suspend, Ctrl-Z, a paused container) and resumed
//! later, the suspended time must not count towards timeouts.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Every wait that uses this clock must read it more often than this. A longer interval without any reading counts as time in which the process was
/// stopped.
const LONGEST_LOOK: Duration = Duration::from_secs(2);

/// The last reading of the clock, and the time left out so far.
#[derive(Debug)]
struct AwakeClock {
    looked: Option<Instant>,
    left_out: Duration,
}

impl AwakeClock {
    fn look(&mut self, now: Instant) -> Instant {
        let unseen = now.saturating_duration_since(self.looked.unwrap_or(now));
        if unseen > LONGEST_LOOK {
            self.left_out += unseen;
        }
        self.looked = Some(now);
        now - self.left_out
    }
}

/// The current time of this clock. Use it only to measure the time between two readings within one wait that reads it repeatedly.
pub fn awake_now() -> Instant {
    static CLOCK: Mutex<AwakeClock> = Mutex::new(AwakeClock { looked: None, left_out: Duration::ZERO });
    CLOCK.lock().unwrap_or_else(PoisonError::into_inner).look(Instant::now())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_while_the_process_was_stopped_is_not_counted() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut clock = AwakeClock { looked: None, left_out: Duration::ZERO };
        let seen = [10, 11, 13, 1013, 1014, 2014].map(|seconds| clock.look(at(seconds)) - start);
        assert_eq!(seen.map(|time| time.as_secs()), [10, 11, 13, 13, 14, 14]);
    }
}
