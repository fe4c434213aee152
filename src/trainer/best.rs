//! Finds the best evaluation so far and decides on early stopping. Both follow from the run's log, so a resumed run and every rank get the same
//! result.

use super::Trainer;
use crate::checkpoint::{Checkpoint, folder_of_step, writes_folder};
use crate::error::{Error, Result};
use crate::ranks::any_rank;

/// The best evaluation so far.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Best {
    /// Step of the evaluated weights.
    pub step: u64,
    /// Value of the metric that decides.
    pub value: f64,
    /// Number of consecutive newest evaluations that were not better.
    num_worse: usize,
}

impl Best {
    /// The best of `evaluations` (step, value). To reset the count of worse evaluations, one must be better by more than `threshold`, as in
    /// transformers' `EarlyStoppingCallback`.
    fn of(evaluations: impl Iterator<Item = (u64, f64)>, is_greater_better: bool, threshold: f64) -> Option<Self> {
        let sign = if is_greater_better { 1.0 } else { -1.0 };
        evaluations.fold(None, |best: Option<Self>, (step, value)| {
            let Some(best) = best else { return Some(Self { step, value, num_worse: 0 }) };
            let gain = sign * (value - best.value);
            let num_worse = if gain > threshold { 0 } else { best.num_worse + 1 };
            Some(if gain > 0.0 { Self { step, value, num_worse } } else { Self { num_worse, ..best } })
        })
    }
}

impl Trainer {
    /// The best evaluation after the start of training.
    pub(super) fn best(&self) -> Option<Best> {
        let keys = &self.config.best;
        let metric = keys.metric();
        let trained = self.output.evaluated(&metric).filter(|(step, _)| *step > 0);
        Best::of(trained, keys.is_greater_better(), keys.early_stopping_threshold)
    }

    /// Whether this step's evaluation is the best, so that its checkpoint must be kept.
    pub(super) fn is_best(&self) -> bool {
        self.config.best.load_best_model_at_end
            && self.best().is_some_and(|best| best.step == self.progress.global_step)
    }

    /// Whether as many consecutive evaluations as `early_stopping_patience` were no better.
    pub(super) fn is_exhausted(&self) -> bool {
        let Some((patience, best)) = self.config.best.early_stopping_patience.zip(self.best()) else { return false };
        best.num_worse >= patience
    }

    /// After the first evaluation, refuses a metric name that evaluations do not have.
    pub(super) fn check_metric(&self) -> Result<()> {
        let keys = &self.config.best;
        let wanted = keys.load_best_model_at_end || keys.early_stopping_patience.is_some();
        let names = self.output.names_of_evaluations();
        if !wanted || names.is_empty() || names.contains(&keys.metric()) {
            return Ok(());
        }
        Err(Error::invalid_value("metric_for_best_model", keys.metric(), format!("one of {}", names.join(", "))))
    }

    /// Prints why the run stops before its last step.
    pub(super) fn tell_early_stop(&self) {
        let (metric, step) = (self.config.best.metric(), self.progress.global_step);
        if let Some(Best { step: best, value, num_worse }) = self.best() {
            self.output.say(&format!(
                "step {step}: stopped early: {metric} was best at step {best} ({value:.4}) and has not improved in \
                 {num_worse} evaluations since (early_stopping_patience)"
            ));
        }
    }

    /// Loads the weights of the best evaluation, if `load_best_model_at_end` is set. Returns the step that the final model is from. Collective over
    /// the world.
    pub(super) fn load_best(&mut self) -> Result<u64> {
        let now = self.progress.global_step;
        let best = self.best().filter(|best| self.config.best.load_best_model_at_end && best.step != now);
        let Some(Best { step, value, .. }) = best else { return Ok(now) };
        let folder = folder_of_step(&self.config.output.output_dir, step);
        let on_each_node = self.config.saving.save_on_each_node;
        let reads = writes_folder(&self.world, on_each_node);
        if any_rank(&*self.world.group(), reads && !folder.exists())? {
            self.output.say(&format!(
                "warning: {}, the checkpoint of the best model, was deleted: the final model is that of the last step",
                folder.display()
            ));
            return Ok(now);
        }
        let checkpoint = self.world.agree(Checkpoint::open(&folder, reads))?;
        let restored = self.model.policy_mut().map_or(Ok(()), |policy| checkpoint.restore(policy));
        self.world.agree(restored)?;
        self.output.say(&format!("the final model is that of step {step}: {} {value:.4}", self.config.best.metric()));
        Ok(step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_improvements_are_best_but_do_not_reset_patience() {
        let of = |values: &[f64], is_greater_better, threshold| {
            let steps = values.iter().enumerate().map(|(index, value)| (index as u64 + 1, *value));
            Best::of(steps, is_greater_better, threshold).map(|best| (best.step, best.num_worse))
        };
        assert_eq!(of(&[], true, 0.0), None);
        assert_eq!(of(&[0.5, 0.7, 0.6, 0.7], true, 0.0), Some((2, 2)));
        assert_eq!(of(&[0.5, 0.7, 0.6, 0.7], false, 0.0), Some((1, 3)));
        assert_eq!(of(&[0.5, 0.55, 0.58], true, 0.1), Some((3, 2)));
        assert_eq!(of(&[0.5, 0.55, 0.7], true, 0.1), Some((3, 0)));
    }
}
