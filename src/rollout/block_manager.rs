//! Tracks which KV blocks are free and how many sequences read each of the others. It handles block numbers only, never memory.

use crate::error::{Error, Result};

/// Reference-counted blocks `0 .. num_blocks`. All ranks of a tensor-parallel group allocate the same numbers.
#[derive(Debug)]
pub(super) struct BlockManager {
    block_size: usize,
    free: Vec<u32>, // a stack; the lowest numbers are taken first
    ref_counts: Vec<u32>,
}

impl BlockManager {
    pub(super) fn new(num_blocks: usize, block_size: usize) -> Self {
        let free = (0..num_blocks as u32).rev().collect();
        Self { block_size, free, ref_counts: vec![0; num_blocks] }
    }

    /// Marks the blocks in `tables` as used, because an earlier manager with as many blocks allocated them. Call this before any allocation.
    pub(super) fn adopt<'a>(&mut self, tables: impl Iterator<Item = &'a [u32]>) {
        tables.flatten().for_each(|&block| self.ref_counts[block as usize] += 1);
        self.free.retain(|&block| self.ref_counts[block as usize] == 0);
    }

    pub(super) fn num_total(&self) -> usize {
        self.ref_counts.len()
    }

    pub(super) fn num_free(&self) -> usize {
        self.free.len()
    }

    pub(super) fn num_used(&self) -> usize {
        self.num_total() - self.num_free()
    }

    /// Number of blocks that `num_tokens` tokens occupy.
    pub(super) fn blocks_for(&self, num_tokens: usize) -> usize {
        num_tokens.div_ceil(self.block_size)
    }

    /// Appends free blocks to `table` until it can hold `num_tokens` tokens. Returns `false`, and takes nothing, if too few are free.
    pub(super) fn grow(&mut self, table: &mut Vec<u32>, num_tokens: usize) -> bool {
        let missing = self.blocks_for(num_tokens).saturating_sub(table.len());
        if missing > self.free.len() {
            return false;
        }
        for block in self.free.drain(self.free.len() - missing..).rev() {
            self.ref_counts[block as usize] = 1;
            table.push(block);
        }
        true
    }

    /// Adds one reader to each of `blocks` and returns the table of the new reader.
    pub(super) fn share(&mut self, blocks: &[u32]) -> Vec<u32> {
        for &block in blocks {
            self.ref_counts[block as usize] += 1;
        }
        blocks.to_vec()
    }

    /// Frees the blocks at the end of `table` that `num_tokens` tokens do not need. No other sequence may read them.
    pub(super) fn shrink(&mut self, table: &mut Vec<u32>, num_tokens: usize) {
        let mut surplus = table.split_off(self.blocks_for(num_tokens).min(table.len()));
        self.release(&mut surplus);
    }

    /// Releases all blocks of a sequence's table; blocks that no other sequence reads become free.
    pub(super) fn release(&mut self, table: &mut Vec<u32>) {
        for block in table.drain(..).rev() {
            let count = &mut self.ref_counts[block as usize];
            *count -= 1;
            if *count == 0 {
                self.free.push(block);
            }
        }
    }

    /// Checks that free + used == total, and that each block has exactly as many readers as `tables` imply.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] with the numbers if blocks leaked or were allocated twice.
    pub(super) fn check_integrity<'a>(&self, tables: impl Iterator<Item = &'a [u32]>) -> Result<()> {
        let mut expected = vec![0; self.num_total()];
        tables.flatten().for_each(|&block| expected[block as usize] += 1);
        let used = expected.iter().filter(|&&count| count > 0).count();
        let mut free = self.free.clone();
        free.sort_unstable();
        free.dedup();
        if self.ref_counts == expected && free.len() == self.free.len() && free.len() + used == self.num_total() {
            return Ok(());
        }
        let counted: u32 = self.ref_counts.iter().sum();
        let held: u32 = expected.iter().sum();
        Err(Error::InvalidArgument {
            op: "BlockManager::check_integrity",
            expected: format!("free + used == {} blocks, {held} readers", self.num_total()),
            got: format!("{} free, {used} used, {counted} readers counted", self.free.len()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_blocks_are_freed_with_their_last_reader() {
        let mut blocks = BlockManager::new(4, 8);
        let (mut first, mut late) = (Vec::new(), Vec::new());
        assert!(blocks.grow(&mut first, 17));
        assert_eq!(first, [0, 1, 2]);
        let mut second = blocks.share(&first[..2]);
        assert!(blocks.grow(&mut second, 24));
        assert_eq!((second.as_slice(), blocks.num_free()), (&[0, 1, 3][..], 0));
        assert!(!blocks.grow(&mut late, 1) && late.is_empty());
        blocks.check_integrity([first.as_slice(), second.as_slice()].into_iter()).unwrap();
        blocks.release(&mut first);
        assert_eq!(blocks.num_free(), 1);
        blocks.release(&mut second);
        assert_eq!((blocks.num_free(), blocks.num_used()), (4, 0));
        blocks.check_integrity(std::iter::empty()).unwrap();
    }

    #[test]
    fn adopted_block_tables_keep_their_sharing() {
        let mut blocks = BlockManager::new(5, 8);
        let (mut first, mut second) = (vec![4, 1], vec![4, 2]);
        blocks.adopt([first.as_slice(), second.as_slice()].into_iter());
        blocks.check_integrity([first.as_slice(), second.as_slice()].into_iter()).unwrap();
        blocks.release(&mut first);
        assert_eq!((blocks.num_free(), blocks.num_used()), (3, 2));
        assert!(blocks.grow(&mut second, 40) && second[..2] == [4, 2]);
        blocks.release(&mut second);
        assert_eq!(blocks.num_free(), 5);
    }

    #[test]
    fn the_integrity_check_finds_leaked_blocks() {
        let mut blocks = BlockManager::new(2, 8);
        assert!(blocks.grow(&mut Vec::new(), 8));
        let message = blocks.check_integrity(std::iter::empty()).unwrap_err().to_string();
        assert!(message.contains("1 free, 0 used, 1 readers counted"), "{message}");
    }
}
