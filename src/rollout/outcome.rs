//! What a rollout leaves: complete groups, and those that a later one goes on with.

use super::requests::Request;
use super::scheduler::Scheduler;
use super::sequence::Sequence;
use crate::data::Tokenizer;
use crate::error::Result;
use crate::types::{Completion, Prompt, RolloutGroup, UnfinishedCompletion, UnfinishedGroup};

/// What [`RolloutEngine::generate_first`](super::RolloutEngine::generate_first) leaves of this rank's groups, each with its index
/// among them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Rollout {
    /// Those that count.
    pub complete: Vec<(usize, RolloutGroup)>,
    /// The others, for a later rollout to go on with.
    pub unfinished: Vec<(usize, UnfinishedGroup)>,
}

impl Rollout {
    pub(super) fn new(
        complete: Vec<Option<RolloutGroup>>,
        groups: Vec<UnfinishedGroup>,
        scheduler: &Scheduler,
        requests: &[Request],
        rank: usize,
    ) -> Self {
        let mut rollout = Self { complete: Vec::new(), unfinished: Vec::new() };
        let own = (0..requests.len()).filter(|&index| requests[index].owner.0 == rank);
        for (position, ((complete, group), index)) in complete.into_iter().zip(groups).zip(own).enumerate() {
            match complete {
                Some(complete) => rollout.complete.push((position, complete)),
                None => {
                    let completions = unfinished(scheduler, index);
                    let first_step = requests[index].step;
                    rollout.unfinished.push((position, UnfinishedGroup { first_step, completions, ..group }));
                }
            }
        }
        rollout
    }
}

/// A group whose last completion has ended.
pub(super) fn complete_group(
    scheduler: &Scheduler,
    index: usize,
    prompt: &Prompt,
    tokenizer: &Tokenizer,
) -> Result<RolloutGroup> {
    let completions = scheduler.members(index).map(|member| {
        let sequence = &scheduler.sequences[member];
        Ok(Completion {
            token_ids: sequence.completion().to_vec(),
            rollout_logprobs: sequence.rollout_logprobs.clone(),
            finish_reason: sequence.finish_reason.expect("a complete group has ended"),
            text: tokenizer.decode(sequence.completion())?,
            rewards: Vec::new(),
            reward: None,
            advantage: 0.0,
        })
    });
    Ok(RolloutGroup { prompt: prompt.clone(), completions: completions.collect::<Result<_>>()? })
}

/// What has been sampled of a group, if anything.
fn unfinished(scheduler: &Scheduler, index: usize) -> Vec<UnfinishedCompletion> {
    let members = &scheduler.sequences[scheduler.members(index)];
    if members.iter().all(|sequence| sequence.completion().is_empty()) {
        return Vec::new();
    }
    members.iter().map(Sequence::unfinished).collect()
}
