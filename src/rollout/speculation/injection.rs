//! Drafts that a test makes.

use std::fmt;
use std::sync::Arc;

/// Makes the drafts of a completion, in the place of what occurred before. Whatever they are, they change no token.
#[derive(Clone)]
pub struct DraftInjection(Arc<DraftSource>);

/// Prompt id, number of the completion, all of its tokens so far and the most that are wanted.
type DraftSource = dyn Fn(u64, usize, &[u32], usize) -> Vec<u32> + Send + Sync;

impl DraftInjection {
    /// `drafts` takes prompt id, number of the completion, prompt and completion so far, and the most tokens that are wanted.
    pub fn new(drafts: impl Fn(u64, usize, &[u32], usize) -> Vec<u32> + Send + Sync + 'static) -> Self {
        Self(Arc::new(drafts))
    }

    pub(super) fn drafts(&self, prompt_id: u64, sample: usize, token_ids: &[u32], most: usize) -> Vec<u32> {
        let mut drafts = self.0(prompt_id, sample, token_ids, most);
        drafts.truncate(most);
        drafts
    }
}

impl fmt::Debug for DraftInjection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DraftInjection(..)")
    }
}
