//! Blocks between two turns. A sequence that ended a turn leaves its keys and values behind, and its states, known by its tokens; the next
//! turn, a sequence of the same tokens with context behind them, prefills from there. They are the first to go where blocks or pages of states
//! run short, and are then computed again.

use super::Scheduler;
use crate::rollout::kept::KeptPlace;
use crate::rollout::sequence::EngineSequence;

impl Scheduler {
    /// Lets sequences that end by themselves leave their blocks to their next turn, until [`Scheduler::forget_turn`].
    pub(in crate::rollout) fn keep_turns(&mut self) {
        self.keeps_turns = true;
    }

    /// Frees what a sequence of these tokens has left to its next turn, if it has: there will be none.
    pub(in crate::rollout) fn forget_turn(&mut self, token_ids: &[u32]) {
        if let Some(place) = self.between_turns.take(token_ids) {
            self.free(place);
        }
    }

    /// Leaves the blocks of a sequence that ended a turn to the next one. Keys and values of tokens behind the end, which steps that run ahead
    /// compute, are overwritten; a state that has taken such tokens in, or lacks drafts that were drawn, is of no use.
    pub(super) fn leave_to_next_turn(&mut self, index: usize) {
        let drafts = self.speculator.is_some();
        let sequence = &mut self.sequences[index];
        let num_computed = match sequence.state_page {
            Some(_) if drafts || sequence.num_in_state > sequence.len() => return self.release(index),
            Some(_) => sequence.num_in_state,
            None => sequence.len() - 1, // the turn's last token was sampled, and perhaps never fed
        };
        let EngineSequence { block_table, state_page, token_ids, adapter: None, .. } = sequence else {
            return self.release(index); // sequences are known by their tokens alone
        };
        if !block_table.is_empty() {
            let (block_table, state_page) = (std::mem::take(block_table), state_page.take());
            let place = KeptPlace { block_table, state_page, num_computed };
            self.between_turns.insert(token_ids.clone(), place);
        }
    }

    /// Takes over what an earlier rollout kept of a begun sequence that is between two turns.
    pub(super) fn adopt_turn(&mut self, index: usize) {
        let sequence = &self.sequences[index];
        let end = match sequence.finish_reason {
            Some(_) => sequence.len(), // its tools still run
            None => sequence.turn_end,
        };
        if self.keeps_turns
            && end > sequence.prompt_len
            && let Some(place) = self.kept.take(&sequence.token_ids[..end])
        {
            self.between_turns.insert(sequence.token_ids[..end].to_vec(), place);
        }
    }

    /// What the turn before has left to a sequence that waits.
    pub(super) fn take_turn(&mut self, index: usize) -> Option<KeptPlace> {
        let sequence = &self.sequences[index];
        let end = sequence.turn_end;
        (end > sequence.prompt_len).then(|| self.between_turns.take(&sequence.token_ids[..end])).flatten()
    }

    /// Gives it back to a sequence that is not admitted yet.
    pub(super) fn put_turn(&mut self, index: usize, place: Option<KeptPlace>) {
        let sequence = &self.sequences[index];
        let token_ids = &sequence.token_ids[..sequence.turn_end];
        if let Some(place) = place {
            self.between_turns.insert(token_ids.to_vec(), place);
        }
    }

    /// Admits a sequence that goes on with what the turn before has left.
    pub(super) fn continue_turn(&mut self, index: usize, place: KeptPlace) {
        let KeptPlace { mut block_table, state_page, num_computed } = place;
        let sequence = &mut self.sequences[index];
        let granted = self.blocks.grow(&mut block_table, sequence.len());
        assert!(granted, "admission counted {} free blocks wrongly", self.blocks.num_free());
        (sequence.block_table, sequence.state_page) = (block_table, state_page);
        (sequence.num_computed, sequence.num_in_state) = (num_computed, num_computed);
        sequence.turn_end = 0;
        self.stats.num_turn_tokens += num_computed;
        self.waiting.pop_front();
        self.running.push(index);
        self.prefilling.push_back(index..index + 1);
    }
}
