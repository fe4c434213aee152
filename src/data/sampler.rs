//! Chooses the next rows. The order in an epoch depends only on the seed.
//!
//! The sampler's state includes solve rates of rows: before the next rows are drawn, every rank records the solve rates from all ranks. With a
//! curriculum, a row outside the bounds is drawn only in the epochs in which (hash of seed and row) + epoch is a multiple of
//! `curriculum.every`.

use std::collections::{BTreeMap, HashSet};

use crate::config::CurriculumConfig;
use crate::error::{Error, Result};

/// Draws batches of row indexes in a new order per epoch. The order is a function of (seed, epoch) and does not depend on the
/// world size. Rows of an epoch that do not fill a whole batch are either dropped, as by TRL's `RepeatSampler`, or begin a batch that
/// is filled from the next epoch. In the latter case rows already in that batch come last in the next epoch, so that no batch contains a
/// row twice and every epoch contains every row once. With a [`Curriculum`] an epoch skips rows that are not due in it, and a
/// batch may continue into the next epoch.
#[derive(Debug, Clone)]
pub struct PromptSampler {
    len: usize,
    seed: u64,
    shuffle: bool,
    /// Rows per epoch: all rows, or only those that fill whole batches.
    epoch_len: usize,
    curriculum: Option<Curriculum>,
    state: SamplerState,
    order: Vec<usize>,
}

/// Draws rows less often if their recent solve rate is outside bounds: in one of several epochs. The epoch depends on seed and row, so that
/// these rows are spread evenly over the epochs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Curriculum {
    /// Lowest and highest solve rate of a row that is drawn in every epoch.
    pub solve_rate: [f64; 2],
    /// Period in epochs with which other rows are drawn.
    pub every: u64,
}

impl Curriculum {
    /// The configured curriculum; `None` if none is configured.
    pub fn new(config: &CurriculumConfig) -> Option<Self> {
        Some(Self { solve_rate: config.solve_rate?, every: config.every as u64 })
    }

    /// Whether a row's solve rate is below the bounds, and whether it is above them.
    fn is_outside(&self, [num_solved, num_judged]: [u32; 2]) -> [bool; 2] {
        let ([low, high], rate) = (self.solve_rate, f64::from(num_solved) / f64::from(num_judged));
        [rate < low, rate > high]
    }
}

/// State of a [`PromptSampler`] in checkpoints.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SamplerState {
    /// Current epoch, from 0.
    pub epoch: u64,
    /// Rows of the current epoch drawn so far.
    pub position: usize,
    /// Rows of the current epoch that were moved to its end.
    pub late: Vec<usize>,
    /// For each row with scored completions: how many of its most recent completions are solved, and their number. Kept only with a
    /// curriculum.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub solved: BTreeMap<usize, [u32; 2]>,
}

impl PromptSampler {
    /// A sampler over `len` rows, at the start of epoch 0. Without `shuffle`, rows come in file order.
    pub fn new(len: usize, seed: u64, shuffle: bool) -> Self {
        let state = SamplerState::default();
        let order = epoch_order(len, seed, shuffle, &state);
        Self { len, seed, shuffle, epoch_len: len, curriculum: None, state, order }
    }

    /// Drops rows at the end of every epoch that do not fill a batch of `n` rows.
    pub fn dropping_last(self, n: usize) -> Self {
        Self { epoch_len: self.len / n * n, ..self }
    }

    /// Draws rows outside the curriculum's bounds less often.
    pub fn with_curriculum(self, curriculum: Option<Curriculum>) -> Self {
        Self { curriculum, ..self }
    }

    /// Records how many of a row's most recent completions are solved, and their number; ignored if there are none.
    pub fn observe(&mut self, row: usize, solved: [u32; 2]) {
        if solved[1] > 0 {
            self.state.solved.insert(row, solved);
        }
    }

