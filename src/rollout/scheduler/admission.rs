//! Decides which waiting sequences start or continue: whole groups, reusing the blocks of their prompt that are already computed.

use std::ops::Range;

use super::{Scheduler, TokenRun};
use crate::rollout::kept::KeptPlace;
use crate::rollout::request::{Event, RequestId};
use crate::rollout::sequence::{EngineSequence, QueuePriority};
use crate::types::Trajectory;

impl Scheduler {
    /// Gives the sequences of a new group the tokens in `begun`, which an earlier rollout sampled, and queues those that are neither finished nor
    /// running. If no running sequence holds the prompt, one of them goes to the front of the queue, to compute it for the others.
    pub(super) fn queue(&mut self, group: usize, begun: Vec<Trajectory>) {
        let members = self.members(group);
        for (index, completion) in members.clone().zip(begun) {
            self.sequences[index].resume(completion);
            let sequence = &self.sequences[index];
            self.has_unclaimed |= !sequence.is_fresh() && sequence.turn_end == 0; // a next turn is not a later rollout
            self.adopt_turn(index);
            self.go_on(index);
        }
        let open: Vec<usize> = members.clone().filter(|&index| self.is_open(index)).collect();
        let is_begun = |&index: &usize| !self.sequences[index].is_fresh();
        if open.is_empty() && self.holder(group).is_none() {
            self.end_drafts(group);
            self.events.push(Event::Complete { request: RequestId(group) });
            return;
        }
        let leader = match open.iter().copied().find(is_begun) {
            _ if self.holder(group).is_some() => None, // another sequence holds the prompt
            None if open.len() == members.len() => {
                return open.into_iter().for_each(|index| self.enqueue(index, QueuePriority::New));
            }
            begun => begun.or(open.first().copied()),
        };
        for index in open {
            self.enqueue(index, if Some(index) == leader { QueuePriority::First } else { QueuePriority::Begun });
        }
    }

    /// Inserts a sequence into the queue, behind the sequences of equal priority.
    fn enqueue(&mut self, index: usize, turn: QueuePriority) {
        self.sequences[index].turn = turn;
        let at = self.waiting.partition_point(|&waiting| self.sequences[waiting].turn <= turn);
        self.waiting.insert(at, index);
    }

    /// Whether a sequence is unfinished and has no blocks.
    fn is_open(&self, index: usize) -> bool {
        self.sequences[index].finish_reason.is_none() && self.sequences[index].block_table.is_empty()
    }

    /// Finds a sequence of the group that has blocks.
    fn holder(&self, group: usize) -> Option<&EngineSequence> {
        self.sequences[self.members(group)].iter().find(|sequence| !sequence.block_table.is_empty())
    }

    /// Continues a sequence from the blocks that an earlier rollout kept, if there are any and a slot is free.
    fn go_on(&mut self, index: usize) {
        let sequence = &self.sequences[index];
        let is_kept = sequence.finish_reason.is_none() && sequence.adapter.is_none(); // kept sequences are found by their tokens only, not by adapter
        if !is_kept || self.running.len() == self.limits.max_num_seqs {
            return;
        }
        let Some(KeptPlace { block_table, state_page, .. }) = self.kept.take(&sequence.token_ids) else { return };
        let in_both =
            |holder: &EngineSequence| holder.block_table.iter().zip(&block_table).take_while(|(a, b)| a == b).count();
        let num_counted = self.holder(sequence.group).map_or(0, in_both) * self.limits.block_size;
        let sequence = &mut self.sequences[index];
        sequence.num_computed = sequence.len() - 1;
        sequence.num_in_state = sequence.num_computed;
        sequence.block_table = block_table;
        sequence.state_page = state_page;
        self.stats.num_kept_tokens += sequence.num_computed - num_counted;
        self.running.push(index);
    }

    /// Admits the front of the queue if slots and blocks are free. While others run, a group waits until all of it fits and every running sequence
    /// still has a free block to grow into. With nothing running, the group is reduced to what fits. Returns whether to try again: something was
    /// admitted, or blocks were freed for it.
    pub(super) fn admit(&mut self) -> bool {
        let Some(members) = self.front() else { return false };
        let slots = self.limits.max_num_seqs - self.running.len();
        let alone = self.running.is_empty();
        let headroom = self.blocks.num_free().saturating_sub(self.running.len());
        let of_turn = self.take_turn(members.start); // taken out, so that it is not freed to make space for itself
        let shared = if of_turn.is_some() { Vec::new() } else { self.shared_prefix(members.start) };
        let num_held = of_turn.as_ref().map_or(&shared, |place| &place.block_table).len();
        let has_page = of_turn.as_ref().is_some_and(|place| place.state_page.is_some());
        let total = self.blocks.blocks_for(self.sequences[members.start].len()).saturating_sub(num_held);
        let (own, tail) = (total, self.tail_blocks(members.start));
        let fits = if total > headroom { 0 } else { (headroom - own).checked_div(tail).map_or(usize::MAX, |n| n + 1) };
        let wanted = members.len().min(slots);
        let count = wanted.min(fits).min(if has_page { usize::MAX } else { self.states.num_free() });
        let waits = count == 0 || (count < members.len() && !alone);
        if (count < wanted || waits) && of_turn.is_some() {
            let is_freed = count < wanted && self.drop_kept();
            self.put_turn(members.start, of_turn);
            return is_freed;
        }
        if count < wanted && self.drop_kept() {
            return true;
        }
        if waits {
            return false;
        }
        match of_turn {
            Some(place) => self.continue_turn(members.start, place),
            None => self.allocate(members.start..members.start + count, &shared),
        }
        true
    }

