//! Completions of earlier rollouts by prompt, limited by their total number of tokens.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// Maximum number of completions remembered per prompt.
const MOST_OF_PROMPT: usize = 8;
/// Maximum number of tokens that are stored for all prompts (32 MiB).
const MOST_TOKENS: usize = 8 << 20;
/// Overhead of a stored completion, counted in tokens.
const BESIDE: usize = 32;

/// A hash of a prompt's tokens.
pub(super) fn prompt_key(token_ids: &[u32]) -> u64 {
    let mut hasher = DefaultHasher::new(); // without random keys: equal on all ranks
    token_ids.hash(&mut hasher);
    hasher.finish()
}

/// The newest completions of each prompt. When full, it first drops the prompts that have not been sampled for longest.
#[derive(Debug, Default)]
pub(super) struct EarlierCompletions {
    of_prompts: HashMap<u64, Remembered>,
    order: BTreeMap<u64, u64>, // prompt key by insertion number
    num_prompts: u64,          // number of insertions so far, including prompts that were dropped
    num_tokens: usize,
    digest: u64,
}

#[derive(Debug, Default)]
struct Remembered {
    number: u64,
    completions: Vec<Arc<[u32]>>, // the newest first
}

impl EarlierCompletions {
    /// The completions of a prompt, the newest first.
    pub(super) fn of(&self, prompt: u64) -> &[Arc<[u32]>] {
        self.of_prompts.get(&prompt).map_or(&[], |remembered| &remembered.completions)
    }

    /// Stores completions of a prompt. A completion replaces a stored one that it begins with, which was an earlier turn.
    pub(super) fn remember<'a>(&mut self, prompt: u64, completions: impl Iterator<Item = &'a [u32]>) {
        let mut completions = completions.peekable();
        if completions.peek().is_none() {
            return;
        }
        let remembered = self.of_prompts.entry(prompt).or_default();
        self.order.remove(&remembered.number);
        self.num_prompts += 1;
        remembered.number = self.num_prompts;
        self.order.insert(self.num_prompts, prompt);
        for completion in completions {
            if let Some(turn) = remembered.completions.iter().position(|turn| completion.starts_with(turn)) {
                self.num_tokens -= remembered.completions.remove(turn).len() + BESIDE;
            }
            self.num_tokens += completion.len() + BESIDE;
            remembered.completions.insert(0, completion.into());
            let mut hasher = DefaultHasher::new();
            (self.digest, prompt, completion).hash(&mut hasher);
            self.digest = hasher.finish();
        }
        let dropped = remembered.completions.drain(MOST_OF_PROMPT.min(remembered.completions.len())..);
        self.num_tokens -= dropped.map(|completion| completion.len() + BESIDE).sum::<usize>();
        while self.num_tokens > MOST_TOKENS {
            let Some((_, oldest)) = self.order.pop_first() else { break };
            let forgotten = self.of_prompts.remove(&oldest).unwrap_or_default();
            let num_tokens = |completion: &Arc<[u32]>| completion.len() + BESIDE;
            self.num_tokens -= forgotten.completions.iter().map(num_tokens).sum::<usize>();
        }
    }

    /// A hash of all completions that were stored, in order.
    pub(super) fn digest(&self) -> u64 {
        self.digest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_completions_of_recent_prompts_are_remembered() {
        let mut earlier = EarlierCompletions::default();
        for token in 0..10 {
            earlier.remember(7, [[token, token].as_slice()].into_iter());
        }
        let first: Vec<u32> = earlier.of(7).iter().map(|completion| completion[0]).collect();
        assert_eq!(first, [9, 8, 7, 6, 5, 4, 3, 2]);
        let long = vec![1; MOST_TOKENS / 2];
        earlier.remember(8, [long.as_slice()].into_iter());
        earlier.remember(7, [[1].as_slice()].into_iter());
        earlier.remember(9, [long.as_slice()].into_iter());
        assert_eq!((earlier.of(8).len(), earlier.of(7).len(), earlier.of(9).len()), (0, 8, 1));
        earlier.remember(3, std::iter::empty());
        assert_eq!((earlier.num_tokens, earlier.of_prompts.len()), (15 + 9 * BESIDE + MOST_TOKENS / 2, 2));
    }

    #[test]
    fn the_digest_depends_on_order() {
        let of = |tokens: [u32; 2]| {
            let mut earlier = EarlierCompletions::default();
            tokens.iter().for_each(|&token| earlier.remember(1, [[token].as_slice()].into_iter()));
            earlier.digest()
        };
        assert_eq!(of([1, 2]), of([1, 2]));
        assert_ne!(of([1, 2]), of([2, 1]));
    }
}
