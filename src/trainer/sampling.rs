//! Work for the engines: training batches, which may be sampled ahead, and evaluations.

use std::ops::Range;

use super::carry::Carry;
use super::output::RunOutput;
use super::replace::{Candidates, GroupQuota, OpenBatch, PlacedGroups};
use super::signal::Tally;
use super::turns::turns_of;
use super::{Trainer, records, submit, turns};
use crate::checkpoint::CarriedGroup;
use crate::data::{Dataset, SamplerState};
use crate::dist::{HostGroup, share};
use crate::error::Result;
use crate::eval;
use crate::metrics::StepMetrics;
use crate::phase::{self, Phase};
use crate::reward::{RewardPool, RewardTicket};
use crate::rollout::{Batches, EngineStats, SampledGroup};
use crate::types::{Prompt, RolloutGroup, SamplingParams};

/// A generation batch to be sampled.
#[derive(Debug)]
pub(super) struct GenerationBatch {
    /// Groups that this rank begins or goes on with.
    pub begun: Vec<CarriedGroup>,
    /// The groups in the form that the engine takes.
    pub groups: Vec<RolloutGroup>,
    /// How many of them the step takes.
    pub num_groups: usize,
    pub params: SamplingParams,
    pub before: DataPosition,
    /// The rows, where groups are replaced; no others are begun then.
    open: Option<(Candidates, GroupQuota)>,
}

/// The groups that this rank's engine sampled for a batch.
#[derive(Debug, Default)]
pub(super) struct SamplingResult {
    pub sampled: Vec<SampledGroup<RewardTicket>>,
    /// The engine's counts since it woke.
    pub stats: EngineStats,
    pub drawn: Option<PlacedGroups>,
}

/// The trainer's parts that sampling uses, beside the engine and the turns.
pub(super) struct SamplingContext<'a> {
    pub rewards: &'a mut RewardPool,
    pub output: &'a RunOutput,
    pub dataset: &'a Dataset,
    /// All ranks with engines; none where nothing is replaced.
    pub engines: Option<&'a HostGroup>,
}

impl SamplingContext<'_> {
    /// The ranks with engines, of a run that replaces groups.
    pub fn engines(&self) -> &HostGroup {
        self.engines.expect("a group of the engines where groups are replaced")
    }
}

/// A [`SamplingContext`] of the trainer's parts; the others can be borrowed beside it.
macro_rules! context {
    ($trainer:ident) => {
        crate::trainer::sampling::SamplingContext {
            rewards: &mut $trainer.rewards,
            output: &$trainer.output,
            dataset: &$trainer.dataset,
            engines: $trainer.engines.as_ref(),
        }
    };
}
pub(super) use context;

/// Where the rows were before a batch was drawn.
#[derive(Debug, Clone)]
pub(super) struct DataPosition {
    pub sampler: SamplerState,
    pub carried: Vec<CarriedGroup>,
}

/// Groups of which nothing is sampled yet, of the same rows.
pub(super) fn begun_anew(groups: &[CarriedGroup]) -> Vec<CarriedGroup> {
    groups.iter().map(|group| CarriedGroup::new(group.row)).collect()
}

/// A batch that is not trained on yet; it may have been sampled while the one before it was, with the weights from before that.
#[derive(Debug)]
pub(super) struct SampledBatch {
    /// This rank's groups.
    pub groups: Vec<RolloutGroup>,
    /// The place of each in the order of the data; none where the order of ranks is that.
    pub places: Vec<u32>,
    /// This rank's groups that are left out, each with its place.
    pub dropped: Vec<(u32, RolloutGroup)>,
    /// Groups of all ranks, where some may be left out.
    pub tally: Option<Tally>,
    /// Tickets of the rewards that are still to be awaited, one a group; none where they are there.
    pub tickets: Option<Vec<RewardTicket>>,
    pub before: DataPosition,
    pub carry: Carry,
}

