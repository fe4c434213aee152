//! Which waiting sequences begin: whole groups, with the blocks of their prompt that are computed already.

use std::ops::Range;

use super::{Limits, Scheduler};
use crate::error::{Error, Result};
use crate::rollout::block_manager::BlockManager;

impl Scheduler {
    /// Admits the front of the queue if slots and blocks are there. While others run, a group waits until all of it fits
    /// and every running sequence keeps a block to grow into; alone, it is cut to what fits.
    pub(super) fn admit(&mut self) -> bool {
        let Some(members) = self.front() else { return false };
        let slots = self.limits.max_num_seqs - self.running.len();
        let alone = self.running.is_empty();
        let headroom = self.blocks.num_free().saturating_sub(self.running.len());
        let shared = self.shared_prefix(members.start);
        let total = self.blocks.blocks_for(self.sequences[members.start].len()) - shared.len();
        let (own, tail) = (total, self.tail_blocks(members.start));
        let fits = if total > headroom { 0 } else { (headroom - own).checked_div(tail).map_or(usize::MAX, |n| n + 1) };
        let count = members.len().min(slots).min(fits);
        if count == 0 || (count < members.len() && !alone) {
            return false;
        }
        self.allocate(members.start..members.start + count, &shared);
        true
    }

    /// The sequences at the front of the queue that need the same computation: one group's, if nothing is sampled yet. None
    /// while a token that it begins with is under way.
    fn front(&self) -> Option<Range<usize>> {
        let &first = self.waiting.front().filter(|&&first| self.sequences[first].num_pending == 0)?;
        let sequence = &self.sequences[first];
        let same = |&&index: &&usize| self.sequences[index].group == sequence.group && sequence.is_fresh();
        let count = self.waiting.iter().take_while(same).count().max(1);
        Some(first..first + count)
    }

    /// Full blocks of the prompt that a running completion of the same group has computed. At least one token is left to
    /// compute, for its logits.
    fn shared_prefix(&self, index: usize) -> Vec<u32> {
        let sequence = &self.sequences[index];
        let num_blocks = sequence.prompt_len.min(sequence.len() - 1) / self.limits.block_size;
        let holds = |&member: &usize| {
            let other = &self.sequences[member];
            !other.block_table.is_empty() && other.num_computed >= num_blocks * self.limits.block_size
        };
        let holder = self.members(sequence.group).find(holds);
        holder.map_or(Vec::new(), |holder| self.sequences[holder].block_table[..num_blocks].to_vec())
    }

    /// Blocks that each further member of a group needs: a copy of the prompt's last block, unless it is full.
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
        assert!(granted, "admission counted {} free blocks wrongly", self.blocks.num_free());
        self.sequences[first].block_table = table;
        self.sequences[first].num_computed = shared.len() * self.limits.block_size;
        self.stats.num_shared_tokens += self.sequences[first].num_computed + (members.len() - 1) * num_tokens;
        self.waiting.drain(..members.len());
        self.running.extend(members.clone());
        self.prefilling.push_back(members);
    }
}

/// A sequence's last token is sampled, never fed, so its keys and values take no room.
pub(super) fn check_fits(limits: &Limits, blocks: &BlockManager, prompt_len: usize) -> Result<()> {
    let refuse = |expected, got| Err(Error::InvalidArgument { op: "RolloutEngine::generate", expected, got });
    if prompt_len == 0 || prompt_len >= limits.max_model_length {
        let expected = format!("prompts of 1 to {} tokens (max_model_length - 1)", limits.max_model_length - 1);
        return refuse(expected, format!("one of {prompt_len}"));
    }
    let longest = (prompt_len + limits.max_completion_length).min(limits.max_model_length) - 1;
    let needed = blocks.blocks_for(longest);
    if needed > blocks.num_total() {
        let (total, block_size) = (blocks.num_total(), limits.block_size);
        let expected = format!("sequences of at most {total} KV blocks of {block_size} tokens; raise kv_cache_bytes");
        let completion = limits.max_completion_length;
        let got = format!("a prompt of {prompt_len} and a completion of up to {completion} tokens: {needed} blocks");
        return refuse(expected, got);
    }
    Ok(())
}
