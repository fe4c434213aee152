//! Draft tokens of one sequence in one step.

/// Draft tokens: tokens that may follow a sequence. A step computes a row for each draft token and samples from that row, too. This sample counts
/// only if the row before it sampled exactly the draft token.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::rollout) struct Drafts {
    pub(in crate::rollout) token_ids: Vec<u32>,
    /// Length of the match that these tokens were found by: this many tokens at the end of the sequence also precede an earlier occurrence of the
    /// draft tokens.
    pub(in crate::rollout) matched: usize,
}

/// Accepted draft tokens that the recurrent state of their sequence has not processed yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::rollout) struct StoredDrafts {
    /// State page of the sequence.
    pub(in crate::rollout) page: u32,
    pub(in crate::rollout) count: usize,
    /// Position after the last of these draft tokens.
    pub(in crate::rollout) end: usize,
}
