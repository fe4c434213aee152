//! Blocks between two turns. A sequence that ended a turn leaves its keys and values behind, known by its tokens; the next turn, a
//! sequence of the same tokens with context behind them, prefills from there. They are the first to go where blocks run short, and are
//! then computed again.

use super::Scheduler;
use crate::rollout::kept::KeptPlace;
use crate::rollout::sequence::EngineSequence;

impl Scheduler {
    /// Lets sequences that end by themselves leave their blocks to their next turn, until [`Scheduler::forget_turn`]. States of gated
    /// delta nets are not left, as there are no more pages of them than sequences that run.
    pub(in crate::rollout) fn keep_turns(&mut self) {
        self.keeps_turns = !self.states.are_used();
    }

    /// Frees what a sequence of these tokens has left to its next turn, if it has: there will be none.
    pub(in crate::rollout) fn forget_turn(&mut self, token_ids: &[u32]) {
        if let Some(mut place) = self.between_turns.take(token_ids) {
            self.blocks.release(&mut place.block_table);
        }
    }

    /// Leaves the blocks of a sequence that ended a turn to the next one.
    pub(super) fn leave_to_next_turn(&mut self, index: usize) {
        let EngineSequence { block_table, token_ids, adapter: None, .. } = &mut self.sequences[index] else {
            return self.release(index); // sequences are known by their tokens alone
        };
        if !block_table.is_empty() {
            let place = KeptPlace { block_table: std::mem::take(block_table), state_page: None };
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

    /// The blocks that the turn before has left to a sequence that waits.
    pub(super) fn take_turn(&mut self, index: usize) -> Option<Vec<u32>> {
        let sequence = &self.sequences[index];
        let end = sequence.turn_end;
        let place = (end > sequence.prompt_len).then(|| self.between_turns.take(&sequence.token_ids[..end])).flatten();
        place.map(|place| place.block_table)
    }

    /// Gives them back to a sequence that is not admitted yet.
    pub(super) fn put_turn(&mut self, index: usize, table: Option<Vec<u32>>) {
        let sequence = &self.sequences[index];
        let token_ids = &sequence.token_ids[..sequence.turn_end];
        if let Some(block_table) = table {
            self.between_turns.insert(token_ids.to_vec(), KeptPlace { block_table, state_page: None });
        }
    }

    /// Admits a sequence that goes on with the blocks of the turn before.
    pub(super) fn continue_turn(&mut self, index: usize, mut table: Vec<u32>) {
        let sequence = &mut self.sequences[index];
        let granted = self.blocks.grow(&mut table, sequence.len());
        assert!(granted, "admission counted {} free blocks wrongly", self.blocks.num_free());
        sequence.block_table = table;
        sequence.num_computed = sequence.turn_end - 1; // the turn's last token was sampled, and never fed
        sequence.turn_end = 0;
        self.stats.num_turn_tokens += sequence.num_computed;
        self.waiting.pop_front();
        self.running.push(index);
        self.prefilling.push_back(index..index + 1);
    }
}