    /// Numbers of rows whose solve rate is below and above the curriculum's bounds.
    pub fn num_resting(&self) -> [usize; 2] {
        let outside = |at: usize| {
            let is_outside = |solved| self.curriculum.is_some_and(|curriculum| curriculum.is_outside(solved)[at]);
            self.state.solved.values().filter(|solved| is_outside(**solved)).count()
        };
        [outside(0), outside(1)]
    }

    /// Draws the next `n` distinct rows.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there are fewer than `n` rows: the same prompt twice in a step would get the same
    /// samples.
    pub fn next_batch(&mut self, n: usize) -> Result<Vec<usize>> {
        self.next_batch_beside(n, &[])
    }

    /// Draws the next `n` rows while the rows `under_way` from earlier batches are unfinished; those come last in a new epoch.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there are fewer rows than `n` and `under_way` together.
    pub fn next_batch_beside(&mut self, n: usize, under_way: &[usize]) -> Result<Vec<usize>> {
        if n + under_way.len() > self.len {
            return Err(Error::InvalidArgument {
                op: "PromptSampler::next_batch",
                expected: format!("at most {} prompts per batch, the number of rows of the data set", self.len),
                got: format!("{} (lower the generation batch or raise num_generations)", n + under_way.len()),
            });
        }
        let mut batch = self.take(n, under_way);
        while batch.len() < n {
            let late = [&batch, under_way].concat();
            let solved = std::mem::take(&mut self.state.solved);
            self.restore(SamplerState { epoch: self.state.epoch + 1, position: 0, late: late.clone(), solved })?;
            batch.extend(self.take(n - batch.len(), &late));
        }
        Ok(batch)
    }

    /// Completed epochs, including the fraction of the current one.
    pub fn epochs(&self) -> f64 {
        self.state.epoch as f64 + self.state.position as f64 / self.epoch_len.max(1) as f64
    }

    /// The sampler's state, to be saved in a checkpoint.
    pub fn state(&self) -> &SamplerState {
        &self.state
    }

    /// Restores `state`; the next batches are the same as if the batches before it had been drawn.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the state does not fit a data set with this number of rows.
    pub fn restore(&mut self, state: SamplerState) -> Result<()> {
        let mut rows = state.late.iter().chain(state.solved.keys());
        if state.position > self.len || rows.any(|row| *row >= self.len) {
            return Err(Error::InvalidArgument {
                op: "PromptSampler::restore",
                expected: format!("the sampler state of a data set with {} rows", self.len),
                got: format!("{state:?}"),
            });
        }
        self.order = epoch_order(self.len, self.seed, self.shuffle, &state);
        self.state = state;
        Ok(())
    }

    /// Draws up to `n` rows from the rest of the epoch. With a curriculum, rows in `taken` are skipped.
    fn take(&mut self, n: usize, taken: &[usize]) -> Vec<usize> {
        let taken: HashSet<usize> = taken.iter().copied().filter(|_| self.curriculum.is_some()).collect();
        let mut rows = Vec::with_capacity(n);
        while rows.len() < n && self.state.position < self.epoch_len {
            let row = self.order[self.state.position];
            self.state.position += 1;
            if self.is_due(row) && !taken.contains(&row) {
                rows.push(row);
            }
        }
        rows
    }

    /// Whether a row is drawn in the current epoch.
    fn is_due(&self, row: usize) -> bool {
        let Some((curriculum, solved)) = self.curriculum.zip(self.state.solved.get(&row)) else { return true };
        let is_resting = curriculum.is_outside(*solved).contains(&true);
        let turn = splitmix64(self.seed ^ row as u64).wrapping_add(self.state.epoch);
        !is_resting || turn.is_multiple_of(curriculum.every)
    }
}

