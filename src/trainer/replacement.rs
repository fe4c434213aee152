//! `dynamic_sampling = replace`: groups without a learning signal are replaced while others are still decoded.
//!
//! The candidates of a step are the next rows in the order of the data. All engines hold one list of candidates with their verdicts: whether each
//! group has a signal. They begin the next row as soon as the number of groups with a signal plus those without a verdict is less than the step
//! needs. So no candidate is sampled unnecessarily. The batch is the first groups with a signal in that order, whichever engine sampled them and
//! whichever reward came first.
//!
//! Engines exchange verdicts every [`STEPS`] steps of their own. If bits must not depend on timing, an exchange waits for the rewards of all groups
//! that were complete at the previous one; otherwise it uses the rewards that are there.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::batches::PlacedGroup;
use super::output::RunOutput;
use super::turns::{RunTurns, turns_of};
use super::verdict::{GroupVerdict, Tally};
use crate::data::{Dataset, PromptSampler};
use crate::error::Result;
use crate::phase::{self, Phase};
use crate::ranks::HostGroup;
use crate::reward::{RewardPool, RewardTicket};
use crate::rollout::{Flow, GroupTurns, Request, RolloutEngine, SamplingPolicy, Session};
use crate::types::{Place, RolloutGroup, SamplingParams};

/// Number of engine steps between two exchanges of verdicts.
const STEPS: usize = 16;

/// How many groups a step with replacement needs, and which of them count.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct GroupQuota {
    /// Number of groups in the batch.
    pub num_groups: usize,
    /// Maximum number of groups that are begun for the batch.
    pub max_groups: usize,
    /// Range of mean rewards in which a group counts.
    pub range: Option<[f64; 2]>,
    /// Whether exchanges wait for rewards.
    pub waits: bool,
    /// Number of ranks that share an engine.
    pub ranks_per_engine: usize,
}

/// This rank's groups of a step with replacement.
#[derive(Debug, Default)]
pub(super) struct DrawnGroups {
    pub kept: Vec<PlacedGroup>,
    pub dropped: Vec<PlacedGroup>,
    /// Counts over the groups of all engines.
    pub tally: Tally,
}

/// The rows of a step, drawn one at a time.
#[derive(Debug, Clone)]
pub(super) struct Candidates {
    sampler: PromptSampler,
    rows: Vec<usize>,
}

impl Candidates {
    /// Draws the first `num_groups` rows of a step.
    pub fn first(mut sampler: PromptSampler, num_groups: usize) -> Result<Self> {
        let rows = sampler.next_batch(num_groups)?;
        Ok(Self { sampler, rows })
    }

    /// Draws the next row that the step does not have yet.
    pub fn draw(&mut self) -> Result<usize> {
        let row = self.sampler.next_batch_beside(1, &self.rows)?[0];
        self.rows.push(row);
        Ok(row)
    }

    /// The data sampler after `num_rows` rows of the step.
    pub fn into_sampler(mut self, num_rows: usize) -> Result<PromptSampler> {
        while self.rows.len() < num_rows {
            self.draw()?;
        }
        Ok(self.sampler)
    }
}

/// A rank's message at an exchange of verdicts.
#[derive(Debug, Serialize, Deserialize)]
struct VerdictReport {
    /// Requests under way on this rank.
    num_open: usize,
    scored: Vec<(usize, GroupVerdict)>,
}

/// A candidate's index, and the ticket of its group's rewards.
type Submitted = (usize, RewardTicket);

/// The rank (among those with engines) that owns a candidate, and the verdict on its rewards.
type CandidateGroup = (usize, Option<GroupVerdict>);

/// What sampling with replacement uses, apart from the engine and the turns.
pub(super) struct Replacement<'a> {
    pub rewards: &'a mut RewardPool,
    pub output: &'a RunOutput,
    pub dataset: &'a Dataset,
    /// The group of all ranks with engines, or of all without.
    pub engines: Option<&'a HostGroup>,
    /// Total updates of the run.
    pub max_steps: u64,
    pub quota: GroupQuota,
}

/// The step numbers for sampling a batch.
#[derive(Debug, Clone, Copy)]
pub(super) struct StepNumbers {
    /// The generation step in the random keys.
    pub generation_step: u64,
    /// Number of updates before the one that trains on the batch.
    pub global_step: u64,
}

