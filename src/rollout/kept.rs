//! Sequences that stay in the cache between rollouts: keys and values of those that a rollout left unfinished.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::dist::{Collective, ReduceOp, all_reduce_f64};
use crate::error::Result;

/// Sequences, each with the blocks that hold keys and values of all its tokens but the last. They are known by their tokens: of
/// those alone, and of the weights that computed them, are keys and values a function. In an order that all ranks of a
/// tensor-parallel group have.
#[derive(Debug, Default, Hash)]
pub(super) struct KeptSequences {
    block_tables: BTreeMap<Vec<u32>, Vec<Vec<u32>>>, // by token ids, which samples of a group may have in common
}

impl KeptSequences {
    pub(super) fn insert(&mut self, token_ids: Vec<u32>, block_table: Vec<u32>) {
        self.block_tables.entry(token_ids).or_default().push(block_table);
    }

    /// Takes over all of another.
    pub(super) fn extend(&mut self, other: Self) {
        let all = other
            .block_tables
            .into_iter()
            .flat_map(|(ids, tables)| tables.into_iter().map(move |table| (ids.clone(), table)));
        all.for_each(|(token_ids, table)| self.insert(token_ids, table));
    }

    /// The blocks of a sequence of these tokens, if there is one; they are the caller's.
    pub(super) fn take(&mut self, token_ids: &[u32]) -> Option<Vec<u32>> {
        let tables = self.block_tables.get_mut(token_ids)?;
        let table = tables.pop();
        if tables.is_empty() {
            self.block_tables.remove(token_ids);
        }
        table
    }

    /// The blocks of any one sequence.
    pub(super) fn take_any(&mut self) -> Option<Vec<u32>> {
        let mut last = self.block_tables.last_entry()?;
        let table = last.get_mut().pop();
        if last.get().is_empty() {
            last.remove();
        }
        table
    }

    pub(super) fn is_empty(&self) -> bool {
        self.block_tables.is_empty()
    }

    pub(super) fn tables(&self) -> impl Iterator<Item = &[u32]> {
        self.block_tables.values().flatten().map(Vec::as_slice)
    }

    /// The poorest rank's number of blocks, of `num_blocks`; and all is given up unless every rank has kept the same. Collective
    /// over the tensor-parallel group.
    pub(super) fn agree(&mut self, num_blocks: usize, tp: &dyn Collective) -> Result<usize> {
        let digest = self.digest();
        let mut least = [num_blocks as f64, digest, -digest];
        all_reduce_f64(tp, &mut least, ReduceOp::Min)?;
        if least[1] != -least[2] {
            if tp.rank() == 0 {
                tracing::warn!("unfinished sequences are computed again: not all ranks of the engine still have them");
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
    fn sequences_are_found_by_all_their_tokens_and_every_one_is_taken_once() {
        let mut kept = KeptSequences::default();
        kept.insert(vec![1, 2], vec![0]);
        kept.insert(vec![1, 2], vec![1]);
        kept.insert(vec![1, 2, 3], vec![2]);
        assert_eq!(kept.tables().collect::<Vec<_>>(), [[0], [1], [2]]);
        assert_eq!(kept.take(&[1]), None);
        assert_eq!(
            (kept.take(&[1, 2]), kept.take_any(), kept.take_any()),
            (Some(vec![1]), Some(vec![2]), Some(vec![0]))
        );
        assert_eq!((kept.take(&[1, 2]), kept.take_any()), (None, None));
        assert_eq!(kept.digest(), KeptSequences::default().digest());
        kept.insert(vec![1], vec![3]);
        assert_ne!(kept.digest(), KeptSequences::default().digest());
    }
}
