//! Steps in a row that teach nothing, and the end of a run whose rewards give no score.

use super::{RunTurns, Trainer};
use crate::error::{Error, Result};
use crate::eval::EvalOutcome;
use crate::grpo::AdvantageStats;
use crate::ranks::first_text;

/// Steps in a row without a score, or whose groups are all left out, that end a run: it would go on for nothing.
pub(super) const MAX_STEPS: usize = 3;

/// Steps in a row, up to now, that taught nothing.
#[derive(Debug, Default)]
pub(super) struct FruitlessSteps {
    /// Steps in which no sample of any rank got a reward.
    unscored_steps: usize,
    /// The failure that was told last.
    cause: String,
    /// Steps all of whose groups were left out.
    pub steps_without_signal: usize,
}

impl FruitlessSteps {
    /// The words that tell `cause`, which is said once where it stays the same.
    fn reason(&mut self, cause: String) -> String {
        if cause == self.cause {
            return ", for the same reason as before".to_owned();
        }
        self.cause = cause;
        format!(": {}", self.cause)
    }

    /// Ends a run that learns nothing, with the same verdict on every rank.
    ///
    /// # Errors
    /// [`Error::NoScore`] after [`MAX_STEPS`].
    pub fn check(&self) -> Result<()> {
        if self.unscored_steps < MAX_STEPS {
            return Ok(());
        }
        Err(Error::NoScore { place: format!("in {MAX_STEPS} steps in a row"), message: self.cause.clone() })
    }
}

impl Trainer {
    /// Tells once, for all ranks, how many samples of the step behind are masked for want of a score; collective over the
    /// world. `advantages` are already those of all ranks.
    pub(super) fn tell_failures(&mut self, advantages: &AdvantageStats) -> Result<()> {
        let (num_failed, total) = (advantages.num_failed, advantages.num_failed + advantages.reward.count);
        let is_lost = num_failed == total && total > 0.0;
        self.fruitless.unscored_steps = if is_lost { self.fruitless.unscored_steps + 1 } else { 0 };
        let Some(cause) = self.first_cause(num_failed)? else { return Ok(()) };
        let step = self.progress.global_step;
        let (lost, reason) = (if is_lost { "; this step trains on nothing" } else { "" }, self.fruitless.reason(cause));
        self.output.say(&format!(
            "step {step}: warning: {num_failed} of {total} samples have no reward and are masked{lost}{reason}"
        ));
        Ok(())
    }

    /// Warns once, for all ranks, of held-out samples without a score; collective over the world.
    pub(super) fn tell_unscored(&mut self, outcome: &EvalOutcome) -> Result<()> {
        let total = outcome.lengths.count;
        let num_failed = total - outcome.reward.count;
        if let Some(cause) = self.first_cause(num_failed)? {
            let reason = self.fruitless.reason(cause);
            self.output.say(&format!("warning: {num_failed} of {total} held-out samples have no reward{reason}"));
        }
        Ok(())
    }

    /// Why `num_failed` samples of all ranks have no reward, if that many is any: the first failure of the lowest rank that has
    /// had one since the last call.
    fn first_cause(&mut self, num_failed: f64) -> Result<Option<String>> {
        let lost = self.generation.turns.as_mut().and_then(RunTurns::take_loss);
        let own = self.rewards.take_cause().or(lost);
        if num_failed == 0.0 {
            return Ok(None);
        }
        let cause = first_text(&*self.world.group(), own)?;
        Ok(cause.or_else(|| Some("no reward applies to them".to_owned())))
    }
}
