//! How sequence-parallel ranks split heads, and repeat them if there are too few.

/// Key or value heads split over the ranks of a sequence-parallel group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::model) struct SharedHeads {
    /// Number of distinct heads in the model.
    pub total: usize,
    /// Number of heads on each rank.
    pub own: usize,
    /// Elements of a head.
    pub width: usize,
    /// Number of heads on each rank before these, if these are a part of its heads.
    before: usize,
    /// Number of heads on each rank in all parts.
    of_rank: usize,
}

/// A run of heads that are consecutive both on a rank and in the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::model) struct HeadRun {
    /// Index of the first head on the rank.
    pub slot: usize,
    /// Index of the first head in the model.
    pub head: usize,
    /// Number of heads.
    pub len: usize,
}

impl SharedHeads {
    /// Splits `total` heads over `num_ranks` ranks, if the `queries` query heads that read them are split evenly.
    pub(in crate::model) fn new(total: usize, width: usize, queries: usize, num_ranks: usize) -> Self {
        let of_rank = queries / num_ranks;
        let own = match (total.is_multiple_of(num_ranks), num_ranks.is_multiple_of(total)) {
            (true, _) => total / num_ranks,
            (false, true) => 1,
            (false, false) => of_rank, // one for each query head
        };
        Self { total, own, width, before: 0, of_rank: own }
    }

    /// One of `num_parts` equal parts of every rank's heads.
    pub(in crate::model) fn part(self, index: usize, num_parts: usize) -> Self {
        let own = self.own / num_parts;
        Self { own, before: self.before + index * own, ..self }
    }

    /// The heads on `rank`, as runs of consecutive heads.
    pub(in crate::model) fn runs(self, rank: usize, num_ranks: usize) -> Vec<HeadRun> {
        let mut runs: Vec<HeadRun> = Vec::new();
        for slot in 0..self.own {
            let head = (rank * self.of_rank + self.before + slot) * self.total / (num_ranks * self.of_rank);
            match runs.last_mut() {
                Some(run) if run.head + run.len == head => run.len += 1,
                _ => runs.push(HeadRun { slot, head, len: 1 }),
            }
        }
        runs
    }

    /// Whether some heads are on more than one rank.
    pub(in crate::model) fn repeats(self, num_ranks: usize) -> bool {
        self.of_rank * num_ranks > self.total
    }
}
