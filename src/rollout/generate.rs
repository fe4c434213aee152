//! Closed batches on an engine that is awake: all prompts of the tensor-parallel group at once, in groups of completions.

use std::sync::Arc;

use super::engine::RolloutEngine;
use super::exchange::exchange;
use super::groups::{GroupSession, GroupTurns};
use super::request::ModelIds;
use super::stats::EngineStats;
use crate::error::Result;
use crate::types::{Prompt, RolloutGroup, SamplingParams};

/// This rank's groups after [`RolloutEngine::generate_first`], each with its index among those that were passed.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Rollout {
    /// The groups that are complete, each with its index.
    pub complete: Vec<(usize, RolloutGroup)>,
    /// The other groups, for a later rollout to continue.
    pub unfinished: Vec<(usize, RolloutGroup)>,
    /// The engine's counts since it woke.
    pub stats: EngineStats,
}

impl RolloutEngine<'_> {
    /// Samples `num_generations` completions for each of this rank's prompts, in its own order. Collective over the
    /// tensor-parallel group: the ranks' prompts are gathered and generated from together, with equal `params`.
    /// `done` is called with each own group as soon as its last completion ends.
    ///
    /// A completion depends on (seed, step, prompt id, sample index) and the prompt's tokens, not on what else is in the
    /// batch, on preemption or on the tensor-parallel degree, up to floating-point rounding of the logits. Two prompts
    /// of equal id and tokens therefore get equal completions.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for parameters or prompts that cannot be served, before anything
    /// is computed; [`Error::NonFinite`](crate::Error::NonFinite) for logits that are not numbers. Errors are the same on every rank
    /// of the group, except those of one rank's device.
    pub fn generate(
        &mut self,
        prompts: &[Prompt],
        params: &SamplingParams,
        done: impl FnMut(&RolloutGroup),
    ) -> Result<Vec<RolloutGroup>> {
        let groups = prompts.iter().cloned().map(RolloutGroup::new).collect();
        let rollout = self.generate_first(groups, prompts.len(), params, done)?;
        Ok(rollout.complete.into_iter().map(|(_, group)| group).collect())
    }

    /// Goes on with groups, begun or not, until the first `num_groups` of them are complete, the ranks' numbers added up. Lengths
    /// alone decide which ones these are, and so how many of this rank's. A completion goes on as if it had never been interrupted,
    /// but for the weights; its tokens keep the log-probabilities that they had. Its keys and values are computed again, unless the
    /// engine keeps them.
    ///
    /// # Errors
    /// The errors of [`RolloutEngine::generate`]; [`Error::InvalidArgument`](crate::Error::InvalidArgument) if there are fewer groups, or
    /// if what has been sampled of one is not `num_generations` completions.
    pub fn generate_first(
        &mut self,
        groups: Vec<RolloutGroup>,
        num_groups: usize,
        params: &SamplingParams,
        done: impl FnMut(&RolloutGroup),
    ) -> Result<Rollout> {
        self.generate_turns(groups, num_groups, params, None, done)
    }

    /// [`RolloutEngine::generate_first`] of completions that may have several turns, with `tools`. Tools and environments of groups that
    /// are not complete live on for the rollout that goes on with them.
    ///
    /// # Errors
    /// The errors of [`RolloutEngine::generate_first`] and of tools.
    pub fn generate_turns(
        &mut self,
        mut groups: Vec<RolloutGroup>,
        num_groups: usize,
        params: &SamplingParams,
        mut turns: Option<Box<dyn GroupTurns + '_>>,
        mut done: impl FnMut(&RolloutGroup),
    ) -> Result<Rollout> {
        for group in groups.iter_mut().filter(|group| group.completions.is_empty()) {
            group.first_step = params.step;
        }
        turns.iter_mut().for_each(|turns| turns.restore(&mut groups));
        let (limits, ids) = (self.limits(), ModelIds::of(&self.engine.spec));
        let ranks = Arc::clone(&self.engine.ranks.all);
        let (requests, mut num_left) = exchange(&groups, num_groups, params, (ids, &limits), ranks.as_ref())?;
        let mut session = GroupSession::open(self, turns)?;
        let mut own = vec![0; groups.len()]; // numbers in the session
        for ((rank, position), request) in requests {
            let is_own = rank == ranks.rank();
            let number = session.submit(request, is_own.then(|| &groups[position].prompt))?;
            if is_own {
                own[position] = number;
            }
        }
        let mut complete: Vec<Option<RolloutGroup>> = groups.iter().map(|_| None).collect();
        while num_left > 0 {
            // What is complete in the same step as the last one that counts is reported again by the rollout that goes on with it.
            for number in session.step()?.into_iter().take(num_left) {
                num_left -= 1;
                if let Some(position) = own.iter().position(|own| *own == number) {
                    let group = session.take_complete(number)?;
                    done(&group);
                    complete[position] = Some(group);
                }
            }
        }
        session.drain()?;
        let mut rollout = Rollout::default();
        for (position, complete) in complete.into_iter().enumerate() {
            match complete {
                Some(complete) => rollout.complete.push((position, complete)),
                None => rollout.unfinished.push((position, session.group(own[position])?)),
            }
        }
        session.close()?;
        rollout.stats = *self.stats();
        Ok(rollout)
    }
}
