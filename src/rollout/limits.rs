//! Bounds of an engine's steps.

use crate::error::{Error, Result};

/// Bounds on one step and on one sequence.
#[derive(Debug, Clone, Copy)]
pub(super) struct StepLimits {
    pub(super) num_blocks: usize,
    pub(super) block_size: usize,
    pub(super) max_num_seqs: usize,
    /// Rows of a decode step: its sequences and their drafts.
    pub(super) max_decode_rows: usize,
    pub(super) max_num_batched_tokens: usize,
    /// Longest prompt and completion together.
    pub(super) max_model_length: usize,
    /// Sequences have states, one page each: prompts are not shared by blocks alone.
    pub(super) has_states: bool,
    /// Stages of layers, each of which can compute a step of its own: with several, a step has a share of the sequences, none that
    /// another step has which may be on its way through them.
    pub(super) num_stages: usize,
    /// A step can take tokens that the host does not know yet: of P stages those of the P-th step before it, else of the last.
    pub(super) runs_ahead: bool,
}

/// Rows of the decode step that so many run in, at most `most`: 1, 2, 4, 8, then multiples of 8, of 16 from 32 on and of 32 from 256 on.
pub(super) fn step_rows(num_rows: usize, most: usize) -> usize {
    let rows = match num_rows {
        0..=8 => num_rows.next_power_of_two(),
        9..=32 => num_rows.next_multiple_of(8),
        33..=256 => num_rows.next_multiple_of(16),
        _ => num_rows.next_multiple_of(32),
    };
    rows.min(most)
}

impl StepLimits {
    /// Whether a prompt and its longest completion fit, alone. A sequence's last token is sampled, never fed, so its keys and values
    /// take no room.
    pub(super) fn check(&self, prompt_len: usize, max_completion_length: usize) -> Result<()> {
        let refuse = |expected, got| Err(Error::InvalidArgument { op: "RolloutEngine::generate", expected, got });
        if prompt_len == 0 || prompt_len >= self.max_model_length {
            let expected = format!("prompts of 1 to {} tokens (max_model_length - 1)", self.max_model_length - 1);
            return refuse(expected, format!("a prompt of {prompt_len} tokens"));
        }
        let longest = (prompt_len + max_completion_length).min(self.max_model_length) - 1;
        let (needed, total) = (longest.div_ceil(self.block_size), self.num_blocks);
        if needed > total {
            let block_size = self.block_size;
            let expected =
                format!("sequences of at most {total} KV blocks of {block_size} tokens; raise kv_cache_bytes");
            let got = format!(
                "a prompt of {prompt_len} and a completion of up to {max_completion_length} tokens: {needed} blocks"
            );
            return refuse(expected, got);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_sizes_hold_their_rows_up_to_the_largest() {
        let rows = [1, 2, 3, 8, 9, 32, 33, 250, 256, 257, 300].map(|num_seqs| step_rows(num_seqs, 300));
        assert_eq!(rows, [1, 2, 4, 8, 16, 32, 48, 256, 256, 288, 300]);
        assert!((1..=300).all(|num_seqs| step_rows(num_seqs, 300) >= num_seqs));
    }
}
