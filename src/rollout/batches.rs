//! The sampling policy for batches of known groups. A session samples one batch and ends when enough of its groups are complete, or samples several
//! batches and ends when the first is complete and the caller requests the end.

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

/// Engine steps between two calls that ask whether to end the session.
const STEPS: usize = 16;

/// This rank's groups after [`RolloutEngine::generate_first`], each with its index in the passed list.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Rollout {
    /// The complete groups, each with its index.
    pub complete: Vec<(usize, RolloutGroup)>,
    /// The other groups, for a later rollout to continue.
    pub unfinished: Vec<(usize, RolloutGroup)>,
    /// The engine's counters since it woke.
    pub stats: EngineStats,
}

/// A group of a batch after a sampling session.
#[derive(Debug, Clone, PartialEq)]
pub struct SampledGroup<D = ()> {
    /// The group with all tokens that have been sampled so far.
    pub group: RolloutGroup,
    /// The value that the `done` callback of [`Batches`] returned for the group; `None` while a completion is unfinished.
    pub done: Option<D>,
}

impl<D> SampledGroup<D> {
    /// Wraps a group that is not complete.
    pub fn open(group: RolloutGroup) -> Self {
        Self { group, done: None }
    }

    /// Splits groups into complete and unfinished ones.
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

/// Groups after a session, split by whether they are complete; the order is kept.
#[derive(Debug, Clone, PartialEq)]
pub struct SampledGroups<D = ()> {
    /// Groups whose completions have all ended.
    pub complete: Vec<RolloutGroup>,
    /// The value that the `done` callback of [`Batches`] returned for each complete group.
    pub done: Vec<D>,
    /// Unfinished groups, which a later session can continue.
    pub open: Vec<RolloutGroup>,
}

impl<D> Default for SampledGroups<D> {
    fn default() -> Self {
        Self { complete: Vec::new(), done: Vec::new(), open: Vec::new() }
    }
}

/// A callback for each complete group of this rank; it receives the number of the group's batch.
type Done<'p, D> = &'p mut dyn FnMut(usize, &RolloutGroup) -> D;

/// The sampling policy for batches whose groups are all known before the first step.
pub struct Batches<'p, D = ()> {
    params: &'p SamplingParams,
    groups: Vec<Vec<SampledGroup<D>>>, // groups of this rank
    /// How many of this rank's groups in the first batch must be complete before the session ends.
    num_groups: usize,
    /// Called every [`STEPS`] steps once the first batch is complete; the session ends when it returns true. If `None`, the session ends at once.
    asks_to_end: Option<&'p mut dyn FnMut() -> Result<bool>>,
    done: Done<'p, D>,
    /// Requests of all ranks' groups that are not yet submitted.
    requests: Vec<(OwnedPlace, Request)>,
    /// The place of each submitted group, by group number.
    places: Vec<OwnedPlace>,
    /// Incomplete groups, over all ranks, that the session still waits for.
    num_awaited: usize,
    num_left: usize,
    num_steps: usize,
}

/// The number of a group's batch, and the group's index in that batch if it belongs to this rank.
type OwnedPlace = (usize, Option<usize>);

impl<'p, D> Batches<'p, D> {
    /// Samples one batch. The session ends once `num_groups` groups, summed over the ranks, are complete. `done` is called with each of this rank's
    /// groups as soon as its last completion ends.
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

    /// Samples several batches, the earlier ones first. The session ends when all are complete, or once the first is complete and `asks_to_end`,
    /// called every 16 steps from then on, returns true. Tokens get `params.step` as their weight version; random keys use each group's own
    /// `first_step`. All ranks of an engine must pass equally many batches and get the same answers from `asks_to_end`.
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

    /// The groups of each batch in their current state, in the order in which they were passed.
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
        // Further groups that complete in the same step as the last counted one are reported by the rollout that continues them.
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
    /// Samples `num_generations` completions for each of this rank's prompts and returns them in the order of the prompts. Collective over the
    /// tensor-parallel group: the prompts of all ranks are gathered and sampled in one batch, so `params` must be equal. `done` is called with each
    /// of this rank's groups as soon as its last completion ends.
    ///
    /// A completion depends on (seed, step, prompt id, sample index) and the prompt's tokens. Up to floating-point rounding of the logits it does not
    /// depend on the other requests of the batch, on preemption or on the tensor-parallel degree. Two prompts of equal id and tokens therefore get
    /// equal completions.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for parameters or prompts that the engine does not support, before anything is
    /// computed; [`Error::NonFinite`](crate::Error::NonFinite) for logits that are NaN or infinite. All ranks of the group return the same error,
    /// except for errors of one rank's device.
    pub fn generate(
        &mut self,
        prompts: &[Prompt],
        params: &SamplingParams,
        done: impl FnMut(&RolloutGroup),
    ) -> Result<Vec<RolloutGroup>> {
        let sampled = self.generate_with(Box::<SingleTurns>::default(), prompts, params, done)?;
        Ok(sampled.complete)
    }

    /// Samples like [`RolloutEngine::generate`], for completions that may have several turns.
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

    /// Continues groups, new or partly sampled, until the first `num_groups` of them, summed over the ranks, are complete. Only lengths decide which
    /// groups finish first, and so how many of them belong to this rank. An interrupted completion continues as if it had never stopped, but with the
    /// current weights; its earlier tokens keep their log-probabilities. Its keys and values are computed again unless the engine keeps them.
    ///
    /// # Errors
    /// The errors of [`RolloutEngine::generate`]; [`Error::InvalidArgument`](crate::Error::InvalidArgument) if fewer than `num_groups` groups are
    /// passed, or if a partly sampled group does not have `num_generations` completions.
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
