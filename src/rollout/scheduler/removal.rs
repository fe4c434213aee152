//! Removes requests whose results are no longer needed: ends them, frees their blocks and drops their data.

use super::Scheduler;
use crate::rollout::request::{Event, RequestId};
use crate::rollout::session::SessionLoad;
use crate::types::FinishReason;

impl Scheduler {
    /// Ends the unfinished sequences of a request, frees its blocks and drops its tokens and events. If a step under way still computes for it, that
    /// result is dropped.
    pub(in crate::rollout) fn remove(&mut self, group: usize) {
        self.end_drafts(group);
        for index in self.members(group) {
            self.release(index);
            let sequence = &mut self.sequences[index];
            sequence.finish_reason.get_or_insert(FinishReason::Stop); // never reported
            sequence.forget_tokens();
        }
        let is_other = |index: &usize| self.sequences[*index].group != group;
        self.prefilling.retain(|members| is_other(&members.start));
        self.running.retain(is_other);
        self.waiting.retain(is_other);
        self.events.retain(|event| event.request() != RequestId(group));
        self.groups[group - self.num_dropped].is_removed = true;
    }

    /// Whether a request was submitted and not removed.
    pub(in crate::rollout) fn knows(&self, group: usize) -> bool {
        let at = group.checked_sub(self.num_dropped);
        at.and_then(|at| self.groups.get(at)).is_some_and(|group| !group.is_removed)
    }

    pub(in crate::rollout) fn load(&self) -> SessionLoad {
        SessionLoad {
            num_running: self.running.len(),
            num_waiting: self.waiting.len(),
            num_free_blocks: self.blocks.num_free(),
            num_blocks: self.blocks.num_total(),
            num_preemptions: self.stats.num_preemptions,
            num_draft_tokens: self.stats.num_draft_tokens,
            num_accepted_tokens: self.stats.num_accepted_tokens,
        }
    }

    /// Number of removed requests at the front of the list. Removed requests behind an active one stay in the list.
    pub(in crate::rollout) fn num_removed(&self) -> usize {
        self.groups.iter().take_while(|group| group.is_removed).count()
    }

    /// Deletes removed requests from the front of the list. Call it only with no step under way, because steps hold indices of sequences.
    pub(in crate::rollout) fn compact(&mut self) {
        let num_groups = self.num_removed();
        let Some(last) = self.groups[..num_groups].last() else { return };
        let num_sequences = last.members.end;
        self.groups.drain(..num_groups);
        self.sequences.drain(..num_sequences);
        self.num_dropped += num_groups;
        let ranges = self.groups.iter_mut().map(|group| &mut group.members).chain(&mut self.prefilling);
        ranges.for_each(|range| *range = range.start - num_sequences..range.end - num_sequences);
        self.running.iter_mut().chain(&mut self.waiting).for_each(|index| *index -= num_sequences);
    }
}

impl Event {
    /// The request that the event belongs to.
    pub fn request(&self) -> RequestId {
        match *self {
            Self::Token { request, .. }
            | Self::Finished { request, .. }
            | Self::Complete { request }
            | Self::Preempted { request, .. }
            | Self::Failed { request, .. } => request,
        }
    }
}
