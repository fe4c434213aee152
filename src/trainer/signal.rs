//! Groups that teach nothing: counted, left out of the update, and the end of a run that samples nothing else.

use serde::{Deserialize, Serialize};

use super::Trainer;
use super::records::placed;
use super::replace::{Candidates, GroupQuota, PlacedGroups, Replacement};
use super::sampling::{DataPosition, SampledBatch};
use crate::config::{Config, DynamicSampling};
use crate::error::{Error, Result};
use crate::grpo::{BatchStats, has_signal, rewards_are_equal};
use crate::metrics::{LoggedGroup, Reduce, StepMetrics};
use crate::ranks::{HostGroup, ReduceOp, World, all_gather_json, all_reduce_f64};
use crate::types::RolloutGroup;

/// Steps in a row whose groups are all left out that end a run: it would go on for nothing.
const MAX_STEPS: usize = 3;

/// Whether the rewards of a group teach something.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct GroupVerdict {
    pub has_signal: bool,
    are_equal: bool,
    /// Sum and number of its rewards.
    sum: f64,
    count: f64,
}

impl GroupVerdict {
    pub fn of(group: &RolloutGroup, range: Option<[f64; 2]>) -> Self {
        let BatchStats { sum, count, .. } = BatchStats::of_group(group);
        Self { has_signal: has_signal(group, range), are_equal: rewards_are_equal(group), sum, count }
    }
}

/// Groups of a step, over all ranks, and their rewards.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Tally {
    pub num_sampled: f64,
    pub num_kept: f64,
    num_equal: f64,
    reward_sum: f64,
    reward_count: f64,
}

impl FromIterator<GroupVerdict> for Tally {
    fn from_iter<I: IntoIterator<Item = GroupVerdict>>(verdicts: I) -> Self {
        let mut tally = Self::default();
        for GroupVerdict { has_signal, are_equal, sum, count } in verdicts {
            tally.num_sampled += 1.0;
            tally.num_kept += f64::from(u8::from(has_signal));
            tally.num_equal += f64::from(u8::from(are_equal));
            tally.reward_sum += sum;
            tally.reward_count += count;
        }
        tally
    }
}

impl Tally {
    /// Adds up the tallies of all ranks; collective over the world.
    fn of_all_ranks(self, world: &World) -> Result<Self> {
        let mut sums = [self.num_sampled, self.num_kept, self.num_equal, self.reward_sum, self.reward_count];
        all_reduce_f64(&*world.group(), &mut sums, ReduceOp::Sum)?;
        let [num_sampled, num_kept, num_equal, reward_sum, reward_count] = sums;
        Ok(Self { num_sampled, num_kept, num_equal, reward_sum, reward_count })
    }

    /// Metrics of a step that takes `num_groups` groups.
    fn add_metrics(&self, metrics: &mut StepMetrics, num_groups: usize) {
        let num_groups = num_groups as f64;
        for (name, value) in [
            ("generated_groups", self.num_sampled),
            ("kept_groups", self.num_kept),
            ("no_signal_groups", self.num_sampled - self.num_kept),
            ("replaced_groups", self.num_sampled - num_groups),
            ("gen_batches", self.num_sampled / num_groups),
            ("reward", self.reward_sum / self.reward_count),
        ] {
            metrics.set(format!("dynamic_sampling/{name}"), value, Reduce::Last);
        }
    }
}

/// Steps in a row, up to now, all of whose groups were left out.
#[derive(Debug, Default)]
pub(super) struct Signal {
    num_steps: usize,
    newest: Tally,
}

impl Trainer {
    /// Samples the next batch with the newest weights, and replaces groups without a signal. Collective over the world.
    pub(super) fn sample_with_replacement(&mut self) -> Result<SampledBatch> {
        let (before, open, params) = (self.data_position(), self.open_batch()?, self.sampling_params());
        let (step, max_steps) = ([params.step, self.progress.global_step], self.schedule.total_steps as u64);
        self.output.begin_phase("generate", self.batch.num_prompts);
        let Self { model, turns, rewards, output, dataset, engines, .. } = self;
        let drawn = model.with_rollout(|engine| {
            let mut replacement = Replacement { rewards, output, dataset, engines: engines.as_ref(), max_steps };
            replacement.sample(engine, turns.as_mut(), open, &params, &[step])
        })?;
        self.take_drawn(before, drawn.into_iter().next())
    }

    /// Where replacement begins: the first rows of a step, and what it wants of them.
    pub(super) fn open_batch(&self) -> Result<(Candidates, GroupQuota)> {
        let (config, num_groups) = (&self.config, self.batch.num_prompts);
        let wanted = GroupQuota {
            num_groups,
            max_groups: self.max_groups(),
            range: config.dynamic_sampling_range,
            waits: config.strict || config.full_determinism || !self.world.device().is_cuda(),
            ranks_per_engine: config.engine_shape().num_ranks(),
        };
        Ok((Candidates::first(self.sampler.clone(), num_groups)?, wanted))
    }

    /// Most groups that a step begins: no row comes twice.
    fn max_groups(&self) -> usize {
        let asked = self.batch.num_prompts.saturating_mul(self.config.dynamic_sampling_max_gen_batches);
        asked.min(self.dataset.len())
    }

