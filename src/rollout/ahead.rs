//! Groups of several batches at once, sampled until all are complete or until the first batch is and the caller asks for a pause.

use std::sync::Arc;

use super::engine::RolloutEngine;
use super::exchange::exchange;
use super::request::{Event, RequestId, refuse};
use super::session::Session;
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
        mut pauses: impl FnMut() -> Result<bool>,
        mut done: impl FnMut(usize, &RolloutGroup),
    ) -> Result<Vec<Vec<SampledGroup>>> {
        let (limits, vocab_size, tp) = (self.limits(), self.engine.spec.vocab_size, Arc::clone(&self.engine.tp));
        let mut requests = Vec::new(); // with the batch of each
        for (batch, groups) in batches.iter().enumerate() {
            let (of_batch, _) = exchange(groups, groups.len(), params, (vocab_size, &limits), tp.as_ref())?;
            requests.extend(of_batch.into_iter().map(|request| (batch, request)));
        }
        let is_first = |(batch, _): &&(usize, _)| *batch == 0;
        let (mut num_left, mut num_left_of_first) = (requests.len(), requests.iter().filter(is_first).count());
        let mut session = self.session()?;
        let mut own: Vec<Vec<Option<RequestId>>> = batches.iter().map(|groups| vec![None; groups.len()]).collect();
        let mut batch_of_request = Vec::with_capacity(requests.len()); // by the request's number
        for (batch, ((rank, position), request)) in requests {
            let id = session.submit_checked(request)?;
            batch_of_request.push(batch);
            if rank == tp.rank() {
                own[batch][position] = Some(id);
            }
        }
        let group = |session: &Session<'_>, batch: usize, position: usize| -> Result<RolloutGroup> {
            let request = own[batch][position].expect("a request of each group");
            Ok(RolloutGroup { completions: session.completions(request)?, ..batches[batch][position].clone() })
        };
        let mut sampled: Vec<Vec<Option<SampledGroup>>> = own.iter().map(|groups| vec![None; groups.len()]).collect();
        for at in 0.. {
            if num_left == 0 || (num_left_of_first == 0 && at % STEPS == 0 && pauses()?) {
                break;
            }
            for event in session.step()? {
                let request = match event {
                    Event::Complete { request } => request,
                    Event::Failed { message, .. } => return refuse("a structure to follow".to_owned(), message),
                    _ => continue,
                };
                let batch = batch_of_request[request.0];
                num_left -= 1;
                num_left_of_first -= usize::from(batch == 0);
                if let Some(position) = own[batch].iter().position(|id| *id == Some(request)) {
                    let group = group(&session, batch, position)?;
                    done(batch, &group);
                    sampled[batch][position] = Some(SampledGroup { group, is_complete: true });
                }
            }
        }
        session.drain()?; // what completes in these steps is reported by the call that goes on with it
        let mut all = Vec::with_capacity(batches.len());
        for (batch, groups) in sampled.into_iter().enumerate() {
            let open = |position| Ok(SampledGroup { group: group(&session, batch, position)?, is_complete: false });
            let groups = groups.into_iter().enumerate();
            all.push(groups.map(|(position, it)| it.map_or_else(|| open(position), Ok)).collect::<Result<_>>()?);
        }
        session.close()?;
        Ok(all)
    }
}
