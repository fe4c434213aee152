//! The watchdog of a worker without this crate's launcher: under torchrun, srun or an operator, or alone.

use std::time::Duration;

use super::exit::exit_now;
use super::report::report_error;
use crate::console;
use crate::error::{Error, Result};
use crate::phase::{self, HeartbeatLimits, Phase, Watch};

const LOOK: Duration = Duration::from_millis(100);

/// Starts a thread that ends this process with exit code 15, and prints what it was doing, if it makes no progress for longer than its phase allows.
/// A rank that waits for peers gets at least `collective_timeout`, so that the error names the rank that hangs.
///
/// # Errors
/// [`Error::Environment`] if no thread can be started.
pub fn watch_self(rank: usize, limits: &HeartbeatLimits, collective_timeout: Duration) -> Result<()> {
    let limits = [false, true].map(|is_waiting| {
        let least = if is_waiting { collective_timeout + LOOK } else { Duration::ZERO };
        HeartbeatLimits::new(|phase: Phase| limits.of(phase).max(least))
    });
    let thread = std::thread::Builder::new().name("watchdog".to_owned());
    let started = thread.spawn(move || {
        let mut watches = limits.map(|limits| Watch::new(1, limits, phase::awake_now()));
        let mut has_said_stop = false;
        loop {
            std::thread::sleep(LOOK);
            if phase::stop_requested() && !std::mem::replace(&mut has_said_stop, true) {
                console::say("asked to stop; another signal after a second ends the program at once");
            }
            let pulse = phase::pulse();
            let is_waiting = usize::from(pulse.is_waiting());
            let stalls = watches.each_mut().map(|watch| watch.look(&[Some(pulse.clone())], phase::awake_now()));
            if let Some(stall) = stalls[is_waiting].first() {
                let (stood_s, limit_s) = (stall.stood.as_secs_f64(), stall.limit.as_secs_f64());
                let error = Error::Hang { phase: pulse.phase().name(), stood_s, limit_s, state: pulse.to_string() };
                report_error(&error, Some(rank));
                exit_now(error.exit_code() as i32);
            }
        }
    });
    let failed =
        |error| Error::Environment { message: format!("cannot start the thread that watches heartbeats: {error}") };
    started.map(drop).map_err(failed)
}