impl SampledBatch {
    /// A batch that takes all of its groups.
    pub fn of_groups(groups: Vec<RolloutGroup>, tickets: Vec<RewardTicket>, before: DataPosition) -> Self {
        let (places, dropped, carry) = (Vec::new(), Vec::new(), Carry::default());
        Self { groups, places, dropped, tally: None, tickets: Some(tickets), before, carry }
    }
}

impl Trainer {
    /// Where the rows are now.
    pub(super) fn data_position(&self) -> DataPosition {
        DataPosition { sampler: self.sampler.state().clone(), carried: self.carried.clone() }
    }

    /// Draws the groups of generation step `step`, which is trained on after `global_step` updates.
    pub(super) fn next_batch(&mut self, step: u64, global_step: u64) -> Result<GenerationBatch> {
        self.rewards.set_progress(global_step, self.schedule.total_steps as u64);
        let before = self.data_position();
        let open = self.open_batch()?;
        let begun = if open.is_some() { Vec::new() } else { self.next_groups()? };
        let group = |CarriedGroup { row, first_step, completions }: &CarriedGroup| RolloutGroup {
            prompt: self.dataset.prompt(*row).clone(),
            first_step: if completions.is_empty() { step } else { *first_step },
            completions: completions.clone(),
        };
        let (groups, num_groups) = (begun.iter().map(group).collect(), self.share(self.batch.num_prompts).len());
        Ok(GenerationBatch { begun, groups, num_groups, params: self.sampling_params_of(step), before, open })
    }

    /// Samples the next batch with the newest weights. Collective over the world.
    pub(super) fn sample(&mut self) -> Result<SampledBatch> {
        let mut batch = self.next_batch(self.progress.generation_step, self.progress.global_step)?;
        let num_shown = batch.open.as_ref().map_or(batch.num_groups, |(_, wanted)| wanted.num_groups);
        self.output.begin_phase("generate", num_shown);
        let (groups, open, num_groups) = (std::mem::take(&mut batch.groups), batch.open.take(), batch.num_groups);
        let (model, turns, mut context) = (&mut self.model, self.turns.as_mut(), context!(self));
        let sampled = model.with_rollout(|engine| {
            engine.on_progress(context.output.sampling_progress());
            let (turns, params) = (turns_of(turns), &batch.params);
            if let Some(open) = open {
                let mut batch = OpenBatch::new(open, (params.step, params), &mut context);
                engine.run(turns, &mut batch)?;
                return Ok(SamplingResult { drawn: Some(batch.finish()), ..SamplingResult::default() });
            }
            let mut done = |_, group: &RolloutGroup| submit(group, context.rewards, context.output);
            let mut batch = Batches::first(groups, num_groups, params, &mut done);
            engine.run(turns, &mut batch)?;
            let sampled = batch.into_sampled().into_iter().flatten().collect();
            Ok(SamplingResult { sampled, stats: *engine.stats(), drawn: None })
        })?;
        self.take(batch, sampled)
    }

    /// Awaits the rewards of a batch and leaves out what is to be left out. Collective over the world.
    ///
    /// # Errors
    /// The first failure of any rank; these rows are then drawn again.
    pub(super) fn await_rewards(&mut self, mut sampled: SampledBatch) -> Result<SampledBatch> {
        if let Some(tickets) = sampled.tickets.take() {
            let awaited = phase::scope(Phase::Reward, || self.rewards.wait(&mut sampled.groups, &tickets));
            if let Err(error) = self.world.agree(awaited) {
                self.put_back(sampled.before)?; // these rows were not trained on
                return Err(error);
            }
            self.filter(&mut sampled)?;
        }
        if let Err(error) = self.check_signal(sampled.tally) {
            self.put_back(sampled.before)?;
            return Err(error);
        }
        Ok(sampled)
    }

