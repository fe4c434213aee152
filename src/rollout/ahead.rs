//! Groups of several batches at once, sampled until all are complete or until the first batch is and the caller asks for a pause.

use std::sync::Arc;

use super::engine::RolloutEngine;
use super::exchange::exchange;
use super::groups::{GroupSession, GroupTurns};
use super::request::ModelIds;
use crate::error::Result;
use crate::types::{RolloutGroup, SamplingParams};

/// Engine steps between two questions whether to pause.
const STEPS: usize = 16;

/// A group after [`RolloutEngine::generate_batches`].
#[derive(Debug, Clone, PartialEq)]
pub struct SampledGroup {
    /// The group, with what is sampled of it.
    pub group: RolloutGroup,
    /// Whether all of its completions ended, and `done` was called with it.
    pub is_complete: bool,
}

impl RolloutEngine<'_> {
    /// Goes on with this rank's groups of several batches, those of earlier batches first, until all are complete. Once the groups
    /// of the first batch are complete, `pauses` is called every 16 steps, and the engine stops where it returns true: the other
    /// groups come back as they stand, and a later call goes on with them. `params.step` is the weight version of the tokens that
    /// are sampled now; random keys have the `first_step` of each group. `done` is called with the batch and the group as soon as
    /// a group of this rank is complete. Returns the groups in the order in which they were passed. Collective over the
    /// tensor-parallel group, whose ranks pass equally many batches and must get the same answers from `pauses`.
    ///
    /// # Errors
    /// The errors of [`RolloutEngine::generate`] and of `pauses`.
    pub fn generate_batches(
        &mut self,
        batches: Vec<Vec<RolloutGroup>>,
        params: &SamplingParams,
        pauses: impl FnMut() -> Result<bool>,
        done: impl FnMut(usize, &RolloutGroup),
    ) -> Result<Vec<Vec<SampledGroup>>> {
        self.generate_turn_batches(batches, params, None, pauses, done)
    }

    /// [`RolloutEngine::generate_batches`] of completions that may have several turns, with `tools`.
    ///
    /// # Errors
    /// The errors of [`RolloutEngine::generate_batches`] and of tools.
    pub fn generate_turn_batches(
        &mut self,
        mut batches: Vec<Vec<RolloutGroup>>,
        params: &SamplingParams,
        mut turns: Option<Box<dyn GroupTurns + '_>>,
        mut pauses: impl FnMut() -> Result<bool>,
        mut done: impl FnMut(usize, &RolloutGroup),
    ) -> Result<Vec<Vec<SampledGroup>>> {
        let (limits, ids) = (self.limits(), ModelIds::of(&self.engine.spec));
        let ranks = Arc::clone(&self.engine.ranks.all);
        let mut requests = Vec::new(); // with the batch of each
        for (batch, groups) in batches.iter_mut().enumerate() {
            turns.iter_mut().for_each(|turns| turns.restore(groups));
            let (of_batch, _) = exchange(groups, groups.len(), params, (ids, &limits), ranks.as_ref())?;
            requests.extend(of_batch.into_iter().map(|request| (batch, request)));
        }
        let is_first = |(batch, _): &&(usize, _)| *batch == 0;
        let (mut num_left, mut num_left_of_first) = (requests.len(), requests.iter().filter(is_first).count());
        let mut session = GroupSession::open(self, turns)?;
        let mut own: Vec<Vec<usize>> = batches.iter().map(|groups| vec![0; groups.len()]).collect();
        let mut batch_of_group = Vec::with_capacity(requests.len()); // by the group's number
        for (batch, ((rank, position), request)) in requests {
            let is_own = rank == ranks.rank();
            let number = session.submit(request, is_own.then(|| &batches[batch][position].prompt))?;
            batch_of_group.push(batch);
            if is_own {
                own[batch][position] = number;
            }
        }
        let mut sampled: Vec<Vec<Option<SampledGroup>>> = own.iter().map(|groups| vec![None; groups.len()]).collect();
        for at in 0.. {
            let may_pause = at % STEPS == 0 || session.is_idle();
            if num_left == 0 || (num_left_of_first == 0 && may_pause && pauses()?) {
                break;
            }
            for number in session.step()? {
                let batch = batch_of_group[number];
                num_left -= 1;
                num_left_of_first -= usize::from(batch == 0);
                if let Some(position) = own[batch].iter().position(|own| *own == number) {
                    let group = session.take_complete(number)?;
                    done(batch, &group);
                    sampled[batch][position] = Some(SampledGroup { group, is_complete: true });
                }
            }
        }
        session.drain()?; // what completes in these steps is reported by the call that goes on with it
        let mut all = Vec::with_capacity(batches.len());
        for (batch, groups) in sampled.into_iter().enumerate() {
            let open =
                |position: usize| Ok(SampledGroup { group: session.group(own[batch][position])?, is_complete: false });
            let groups = groups.into_iter().enumerate();
            all.push(groups.map(|(position, it)| it.map_or_else(|| open(position), Ok)).collect::<Result<_>>()?);
        }
        session.close()?;
        Ok(all)
    }
}
