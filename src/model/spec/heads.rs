//! Heads of one kind, as ranks that share rows have them.

/// Heads of one kind, as the ranks of a group share them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::model) struct SharedHeads {
    /// Of all ranks together.
    pub total: usize,
    /// Of each rank.
    pub own: usize,
    /// Elements of a head.
    pub width: usize,
}

/// Heads that follow one another on a rank and in the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::model) struct HeadRun {
    /// The first one's place among the rank's.
    pub slot: usize,
    /// The first one's place in the model.
    pub head: usize,
    /// How many they are.
    pub len: usize,
}

impl SharedHeads {
    /// Heads that `queries` heads read, of which each of `num_ranks` has an equal share.
    pub(in crate::model) fn new(total: usize, width: usize, queries: usize, num_ranks: usize) -> Self {
        let of_rank = queries / num_ranks;
        let own = match (total.is_multiple_of(num_ranks), num_ranks.is_multiple_of(total)) {
            (true, _) => total / num_ranks,
            (false, true) => 1,
            (false, false) => of_rank, // one for each query head
        };
        Self { total, own, width }
    }

    /// Runs of a rank's heads.
    pub(in crate::model) fn runs(self, rank: usize, num_ranks: usize) -> Vec<HeadRun> {
        let mut runs: Vec<HeadRun> = Vec::new();
        for slot in 0..self.own {
            let head = (rank * self.own + slot) * self.total / (num_ranks * self.own);
            match runs.last_mut() {
                Some(run) if run.head + run.len == head => run.len += 1,
                _ => runs.push(HeadRun { slot, head, len: 1 }),
            }
        }
        runs
    }

    /// Whether several ranks have some of the heads.
    pub(in crate::model) fn repeats(self, num_ranks: usize) -> bool {
        self.own * num_ranks > self.total
    }
}
