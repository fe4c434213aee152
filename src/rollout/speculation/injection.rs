//! Drafts that a test makes, or a benchmark.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// Makes the drafts of a completion, in the place of what occurred before. Whatever they are, they change no token, unless they replay an acceptance.
#[derive(Clone)]
pub struct DraftInjection {
    source: Arc<DraftSource>,
    replayed_acceptance: Option<f64>,
}

/// Prompt id, number of the completion, all of its tokens so far and the most that are wanted.
type DraftSource = dyn Fn(u64, usize, &[u32], usize) -> Vec<u32> + Send + Sync;

impl DraftInjection {
    /// `drafts` takes prompt id, number of the completion, prompt and completion so far, and the most tokens that are wanted.
    pub fn new(drafts: impl Fn(u64, usize, &[u32], usize) -> Vec<u32> + Send + Sync + 'static) -> Self {
        Self { source: Arc::new(drafts), replayed_acceptance: None }
    }

    /// Drafts any tokens, and has each taken for drawn with this probability, whatever was drawn: steps have the rows of a run whose drafts were
    /// drawn as often. For benchmarks of random weights, whose texts mean nothing.
    pub fn replaying(acceptance: f64) -> Self {
        Self { replayed_acceptance: Some(acceptance), ..Self::new(|_, _, _, most| vec![0; most]) }
    }

    /// Whether it replays an acceptance.
    pub(super) fn is_replay(&self) -> bool {
        self.replayed_acceptance.is_some()
    }

    /// Whether the draft at a position is taken for drawn.
    pub(super) fn replays(&self, prompt_id: u64, sample: usize, position: usize) -> bool {
        let Some(acceptance) = self.replayed_acceptance else { return false };
        let mut hasher = DefaultHasher::new(); // without random keys: equal on all ranks
        (prompt_id, sample, position).hash(&mut hasher);
        ((hasher.finish() >> 11) as f64) < acceptance * (1u64 << 53) as f64
    }

    pub(super) fn drafts(&self, prompt_id: u64, sample: usize, token_ids: &[u32], most: usize) -> Vec<u32> {
        let mut drafts = (self.source)(prompt_id, sample, token_ids, most);
        drafts.truncate(most);
        drafts
    }
}

impl fmt::Debug for DraftInjection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DraftInjection(..)")
    }
}
