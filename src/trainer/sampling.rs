//! Work for the engines: training batches, which may be sampled ahead, and evaluations.

use std::ops::Range;

use super::carry::Carry;
use super::signal::Tally;
use super::turns::turns_of;
use super::{Trainer, records, submit, turns};
use crate::checkpoint::CarriedGroup;
use crate::data::SamplerState;
use crate::error::Result;
use crate::eval;
use crate::metrics::StepMetrics;
use crate::phase::{self, Phase};
use crate::ranks::share;
use crate::reward::RewardTicket;
use crate::rollout::{Batches, SampledGroups};
use crate::types::{Prompt, RolloutGroup, SamplingParams};

/// A generation batch to be sampled.
#[derive(Debug)]
pub(super) struct GenerationBatch {
    /// Groups that this rank begins or goes on with.
    pub begun: Vec<CarriedGroup>,
    /// The groups in the form that the engine takes.
    pub groups: Vec<RolloutGroup>,
    pub before: DataPosition,
}

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
        let begun = self.next_groups()?;
        let group = |CarriedGroup { row, first_step, completions }: &CarriedGroup| RolloutGroup {
            prompt: self.dataset.prompt(*row).clone(),
            first_step: if completions.is_empty() { step } else { *first_step },
            completions: completions.clone(),
        };
        let groups = begun.iter().map(group).collect();
        Ok(GenerationBatch { begun, groups, before })
    }

    /// Samples the next batch with the newest weights. Collective over the world.
    pub(super) fn sample(&mut self) -> Result<SampledBatch> {
        if self.engines.is_some() {
            return self.sample_with_replacement();
        }
        let (step, num_groups) = (self.progress.generation_step, self.share(self.batch.num_prompts).len());
        let GenerationBatch { begun, groups, before } = self.next_batch(step, self.progress.global_step)?;
        let params = self.sampling_params();
        self.output.begin_phase("generate", num_groups);
        let Self { model, turns, rewards, output, .. } = self;
        let (sampled, stats) = model.with_rollout(|engine| {
            engine.on_progress(output.sampling_progress());
            let mut done = |_, group: &RolloutGroup| submit(group, rewards, output);
            let mut batch = Batches::first(groups, num_groups, &params, &mut done);
            engine.run(turns_of(turns.as_mut()), &mut batch)?;
            Ok((batch.into_sampled(), *engine.stats()))
        })?;
        self.take(begun, before, sampled.into_iter().flatten(), stats)
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
        let Self { model, rewards, output, world, turns, .. } = self;
        output.begin_phase("evaluate", prompts.len());
        let groups = phase::scope(Phase::Eval, || {
            let sampled = model.with_rollout(|engine| {
                engine.on_progress(output.sampling_progress());
                let done = |group: &RolloutGroup| submit(group, rewards, output);
                turns::generate(turns.as_mut(), engine, &prompts, &params, done)
            })?;
            let SampledGroups { complete: mut groups, done: tickets, open: _ } = sampled; // none is: all rows were awaited
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