fn epoch_order(len: usize, seed: u64, shuffle: bool, state: &SamplerState) -> Vec<usize> {
    let key = splitmix64(splitmix64(seed) ^ state.epoch);
    let mut order: Vec<usize> = (0..len).collect();
    if shuffle {
        order.sort_by_cached_key(|row| (splitmix64(key ^ splitmix64(*row as u64)), *row));
    }
    let late: HashSet<usize> = state.late.iter().copied().collect();
    let (early, late): (Vec<usize>, Vec<usize>) = order.into_iter().partition(|row| !late.contains(row));
    [early, late].concat()
}

/// The finalizer of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words that mixes every bit.
pub(super) fn splitmix64(word: u64) -> u64 {
    let word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draw(sampler: &mut PromptSampler, batches: usize, n: usize) -> Vec<Vec<usize>> {
        (0..batches).map(|_| sampler.next_batch(n).unwrap()).collect()
    }

    #[test]
    fn splitmix_matches_the_published_sequence() {
        // First outputs of the reference generator with seed 0.
        assert_eq!(splitmix64(0), 0xe220_a839_7b1d_cdaf);
        assert_eq!(splitmix64(0x9e37_79b9_7f4a_7c15), 0x6e78_9e6a_a1b9_65f4);
    }

    #[test]
    fn every_epoch_has_each_row_once_and_no_batch_repeats_a_row() {
        let mut sampler = PromptSampler::new(10, 42, true);
        let batches = draw(&mut sampler, 10, 7);
        for batch in &batches {
            let mut rows = batch.clone();
            rows.sort_unstable();
            rows.dedup();
            assert_eq!(rows.len(), 7, "{batch:?}");
        }
        for epoch in batches.concat().chunks(10) {
            let mut rows = epoch.to_vec();
            rows.sort_unstable();
            assert_eq!(rows, (0..10).collect::<Vec<_>>());
        }
        assert_eq!(sampler.epochs(), 7.0);
    }

    #[test]
    fn row_order_depends_only_on_epoch_and_seed() {
        let epochs = |seed| draw(&mut PromptSampler::new(50, seed, true), 2, 50);
        let first = epochs(42);
        assert_eq!(first, epochs(42));
        assert_ne!(first, epochs(43));
        assert_ne!(first[0], first[1]);
        assert_eq!(draw(&mut PromptSampler::new(5, 1, false), 2, 3), [[0, 1, 2], [3, 4, 0]]);
    }

    #[test]
    fn rows_of_unfinished_groups_come_last_in_the_next_epoch() {
        let mut sampler = PromptSampler::new(6, 1, false);
        assert_eq!(sampler.next_batch(4).unwrap(), [0, 1, 2, 3]);
        assert_eq!(sampler.next_batch_beside(4, &[0, 3]).unwrap(), [4, 5, 1, 2]);
        assert!(sampler.next_batch_beside(5, &[1, 2]).is_err());
        assert_eq!(sampler.next_batch(4).unwrap(), [0, 3, 4, 5]);
    }

    #[test]
    fn rows_of_an_incomplete_last_batch_are_skipped() {
        let mut sampler = PromptSampler::new(10, 42, true).dropping_last(4);
        let (first, epochs) = (draw(&mut sampler, 2, 4).concat(), sampler.epochs());
        assert_eq!((first.iter().collect::<HashSet<_>>().len(), epochs), (8, 1.0));
        let whole: Vec<usize> = draw(&mut PromptSampler::new(10, 42, true), 1, 10).concat();
        assert_eq!(first, whole[..8]);
        assert_eq!((sampler.next_batch(4).unwrap().len(), sampler.epochs()), (4, 1.5));
        let mut restored = PromptSampler::new(10, 42, true).dropping_last(4);
        restored.restore(sampler.state().clone()).unwrap();
        assert_eq!(draw(&mut restored, 5, 4), draw(&mut sampler, 5, 4));
    }

    /// With a surplus, a batch may contain more rows than an epoch.
    #[test]
    fn a_batch_larger_than_an_epoch_holds_no_row_twice() {
        let mut sampler = PromptSampler::new(10, 42, true).dropping_last(6);
        for batch in [draw(&mut sampler, 1, 9), draw(&mut sampler, 3, 10)].concat() {
            assert_eq!(batch.iter().collect::<HashSet<_>>().len(), batch.len(), "{batch:?}");
        }
    }

    const MIDDLE: Curriculum = Curriculum { solve_rate: [0.25, 0.75], every: 3 };

    #[test]
    fn rows_outside_the_curriculum_bounds_appear_every_nth_epoch() {
        let mut sampler = PromptSampler::new(12, 5, true).with_curriculum(Some(MIDDLE));
        let unobserved = draw(&mut PromptSampler::new(12, 5, true), 3, 4);
        assert_eq!(draw(&mut sampler, 3, 4), unobserved, "nothing is known yet");
        for row in 0..12 {
            sampler.observe(row, [[0, 4], [1, 4], [3, 4], [4, 4]][row % 4]);
        }
        assert_eq!(sampler.num_resting(), [3, 3]);
        let (mut counts, mut drawn) = ([0; 12], Vec::new());
        while sampler.state.epoch < 30 {
            drawn.push(sampler.next_batch(4).unwrap());
        }
        for batch in &drawn {
            assert_eq!(batch.iter().collect::<HashSet<_>>().len(), 4, "{batch:?}");
            batch.iter().for_each(|row| counts[*row] += 1);
        }
        for (row, count) in counts.into_iter().enumerate() {
            let epochs = if row % 4 == 1 || row % 4 == 2 { 25..=30 } else { 8..=11 };
            assert!(epochs.contains(&count), "row {row}: {count} of 29 epochs");
        }
        sampler.observe(0, [2, 4]);
        sampler.observe(1, [0, 0]);
        assert_eq!(sampler.num_resting(), [2, 3], "the newest completions count, and those without a verdict do not");
    }

    #[test]
    fn a_batch_of_skipped_rows_is_filled_from_later_epochs() {
        let mut sampler = PromptSampler::new(6, 1, false).dropping_last(4).with_curriculum(Some(MIDDLE));
        (0..6).for_each(|row| sampler.observe(row, [0, 8]));
        for batch in draw(&mut sampler, 6, 4) {
            assert_eq!(batch.iter().collect::<HashSet<_>>().len(), 4, "{batch:?}");
        }
        let batch = sampler.next_batch_beside(4, &[2, 5]).unwrap();
        assert!(!batch.contains(&2) && !batch.contains(&5), "{batch:?}");
        let mut restored = PromptSampler::new(6, 1, false).dropping_last(4).with_curriculum(Some(MIDDLE));
        restored.restore(serde_json::from_str(&serde_json::to_string(sampler.state()).unwrap()).unwrap()).unwrap();
        assert_eq!(draw(&mut restored, 5, 3), draw(&mut sampler, 5, 3));
        assert!(PromptSampler::new(5, 1, false).restore(sampler.state().clone()).is_err(), "a rate of a sixth row");
    }

    #[test]
    fn a_restored_sampler_continues_at_its_position() {
        let mut sampler = PromptSampler::new(10, 7, true);
        draw(&mut sampler, 3, 7);
        let json = serde_json::to_string(sampler.state()).unwrap();
        let mut restored = PromptSampler::new(10, 7, true);
        restored.restore(serde_json::from_str(&json).unwrap()).unwrap();
        assert_eq!(draw(&mut restored, 5, 7), draw(&mut sampler, 5, 7));
        assert!(PromptSampler::new(3, 7, true).restore(sampler.state().clone()).is_err());
    }

    #[test]
    fn a_batch_larger_than_the_data_is_refused() {
        let error = PromptSampler::new(3, 0, true).next_batch(4).unwrap_err().to_string();
        assert!(error.contains("at most 3 prompts"), "{error}");
    }
}
