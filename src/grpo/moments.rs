//! Count, mean and standard deviation of rewards, in a form that merges over groups and ranks without loss of precision.

use crate::error::Result;
use crate::ranks::{Collective, all_gather_f64};
use crate::types::{RolloutGroup, Trajectory};

/// Count, sum and sum of squared deviations from the mean of rewards, in float64.
///
/// They merge by the formula of Chan, Golub and LeVeque ("Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979). No large
/// squares are subtracted, so a large offset common to all rewards costs no precision.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct BatchStats {
    /// Number of rewards that are not missing.
    pub count: f64,
    /// Sum of the rewards.
    pub sum: f64,
    /// Sum of the squared deviations from their mean.
    pub squared_deviations: f64,
}

impl BatchStats {
    /// Statistics of the rewards that are not `None`, in two passes: the mean, then the deviations from it.
    pub fn of(rewards: impl IntoIterator<Item = Option<f32>>) -> Self {
        Self::of_values(rewards.into_iter().map(|reward| reward.map(f64::from)))
    }

    /// Statistics of the values that are not `None`, computed like [`BatchStats::of`].
    pub(super) fn of_values(values: impl IntoIterator<Item = Option<f64>>) -> Self {
        let rewards: Vec<f64> = values.into_iter().flatten().collect();
        let (count, sum) = (rewards.len() as f64, rewards.iter().sum::<f64>());
        let mean = sum / count;
        let squared_deviations = rewards.iter().map(|reward| (reward - mean).powi(2)).sum();
        Self { count, sum, squared_deviations }
    }

    /// Statistics of one group's weighted rewards, minus their KL penalties.
    pub fn of_group(group: &RolloutGroup) -> Self {
        Self::of(group.completions.iter().map(Trajectory::penalized_reward))
    }

    /// Statistics of the weighted rewards of all completions, minus their KL penalties.
    pub fn of_groups(groups: &[RolloutGroup]) -> Self {
        Self::of(groups.iter().flat_map(|group| &group.completions).map(Trajectory::penalized_reward))
    }

    /// Merges the statistics of further rewards.
    pub fn merge(&mut self, other: &Self) {
        if self.count == 0.0 || other.count == 0.0 {
            *self = if self.count == 0.0 { *other } else { *self };
            return;
        }
        let (count, between) = (self.count + other.count, other.mean() - self.mean());
        self.squared_deviations += other.squared_deviations + between * between * (self.count * other.count / count);
        self.count = count;
        self.sum += other.sum;
    }

    /// Merges each of `stats` with the corresponding statistics of other ranks, in rank order. Collective over `group`; every rank passes equally
    /// many.
    ///
    /// # Errors
    /// The errors of [`Collective`].
    pub fn merge_ranks(stats: &mut [&mut Self], group: &dyn Collective) -> Result<()> {
        let own: Vec<f64> = stats.iter().flat_map(|stats| stats.to_array()).collect();
        stats.iter_mut().for_each(|stats| **stats = Self::default());
        for of_rank in all_gather_f64(group, &own)? {
            for (stats, of_rank) in stats.iter_mut().zip(of_rank.chunks_exact(3)) {
                stats.merge(&Self { count: of_rank[0], sum: of_rank[1], squared_deviations: of_rank[2] });
            }
        }
        Ok(())
    }

    /// Mean; NaN without rewards.
    pub fn mean(&self) -> f64 {
        self.sum / self.count
    }

    /// Standard deviation with Bessel's correction; NaN below two rewards.
    pub fn std(&self) -> f64 {
        if self.count < 2.0 { f64::NAN } else { (self.squared_deviations / (self.count - 1.0)).sqrt() }
    }

    fn to_array(self) -> [f64; 3] {
        [self.count, self.sum, self.squared_deviations]
    }
}
