//! The engines' work: training batches, which may be sampled ahead, and evaluations.

use std::ops::Range;

use super::batches::{DataPosition, GenerationBatch, SampledBatch, begun_anew};
use super::carry::{self, Carry};
use super::turns::turns_of;
use super::{Trainer, records, submit, turns};
use crate::checkpoint::CarriedGroup;
use crate::data::SamplerState;
use crate::error::Result;
use crate::eval;
use crate::metrics::StepMetrics;
use crate::phase::{self, Phase};
use crate::ranks::all_gather_json;
use crate::reward::RewardTicket;
use crate::rollout::{Batches, EngineStats, SampledGroup, SampledGroups};
use crate::types::{Place, Prompt, RolloutGroup, SamplingParams};

impl Trainer {
    /// Draws the groups of generation step `step`; `global_step` updates will precede the training on it.
    pub(super) fn next_batch(&mut self, step: u64, global_step: u64) -> Result<GenerationBatch> {
        self.rewards.set_progress(global_step, self.max_steps());
        let before = self.data.position();
        let begun = self.next_groups()?;
        let group = |CarriedGroup { row, first_step, completions }: &CarriedGroup| RolloutGroup {
            prompt: self.data.train.prompt(*row).clone(),
            first_step: if completions.is_empty() { step } else { *first_step },
            completions: completions.clone(),
        };
        let groups = begun.iter().map(group).collect();
        Ok(GenerationBatch { begun, groups, before })
    }

    /// Samples the next batch with the newest weights. Collective over the world.
    pub(super) fn sample(&mut self) -> Result<SampledBatch> {
        if self.generation.verdict_group.is_some() {
            return self.sample_with_replacement();
        }
        let (step, num_groups) = (self.progress.generation_step, self.share(self.batch.num_prompts).len());
        let GenerationBatch { begun, groups, before } = self.next_batch(step, self.progress.global_step)?;
        let params = self.sampling_params();
        self.output.begin_phase("generate", num_groups);
        let Self { model, generation, rewards, output, .. } = self;
        let (sampled, stats) = model.with_rollout(|engine| {
            engine.on_progress(output.sampling_progress());
            let mut done = |_, group: &RolloutGroup| submit(group, rewards, output);
            let mut batch = Batches::first(groups, num_groups, &params, &mut done);
            engine.run(turns_of(generation.turns.as_mut()), &mut batch)?;
            Ok((batch.into_sampled(), *engine.stats()))
        })?;
        self.take(begun, before, sampled.into_iter().flatten(), stats)
    }

    /// This rank's groups for the next step, carried ones first. If all ranks carry equally many and begin no more groups than the step trains on,
    /// each gets a consecutive share of the next rows.
    pub(super) fn next_groups(&mut self) -> Result<Vec<CarriedGroup>> {
        let carried = std::mem::take(&mut self.data.carried);
        let under_way: Vec<usize> = carried.iter().map(|group| group.row).collect();
        let num_new = self.batch.num_begun.saturating_sub(carried.len());
        let new = self.data.sampler.next_batch_beside(num_new, &under_way)?.into_iter().map(CarriedGroup::new);
        let num_engines = self.batch.roles.num_generators;
        let carried_by = std::mem::take(&mut self.data.carried_by);
        let mut shares = match self.config.keeps_kv_cache() {
            _ if !carried_by.is_empty() => {
                carry::with_their_ranks(carried, &carried_by[carried_by.len() - num_engines..])
            }
            true => carry::in_order(&carried, num_engines),
            false => carry::one_by_one(carried, num_engines),
        };
        carry::fill(&mut shares, new, [self.batch.num_prompts, self.batch.num_begun]);
        Ok(self.place_among_engines().map_or_else(Vec::new, |place| shares.swap_remove(place)))
    }

    /// Selects the groups that the step trains on; the others are carried to the next step or dropped. Collective over the world if more groups are
    /// begun than a step trains on.
    pub(super) fn take(
        &mut self,
        begun: Vec<CarriedGroup>,
        before: DataPosition,
        sampled: impl Iterator<Item = SampledGroup<RewardTicket>>,
        engine: EngineStats,
    ) -> Result<SampledBatch> {
        let step = self.progress.generation_step;
        let (mut carry, mut kept) = (Carry::new(engine), Vec::new());
        let (mut groups, mut tickets) = (Vec::new(), Vec::new());
        for (begun, SampledGroup { group, done }) in begun.into_iter().zip(sampled) {
            let num_continued = carry::num_sampled(&begun.completions);
            if let Some(ticket) = done {
                carry.take(num_continued, &group, step);
                groups.push(group);
                tickets.push(ticket);
                continue;
            }
            let num_tokens = carry::num_sampled(&group.completions);
            // An agent may have dropped requests whose tokens were counted.
            carry.num_sampled += num_tokens.saturating_sub(num_continued);
            if self.config.partial_rollout || num_tokens == 0 {
                let RolloutGroup { first_step, completions, .. } = group;
                kept.push(CarriedGroup { row: begun.row, first_step, completions });
            } else {
                carry.num_discarded += num_tokens;
                self.generation.turns.iter_mut().for_each(|turns| turns.forget(&group));
            }
        }
        carry.num_carried = kept.len();
        if self.config.oversample > 0.0 {
            let of_ranks: Vec<Vec<CarriedGroup>> =
                all_gather_json(&*self.world.group(), "gather unfinished groups", &kept)?;
            if self.generation.turns.is_some() {
                self.data.carried_by = of_ranks.iter().map(Vec::len).collect(); // the ranks that hold tools and environments
            }
            self.data.carried = of_ranks.concat();
        }
        Ok(SampledBatch { carry, ..SampledBatch::of_groups(groups, tickets, before) })
    }

