//! Group-relative advantages.

use crate::config::ScaleRewards;
use crate::types::RolloutGroup;

/// Added to the standard deviation before dividing, as in TRL.
const EPSILON: f64 = 1e-4;

/// A standard deviation up to this counts as zero (`torch.isclose` with its default `atol`).
const ZERO_STD: f64 = 1e-8;

/// Writes `advantage` into every completion: `(reward - mean(group)) / (std + 1e-4)` (arXiv 2402.03300, section 4.1).
///
/// `std` is the group's (`Group`), the whole generation batch's (`Batch`, arXiv 2508.08221) or absent (`None`,
/// arXiv 2503.20783), always with Bessel's correction. Completions without a reward are left out of mean and std and get
/// advantage 0; the caller leaves their tokens out of the loss too. Where fewer than two rewards are left, the advantage is 0.
///
/// `batch` holds the sums over all ranks and is read only by `Batch`; `None` says that `groups` are the whole batch.
pub fn assign_advantages(
    groups: &mut [RolloutGroup],
    scale: ScaleRewards,
    batch: Option<BatchStats>,
) -> AdvantageStats {
    let batch_std = batch.unwrap_or_else(|| BatchStats::of_groups(groups)).std();
    let mut stats = AdvantageStats::default();
    for group in groups {
        let rewards = BatchStats::of(group.completions.iter().map(|completion| completion.reward));
        let group_std = if group.completions.len() == 1 { 0.0 } else { rewards.std() };
        let std = if scale == ScaleRewards::Batch { batch_std } else { group_std };
        let divisor = if scale == ScaleRewards::None { 1.0 } else { std + EPSILON };
        for completion in &mut group.completions {
            let advantage = completion.reward.map_or(0.0, |reward| (f64::from(reward) - rewards.mean()) / divisor);
            completion.advantage = if advantage.is_nan() { 0.0 } else { advantage as f32 };
        }
        stats.book(group, std <= ZERO_STD);
    }
    stats
}

/// Count, sum and sum of squares of rewards: adds up over groups and ranks. In float64.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct BatchStats {
    /// Rewards that exist.
    pub count: f64,
    /// Their sum.
    pub sum: f64,
    /// The sum of their squares.
    pub sum_of_squares: f64,
}

impl BatchStats {
    /// Sums of the rewards that exist.
    pub fn of(rewards: impl IntoIterator<Item = Option<f32>>) -> Self {
        let mut stats = Self::default();
        for reward in rewards.into_iter().flatten() {
            let reward = f64::from(reward);
            stats.add(&Self { count: 1.0, sum: reward, sum_of_squares: reward * reward });
        }
        stats
    }

    /// Sums over the weighted rewards of all completions.
    pub fn of_groups(groups: &[RolloutGroup]) -> Self {
        Self::of(groups.iter().flat_map(|group| &group.completions).map(|completion| completion.reward))
    }

    /// Adds another rank's or group's sums.
    pub fn add(&mut self, other: &Self) {
        self.count += other.count;
        self.sum += other.sum;
        self.sum_of_squares += other.sum_of_squares;
    }

    /// The three sums, for an all-reduce over ranks.
    pub fn to_array(self) -> [f64; 3] {
        [self.count, self.sum, self.sum_of_squares]
    }

    /// Back from [`BatchStats::to_array`].
    pub fn from_array([count, sum, sum_of_squares]: [f64; 3]) -> Self {
        Self { count, sum, sum_of_squares }
    }

    /// Mean; NaN without rewards.
    pub fn mean(&self) -> f64 {
        self.sum / self.count
    }

    /// Standard deviation with Bessel's correction; NaN below two rewards.
    pub fn std(&self) -> f64 {
        if self.count < 2.0 {
            return f64::NAN;
        }
        let squares = self.sum_of_squares - self.sum * self.sum / self.count;
        // Below the rounding error of the subtraction all rewards are equal.
        if squares <= 1e-14 * self.sum_of_squares { 0.0 } else { (squares / (self.count - 1.0)).sqrt() }
    }
}

/// What `reward`, `reward_std`, `rewards/{name}/{mean,std}` and `frac_reward_zero_std` are made of: sums over groups.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AdvantageStats {
    /// The weighted reward.
    pub reward: BatchStats,
    /// Each reward function, in configured order.
    pub rewards: Vec<BatchStats>,
    /// Groups seen.
    pub num_groups: f64,
    /// Groups whose divisor's standard deviation is zero: they teach nothing.
    pub num_zero_std_groups: f64,
    /// Completions without a reward.
    pub num_failed: f64,
}

impl AdvantageStats {
    fn book(&mut self, group: &RolloutGroup, zero_std: bool) {
        self.num_groups += 1.0;
        self.num_zero_std_groups += f64::from(u8::from(zero_std));
        for completion in &group.completions {
            self.reward.add(&BatchStats::of([completion.reward]));
            self.num_failed += f64::from(u8::from(completion.reward.is_none()));
            self.rewards.resize(self.rewards.len().max(completion.rewards.len()), BatchStats::default());
            for (sums, reward) in self.rewards.iter_mut().zip(&completion.rewards) {
                sums.add(&BatchStats::of([*reward]));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::fixtures::scored;

    fn advantages(groups: &[RolloutGroup]) -> Vec<f32> {
        groups.iter().flat_map(|group| &group.completions).map(|completion| completion.advantage).collect()
    }

    #[test]
    fn equal_rewards_teach_nothing_and_are_counted() {
        let mut groups = [scored(&[Some(0.1); 7]), scored(&[Some(0.0), Some(1.0)])];
        let stats = assign_advantages(&mut groups, ScaleRewards::Group, None);
        assert!(groups[0].completions.iter().all(|completion| completion.advantage == 0.0));
        assert_eq!((stats.num_groups, stats.num_zero_std_groups), (2.0, 1.0));
    }

    #[test]
    fn batch_statistics_span_the_ranks() {
        let halves = [vec![scored(&[Some(0.0), Some(4.0)])], vec![scored(&[Some(1.0), Some(2.0)])]];
        let mut whole = halves.concat();
        assign_advantages(&mut whole, ScaleRewards::Batch, None);
        let mut sums = BatchStats::of_groups(&halves[0]).to_array();
        for (sum, other) in sums.iter_mut().zip(BatchStats::of_groups(&halves[1]).to_array()) {
            *sum += other;
        }
        let mut split = Vec::new();
        for mut half in halves {
            assign_advantages(&mut half, ScaleRewards::Batch, Some(BatchStats::from_array(sums)));
            split.extend(advantages(&half));
        }
        assert_eq!(split, advantages(&whole));
    }

    #[test]
    fn failed_rewards_are_left_out_of_the_statistics() {
        let mut with = [scored(&[Some(1.0), None, Some(3.0)])];
        let mut without = [scored(&[Some(1.0), Some(3.0)])];
        let stats = assign_advantages(&mut with, ScaleRewards::Group, None);
        assign_advantages(&mut without, ScaleRewards::Group, None);
        let (with, without) = (advantages(&with), advantages(&without));
        assert_eq!([with[0], with[2]], [without[0], without[1]]);
        assert_eq!((with[1], stats.num_failed), (0.0, 1.0));
    }
}
