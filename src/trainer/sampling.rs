//! What is asked of the engines: training batches, which may be sampled ahead, and evaluations.

use super::carry::Carry;
use super::output::Output;
use super::{Trainer, records};
use crate::checkpoint::CarriedGroup;
use crate::data::SamplerState;
use crate::error::Result;
use crate::eval;
use crate::metrics::StepMetrics;
use crate::phase::{self, Phase};
use crate::reward::RewardPool;
use crate::rollout::RolloutEngine;
use crate::types::{Prompt, RolloutGroup, SamplingParams};

/// A batch that is not trained on yet; it may have been sampled while the one before it was, with the weights from before that.
#[derive(Debug)]
pub(super) struct Ahead {
    /// This rank's groups, their rewards still to be awaited.
    pub groups: Vec<RolloutGroup>,
    /// Where the sampler stood before.
    pub sampler: SamplerState,
    /// Groups that were carried before.
    pub carried: Vec<CarriedGroup>,
    pub carry: Carry,
}

impl Ahead {
    /// A batch of all groups that were begun.
    pub fn new(groups: Vec<RolloutGroup>, sampler: SamplerState) -> Self {
        Self { groups, sampler, carried: Vec::new(), carry: Carry::default() }
    }
}

impl Trainer {
    /// The next batch, scored while it is generated.
    pub(super) fn sample(&mut self) -> Result<Ahead> {
        if self.config.oversample > 0.0 {
            return self.sample_first();
        }
        self.tell_rewards(self.progress.global_step);
        let sampler = self.sampler.state().clone();
        let (prompts, params) = (self.next_prompts()?, self.sampling(self.progress.generation_step));
        let (rewards, output) = (&self.rewards, &self.output);
        output.begin_phase("generate", prompts.len());
        let groups = self.halves.with_rollout(|rollout| generate(rollout, &prompts, &params, rewards, output))?;
        Ok(Ahead::new(groups, sampler))
    }

    /// Says before which update what follows was sampled.
    pub(super) fn tell_rewards(&self, global_step: u64) {
        self.rewards.set_progress(global_step, self.schedule.total_steps as u64);
    }

    /// This rank's share of the next prompts.
    pub(super) fn next_prompts(&mut self) -> Result<Vec<Prompt>> {
        let all = self.sampler.next_batch(self.batch.num_prompts)?;
        let own = self.halves.share(all.len());
        Ok(all[own].iter().map(|&row| self.dataset.prompt(row).clone()).collect())
    }

    /// Mean reward on the held-out rows, if there are any.
    pub(super) fn evaluate(&mut self) -> Result<Option<f64>> {
        let Some(eval_set) = &self.eval_set else { return Ok(None) };
        self.tell_rewards(self.progress.global_step);
        let params =
            SamplingParams { num_generations: self.config.eval_num_generations, ..self.sampling(eval::SAMPLING_STEP) };
        let own = self.halves.share(eval_set.len());
        let prompts: Vec<Prompt> = own.map(|row| eval_set.prompt(row).clone()).collect();
        let (halves, rewards, output, world) = (&mut self.halves, &mut self.rewards, &self.output, &self.world);
        output.begin_phase("evaluate", prompts.len());
        let groups = phase::scope(Phase::Eval, || {
            let mut groups = halves.with_rollout(|rollout| generate(rollout, &prompts, &params, rewards, output))?;
            world.agree(rewards.wait(&mut groups))?;
            Ok(groups)
        })?;
        let deciding = self.config.deciding_rewards(self.rewards.judges());
        let outcome = eval::Outcome::of(&groups, &deciding, &*self.world.group())?;
        let (step, epoch) = (self.progress.global_step, self.sampler.epochs());
        let mut failures = StepMetrics::default();
        records::failure_metrics(&mut failures, self.rewards.take_failures());
        let failures = failures.reduce(&*self.world.group())?;
        self.output.evaluation(&outcome, self.rewards.names(), failures, step, epoch);
        self.tell_unscored(&outcome)?;
        Ok((outcome.reward.count > 0.0).then(|| outcome.reward.mean()))
    }

    /// How batch number `step` is sampled.
    pub(super) fn sampling(&self, step: u64) -> SamplingParams {
        SamplingParams {
            num_generations: self.config.num_generations,
            temperature: self.config.temperature,
            top_p: self.config.top_p,
            top_k: self.config.top_k,
            min_p: self.config.min_p,
            repetition_penalty: self.config.repetition_penalty,
            max_completion_length: self.config.max_completion_length,
            spread_lengths: self.spread_lengths,
            stop: self.config.stop.clone(),
            seed: self.config.seed,
            step,
        }
    }
}

/// Groups of `prompts`, each handed to the rewards as it is complete.
pub(super) fn generate(
    rollout: &mut RolloutEngine<'_>,
    prompts: &[Prompt],
    params: &SamplingParams,
    rewards: &RewardPool,
    output: &Output,
) -> Result<Vec<RolloutGroup>> {
    rollout.generate(prompts, params, |done| {
        rewards.submit(done); // scored while others generate
        output.advance();
    })
}
