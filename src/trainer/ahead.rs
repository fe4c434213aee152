//! Sampling ahead in split mode (`split.async_steps`): engines on their own ranks sample batches before the steps that train on them.
//!
//! While the trainers update on the batch of step t, the engines sample the batches of steps t + 1 to t + N, with the weights from before that
//! update. Without `split.in_flight_updates` they complete all of them; in a steady state that is the batch of step t + N. With it they pause as soon
//! as the trainers are done and the batch of step t + 1 is complete, load the newest weights and continue. A batch with a few very long completions
//! then delays nothing while other batches are queued.

use super::batches::{DataPosition, SampledBatch};
use super::preflight::Preflight;
use super::replacement::{Replacement, StepNumbers};
use super::turns::turns_of;
use super::{Generation, Trainer, passes, submit};
use crate::checkpoint::{CarriedGroup, Checkpoint, SavedBatch};
use crate::config::{Config, DynamicSampling};
use crate::data::Tokenizer;
use crate::error::Result;
use crate::ranks::{HostGroup, World, all_gather_json};
use crate::reward::RewardTicket;
use crate::rollout::{Batches, RolloutEngine, SampledGroup, SampledGroups};
use crate::split::Updated;
use crate::train::Sequence;
use crate::types::RolloutGroup;
use crate::update::{UpdateOptions, UpdateOutcome};

