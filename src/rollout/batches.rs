//! Batches of groups: one, which ends when enough of its groups are complete, or several, which end when the first is complete and the
//! caller asks for an end.

use std::fmt;

use super::engine::RolloutEngine;
use super::exchange::{Owner, exchange};
use super::request::{ModelIds, Request};
use super::run::{Flow, SamplingPolicy};
use super::session::Session;
use super::stats::EngineStats;
use super::turns::{GroupTurns, SingleTurns};
use crate::error::Result;
use crate::types::{Prompt, RolloutGroup, SamplingParams};

/// Engine steps between two questions whether to end.
const STEPS: usize = 16;

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

/// A group of a batch after a session.
#[derive(Debug, Clone, PartialEq)]
pub struct SampledGroup<D = ()> {
    /// The group, with what is sampled of it.
    pub group: RolloutGroup,
    /// The value that `done` of [`Batches`] returned for it; none while a completion has not ended.
    pub done: Option<D>,
}

impl<D> SampledGroup<D> {
    /// A group that is not complete.
    pub fn open(group: RolloutGroup) -> Self {
        Self { group, done: None }
    }

    /// Splits groups by whether they are complete.
    pub fn split(groups: impl IntoIterator<Item = Self>) -> SampledGroups<D> {
        let mut split = SampledGroups::default();
        for Self { group, done } in groups {
            match done {
                Some(done) => {
                    split.complete.push(group);
                    split.done.push(done);
                }
                None => split.open.push(group),
            }
        }
        split
    }
}

/// Groups after a session, in their order.
#[derive(Debug, Clone, PartialEq)]
pub struct SampledGroups<D = ()> {
    /// Groups whose completions have all ended.
    pub complete: Vec<RolloutGroup>,
    /// The value that `done` of [`Batches`] returned for each of them.
    pub done: Vec<D>,
    /// Groups that a later session may go on with.
    pub open: Vec<RolloutGroup>,
}

impl<D> Default for SampledGroups<D> {
    fn default() -> Self {
        Self { complete: Vec::new(), done: Vec::new(), open: Vec::new() }
    }
}

/// A function that is called with each complete group of this rank and the number of its batch.
type Done<'p, D> = &'p mut dyn FnMut(usize, &RolloutGroup) -> D;

/// The policy of batches whose groups are known before the first step.
pub struct Batches<'p, D = ()> {
    params: &'p SamplingParams,
    groups: Vec<Vec<SampledGroup<D>>>, // this rank's
    /// This rank's part of the groups of the first batch that must be complete before the session ends.
    num_groups: usize,
    /// Asked every [`STEPS`] steps from then on whether the session ends; without it, it ends at once.
    asks_to_end: Option<&'p mut dyn FnMut() -> Result<bool>>,
    done: Done<'p, D>,
    /// All ranks' groups until they are submitted.
    requests: Vec<(OwnedPlace, Request)>,
    /// The place of each submitted group, by its number.
    places: Vec<OwnedPlace>,
    /// Groups of all ranks that the session waits for, and that are not complete.
    num_awaited: usize,
    num_left: usize,
    num_steps: usize,
}

/// A group's batch, and its place there if it is this rank's.
type OwnedPlace = (usize, Option<usize>);

impl<'p, D> Batches<'p, D> {
    /// One batch, whose session ends once `num_groups` of the groups are complete, the ranks' numbers added up. `done` is called with
    /// each of this rank's as soon as its last completion ends.
    pub fn first(
        mut groups: Vec<RolloutGroup>,
        num_groups: usize,
        params: &'p SamplingParams,
        done: Done<'p, D>,
    ) -> Self {
        for group in groups.iter_mut().filter(|group| group.completions.is_empty()) {
            group.first_step = params.step;
        }
        Self::new(vec![groups], num_groups, params, done)
    }

    /// Several batches, the earlier ones first, whose session ends when all are complete. Once the groups of the first batch are,
    /// `asks_to_end` is called every 16 steps, and the session ends where it returns true. `params.step` is the weight version of the tokens
    /// that are sampled now; random keys have the `first_step` of each group. The ranks of an engine pass equally many batches and must
    /// get the same answers from `asks_to_end`.
    pub fn ahead(
        batches: Vec<Vec<RolloutGroup>>,
        params: &'p SamplingParams,
        asks_to_end: &'p mut dyn FnMut() -> Result<bool>,
        done: Done<'p, D>,
    ) -> Self {
        let num_groups = batches.first().map_or(0, Vec::len);
        Self { asks_to_end: Some(asks_to_end), ..Self::new(batches, num_groups, params, done) }
    }

    fn new(batches: Vec<Vec<RolloutGroup>>, num_groups: usize, params: &'p SamplingParams, done: Done<'p, D>) -> Self {
        let open = |groups: Vec<RolloutGroup>| groups.into_iter().map(SampledGroup::open).collect();
        let groups = batches.into_iter().map(open).collect();
        let (requests, places) = (Vec::new(), Vec::new());
        let (num_awaited, num_left, num_steps) = (0, 0, 0);
        Self { params, groups, num_groups, asks_to_end: None, done, requests, places, num_awaited, num_left, num_steps }
    }