    /// The batch of a step with replacement, and the sampler behind all rows that were begun. Collective over the world.
    pub(super) fn take_drawn(&mut self, before: DataPosition, drawn: Option<PlacedGroups>) -> Result<SampledBatch> {
        let own = drawn.as_ref().map(|drawn| drawn.tally);
        let tallies: Vec<Option<Tally>> = all_gather_json(&*self.world.group(), "gather verdicts", &own)?;
        let tally = tallies.into_iter().flatten().next().unwrap_or_default();
        let candidates = Candidates::first(self.sampler.clone(), self.batch.num_prompts)?;
        self.sampler = candidates.into_sampler(tally.num_sampled as usize)?;
        let PlacedGroups { kept, dropped, .. } = drawn.unwrap_or_default();
        let placed = |(index, group): (usize, RolloutGroup)| (index as u32, group);
        let (places, groups) = kept.into_iter().map(placed).unzip();
        let dropped = dropped.into_iter().map(placed).collect();
        Ok(SampledBatch {
            groups,
            places,
            dropped,
            tally: Some(tally),
            before,
            carry: Default::default(),
            tickets: None,
        })
    }

    /// Leaves scored groups without a signal out of a batch, where they are to be. Collective over the world then.
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
        sampled.dropped = dropped.into_iter().map(|group| (0, group)).collect();
        Ok(())
    }

    /// Tells of a batch without enough groups that teach something, before it is trained on.
    ///
    /// # Errors
    /// [`Error::NoSignal`], on all ranks, for a step with replacement that found none, and for the last of [`MAX_STEPS`] steps whose
    /// groups were all filtered.
    pub(super) fn check_signal(&mut self, tally: Option<Tally>) -> Result<()> {
        let Some(tally) = tally else { return Ok(()) };
        let replaces = self.config.dynamic_sampling == DynamicSampling::Replace;
        self.signal.num_steps = if tally.num_kept == 0.0 { self.signal.num_steps + 1 } else { 0 };
        self.signal.newest = tally;
        if self.signal.num_steps >= if replaces { 1 } else { MAX_STEPS } {
            return Err(Error::NoSignal { message: self.describe(&tally) });
        }
        let Tally { num_sampled, num_kept, .. } = tally;
        if num_kept < self.batch.num_prompts as f64 && (replaces || num_kept == 0.0) {
            let step = self.progress.global_step + 1;
            let lost = if num_kept == 0.0 { "; nothing is learned" } else { "" };
            self.output.say(&format!(
                "step {step}: warning: only {num_kept} of {num_sampled} sampled groups teach something, and a batch is {} groups{lost}",
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
                 dynamic_sampling_max_gen_batches = {} batches, or the {} rows there are)",
                self.max_groups(),
                self.config.dynamic_sampling_max_gen_batches,
                self.dataset.len()
            ),
            _ => format!("{MAX_STEPS} steps in a row; {num_sampled} groups were sampled in the last"),
        };
        let outside = match self.config.dynamic_sampling_range {
            Some([low, high]) => {
                format!(", {} have a mean outside of dynamic_sampling_range = [{low}, {high}]", num_sampled - num_equal)
            }
            None => String::new(),
        };
        format!(
            "{bound}: {num_equal} have equal rewards{outside}; their mean reward is {:.4}. Take rows that the model sometimes \
             solves and sometimes does not, or rewards that tell its completions apart, or raise num_generations or temperature",
            reward_sum / reward_count
        )
    }

    /// Counts sampled groups and tokens, those that were left out among them.
    pub(super) fn add_signal_metrics(
        &self,
        metrics: &mut StepMetrics,
        tally: Option<Tally>,
        groups: &[RolloutGroup],
        dropped: &[(u32, RolloutGroup)],
    ) {
        let Some(tally) = tally else { return };
        let num_groups = match self.config.dynamic_sampling {
            DynamicSampling::Replace => self.batch.num_prompts,
            _ => tally.num_sampled as usize,
        };
        tally.add_metrics(metrics, num_groups);
        let all = groups.iter().chain(dropped.iter().map(|(_, group)| group));
        let num_tokens: usize =
            all.flat_map(|group| &group.completions).map(|completion| completion.num_sampled()).sum();
        metrics.set("tokens/generated", num_tokens as f64, Reduce::Sum);
    }
}

/// All groups of this rank for the file of completions.
pub(super) fn logged<'a>(
    groups: &'a [RolloutGroup],
    places: &'a [u32],
    dropped: &'a [(u32, RolloutGroup)],
) -> Vec<LoggedGroup<'a>> {
    let kept = placed(groups, places).map(|(group, place)| LoggedGroup { group, place, is_dropped: false });
    kept.chain(dropped.iter().map(|(place, group)| LoggedGroup { group, place: *place, is_dropped: true })).collect()
}

/// The ranks with engines, where they exchange verdicts; collective over the world then.
pub(super) fn engines(config: &Config, world: &World, num_generators: usize) -> Result<Option<HostGroup>> {
    if config.dynamic_sampling != DynamicSampling::Replace {
        return Ok(None);
    }
    let num_others = world.size() - num_generators;
    let ranks = if world.rank() < num_others { 0..num_others } else { num_others..world.size() };
    world.host_group("verdicts", &ranks.collect::<Vec<_>>()).map(Some)
}