    /// The sequences at the front of the queue that need the same computation: a whole group if none of its tokens are sampled yet. `None` while its
    /// first tokens are still being sampled, or while another sequence of the group is about to compute its prompt.
    fn front(&self) -> Option<Range<usize>> {
        let is_ready = |&&first: &&usize| self.sequences[first].num_pending == 0 && !self.prompt_is_coming(first);
        let &first = self.waiting.front().filter(is_ready)?;
        let group = self.sequences[first].group;
        let same = |&(offset, &index): &(usize, &usize)| {
            index == first + offset && self.sequences[index].group == group && self.sequences[index].is_fresh()
        };
        let count = self.waiting.iter().enumerate().take_while(same).count().max(1);
        Some(first..first + count)
    }

    /// Whether another sequence of the group is admitted but has not yet computed the full blocks of the prompt.
    fn prompt_is_coming(&self, index: usize) -> bool {
        let num_tokens = self.shareable_blocks(index) * self.limits.block_size;
        let is_coming = |member: usize| {
            let other = &self.sequences[member];
            !other.block_table.is_empty() && other.num_computed < num_tokens
        };
        self.shared_prefix(index).is_empty() && self.members(self.sequences[index].group).any(is_coming)
    }

    /// Number of full blocks of a sequence's prompt that can be shared. At least one prompt token remains to be computed, for its logits.
    fn shareable_blocks(&self, index: usize) -> usize {
        if self.states.are_used() {
            return 0; // no sequence has the states after these blocks
        }
        let sequence = &self.sequences[index];
        sequence.prompt_len.min(sequence.len() - 1) / self.limits.block_size
    }

    /// Returns the full blocks of the prompt if a running sequence of the same group has computed them.
    fn shared_prefix(&self, index: usize) -> Vec<u32> {
        let num_blocks = self.shareable_blocks(index);
        let holds = |&member: &usize| {
            let other = &self.sequences[member];
            !other.block_table.is_empty() && other.num_computed >= num_blocks * self.limits.block_size
        };
        let holder = self.members(self.sequences[index].group).find(holds);
        holder.map_or(Vec::new(), |holder| self.sequences[holder].block_table[..num_blocks].to_vec())
    }

    /// If a run starts behind shared blocks of the prompt, copies the recorded experts of their tokens from another sequence of the group.
    pub(super) fn share_experts(&mut self, run: &TokenRun) {
        let sequence = &self.sequences[run.sequence];
        let num_shared = run.tokens.start;
        if sequence.routed_experts.num_tokens() >= num_shared || num_shared > sequence.prompt_len {
            return;
        }
        let mut of_group = self.sequences[self.members(sequence.group)].iter().map(|other| &other.routed_experts);
        let known = of_group.find(|known| known.num_tokens() >= num_shared).map(|known| known.first(num_shared));
        if let Some(known) = known {
            self.sequences[run.sequence].routed_experts = known;
        }
    }

    /// Number of blocks that each further member of a group needs: one for a copy of the prompt's last block, or none if that block is full.
    fn tail_blocks(&self, index: usize) -> usize {
        usize::from(!self.sequences[index].len().is_multiple_of(self.limits.block_size))
    }

    fn allocate(&mut self, members: Range<usize>, shared: &[u32]) {
        let (first, num_tokens) = (members.start, self.sequences[members.start].len());
        let num_full = num_tokens / self.limits.block_size;
        let mut table = self.blocks.share(shared);
        let mut granted = self.blocks.grow(&mut table, num_tokens);
        for index in first + 1..members.end {
            let mut copy = self.blocks.share(&table[..num_full]);
            granted &= self.blocks.grow(&mut copy, num_tokens);
            self.sequences[index].block_table = copy;
        }
        for index in members.clone() {
            self.sequences[index].state_page = self.states.take();
        }
        assert!(granted, "admission counted {} free blocks wrongly", self.blocks.num_free());
        self.sequences[first].block_table = table;
        self.sequences[first].num_computed = shared.len() * self.limits.block_size;
        self.stats.num_lost_turn_tokens += std::mem::take(&mut self.sequences[first].turn_end).saturating_sub(1);
        self.stats.num_shared_tokens += self.sequences[first].num_computed + (members.len() - 1) * num_tokens;
        self.waiting.drain(..members.len());
        self.running.extend(members.clone());
        self.prefilling.push_back(members);
    }
}
