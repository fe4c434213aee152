//! Unfinished sequences that stay in the cache between rollouts, with their keys, values and states.
//!
//! With `carried_kv = keep` they continue at the next wake on keys and values of older weights, as in PipelineRL's in-flight updates (arXiv
//! 2509.19128); the importance correction covers the difference. Their blocks are freed, and computed again later, if blocks run short, after a
//! failed rollout, when weights are loaded, and in a resumed run, since no checkpoint holds them.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::error::Result;
use crate::ranks::{Collective, ReduceOp, all_reduce_f64};

/// Where a kept sequence is in the cache.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct KeptPlace {
    /// KV blocks of the sequence.
    pub(super) block_table: Vec<u32>,
    /// State page of the sequence, for a model with gated delta nets.
    pub(super) state_page: Option<u32>,
    /// Number of tokens that the blocks and the page cover: all but the last, or all if a step that ran ahead has already processed the last.
    pub(super) num_computed: usize,
}

/// Kept sequences and their places, found by token ids: keys, values and states depend only on the tokens and on the weights that computed them. The
/// order is equal on all ranks of a tensor-parallel group.
#[derive(Debug, Default, Hash)]
pub(super) struct KeptSequences {
    places: BTreeMap<Vec<u32>, Vec<KeptPlace>>, // by token ids, which several samples of a group may share
}

impl KeptSequences {
    pub(super) fn insert(&mut self, token_ids: Vec<u32>, place: KeptPlace) {
        self.places.entry(token_ids).or_default().push(place);
    }

    /// Adds all sequences of `other`.
    pub(super) fn extend(&mut self, other: Self) {
        let all = other.places.into_iter();
        let all = all.flat_map(|(ids, places)| places.into_iter().map(move |place| (ids.clone(), place)));
        all.for_each(|(token_ids, place)| self.insert(token_ids, place));
    }

    /// Removes and returns the place of a sequence with these tokens, if one is kept. The caller then owns its blocks and page.
    pub(super) fn take(&mut self, token_ids: &[u32]) -> Option<KeptPlace> {
        let places = self.places.get_mut(token_ids)?;
        let place = places.pop();
        if places.is_empty() {
            self.places.remove(token_ids);
        }
        place
    }

    /// Removes and returns the place of any one sequence.
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

    /// Returns the smallest number of blocks of any rank. Drops all sequences unless every rank has kept the same ones. Collective over the
    /// tensor-parallel group.
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

    /// A hash of the contents, exact as a float.
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