/// A placeholder for engines that do no work during an update.
type NoWork = fn(&mut RolloutEngine<'_>) -> Result<()>;

/// A batch that was sampled before the step that trains on it.
#[derive(Debug)]
pub(super) struct QueuedBatch {
    /// Number of updates before the one that trains on this batch.
    global_step: u64,
    /// This rank's groups.
    groups: Vec<QueuedGroup>,
    pub before: DataPosition,
    /// The finished batch, in a run that replaces groups.
    replaced: Option<SampledBatch>,
}

/// A group, with the ticket of its rewards once it is complete.
#[derive(Debug)]
struct QueuedGroup {
    row: usize,
    sampled: SampledGroup<RewardTicket>,
}

impl QueuedBatch {
    /// The batch, once all of its groups are complete.
    pub fn into_sampled(self) -> SampledBatch {
        let SampledGroups { complete, done, open } =
            SampledGroup::split(self.groups.into_iter().map(|group| group.sampled));
        debug_assert!(open.is_empty(), "a batch is trained on once all of its groups are complete");
        self.replaced.unwrap_or_else(|| SampledBatch::of_groups(complete, done, self.before))
    }

    /// This rank's groups in the format of a checkpoint.
    fn to_carried(&self) -> Vec<CarriedGroup> {
        let saved = |QueuedGroup { row, sampled }: &QueuedGroup| {
            let RolloutGroup { first_step, completions, .. } = &sampled.group;
            CarriedGroup { row: *row, first_step: *first_step, completions: completions.clone() }
        };
        self.groups.iter().map(saved).collect()
    }

    /// The groups that are not complete.
    fn open(&mut self) -> impl Iterator<Item = &mut SampledGroup<RewardTicket>> {
        self.groups.iter_mut().map(|group| &mut group.sampled).filter(|sampled| sampled.done.is_none())
    }
}

/// Whether batches from a checkpoint can be continued. If not, the run samples them again.
fn goes_on(saved: &[SavedBatch], config: &Config, num_prompts: usize) -> bool {
    let suits = |group: &CarriedGroup| group.suits(config.num_generations);
    let is_whole = |batch: &SavedBatch| batch.groups.len() == num_prompts && batch.groups.iter().all(suits);
    let is_first_complete = saved.first().is_none_or(|next| next.groups.iter().all(CarriedGroup::is_complete));
    saves_ahead(config) && saved.len() <= config.split.async_steps && is_first_complete && saved.iter().all(is_whole)
}

/// Whether batches sampled ahead are saved in checkpoints. They are not with tools or environments, which end with their process, nor with
/// replacement, which depends on rewards that a checkpoint does not hold.
fn saves_ahead(config: &Config) -> bool {
    !config.tools.takes_turns() && config.dynamic_sampling != DynamicSampling::Replace
}

impl Trainer {
    /// Continues the batches that the run of `checkpoint` had sampled ahead, or samples them again if this run's configuration differs.
    pub(super) fn restore_ahead(&mut self, checkpoint: &Checkpoint, preflight: &Preflight) -> Result<()> {
        let saved = checkpoint.state.ahead.as_slice();
        let Some(next) = saved.first() else { return Ok(()) };
        if !goes_on(saved, &self.config, self.batch.num_prompts) {
            self.data.sampler.restore(next.before.clone())?;
            self.output.say(&format!(
                "{} batches that were sampled ahead for the checkpoint are sampled again, as this run has other \
                 settings",
                saved.len()
            ));
            return Ok(());
        }
        checkpoint.check_carried(self.config.num_generations, preflight.spec.vocab_size)?;
        let restored = saved.iter().map(|batch| self.restored(batch, &preflight.tokenizer));
        self.generation.ahead = restored.collect::<Result<_>>()?;
        Ok(())
    }

    /// This rank's groups of a batch from a checkpoint. Complete groups are scored again.
    fn restored(&mut self, saved: &SavedBatch, tokenizer: &Tokenizer) -> Result<QueuedBatch> {
        let SavedBatch { global_step, before, groups } = saved;
        let (own, max_steps) = (self.share(groups.len()), self.max_steps());
        let Self { data, rewards, .. } = self;
        rewards.set_progress(*global_step, max_steps);
        let restore = |saved: &CarriedGroup| -> Result<QueuedGroup> {
            let (prompt, first_step) = (data.train.prompt(saved.row).clone(), saved.first_step);
            let mut group = RolloutGroup { prompt, first_step, completions: saved.completions.clone() };
            if saved.is_complete() {
                for completion in &mut group.completions {
                    completion.text = tokenizer.decode(&completion.token_ids)?;
                }
            }
            let done = saved.is_complete().then(|| rewards.submit(&group));
            Ok(QueuedGroup { row: saved.row, sampled: SampledGroup { group, done } })
        };
        Ok(QueuedBatch {
            global_step: *global_step,
            groups: groups[own].iter().map(restore).collect::<Result<_>>()?,
            before: DataPosition { sampler: before.clone(), carried: Vec::new() },
            replaced: None,
        })
    }

    /// The queue in the format of a checkpoint; empty if its batches are to be sampled again. Collective over the world.
    pub(super) fn saved_ahead(&self) -> Result<Vec<SavedBatch>> {
        if self.generation.ahead.is_empty() || !saves_ahead(&self.config) {
            return Ok(Vec::new());
        }
        let own: Vec<Vec<CarriedGroup>> = self.generation.ahead.iter().map(QueuedBatch::to_carried).collect();
        let mut of_ranks: Vec<Vec<Vec<CarriedGroup>>> =
            all_gather_json(&*self.world.group(), "gather batches ahead", &own)?;
        let saved = self.generation.ahead.iter().enumerate().map(|(place, batch)| SavedBatch {
            global_step: batch.global_step,
            before: batch.before.sampler.clone(),
            groups: of_ranks.iter_mut().flat_map(|batches| std::mem::take(&mut batches[place])).collect(),
        });
        Ok(saved.collect())
    }

    /// Trains on a batch. Engines without other work sample later batches meanwhile, but none beyond a checkpoint or an evaluation. So a run resumed
    /// from there misses no batch, and failed rewards of a batch under way do not count in the evaluation.
    pub(super) fn update_policy(&mut self, sequences: &[Sequence]) -> Result<UpdateOutcome> {
        let options = self.update_options();
        let num_ahead = self.num_ahead(&options);
        if num_ahead == 0 {
            return Ok(self.model.update(sequences, &options, &self.output, None::<NoWork>)?.outcome);
        }
        match self.config.dynamic_sampling {
            DynamicSampling::Replace => self.update_beside_replacement(sequences, &options, num_ahead),
            _ => self.update_beside_sampling(sequences, &options, num_ahead),
        }
    }

    /// How many batches after the present one may be sampled before a checkpoint, an evaluation or the end is due.
    fn num_ahead(&self, options: &UpdateOptions) -> usize {
        let before = self.progress.global_step;
        let after = |num_batches: usize| self.global_step_after(options, num_batches);
        let is_due = |every, now| passes(every, before, now);
        let is_free = |now| {
            !is_due(self.config.saving.save_steps, now)
                && !is_due(self.config.eval_steps, now)
                && now < self.max_steps()
        };
        (1..=self.config.split.async_steps).take_while(|&num_batches| is_free(after(num_batches))).count()
    }

    /// Number of updates after the present batch and `num_batches - 1` more.
    fn global_step_after(&self, options: &UpdateOptions, num_batches: usize) -> u64 {
        let of_each = (options.num_iterations * options.updates_per_generation) as u64;
        let later = (num_batches - 1) as u64 * of_each;
        self.progress.global_step + options.num_updates() + later
    }

    fn update_beside_sampling(
        &mut self,
        sequences: &[Sequence],
        options: &UpdateOptions,
        num_ahead: usize,
    ) -> Result<UpdateOutcome> {
        while self.generation.ahead.len() < num_ahead {
            let num_batches = self.generation.ahead.len() + 1;
            let global_step = self.global_step_after(options, num_batches);
            let batch = self.next_batch(self.progress.generation_step + num_batches as u64, global_step)?;
            let open = |(begun, group): (&CarriedGroup, RolloutGroup)| QueuedGroup {
                row: begun.row,
                sampled: SampledGroup::open(group),
            };
            let groups = batch.begun.iter().zip(batch.groups).map(open).collect();
            self.generation.ahead.push_back(QueuedBatch { global_step, groups, before: batch.before, replaced: None });
        }
        let (params, max_steps) = (self.sampling_params(), self.max_steps());
        let may_pause = self.config.updates_in_flight(self.world.device().is_cuda());
        let Self { model, generation, rewards, output, world, .. } = self;
        let Generation { turns, ahead, pause_group, .. } = generation;
        let beside = |engine: &mut RolloutEngine<'_>| {
            engine.on_progress(output.sampling_progress());
            let groups = |batch: &mut QueuedBatch| batch.open().map(|sampled| sampled.group.clone()).collect();
            let batches = ahead.iter_mut().map(groups).collect();
            let global_steps: Vec<u64> = ahead.iter().map(|batch| batch.global_step).collect();
            let mut done = |batch: usize, group: &RolloutGroup| {
                rewards.set_progress(global_steps[batch], max_steps);
                submit(group, rewards, output)
            };
            let mut pauses = || Ok(may_pause && trainers_wait(world, pause_group.as_ref())?);
            let mut batches = Batches::ahead(batches, &params, &mut pauses, &mut done);
            engine.run(turns_of(turns.as_mut()), &mut batches)?;
            for (batch, sampled) in ahead.iter_mut().zip(batches.into_sampled()) {
                batch.open().zip(sampled).for_each(|(open, sampled)| *open = sampled);
            }
            Ok(())
        };
        Ok(model.update(sequences, options, &*output, Some(beside))?.outcome)
    }

    /// Trains while engines sample the next batch with replacement. That batch begins in the data where the previous one ended, which at first only
    /// the engines know.
    fn update_beside_replacement(
        &mut self,
        sequences: &[Sequence],
        options: &UpdateOptions,
        num_ahead: usize,
    ) -> Result<UpdateOutcome> {
        let first = self.generation.ahead.len() + 1;
        let numbers = |batch: usize| StepNumbers {
            generation_step: self.progress.generation_step + batch as u64,
            global_step: self.global_step_after(options, batch),
        };
        let steps: Vec<StepNumbers> = (first..=num_ahead).map(numbers).collect();
        let (candidates, quota, max_steps) = (self.candidates()?, self.group_quota(), self.max_steps());
        let params = self.sampling_params();
        let Self { model, generation, rewards, output, data, .. } = self;
        let Generation { turns, verdict_group, .. } = generation;
        let output = &*output;
        let beside = |engine: &mut RolloutEngine<'_>| {
            let (dataset, engines) = (&data.train, verdict_group.as_ref());
            let mut replacement = Replacement { rewards, output, dataset, engines, max_steps, quota };
            replacement.sample(engine, turns.as_mut(), candidates, &params, &steps)
        };
        let Updated { outcome, beside: drawn } = model.update(sequences, options, output, Some(beside))?;
        let mut drawn = drawn.into_iter();
        for StepNumbers { global_step, .. } in steps {
            let before = self.data.position();
            let replaced = Some(self.take_drawn(before.clone(), drawn.next())?);
            self.generation.ahead.push_back(QueuedBatch { global_step, groups: Vec::new(), before, replaced });
        }
        Ok(outcome)
    }
}

/// Whether trainer 0 has finished its update; rank 0 of the engine decides for all of its ranks.
fn trainers_wait(world: &World, pause_group: Option<&HostGroup>) -> Result<bool> {
    let is_waiting = world.is_waiting(0);
    match pause_group {
        None => Ok(is_waiting),
        Some(group) => Ok(group.all_gather_json("agree on a pause", is_waiting)?[0]),
    }
}
