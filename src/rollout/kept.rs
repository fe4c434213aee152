//! Sequences that stay in the cache between rollouts: keys, values and states of those that a rollout left unfinished.
//!
//! With `carried_kv = keep` they continue at the next wake on keys and values of older weights, as in PipelineRL's in-flight updates
//! (arXiv 2509.19128); the importance correction covers the difference. Their blocks are given up, and computed again, where blocks
//! run short, after a failed rollout, when weights are loaded, and in a resumed run, since no checkpoint holds them.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::error::Result;
use crate::ranks::{Collective, ReduceOp, all_reduce_f64};

/// Where a kept sequence is: what the cache has of its first tokens.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct KeptPlace {
    /// Blocks of its keys and values.
    pub(super) block_table: Vec<u32>,
    /// Page of its states, of a model that has some.
    pub(super) state_page: Option<u32>,
    /// Tokens that these are of: all but the last, or all where a step that ran ahead has fed the last one, too.
    pub(super) num_computed: usize,
}

/// Sequences with their places. They are known by their tokens: of those alone, and of the weights that computed them, are keys, values
/// and states a function. In an order that all ranks of a tensor-parallel group have.
#[derive(Debug, Default, Hash)]
pub(super) struct KeptSequences {
    places: BTreeMap<Vec<u32>, Vec<KeptPlace>>, // by token ids, which samples of a group may have in common
}

impl KeptSequences {
    pub(super) fn insert(&mut self, token_ids: Vec<u32>, place: KeptPlace) {
        self.places.entry(token_ids).or_default().push(place);
    }

    /// Takes over all of another.
    pub(super) fn extend(&mut self, other: Self) {
        let all = other.places.into_iter();
        let all = all.flat_map(|(ids, places)| places.into_iter().map(move |place| (ids.clone(), place)));
        all.for_each(|(token_ids, place)| self.insert(token_ids, place));
    }

    /// The place of a sequence of these tokens, if there is one; its blocks and page are the caller's.
    pub(super) fn take(&mut self, token_ids: &[u32]) -> Option<KeptPlace> {
        let places = self.places.get_mut(token_ids)?;
        let place = places.pop();
        if places.is_empty() {
            self.places.remove(token_ids);
        }
        place
    }

    /// The place of any one sequence.
    pub(super) fn take_any(&mut self) -> Option<KeptPlace> {
        let mut last = self.places.last_entry()?;
        let place = last.get_mut().pop();
        if last.get().is_empty() {
            last.remove();
        }
        place
    }

    pub(super) fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    pub(super) fn tables(&self) -> impl Iterator<Item = &[u32]> {
        self.places.values().flatten().map(|place| place.block_table.as_slice())
    }

    pub(super) fn state_pages(&self) -> impl Iterator<Item = u32> {
        self.places.values().flatten().filter_map(|place| place.state_page)
    }

    /// The poorest rank's number of blocks, of `num_blocks`; and all is given up unless every rank has kept the same. Collective
    /// over the tensor-parallel group.
    pub(super) fn agree(&mut self, num_blocks: usize, tp: &dyn Collective) -> Result<usize> {
        let digest = self.digest();
        let mut least = [num_blocks as f64, digest, -digest];
        all_reduce_f64(tp, &mut least, ReduceOp::Min)?;
        if least[1] != -least[2] {
            if tp.rank() == 0 {
                tracing::warn!(
                    "the KV cache of unfinished sequences is computed again, as not all ranks of the engine kept it"
                );
            }
            *self = Self::default();
        }
        Ok(least[0] as usize)
    }

    /// A number that tells contents apart, exact as a float.
    fn digest(&self) -> f64 {
        let mut hasher = DefaultHasher::new(); // without random keys: equal on all ranks
        self.hash(&mut hasher);
        (hasher.finish() >> 11) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_sequences_are_found_by_all_tokens_and_used_once() {
        let at = |block| KeptPlace { block_table: vec![block], state_page: Some(block + 7), num_computed: 1 };
        let mut kept = KeptSequences::default();
        kept.insert(vec![1, 2], at(0));
        kept.insert(vec![1, 2], at(1));
        kept.insert(vec![1, 2, 3], at(2));
        assert_eq!(kept.tables().collect::<Vec<_>>(), [[0], [1], [2]]);
        assert_eq!(kept.state_pages().collect::<Vec<_>>(), [7, 8, 9]);
        assert_eq!(kept.take(&[1]), None);
        assert_eq!((kept.take(&[1, 2]), kept.take_any(), kept.take_any()), (Some(at(1)), Some(at(2)), Some(at(0))));
        assert_eq!((kept.take(&[1, 2]), kept.take_any()), (None, None));
        assert_eq!(kept.digest(), KeptSequences::default().digest());
        kept.insert(vec![1], at(3));
        assert_ne!(kept.digest(), KeptSequences::default().digest());
    }
}
