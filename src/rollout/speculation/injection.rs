//! Draft tokens from a test or benchmark.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// A source of draft tokens that replaces the look-up in earlier texts. No source can change which tokens are sampled, unless it replays an
/// acceptance rate.
#[derive(Clone)]
pub struct DraftInjection {
    source: Arc<DraftSource>,
    replayed_acceptance: Option<f64>,
}

/// A function that creates draft tokens. Its arguments are the prompt id, the number of the completion, the tokens of prompt and completion so far,
/// and the maximum number of draft tokens.
type DraftSource = dyn Fn(u64, usize, &[u32], usize) -> Vec<u32> + Send + Sync;

impl DraftInjection {
    /// Creates a source from a function of prompt id, number of the completion, prompt and completion so far, and maximum number of draft tokens.
    pub fn new(drafts: impl Fn(u64, usize, &[u32], usize) -> Vec<u32> + Send + Sync + 'static) -> Self {
        Self { source: Arc::new(drafts), replayed_acceptance: None }
    }

    /// Creates arbitrary draft tokens, and counts each as accepted with this probability, whatever was sampled. Steps then have as many rows as in a
    /// run with this acceptance rate. Use it for benchmarks of random-weight models, whose texts are not predictable.
    pub fn replaying(acceptance: f64) -> Self {
        Self { replayed_acceptance: Some(acceptance), ..Self::new(|_, _, _, most| vec![0; most]) }
    }

    /// Whether this source replays an acceptance rate.
    pub(super) fn is_replay(&self) -> bool {
        self.replayed_acceptance.is_some()
    }

    /// Whether the draft token at a position counts as accepted.
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
