//! Whether groups have a learning signal, counted over all ranks.

use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::grpo::{BatchStats, has_signal, rewards_are_equal};
use crate::metrics::{Reduce, StepMetrics};
use crate::ranks::{ReduceOp, World, all_reduce_f64};
use crate::types::RolloutGroup;

/// Whether the rewards of a group have a learning signal.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct GroupVerdict {
    pub has_signal: bool,
    are_equal: bool,
    /// Sum of the group's rewards.
    sum: f64,
    /// Number of the group's rewards.
    count: f64,
}

impl GroupVerdict {
    pub fn of(group: &RolloutGroup, range: Option<[f64; 2]>) -> Self {
        let BatchStats { sum, count, .. } = BatchStats::of_group(group);
        Self { has_signal: has_signal(group, range), are_equal: rewards_are_equal(group), sum, count }
    }
}

/// Counts of a step's groups over all ranks, and sums of their rewards.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Tally {
    pub num_sampled: f64,
    pub num_kept: f64,
    pub num_equal: f64,
    pub reward_sum: f64,
    pub reward_count: f64,
}

impl FromIterator<GroupVerdict> for Tally {
    fn from_iter<I: IntoIterator<Item = GroupVerdict>>(verdicts: I) -> Self {
        let mut tally = Self::default();
        for GroupVerdict { has_signal, are_equal, sum, count } in verdicts {
            tally.num_sampled += 1.0;
            tally.num_kept += f64::from(u8::from(has_signal));
            tally.num_equal += f64::from(u8::from(are_equal));
            tally.reward_sum += sum;
            tally.reward_count += count;
        }
        tally
    }
}

impl Tally {
    /// Sums the counts of all ranks; collective over the world.
    pub fn of_all_ranks(self, world: &World) -> Result<Self> {
        let mut sums = [self.num_sampled, self.num_kept, self.num_equal, self.reward_sum, self.reward_count];
        all_reduce_f64(&*world.group(), &mut sums, ReduceOp::Sum)?;
        let [num_sampled, num_kept, num_equal, reward_sum, reward_count] = sums;
        Ok(Self { num_sampled, num_kept, num_equal, reward_sum, reward_count })
    }

    /// Adds the metrics of a step that trains on `num_groups` groups.
    pub fn add_metrics(&self, metrics: &mut StepMetrics, num_groups: usize) {
        let num_groups = num_groups as f64;
        for (name, value) in [
            ("generated_groups", self.num_sampled),
            ("kept_groups", self.num_kept),
            ("no_signal_groups", self.num_sampled - self.num_kept),
            ("replaced_groups", self.num_sampled - num_groups),
            ("gen_batches", self.num_sampled / num_groups),
            ("reward", self.reward_sum / self.reward_count),
        ] {
            metrics.set(format!("dynamic_sampling/{name}"), value, Reduce::Last);
        }
    }
}
