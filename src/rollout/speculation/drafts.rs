//! Draft tokens of one sequence in one step.

/// Tokens that may follow a sequence. A step computes a row for each and samples there as if the draft token had been sampled. This sample counts
/// only if the row before sampled exactly the draft token.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::rollout) struct Drafts {
    pub(in crate::rollout) token_ids: Vec<u32>,
    /// Length of the match that these tokens were found by: the last tokens of the sequence that equal those before an earlier occurrence.
    pub(in crate::rollout) matched: usize,
}

/// Drafts that were drawn, and that the state of their sequence has not taken in yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::rollout) struct StoredDrafts {
    /// Page of the sequence.
    pub(in crate::rollout) page: u32,
    pub(in crate::rollout) count: usize,
    /// Position behind the last one.
    pub(in crate::rollout) end: usize,
}
