//! The parts of a step. [`Trainer::train_step`] calls them in turn; a program with its own loop calls them directly.

use std::time::Instant;

use super::batches::{PlacedGroup, SampledBatch};
use super::carry::Carry;
use super::verdict::Tally;
use super::{DrawnPrompts, Trainer, dynamic_sampling, penalty, records};
use crate::config::{Circumstance, Mode, Speculation};
use crate::error::{Error, Result};
use crate::grpo::{self, AdvantageConfig, AdvantageStats, BatchStats, LossConfig};
use crate::metrics::StepMetrics;
use crate::phase;
use crate::ranks::{ReduceOp, all_reduce_f64};
use crate::rollout::RolloutEngine;
use crate::train::{Policy, Transitions};
use crate::types::{Prompt, RolloutGroup};
use crate::update::{Divergence, UpdateOptions};

/// This rank's completions of one generation batch, with their rewards and advantages.
#[derive(Debug)]
pub struct TrainingBatch {
    /// The groups. Rewards and advantages may be changed before [`Trainer::update`]. A completion without a reward is not trained on.
    pub groups: Vec<RolloutGroup>,
    /// The place of each group in the order of the data; empty if that is the order of ranks.
    places: Vec<u32>,
    /// Groups that are left out of training.
    dropped: Vec<PlacedGroup>,
    tally: Option<Tally>,
    carry: Carry,
    advantages: AdvantageStats,
    /// Share of solved completions, if there is a curriculum.
    solve_rate: Option<f64>,
    /// Divergence from the reference model, if it is subtracted from rewards.
    divergence: Option<Divergence>,
    /// Time when the step began.
    start: Instant,
}

impl Trainer {
    /// Samples the next generation batch and computes its rewards and advantages; collective over the world.
    ///
    /// # Errors
    /// The first failure of any rank. If rewards failed, the next call uses the same batch again.
    pub fn rollout(&mut self) -> Result<TrainingBatch> {
        let start = self.begin_step()?;
        let sampled = match self.generation.ahead.pop_front() {
            Some(queued) => queued.into_sampled(),
            None => self.sample()?,
        };
        self.training_batch(sampled, start)
    }

    /// Draws the next prompts for a program that samples by itself, and returns this rank's share; empty on a rank that only trains. Pass the
    /// completions to [`Trainer::score`].
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for configurations that begin more groups than a step trains on; only [`Trainer::rollout`] supports these.
    pub fn next_prompts(&mut self) -> Result<Vec<Prompt>> {
        self.config.combination().in_circumstances([Circumstance::OwnLoop]).check()?;
        let start = self.begin_step()?;
        let batch = self.next_batch(self.progress.generation_step, self.progress.global_step)?;
        let prompts = batch.groups.iter().map(|group| group.prompt.clone()).collect();
        self.data.drawn = Some(DrawnPrompts { before: batch.before, start });
        Ok(prompts)
    }

