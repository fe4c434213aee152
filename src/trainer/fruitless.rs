//! Detects consecutive steps that learn nothing, and ends a run whose rewards never give a score.

use super::{RunTurns, Trainer};
use crate::error::{Error, Result};
use crate::eval::EvalOutcome;
use crate::grpo::AdvantageStats;
use crate::ranks::first_text;

/// Number of consecutive steps without any score, or with all groups left out, after which a run is ended.
pub(super) const MAX_STEPS: usize = 3;

/// Number of consecutive steps, up to now, that learned nothing.
#[derive(Debug, Default)]
pub(super) struct FruitlessSteps {
    /// Steps in which no sample of any rank got a reward.
    unscored_steps: usize,
    /// The failure that was last reported.
    cause: String,
    /// Steps in which all groups were left out.
    pub steps_without_signal: usize,
}

impl FruitlessSteps {
    /// The text that reports `cause`; a repeated cause is abbreviated.
    fn reason(&mut self, cause: String) -> String {
        if cause == self.cause {
            return ", for the same reason as before".to_owned();
        }
        self.cause = cause;
        format!(": {}", self.cause)
    }

    /// Ends a run that learns nothing, with the same error on every rank.
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
    /// Prints one warning for all ranks with the number of samples that are masked because they have no score; collective over the world.
    /// `advantages` must already be reduced over all ranks.
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

    /// Prints one warning for all ranks about held-out samples without a score; collective over the world.
    pub(super) fn tell_unscored(&mut self, outcome: &EvalOutcome) -> Result<()> {
        let total = outcome.lengths.count;
        let num_failed = total - outcome.reward.count;
        if let Some(cause) = self.first_cause(num_failed)? {
            let reason = self.fruitless.reason(cause);
            self.output.say(&format!("warning: {num_failed} of {total} held-out samples have no reward{reason}"));
        }
        Ok(())
    }

    /// The reason why `num_failed` samples have no reward, if any: the first failure since the last call on the lowest rank that has one.
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
