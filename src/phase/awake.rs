//! A clock that stands still while this process does. A run that is stopped as a whole (Slurm's suspend, Ctrl-Z, a paused
//! container) and goes on later has waited for nobody meanwhile.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Every wait by this clock must look at it more often, whatever it does in between. A longer time without any look counts as time that the
/// process was stopped.
const LONGEST_LOOK: Duration = Duration::from_secs(2);

/// Looks at a clock, and the time that it left out.
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

/// The time by this clock: meant for the time between two looks of one wait that looks again and again, and for nothing else.
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