    /// The groups of each batch as they stand, in the order in which they were passed.
    pub fn into_sampled(self) -> Vec<Vec<SampledGroup<D>>> {
        self.groups
    }
}

impl<T: GroupTurns + ?Sized, D> SamplingPolicy<T> for Batches<'_, D> {
    fn prepare(&mut self, engine: &RolloutEngine<'_>, turns: &mut T) -> Result<()> {
        let (model, ranks) = ((ModelIds::of(&engine.engine.spec), &engine.limits()), &*engine.engine.ranks.all);
        for (batch, groups) in self.groups.iter_mut().enumerate() {
            groups.iter_mut().for_each(|sampled| turns.restore(&mut sampled.group));
            let num_groups = if batch == 0 { self.num_groups } else { groups.len() };
            let groups = groups.iter().map(|sampled| &sampled.group);
            let (requests, num_groups) = exchange(groups, num_groups, self.params, model, ranks)?;
            self.num_awaited += if batch == 0 { num_groups } else { 0 };
            let own = |(rank, position): Owner| (rank == ranks.rank()).then_some(position);
            self.requests.extend(requests.into_iter().map(|(owner, request)| ((batch, own(owner)), request)));
        }
        self.num_left = self.requests.len();
        Ok(())
    }

    fn next(&mut self, turns: &mut T, session: &mut Session<'_>) -> Result<Flow> {
        for ((batch, own), request) in self.requests.drain(..) {
            let prompt = own.map(|position| &self.groups[batch][position].group.prompt);
            let number = turns.submit(session, request, prompt)?;
            assert_eq!(number, self.places.len(), "turns number their groups in order");
            self.places.push((batch, own));
        }
        let may_ask = self.num_steps.is_multiple_of(STEPS) || !session.has_work();
        let ends = self.num_awaited == 0
            && match &mut self.asks_to_end {
                Some(asks_to_end) => self.num_left == 0 || (may_ask && asks_to_end()?),
                None => true,
            };
        self.num_steps += 1;
        Ok(if ends { Flow::End } else { Flow::Step })
    }

    fn complete(&mut self, number: usize, turns: &mut T, session: &Session<'_>) -> Result<()> {
        // What is complete in the same step as the last one that counts is reported again by the rollout that goes on with it.
        if self.num_awaited == 0 && self.asks_to_end.is_none() {
            return Ok(());
        }
        let (batch, own) = self.places[number];
        self.num_awaited -= usize::from(batch == 0);
        self.num_left -= 1;
        let Some(position) = own else { return Ok(()) };
        let group = turns.take_complete(number, session)?;
        let done = Some((self.done)(batch, &group));
        self.groups[batch][position] = SampledGroup { group, done };
        Ok(())
    }

    fn end(&mut self, turns: &T, session: &Session<'_>) -> Result<()> {
        for (number, (batch, own)) in self.places.iter().enumerate() {
            let sampled = own.map(|position| &mut self.groups[*batch][position]);
            if let Some(sampled) = sampled.filter(|sampled| sampled.done.is_none()) {
                sampled.group = turns.group(number, session)?;
            }
        }
        Ok(())
    }
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
        let sampled = self.generate_with(Box::<SingleTurns>::default(), prompts, params, done)?;
        Ok(sampled.complete)
    }

    /// [`RolloutEngine::generate`] of completions that may have several turns.
    ///
    /// # Errors
    /// The errors of [`RolloutEngine::generate`] and of `turns`.
    #[doc(hidden)]
    pub fn generate_with<T: GroupTurns + ?Sized, D>(
        &mut self,
        turns: Box<T>,
        prompts: &[Prompt],
        params: &SamplingParams,
        mut done: impl FnMut(&RolloutGroup) -> D,
    ) -> Result<SampledGroups<D>> {
        let mut done = |_, group: &RolloutGroup| done(group);
        let groups = prompts.iter().cloned().map(RolloutGroup::new).collect();
        let mut batch = Batches::first(groups, prompts.len(), params, &mut done);
        self.run(turns, &mut batch)?;
        Ok(SampledGroup::split(batch.into_sampled().into_iter().flatten()))
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
        mut done: impl FnMut(&RolloutGroup),
    ) -> Result<Rollout> {
        let mut done = |_, group: &RolloutGroup| done(group);
        let mut batch = Batches::first(groups, num_groups, params, &mut done);
        self.run(Box::<SingleTurns>::default(), &mut batch)?;
        let mut rollout = Rollout { stats: *self.stats(), ..Rollout::default() };
        for (index, SampledGroup { group, done }) in batch.into_sampled().into_iter().flatten().enumerate() {
            let groups = if done.is_some() { &mut rollout.complete } else { &mut rollout.unfinished };
            groups.push((index, group));
        }
        Ok(rollout)
    }
}

impl<D: fmt::Debug> fmt::Debug for Batches<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batches").field("groups", &self.groups).finish_non_exhaustive()
    }
}
