//! A run around its steps: the work before the first step, after each one and after the last.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

use super::batches::begun_anew;
use super::{RunSummary, StepReport, Trainer, passes};
use crate::checkpoint::{self, Claim, SavedConfig, TrainerState};
use crate::error::{Error, ExitCode, Result, panic_message};
use crate::memory;
use crate::metrics::StepMetrics;
use crate::phase;
use crate::ranks::any_rank;
use crate::train::Policy;

impl Trainer {
    /// Runs the caller's own training loop with this trainer, so that a failure reaches all ranks and none waits forever in a collective. If rewards
    /// or tools fail permanently, the progress so far is saved. Collective over the world.
    ///
    /// # Errors
    /// The first failure of any rank, including panics.
    pub fn run_with<R>(&mut self, work: impl FnOnce(&mut Self) -> Result<R>) -> Result<R> {
        let outcome =
            catch_unwind(AssertUnwindSafe(|| work(&mut *self).or_else(|error| self.save_without_rewards(error))));
        let outcome = outcome.unwrap_or_else(|panic| Err(Error::of_panic("training", panic_message(&*panic))));
        let outcome = outcome.map_err(memory::explain_out_of_memory);
        if let Err(error) = &outcome {
            self.world.post_failure(error); // peers may be waiting in a collective
        }
        self.output.end(&outcome);
        outcome
    }

    /// Evaluates before the first step, unless a resumed run has already done it; collective over the world.
    ///
    /// # Errors
    /// The first failure of any rank; an error if `metric_for_best_model` is no metric of the evaluation.
    pub fn start(&mut self) -> Result<()> {
        if !self.output.has_evaluated() {
            self.evaluate()?;
        }
        if self.progress.global_step >= self.max_steps() {
            self.output.say(&format!(
                "no steps are left to train: step {} of {} is done",
                self.progress.global_step,
                self.max_steps()
            ));
        }
        self.check_metric()
    }

    /// Whether the last step is done, or training has stopped early.
    pub fn is_finished(&self) -> bool {
        self.progress.global_step >= self.max_steps() || self.is_exhausted()
    }

    /// Ends a step: writes its metrics, calls the function of [`TrainerBuilder::on_step`](super::TrainerBuilder::on_step), evaluates and saves as
    /// configured. Collective over the world.
    ///
    /// # Errors
    /// [`Error::Preempted`], after saving, if a stop was requested before the last step; else the first failure of any rank.
    pub fn finish_step(&mut self, metrics: &StepMetrics) -> Result<()> {
        let (before, now) = (self.progress.previous_step, self.progress.global_step);
        let renewed = self.checkpoints.claim.as_mut().map_or(Ok(false), Claim::renew);
        if self.world.agree(renewed)? {
            self.output.log().begin_again(&self.config)?;
        }
        let values = self.output.step(metrics, now, self.data.sampler.epochs(), self.progress.num_tokens)?;
        if let Some(on_step) = &mut self.functions.on_step {
            let (max_steps, epoch) = (self.schedule.total_steps as u64, self.data.sampler.epochs());
            self.world.agree(on_step(&StepReport { step: now, max_steps, epoch, metrics: &values }))?;
        }
        self.fruitless.check()?;
        let mut finished = now >= self.max_steps();
        let evaluates = finished || passes(self.config.eval_steps, before, now);
        if evaluates {
            self.evaluate()?;
        }
        if !finished && self.is_exhausted() {
            self.tell_early_stop();
            finished = true;
        }
        let stop = any_rank(&*self.world.group(), phase::stop_requested())? && !finished; // not if only saving is left
        let save_steps = self.config.saving.save_steps;
        let is_due =
            passes(save_steps, before, now) || (finished && save_steps.is_some()) || (evaluates && self.is_best());
        if stop || is_due {
            let saved = self.save()?;
            if stop {
                self.checkpoints.saver.finish(&self.world)?;
                self.output.finish()?;
                return Err(Error::Preempted { step: now, saved });
            }
        }
        Ok(())
    }

    /// Completes the checkpoint under way, and writes the final model and the report; collective over the world.
    ///
    /// # Errors
    /// The first failure of any rank.
    pub fn finish(&mut self) -> Result<RunSummary> {
        self.checkpoints.saver.finish(&self.world)?;
        let model_step = self.load_best()?;
        let [eval_reward_before, eval_reward_after] = self.output.rewards_before_and_after(model_step);
        let model_dir = self.export()?;
        let report = self.output.finish()?;
        Ok(RunSummary { eval_reward_before, eval_reward_after, model_dir, report })
    }

    /// Writes the model to the folder `final` in the output folder and returns its path; collective over the world.
    ///
    /// # Errors
    /// The first failure of any rank.
    pub fn export(&self) -> Result<PathBuf> {
        checkpoint::export(self.checkpoints.saver.options(), &self.world, self.model.policy())
    }

    /// Begins to save a checkpoint and returns its folder. It is complete when the next one begins, or after [`Trainer::finish`]. Collective over the
    /// world.
    ///
    /// # Errors
    /// The first failure of any rank.
    pub fn save(&mut self) -> Result<PathBuf> {
        let ahead = self.saved_ahead()?; // for a run that was asked to stop
        let drawn = self.data.drawn.take().map(|drawn| drawn.before);
        let unsaved =
            if ahead.is_empty() { self.generation.ahead.pop_front().map(|queued| queued.before) } else { None };
        if let Some(before) = unsaved.or(drawn) {
            self.put_back(before)?; // these batches are sampled again
        }
        let state = TrainerState {
            run_id: String::new(), // set by the saver
            global_step: self.progress.global_step,
            num_updates: self.model.policy().map_or(0, Policy::num_updates),
            generation_step: self.progress.generation_step,
            epoch: self.data.sampler.epochs(),
            max_steps: self.max_steps(),
            num_input_tokens_seen: self.progress.num_tokens,
            world_size: self.world.size(),
            num_rows: self.data.train.len(),
            rows_digest: self.data.train.digest(),
            frozen_weights: self.checkpoints.frozen_weights.clone(),
            sampler: self.data.sampler.state().clone(),
            carried: if self.generation.turns.is_some() {
                begun_anew(&self.data.carried)
            } else {
                self.data.carried.clone()
            },
            ahead,
            entropy_control: Some(self.progress.entropy_control),
            best_global_step: self.best().filter(|_| self.config.best.load_best_model_at_end).map(|best| best.step),
            config: SavedConfig::of(self.config.entries()),
            log_history: self.output.log().history().clone(),
            unlogged: self.output.log().unlogged(),
        };
        self.checkpoints.newest_step = self.progress.global_step;
        self.checkpoints.saver.save(&self.world, self.model.saved_models(self.config.objective.sync_ref_model), state)
    }

    /// Saves the progress so far if `error` means that rewards or tools failed permanently or give no signal; returns `error`. Collective over the
    /// world.
    fn save_without_rewards<R>(&mut self, error: Error) -> Result<R> {
        if error.exit_code() == ExitCode::RewardService || matches!(error, Error::NoSignal { .. }) {
            let begun =
                if self.progress.global_step > self.checkpoints.newest_step { self.save().map(drop) } else { Ok(()) };
            if let Err(failure) = begun.and_then(|()| self.checkpoints.saver.finish(&self.world)) {
                tracing::warn!("the progress since the last checkpoint could not be saved: {failure}");
            }
        }
        Err(error)
    }
}
