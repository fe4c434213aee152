//! Limits of an engine's steps and sequences.

use crate::error::{Error, Result};

/// Limits on one step and on one sequence.
#[derive(Debug, Clone, Copy)]
pub(super) struct StepLimits {
    pub(super) num_blocks: usize,
    pub(super) block_size: usize,
    pub(super) max_num_seqs: usize,
    /// Maximum rows of a decode step: sequences and their draft tokens.
    pub(super) max_decode_rows: usize,
    pub(super) max_num_batched_tokens: usize,
    /// Maximum length of prompt and completion together, in tokens.
    pub(super) max_model_length: usize,
    /// Whether sequences have state pages. If so, sharing a prompt needs more than sharing its KV blocks.
    pub(super) has_states: bool,
    /// Number of pipeline stages. Each can compute a different step, so with several stages a step takes a share of the sequences, none of which is
    /// in another step under way.
    pub(super) num_stages: usize,
    /// Whether a step may consume tokens that the host does not know yet: with P stages those of the P-th step before it, with one stage those of the
    /// last step.
    pub(super) runs_ahead: bool,
}

/// Rows of the bucket that a decode step of `num_rows` rows runs in, at most `most`: 1, 2, 4, 8, then multiples of 8, of 16 from 32 on and of 32 from
/// 256 on.
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
    /// Checks that a prompt with its longest completion fits, without other sequences. The last token is sampled but never processed, so its keys and
    /// values take no space.
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