impl Replacement<'_> {
    /// Samples a batch for each of `steps`, one after the other.
    pub fn sample(
        &mut self,
        engine: &mut RolloutEngine<'_>,
        mut turns: Option<&mut RunTurns>,
        mut candidates: Candidates,
        params: &SamplingParams,
        steps: &[StepNumbers],
    ) -> Result<Vec<DrawnGroups>> {
        engine.on_progress(self.output.sampling_progress());
        let mut batches = Vec::with_capacity(steps.len());
        for &StepNumbers { generation_step, global_step } in steps {
            self.rewards.set_progress(global_step, self.max_steps);
            let mut batch = OpenBatch::new(candidates.clone(), generation_step, params, self);
            engine.run(turns_of(turns.as_deref_mut()), &mut batch)?;
            let drawn = batch.finish();
            let num_sampled = drawn.tally.num_sampled as usize;
            batches.push(drawn);
            if batches.len() < steps.len() {
                candidates = Candidates::first(candidates.into_sampler(num_sampled)?, self.quota.num_groups)?;
            }
        }
        Ok(batches)
    }

    fn engines(&self) -> &HostGroup {
        self.engines.expect("a group of the engines where groups are replaced")
    }
}

/// The sampling policy for one batch: the state that all engines share, and this rank's part. Collective over all engines.
struct OpenBatch<'c, 'a> {
    context: &'c mut Replacement<'a>,
    params: Arc<SamplingParams>,
    candidates: Candidates,
    first_step: u64, // the generation step in the random keys
    of_all: Vec<CandidateGroup>,
    num_begun: usize,                        // candidates that were submitted to their engine
    num_steps: usize,                        // steps since the last exchange
    is_idle: bool,                           // no engine decodes; only rewards are missing
    under_way: Vec<(usize, usize)>,          // (number in the session, index among the candidates)
    fresh: Vec<(Submitted, RolloutGroup)>,   // groups completed since the last exchange
    waiting: Vec<(Submitted, RolloutGroup)>, // groups completed before it
    scored: Vec<PlacedGroup>,
}

impl<'c, 'a> OpenBatch<'c, 'a> {
    /// Starts with the first candidates, distributed in consecutive shares.
    pub fn new(
        candidates: Candidates,
        first_step: u64,
        params: &SamplingParams,
        context: &'c mut Replacement<'a>,
    ) -> Self {
        let num_places = context.engines().size();
        let shares = (0..num_places).map(|owner| Place { rank: owner, size: num_places }.share(candidates.rows.len()));
        let of_all = shares.enumerate().flat_map(|(owner, rows)| rows.map(move |_| (owner, None))).collect();
        Self {
            context,
            params: Arc::new(params.clone()),
            candidates,
            first_step,
            of_all,
            num_begun: 0,
            num_steps: 0,
            is_idle: false,
            under_way: Vec::new(),
            fresh: Vec::new(),
            waiting: Vec::new(),
            scored: Vec::new(),
        }
    }

    /// Submits the new candidates that belong to this rank's engine.
    fn begin(&mut self, turns: &mut (impl GroupTurns + ?Sized), session: &mut Session<'_>) -> Result<()> {
        let (place, num_ranks) = (self.context.engines().rank(), self.context.quota.ranks_per_engine);
        for index in std::mem::replace(&mut self.num_begun, self.of_all.len())..self.of_all.len() {
            let owner = self.of_all[index].0;
            if owner / num_ranks != place / num_ranks {
                continue;
            }
            let prompt = self.context.dataset.prompt(self.candidates.rows[index]);
            let request = Request {
                prompt_id: prompt.id,
                token_ids: prompt.token_ids.clone(),
                first_step: self.first_step,
                params: self.params.clone(),
                begun: Vec::new(),
                adapter: None,
                first_sample: 0,
            };
            let is_own = owner == place;
            let number = turns.submit(session, request, is_own.then_some(prompt))?;
            if is_own {
                self.under_way.push((number, index));
            }
        }
        Ok(())
    }

    /// The rewards that have arrived since the last exchange.
    fn report(&mut self) -> Result<VerdictReport> {
        let mut asked = std::mem::take(&mut self.waiting);
        let fresh = std::mem::take(&mut self.fresh);
        match self.context.quota.waits {
            true => self.waiting = fresh,
            false => asked.extend(fresh),
        }
        let (submitted, mut groups): (Vec<Submitted>, Vec<RolloutGroup>) = asked.into_iter().unzip();
        let tickets: Vec<RewardTicket> = submitted.iter().map(|(_, ticket)| *ticket).collect();
        let (waits, is_idle, rewards) = (self.context.quota.waits, self.is_idle, &mut *self.context.rewards);
        let is_scored = phase::scope(Phase::Reward, || match waits {
            true => rewards.wait(&mut groups, &tickets).map(|()| vec![true; groups.len()]),
            false => rewards.poll(&mut groups, &tickets, is_idle),
        })?;
        let mut scored = Vec::new();
        for (((index, ticket), group), is_scored) in submitted.into_iter().zip(groups).zip(is_scored) {
            if is_scored {
                scored.push((index, GroupVerdict::of(&group, self.context.quota.range)));
                self.scored.push(PlacedGroup { place: index as u32, group });
            } else {
                self.waiting.push(((index, ticket), group));
            }
        }
        Ok(VerdictReport { num_open: self.under_way.len(), scored })
    }