    /// Waits for the rewards of a batch and applies filters. Collective over the world.
    ///
    /// # Errors
    /// The first failure of any rank. The batch's rows will then be drawn again.
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

    /// Resets the data to the place before a batch, so that its rows and those of all later batches are drawn again. Solve rates recorded since then
    /// stay.
    pub(super) fn put_back(&mut self, before: DataPosition) -> Result<()> {
        self.generation.ahead.clear();
        self.rewards.give_up();
        self.data.carried = before.carried;
        if let Some(turns) = &mut self.generation.turns {
            turns.reset(); // tools have changed since, so episodes start again
            self.data.carried = begun_anew(&self.data.carried);
            self.data.carried_by = Vec::new();
        }
        let solved = self.data.sampler.state().solved.clone();
        self.data.sampler.restore(SamplerState { solved, ..before.sampler })
    }

    /// The index of this rank among the ranks with engines; `None` without an engine.
    pub(super) fn place_among_engines(&self) -> Option<usize> {
        self.world.rank().checked_sub(self.world.size() - self.batch.roles.num_generators)
    }

    /// This rank's share of `len` rows to sample from; empty on a rank that only trains.
    pub(super) fn share(&self, len: usize) -> Range<usize> {
        let size = self.batch.roles.num_generators;
        self.place_among_engines().map_or(0..0, |rank| Place { rank, size }.share(len))
    }

    /// Samples and scores the held-out rows, writes their metrics and returns the mean reward; `None` without such rows, or if no sample was scored.
    /// Collective over the world.
    ///
    /// # Errors
    /// The first failure of any rank.
    pub fn evaluate(&mut self) -> Result<Option<f64>> {
        let Some(eval_set) = &self.data.eval else { return Ok(None) };
        self.rewards.set_progress(self.progress.global_step, self.max_steps());
        let num_generations = self.config.eval_num_generations;
        let temperature = self.config.eval_temperature();
        let params = SamplingParams { num_generations, temperature, ..self.sampling_params_of(eval::SAMPLING_STEP) };
        let own = self.share(eval_set.len());
        let prompts: Vec<Prompt> = own.map(|row| eval_set.prompt(row).clone()).collect();
        let Self { model, rewards, output, world, generation, .. } = self;
        output.begin_phase("evaluate", prompts.len());
        let groups = phase::scope(Phase::Eval, || {
            let sampled = model.with_rollout(|engine| {
                engine.on_progress(output.sampling_progress());
                let done = |group: &RolloutGroup| submit(group, rewards, output);
                turns::generate(generation.turns.as_mut(), engine, &prompts, &params, done)
            })?;
            let SampledGroups { complete: mut groups, done: tickets, open: _ } = sampled; // empty, because the session waits for all rows
            world.agree(rewards.wait(&mut groups, &tickets))?;
            Ok(groups)
        })?;
        let deciding = self.config.deciding_rewards(self.rewards.judges());
        let outcome = eval::EvalOutcome::of(&groups, &deciding, &*self.world.group())?;
        let (step, epoch) = (self.progress.global_step, self.data.sampler.epochs());
        let mut failures = StepMetrics::default();
        records::failure_metrics(&mut failures, self.rewards.take_failures());
        self.generation.turns.iter_mut().for_each(|turns| turns.add_metrics(&mut failures));
        let failures = failures.reduce(&*self.world.group())?;
        let reward = self.output.evaluation(&outcome, self.rewards.names(), failures, step, epoch);
        self.tell_unscored(&outcome)?;
        Ok(reward)
    }

    /// The configured sampling parameters for the prompts that [`Trainer::next_prompts`] drew.
    pub fn sampling_params(&self) -> SamplingParams {
        self.sampling_params_of(self.progress.generation_step)
    }

    /// The sampling parameters of generation step `step`.
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
