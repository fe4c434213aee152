//! Times of decode steps, equal on all ranks of an engine.

use std::time::Instant;

use super::scheduler::Step;
use super::speculation::StepTime;
use crate::error::Result;
use crate::ranks::{Collective, all_gather_f64};

/// Number of steps between two exchanges of times.
const EXCHANGED: usize = 64;

/// Measures the time from one step's result to the next. All ranks use rank 0's times, which they exchange every [`EXCHANGED`] steps.
#[derive(Debug, Default)]
pub(super) struct StepClock {
    /// Time of the previous step's result, if that was a decode step, and whether that step waited for known tokens.
    before: Option<(Instant, bool)>,
    num_steps: usize,
    own: Vec<StepTime>, // not exchanged yet
}

impl StepClock {
    /// Records that the result of a step is available now. Returns the newly exchanged times. Collective.
    pub(super) fn tell(&mut self, step: &Step, all: &dyn Collective) -> Result<Vec<StepTime>> {
        let (now, waited) = (Instant::now(), step.waited);
        let before = std::mem::replace(&mut self.before, step.is_decode.then_some((now, waited)));
        // After a step of another kind the interval does not begin at its launch.
        if let Some((before, _)) = before.filter(|before| step.is_decode && before.1 == waited) {
            let nanos = u64::try_from((now - before).as_nanos()).unwrap_or(u64::MAX);
            self.own.push(StepTime { waited, rows: step.num_tokens(), nanos });
        }
        self.num_steps += 1;
        if all.size() == 1 {
            return Ok(std::mem::take(&mut self.own));
        }
        if !self.num_steps.is_multiple_of(EXCHANGED) {
            return Ok(Vec::new());
        }
        let words = |time: &StepTime| [f64::from(u8::from(time.waited)), time.rows as f64, time.nanos as f64];
        let mut words: Vec<f64> = self.own.drain(..).flat_map(|time| words(&time)).collect();
        words.resize(3 * EXCHANGED, 0.0);
        let of_first = all_gather_f64(all, &words)?.swap_remove(0);
        let times = of_first.chunks_exact(3).filter(|words| words[1] > 0.0);
        let time = |words: &[f64]| StepTime { waited: words[0] > 0.0, rows: words[1] as usize, nanos: words[2] as u64 };
        Ok(times.map(time).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::super::scheduler::TokenRun;
    use super::*;
    use crate::ranks::testing;

    fn step(waited: bool, is_decode: bool, rows: usize) -> Step {
        let runs = (0..rows).map(|row| TokenRun::new(row, 3..4, row..row + 1)).collect();
        Step { waited, ..Step::new(is_decode, runs) }
    }

    #[test]
    fn only_consecutive_steps_of_one_kind_are_timed() {
        let alone = crate::ranks::SingleRank::default();
        let mut clock = StepClock::default();
        let steps =
            [(false, true, 3), (false, true, 2), (true, true, 5), (true, true, 6), (true, false, 9), (true, true, 1)];
        let times = steps.map(|(waited, is_decode, rows)| clock.tell(&step(waited, is_decode, rows), &alone).unwrap());
        let timed: Vec<_> = times.iter().flatten().map(|time| (time.waited, time.rows)).collect();
        assert_eq!(timed, [(false, 2), (true, 6)]);
    }

    #[test]
    fn all_ranks_use_the_step_times_of_rank_0() {
        let times = testing::threads(2, |all| {
            let mut clock = StepClock::default();
            let mut told = Vec::new();
            for _ in 0..EXCHANGED {
                told.extend(clock.tell(&step(false, true, 4), all.as_ref()).unwrap());
            }
            told
        });
        assert_eq!((times[0].len(), &times[0]), (EXCHANGED - 1, &times[1]));
    }
}
