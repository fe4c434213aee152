//! Dynamic sampling: groups without a learning signal are counted and left out of the update. A run that samples only such groups is ended.

use super::batches::{DataPosition, PlacedGroup, SampledBatch};
use super::fruitless::MAX_STEPS;
use super::records::placed;
use super::replacement::{Candidates, DrawnGroups, GroupQuota, Replacement, StepNumbers};
use super::verdict::{GroupVerdict, Tally};
use super::{Generation, Trainer};
use crate::config::DynamicSampling;
use crate::error::{Error, Result};
use crate::grpo::has_signal;
use crate::metrics::{LoggedGroup, Reduce, StepMetrics};
use crate::ranks::all_gather_json;
use crate::types::RolloutGroup;

impl Trainer {
    /// Samples the next batch with the newest weights, and replaces groups without a learning signal. Collective over the world.
    pub(super) fn sample_with_replacement(&mut self) -> Result<SampledBatch> {
        let (before, params) = (self.data.position(), self.sampling_params());
        let (candidates, quota, max_steps) = (self.candidates()?, self.group_quota(), self.max_steps());
        let numbers = StepNumbers { generation_step: params.step, global_step: self.progress.global_step };
        self.output.begin_phase("generate", self.batch.num_prompts);
        let Self { model, generation, rewards, output, data, .. } = self;
        let Generation { turns, verdict_group, .. } = generation;
        let drawn = model.with_rollout(|engine| {
            let (dataset, engines) = (&data.train, verdict_group.as_ref());
            let mut replacement = Replacement { rewards, output, dataset, engines, max_steps, quota };
            replacement.sample(engine, turns.as_mut(), candidates, &params, &[numbers])
        })?;
        self.take_drawn(before, drawn.into_iter().next())
    }

    /// The first candidate rows of a step with replacement.
    pub(super) fn candidates(&self) -> Result<Candidates> {
        Candidates::first(self.data.sampler.clone(), self.batch.num_prompts)
    }

    /// How many groups a step with replacement needs, and which groups qualify.
    pub(super) fn group_quota(&self) -> GroupQuota {
        let config = &self.config;
        GroupQuota {
            num_groups: self.batch.num_prompts,
            max_groups: self.max_groups(),
            range: config.dynamic_sampling_range,
            waits: config.strict || config.full_determinism || !self.world.device().is_cuda(),
            ranks_per_engine: config.engine_shape().num_ranks(),
        }
    }

    /// Maximum number of groups that a step begins. No row is used twice in a step.
    fn max_groups(&self) -> usize {
        let asked = self.batch.num_prompts.saturating_mul(self.config.dynamic_sampling_max_gen_batches);
        asked.min(self.data.train.len())
    }

    /// Builds the batch of a step with replacement, and advances the data sampler past all rows that were begun. Collective over the world.
    pub(super) fn take_drawn(&mut self, before: DataPosition, drawn: Option<DrawnGroups>) -> Result<SampledBatch> {
        let own = drawn.as_ref().map(|drawn| drawn.tally);
        let tallies: Vec<Option<Tally>> = all_gather_json(&*self.world.group(), "gather verdicts", &own)?;
        let tally = tallies.into_iter().flatten().next().unwrap_or_default();
        self.data.sampler = self.candidates()?.into_sampler(tally.num_sampled as usize)?;
        let DrawnGroups { kept, dropped, .. } = drawn.unwrap_or_default();
        let (places, groups) = kept.into_iter().map(|PlacedGroup { place, group }| (place, group)).unzip();
        let batch = SampledBatch::of_groups(groups, Vec::new(), before);
        Ok(SampledBatch { places, dropped, tally: Some(tally), tickets: None, ..batch })
    }

    /// Removes scored groups without a learning signal from a batch, if `dynamic_sampling = filter`. Collective over the world in that case.
    pub(super) fn filter(&self, sampled: &mut SampledBatch) -> Result<()> {
        if self.config.dynamic_sampling != DynamicSampling::Filter {
            return Ok(());
        }
        let range = self.config.dynamic_sampling_range;
        let own: Tally = sampled.groups.iter().map(|group| GroupVerdict::of(group, range)).collect();
        sampled.tally = Some(own.of_all_ranks(&self.world)?);
        let (kept, dropped): (Vec<_>, Vec<_>) =
            std::mem::take(&mut sampled.groups).into_iter().partition(|group| has_signal(group, range));
        sampled.groups = kept;
        sampled.dropped = dropped.into_iter().map(|group| PlacedGroup { place: 0, group }).collect();
        Ok(())
    }

