//! Groups carried from step to step (`partial_rollout`). A step begins `oversample` more groups than it trains on; those that are unfinished at its
//! end continue in the next step. All ranks know all carried groups and distribute them again, so that results do not depend on the rank that began a
//! group. But if keys and values are kept, a group stays with the engine that has them, and with tools it stays with the rank that has them.

use crate::config::Config;
use crate::metrics::{Reduce, StepMetrics};
use crate::rollout::EngineStats;
use crate::types::Place;
use crate::types::{RolloutGroup, Trajectory};

/// Counts of this rank's tokens in a step: trained on, carried and dropped.
#[derive(Debug, Default)]
pub(super) struct Carry {
    /// Tokens of the groups that are trained on, including those sampled in earlier steps; and the sum of their ages in steps.
    num_taken: usize,
    num_continued: usize,
    token_age: u64,
    /// Steps since the oldest of them was begun.
    oldest: u64,
    /// Tokens sampled in this step, and those that will never be trained on.
    pub num_sampled: usize,
    pub num_discarded: usize,
    /// Groups that the next step continues.
    pub num_carried: usize,
    /// Counters of this rank's engine.
    engine: EngineStats,
}

impl Carry {
    /// Starts the counts of a step from the engine's counters.
    pub fn new(engine: EngineStats) -> Self {
        Self { engine, ..Self::default() }
    }

    /// Counts a group that `step` trains on; `num_continued` of its tokens were sampled before.
    pub fn take(&mut self, num_continued: usize, group: &RolloutGroup, step: u64) {
        let of_sampled = |completion: &Trajectory| -> Vec<u64> {
            let versions = completion.weight_versions.iter().zip(&completion.loss_mask);
            versions.filter(|(_, is_sampled)| **is_sampled).map(|(version, _)| *version).collect()
        };
        let versions: Vec<u64> = group.completions.iter().flat_map(of_sampled).collect();
        let num_tokens = versions.len();
        let num_continued = num_continued.min(num_tokens); // an agent may have dropped requests
        self.num_taken += num_tokens;
        self.num_continued += num_continued;
        self.num_sampled += num_tokens - num_continued;
        self.token_age += versions.iter().map(|version| step - version).sum::<u64>();
        if num_continued > 0 {
            self.oldest = self.oldest.max(step - group.first_step);
        }
    }

    /// Adds the metrics. Staleness is the number of steps from sampling a token to training on it. Recomputed tokens include those of preempted
    /// sequences.
    pub(super) fn add_metrics(&self, metrics: &mut StepMetrics, config: &Config) {
        if config.oversample == 0.0 {
            return;
        }
        metrics.set("tokens/generated", self.num_sampled as f64, Reduce::Sum);
        metrics.set("partial_rollout/carried_groups", self.num_carried as f64, Reduce::Sum);
        metrics.set("partial_rollout/staleness_max", self.oldest as f64, Reduce::Max);
        let EngineStats { num_kept_tokens, num_recomputed_tokens, .. } = self.engine;
        for (name, count) in [("kept_tokens", num_kept_tokens), ("recomputed_tokens", num_recomputed_tokens)] {
            let of_rank = count as f64 / config.engine_shape().num_ranks() as f64;
            metrics.set(format!("partial_rollout/{name}"), of_rank, Reduce::Sum);
        }
        let [taken, sampled] = [self.num_taken, self.num_sampled].map(|count| count as f64);
        metrics.set_mean("partial_rollout/staleness_mean", self.token_age as f64, taken);
        metrics.set_mean("partial_rollout/continued_token_share", self.num_continued as f64, taken);
        metrics.set_mean("partial_rollout/discarded_token_share", self.num_discarded as f64, sampled);
    }
}

/// Number of tokens that were sampled so far.
pub(super) fn num_sampled(completions: &[Trajectory]) -> usize {
    completions.iter().map(Trajectory::num_sampled).sum()
}

