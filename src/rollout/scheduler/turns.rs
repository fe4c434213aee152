//! Keeps blocks between two turns. A sequence that ends a turn leaves its keys, values and states in the cache; they are looked up by the sequence's
//! tokens. The next turn is a sequence of these tokens followed by context, and prefills only what is not yet computed. If blocks or state pages run
//! short, those kept between turns are freed first, and computed again later.

use super::Scheduler;
use crate::rollout::kept::KeptPlace;
use crate::rollout::sequence::EngineSequence;

impl Scheduler {
    /// Lets sequences that end a turn leave their blocks to their next turn, until [`Scheduler::forget_turn`].
    pub(in crate::rollout) fn keep_turns(&mut self) {
        self.keeps_turns = true;
    }

    /// Frees the blocks that a sequence of these tokens left to its next turn, if it left any. Call it if there is no next turn.
    pub(in crate::rollout) fn forget_turn(&mut self, token_ids: &[u32]) {
        if let Some(place) = self.between_turns.take(token_ids) {
            self.free(place);
        }
    }

    /// Leaves the blocks of a sequence that ended a turn to its next turn. Steps that ran ahead may have written keys and values after the end; these
    /// are overwritten later. A state that includes such tokens, or lacks accepted draft tokens, is not usable.
    pub(super) fn leave_to_next_turn(&mut self, index: usize) {
        let drafts = self.speculator.is_some();
        let sequence = &mut self.sequences[index];
        let num_computed = match sequence.state_page {
            Some(_) if drafts || sequence.num_in_state > sequence.len() => return self.release(index),
            Some(_) => sequence.num_in_state,
            None => sequence.len() - 1, // the turn's last token was sampled but may not have been processed
        };
        let EngineSequence { block_table, state_page, token_ids, adapter: None, .. } = sequence else {
            return self.release(index); // sequences are found by their tokens only
        };
        if !block_table.is_empty() {
            let (block_table, state_page) = (std::mem::take(block_table), state_page.take());
            let place = KeptPlace { block_table, state_page, num_computed };
            self.between_turns.insert(token_ids.clone(), place);
        }
    }

    /// Whether a sequence that ended a turn must wait for the experts of its last token. This is so if a step under way processes this token. The
    /// sequence's state then includes the token, so the next turn does not compute it again, and only that step records its experts.
    pub(super) fn awaits_experts(&self, index: usize) -> bool {
        let sequence = &self.sequences[index];
        let has_fed_all = sequence.state_page.is_some() && sequence.num_in_state == sequence.len();
        has_fed_all && sequence.num_pending > 0 && sequence.routed_experts.per_token > 0
    }

    /// Takes over the kept blocks of an earlier rollout for a sequence that is between two turns.
    pub(super) fn adopt_turn(&mut self, index: usize) {
        let sequence = &self.sequences[index];
        let end = match sequence.finish_reason {
            Some(_) => sequence.len(), // the turn ended, and its tools still run
            None => sequence.turn_end,
        };
        if self.keeps_turns
            && end > sequence.prompt_len
            && let Some(place) = self.kept.take(&sequence.token_ids[..end])
        {
            self.between_turns.insert(sequence.token_ids[..end].to_vec(), place);
        }
    }

    /// Takes out the KV cache blocks that a waiting sequence's previous turn kept for it.
    pub(super) fn take_turn(&mut self, index: usize) -> Option<KeptPlace> {
        let sequence = &self.sequences[index];
        let end = sequence.turn_end;
        (end > sequence.prompt_len).then(|| self.between_turns.take(&sequence.token_ids[..end])).flatten()
    }

    /// Puts the blocks back for a sequence that was not admitted.
    pub(super) fn put_turn(&mut self, index: usize, place: Option<KeptPlace>) {
        let sequence = &self.sequences[index];
        let token_ids = &sequence.token_ids[..sequence.turn_end];
        if let Some(place) = place {
            self.between_turns.insert(token_ids.to_vec(), place);
        }
    }

    /// Admits a sequence that continues with the blocks of its previous turn.
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