    /// Warns about a batch with too few groups that have a learning signal, before training on it.
    ///
    /// # Errors
    /// [`Error::NoSignal`], on all ranks, if a step with replacement found no such group, or if all groups of [`MAX_STEPS`] consecutive steps were
    /// filtered out.
    pub(super) fn check_signal(&mut self, tally: Option<Tally>) -> Result<()> {
        let Some(tally) = tally else { return Ok(()) };
        let replaces = self.config.dynamic_sampling == DynamicSampling::Replace;
        self.fruitless.steps_without_signal =
            if tally.num_kept == 0.0 { self.fruitless.steps_without_signal + 1 } else { 0 };
        if self.fruitless.steps_without_signal >= if replaces { 1 } else { MAX_STEPS } {
            return Err(Error::NoSignal { message: self.describe(&tally) });
        }
        let Tally { num_sampled, num_kept, .. } = tally;
        if num_kept < self.batch.num_prompts as f64 && (replaces || num_kept == 0.0) {
            let step = self.progress.global_step + 1;
            let lost = if num_kept == 0.0 { "; this step trains on nothing" } else { "" };
            self.output.say(&format!(
                "step {step}: warning: only {num_kept} of {num_sampled} sampled groups give a training signal, fewer \
                 than the {} groups of a batch{lost}",
                self.batch.num_prompts
            ));
        }
        Ok(())
    }

    fn describe(&self, tally: &Tally) -> String {
        let Tally { num_sampled, num_equal, reward_sum, reward_count, .. } = *tally;
        let num_prompts = self.batch.num_prompts;
        let bound = match self.config.dynamic_sampling {
            DynamicSampling::Replace => format!(
                "{num_sampled} groups were sampled for a batch of {num_prompts} (at most {}: \
                 dynamic_sampling_max_gen_batches = {} batches, or all {} rows)",
                self.max_groups(),
                self.config.dynamic_sampling_max_gen_batches,
                self.data.train.len()
            ),
            _ => format!(
                "this happened in {MAX_STEPS} steps in a row; {num_sampled} groups were sampled in the last one"
            ),
        };
        let outside = match self.config.dynamic_sampling_range {
            Some([low, high]) => {
                format!(", {} have a mean outside of dynamic_sampling_range = [{low}, {high}]", num_sampled - num_equal)
            }
            None => String::new(),
        };
        format!(
            "{bound}: {num_equal} have equal rewards{outside}; their mean reward is {:.4}. Use rows that the model \
             solves only sometimes, or rewards that distinguish its completions, or raise num_generations or \
             temperature",
            reward_sum / reward_count
        )
    }

    /// Adds counts of sampled groups and tokens, including those that were left out.
    pub(super) fn add_signal_metrics(
        &self,
        metrics: &mut StepMetrics,
        tally: Option<Tally>,
        groups: &[RolloutGroup],
        dropped: &[PlacedGroup],
    ) {
        let Some(tally) = tally else { return };
        let num_groups = match self.config.dynamic_sampling {
            DynamicSampling::Replace => self.batch.num_prompts,
            _ => tally.num_sampled as usize,
        };
        tally.add_metrics(metrics, num_groups);
        let all = groups.iter().chain(dropped.iter().map(|dropped| &dropped.group));
        let num_tokens: usize =
            all.flat_map(|group| &group.completions).map(|completion| completion.num_sampled()).sum();
        metrics.set("tokens/generated", num_tokens as f64, Reduce::Sum);
    }
}

/// All groups of this rank for the file of completions.
pub(super) fn logged<'a>(
    groups: &'a [RolloutGroup],
    places: &'a [u32],
    dropped: &'a [PlacedGroup],
) -> Vec<LoggedGroup<'a>> {
    let kept = placed(groups, places).map(|(group, place)| LoggedGroup { group, place, is_dropped: false });
    let dropped =
        dropped.iter().map(|PlacedGroup { place, group }| LoggedGroup { group, place: *place, is_dropped: true });
    kept.chain(dropped).collect()
}