    /// Records all engines' verdicts, and draws rows to replace the groups without a signal. Returns whether the batch is complete.
    fn take(&mut self, reports: &[VerdictReport]) -> Result<bool> {
        for (index, verdict) in reports.iter().flat_map(|report| &report.scored) {
            self.of_all[*index].1 = Some(*verdict);
            (0..usize::from(verdict.has_signal)).for_each(|_| self.context.output.advance());
        }
        let mut loads: Vec<usize> = reports.iter().map(|report| report.num_open).collect();
        self.is_idle = loads.iter().all(|num_open| *num_open == 0);
        let can_count = |(_, verdict): &&CandidateGroup| verdict.is_none_or(|verdict| verdict.has_signal);
        while self.of_all.iter().filter(can_count).count() < self.context.quota.num_groups
            && self.of_all.len() < self.context.quota.max_groups
        {
            self.candidates.draw()?;
            let owner = least_loaded(&loads, self.context.quota.ranks_per_engine);
            loads[owner] += 1;
            self.of_all.push((owner, None));
            self.is_idle = false;
        }
        Ok(self.of_all.iter().all(|(_, verdict)| verdict.is_some()))
    }

    /// This rank's groups in the order of the data.
    pub fn finish(mut self) -> DrawnGroups {
        self.scored.sort_by_key(|scored| scored.place);
        let verdict = |index: usize| self.of_all[index].1.expect("a verdict on every candidate");
        let tally = (0..self.of_all.len()).map(verdict).collect();
        let (kept, dropped) = self.scored.into_iter().partition(|scored| verdict(scored.place as usize).has_signal);
        DrawnGroups { kept, dropped, tally }
    }
}

impl<T: GroupTurns + ?Sized> SamplingPolicy<T> for OpenBatch<'_, '_> {
    /// Exchanges verdicts every [`STEPS`] steps, and also when this engine has nothing to decode, because others may have.
    fn next(&mut self, turns: &mut T, session: &mut Session<'_>) -> Result<Flow> {
        if self.num_steps == STEPS || (self.num_steps > 0 && !session.has_work()) {
            phase::beat();
            let report = self.report()?;
            let reports = self.context.engines().all_gather_json("exchange verdicts", report)?;
            if self.take(&reports)? {
                return Ok(Flow::End);
            }
            self.num_steps = 0;
        }
        self.begin(turns, session)?;
        self.num_steps += 1;
        Ok(Flow::Step)
    }

    /// Submits this rank's groups for scoring.
    fn complete(&mut self, number: usize, turns: &mut T, session: &Session<'_>) -> Result<()> {
        let Some(at) = self.under_way.iter().position(|(own, _)| *own == number) else { return Ok(()) };
        let (_, index) = self.under_way.remove(at);
        let group = turns.take_complete(number, session)?;
        let ticket = self.context.rewards.submit(&group);
        self.fresh.push(((index, ticket), group));
        Ok(())
    }
}

/// The rank that gets a new request: on the engine with the fewest requests under way, the rank with the fewest.
fn least_loaded(loads: &[usize], ranks_per_engine: usize) -> usize {
    let of_engine = |rank: usize| -> usize {
        let first = rank / ranks_per_engine * ranks_per_engine;
        loads[first..first + ranks_per_engine].iter().sum()
    };
    (0..loads.len()).min_by_key(|&rank| (of_engine(rank), loads[rank])).expect("a rank with an engine")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replacement_group_goes_to_the_least_busy_engine() {
        assert_eq!(least_loaded(&[3, 2, 2, 4], 1), 1, "the lowest of two");
        assert_eq!(least_loaded(&[3, 2, 5, 0], 2), 3, "engines are equal, and its first rank has more");
        assert_eq!(least_loaded(&[3, 1, 5, 0], 2), 1);
        assert_eq!(least_loaded(&[9], 1), 0);
    }

    /// Rows are drawn one at a time whatever the engines' timing, and all ranks end with the same sampler state.
    #[test]
    fn replacement_candidates_are_the_next_rows_without_repeats() {
        let sampler = PromptSampler::new(10, 42, true).dropping_last(4);
        let mut candidates = Candidates::first(sampler.clone(), 4).unwrap();
        let first = candidates.rows.clone();
        assert_eq!(first, sampler.clone().next_batch(4).unwrap());
        let drawn: Vec<usize> = (0..6).map(|_| candidates.draw().unwrap()).collect();
        assert_eq!(candidates.rows[4..], drawn);
        let mut rows = candidates.rows.clone();
        rows.sort_unstable();
        assert_eq!(rows, (0..10).collect::<Vec<_>>());
        assert!(candidates.draw().is_err(), "all rows are taken");
        let replayed = Candidates::first(sampler, 4).unwrap().into_sampler(10).unwrap();
        assert_eq!(replayed.state(), candidates.sampler.state());
    }
}