    /// Runs `work` with the engine awake; a rank without an engine returns `R`'s default. Collective over the world.
    ///
    /// # Errors
    /// The first failure of any rank.
    pub fn with_rollout<R: Default>(&mut self, work: impl FnOnce(&mut RolloutEngine<'_>) -> Result<R>) -> Result<R> {
        self.model.with_rollout(work)
    }

    /// Computes rewards and advantages for completions of the prompts from [`Trainer::next_prompts`]; collective over the world.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if no prompts were drawn; else the first failure of any rank. If rewards failed, the same prompts are drawn again
    /// next.
    pub fn score(&mut self, groups: Vec<RolloutGroup>) -> Result<TrainingBatch> {
        let Some(DrawnPrompts { before, start }) = self.data.drawn.take() else {
            let expected = "a call of Trainer::next_prompts first".to_owned();
            return Err(Error::InvalidArgument { op: "Trainer::score", expected, got: "none".to_owned() });
        };
        let tickets = groups.iter().map(|group| self.rewards.submit(group)).collect();
        self.training_batch(SampledBatch::of_groups(groups, tickets, before), start)
    }

    /// Computes the advantages of a batch from its rewards, as configured and by the function of
    /// [`TrainerBuilder::advantages`](super::TrainerBuilder::advantages). Only needed after rewards were changed. Collective over the world.
    ///
    /// # Errors
    /// Returns the errors of the function and of the collective.
    pub fn assign_advantages(&self, batch: &mut TrainingBatch) -> Result<()> {
        batch.advantages = self.advantages_of(&mut batch.groups)?;
        Ok(())
    }

    /// Trains on a batch, updates the counters and returns this rank's metrics; collective over the world.
    ///
    /// # Errors
    /// The first failure of any rank.
    pub fn update(&mut self, batch: TrainingBatch) -> Result<StepMetrics> {
        let TrainingBatch { groups, places, dropped, tally, carry, advantages, solve_rate, divergence, start } = batch;
        let needs_ages = self.config.split.async_steps > 0 || self.config.exact;
        let ages_at = needs_ages.then_some(self.progress.generation_step);
        let mut sequences = records::sequences(&groups, &places, self.config.mask_truncated_completions, ages_at);
        let taught = match &self.generation.own_teacher {
            Some(teacher) => Some(self.world.agree(teacher.prompt(&groups, &mut sequences))?),
            None => None,
        };
        let outcome = self.update_policy(&sequences)?;
        self.progress.previous_step = self.progress.global_step;
        self.progress.global_step += outcome.num_updates;
        self.progress.entropy_control = outcome.entropy_control;
        self.progress.generation_step += 1;
        self.progress.num_tokens += self.count_tokens(&groups)?;
        self.output.completions(&dynamic_sampling::logged(&groups, &places, &dropped), self.progress.global_step)?;
        let mut metrics = records::step_metrics(self.rewards.names(), &groups, &advantages, &outcome);
        penalty::add_metrics(&mut metrics, divergence);
        if LossConfig::from(&self.config).has_entropy_bonus() {
            records::bonus_metrics(&mut metrics, &outcome);
        }
        taught.iter().for_each(|counts| counts.add_metrics(&mut metrics));
        records::failure_metrics(&mut metrics, self.rewards.take_failures());
        self.tell_failures(&advantages)?;
        self.add_signal_metrics(&mut metrics, tally, &groups, &dropped);
        self.add_curriculum_metrics(&mut metrics, solve_rate);
        self.generation.turns.iter_mut().for_each(|turns| turns.add_metrics(&mut metrics));
        carry.add_metrics(&mut metrics, &self.config);
        records::stage_metrics(&mut metrics, self.model.take_stage_times());
        let drafts = self.model.take_draft_counts().filter(|_| self.config.speculation != Speculation::None);
        records::draft_metrics(&mut metrics, drafts, self.config.engine_shape().num_ranks());
        let transitions = self.take_transitions()?;
        let role = if self.model.policy().is_some() { "trainers" } else { "generators" };
        let role = Some(role).filter(|_| self.config.mode == Mode::Split);
        records::cost_metrics(&mut metrics, start.elapsed(), transitions, role)?;
        records::utilisation_metric(&mut metrics, outcome.training_flop, self.chip_flop_per_s);
        Ok(metrics)
    }

    fn begin_step(&mut self) -> Result<Instant> {
        phase::set_step(self.progress.generation_step);
        let start = Instant::now();
        let _ = phase::take_timings(); // drop times of loading, evaluation and saving
        self.take_transitions()?;
        Ok(start)
    }

    fn training_batch(&mut self, sampled: SampledBatch, start: Instant) -> Result<TrainingBatch> {
        let SampledBatch { mut groups, places, dropped, tally, carry, .. } = self.await_rewards(sampled)?;
        let solve_rate = self.observe_solved(groups.iter().chain(dropped.iter().map(|dropped| &dropped.group)))?;
        let divergence = self.penalize(&mut groups)?;
        let advantages = self.advantages_of(&mut groups)?;
        Ok(TrainingBatch { groups, places, dropped, tally, carry, advantages, solve_rate, divergence, start })
    }

    /// Time and bytes of moving optimizer state since the last call.
    fn take_transitions(&self) -> Result<Transitions> {
        self.model.policy().map_or_else(|| Ok(Transitions::default()), Policy::take_transitions)
    }

    /// Number of tokens of a generation batch over all ranks.
    fn count_tokens(&self, groups: &[RolloutGroup]) -> Result<u64> {
        let of_group = |group: &RolloutGroup| -> usize {
            let prompt_len = group.prompt.token_ids.len();
            group.completions.iter().map(|completion| prompt_len + completion.num_sampled()).sum()
        };
        let own: usize = groups.iter().map(of_group).sum();
        let mut total = [own as f64];
        all_reduce_f64(&*self.world.group(), &mut total, ReduceOp::Sum)?;
        Ok(total[0] as u64)
    }

    fn advantages_of(&self, groups: &mut [RolloutGroup]) -> Result<AdvantageStats> {
        let config = AdvantageConfig::from(&self.config);
        let mut stats = grpo::assign_advantages(groups, &config, Some(&*self.world.group()))?;
        stats.rewards.resize(self.config.reward_funcs.len(), BatchStats::default()); // on a rank without groups
        records::reduce_advantages(&mut stats, &*self.world.group())?;
        if let Some(assign) = &self.functions.advantages {
            self.world.agree(assign(groups))?;
        }
        Ok(stats)
    }

    pub(super) fn update_options(&self) -> UpdateOptions {
        UpdateOptions {
            loss_function: self.functions.loss.clone(),
            entropy_control: self.progress.entropy_control,
            global_step: self.progress.global_step,
            ..UpdateOptions::new(&self.config, &self.batch, self.schedule, self.world.device())
        }
    }
}