    /// Draws a batch's rows, and those of all later batches, again the next time. Solve rates that were booked since stay.
    pub(super) fn put_back(&mut self, before: DataPosition) -> Result<()> {
        self.ahead.clear();
        self.rewards.give_up();
        self.carried = before.carried;
        if let Some(turns) = &mut self.turns {
            turns.reset(); // tools have gone on since: what was under way is played anew
            self.carried = begun_anew(&self.carried);
            self.carried_by = Vec::new();
        }
        let solved = self.sampler.state().solved.clone();
        self.sampler.restore(SamplerState { solved, ..before.sampler })
    }

    /// This rank among those with engines.
    pub(super) fn place_among_engines(&self) -> Option<usize> {
        self.world.rank().checked_sub(self.world.size() - self.batch.roles.num_generators)
    }

    /// This rank's share of `len` rows to sample from; none where it only trains.
    fn share(&self, len: usize) -> Range<usize> {
        self.place_among_engines().map_or(0..0, |place| share(len, (place, self.batch.roles.num_generators)))
    }

    /// Samples and scores the held-out rows, writes their metrics and returns the mean reward: none where there are no rows, or no
    /// sample was scored. Collective over the world.
    ///
    /// # Errors
    /// The first failure of any rank.
    pub fn evaluate(&mut self) -> Result<Option<f64>> {
        let Some(eval_set) = &self.eval_set else { return Ok(None) };
        self.rewards.set_progress(self.progress.global_step, self.schedule.total_steps as u64);
        let num_generations = self.config.eval_num_generations;
        let temperature = self.config.eval_temperature();
        let params = SamplingParams { num_generations, temperature, ..self.sampling_params_of(eval::SAMPLING_STEP) };
        let own = self.share(eval_set.len());
        let prompts: Vec<Prompt> = own.map(|row| eval_set.prompt(row).clone()).collect();
        let (model, rewards, output, world) = (&mut self.model, &mut self.rewards, &self.output, &self.world);
        let turns = self.turns.as_mut();
        output.begin_phase("evaluate", prompts.len());
        let groups = phase::scope(Phase::Eval, || {
            let sampled = model.with_rollout(|engine| {
                engine.on_progress(output.sampling_progress());
                let done = |group: &RolloutGroup| submit(group, rewards, output);
                turns::generate(turns, engine, &prompts, &params, done)
            })?;
            let (mut groups, tickets) = SampledGroup::complete(sampled);
            world.agree(rewards.wait(&mut groups, &tickets))?;
            Ok(groups)
        })?;
        let deciding = self.config.deciding_rewards(self.rewards.judges());
        let outcome = eval::EvalOutcome::of(&groups, &deciding, &*self.world.group())?;
        let (step, epoch) = (self.progress.global_step, self.sampler.epochs());
        let mut failures = StepMetrics::default();
        records::failure_metrics(&mut failures, self.rewards.take_failures());
        self.turns.iter_mut().for_each(|turns| turns.add_metrics(&mut failures));
        let failures = failures.reduce(&*self.world.group())?;
        self.output.evaluation(&outcome, self.rewards.names(), failures, step, epoch);
        self.tell_unscored(&outcome)?;
        let reward = (outcome.reward.count > 0.0).then(|| outcome.reward.mean());
        self.eval_rewards.get_or_insert((reward, reward)).1 = reward;
        Ok(reward)
    }

    /// The configured sampling of the prompts that [`Trainer::next_prompts`] drew.
    pub fn sampling_params(&self) -> SamplingParams {
        self.sampling_params_of(self.progress.generation_step)
    }

    /// How generation step `step` samples.
    fn sampling_params_of(&self, step: u64) -> SamplingParams {
        SamplingParams {
            num_generations: self.config.num_generations,
            temperature: self.config.temperature,
            top_p: self.config.top_p,
            top_k: self.config.top_k,
            min_p: self.config.min_p,
            repetition_penalty: self.config.repetition_penalty,
            max_completion_length: self.config.max_completion_length,
            stop: self.config.stop.clone(),
            seed: self.config.seed,
            step,
            ..SamplingParams::default()
        }
    }
}