/// Splits carried groups, which are in rank order, into `counts[rank]` groups per rank, so that each stays with its rank.
pub(super) fn with_their_ranks<T>(carried: Vec<T>, counts: &[usize]) -> Vec<Vec<T>> {
    let mut carried = carried.into_iter();
    counts.iter().map(|count| carried.by_ref().take(*count).collect()).collect()
}

/// Distributes carried groups, which are long, over the ranks in turn.
pub(super) fn one_by_one<T: Clone>(carried: Vec<T>, num_ranks: usize) -> Vec<Vec<T>> {
    let mut shares = vec![Vec::new(); num_ranks];
    for (index, group) in carried.into_iter().enumerate() {
        shares[index % num_ranks].push(group);
    }
    shares
}

/// Splits carried groups so that each stays with its engine. All engines complete, and so carry, equally many groups per rank, and their ranks are
/// contiguous.
pub(super) fn in_order<T: Clone>(carried: &[T], num_ranks: usize) -> Vec<Vec<T>> {
    (0..num_ranks).map(|rank| carried[Place { rank, size: num_ranks }.share(carried.len())].to_vec()).collect()
}

/// Adds new groups in two rounds: first until each rank has its share of `totals[0]` groups, then until it has its share of `totals[1]`. Ranks are filled
/// in order; one that has more already gets none.
pub(super) fn fill<T>(shares: &mut [Vec<T>], mut new: impl Iterator<Item = T>, totals: [usize; 2]) {
    let num_ranks = shares.len();
    for total in totals {
        for (rank, own) in shares.iter_mut().enumerate() {
            let num_missing = Place { rank, size: num_ranks }.share(total).len().saturating_sub(own.len());
            own.extend(new.by_ref().take(num_missing));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unfinished_groups_with_tools_stay_on_their_rank() {
        let mut shares = with_their_ranks(vec!["a", "b", "c"], &[0, 3]);
        fill(&mut shares, ["x", "y", "z"].into_iter(), [4, 6]);
        assert_eq!(shares, [vec!["x", "y", "z"], vec!["a", "b", "c"]]);
    }

    #[test]
    fn unfinished_groups_are_spread_over_ranks() {
        let deal = |carried: Vec<usize>, new| {
            let mut shares = one_by_one(carried, 2);
            fill(&mut shares, new, [4, 6]);
            shares
        };
        assert_eq!(deal(vec![], 0..6), [[0, 1, 4], [2, 3, 5]]);
        assert_eq!(deal(vec![90, 91, 92], 0..3), [[90, 92, 1], [91, 0, 2]]);
        assert_eq!(deal((90..97).collect(), 0..0), [vec![90, 92, 94, 96], vec![91, 93, 95]]);
    }

    /// Two engines of two ranks each complete three of their six groups, in any order of ranks.
    #[test]
    fn groups_with_a_kept_cache_stay_on_their_engine() {
        let mut shares: Vec<Vec<(usize, usize)>> = vec![Vec::new(); 4]; // (engine, number)
        fill(&mut shares, (0..12).map(|number| (number / 3 % 2, number)), [12, 12]);
        for step in 1..5 {
            let engine_of = |rank: usize| rank / 2;
            for (rank, share) in shares.iter_mut().enumerate() {
                share.iter_mut().for_each(|group| group.0 = engine_of(rank));
                let num_complete = if (rank + step) % 2 == 0 { 1 } else { 2 };
                share.drain(..num_complete);
            }
            shares = in_order(&shares.concat(), 4);
            for (rank, share) in shares.iter().enumerate() {
                assert!(share.iter().all(|group| group.0 == engine_of(rank)), "step {step}, rank {rank}: {share:?}");
            }
            fill(&mut shares, (100 * step..100 * step + 6).map(|number| (9, number)), [8, 12]);
            assert!(shares.iter().all(|share| share.len() == 3), "{shares:?}");
        }
    }
}
