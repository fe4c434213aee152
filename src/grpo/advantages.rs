//! Advantages of completions within their group.

use super::moments::BatchStats;
use crate::config::{AdvantageEstimator, Config, MultiObjectiveAggregation, ScaleRewards};
use crate::error::Result;
use crate::ranks::Collective;
use crate::types::RolloutGroup;

/// Added to the standard deviation before dividing, as in TRL.
const EPSILON: f64 = 1e-4;

/// A standard deviation up to this counts as zero (`torch.isclose` with its default `atol`).
const ZERO_STD: f64 = 1e-8;

/// How advantages are computed from rewards. Defaults are those of TRL 1.16's `GRPOConfig`.
#[derive(Debug, Clone, PartialEq)]
pub struct AdvantageConfig {
    /// The baseline that is subtracted from a reward.
    pub estimator: AdvantageEstimator,
    /// Which standard deviation divides the advantage.
    pub scale: ScaleRewards,
    /// Whether rewards are summed before or after they are normalised.
    pub aggregation: MultiObjectiveAggregation,
    /// One weight per reward function, or empty for weights of 1; used if rewards are normalised separately.
    pub reward_weights: Vec<f64>,
}

impl Default for AdvantageConfig {
    fn default() -> Self {
        Self {
            estimator: AdvantageEstimator::Grpo,
            scale: ScaleRewards::Group,
            aggregation: MultiObjectiveAggregation::SumThenNormalize,
            reward_weights: Vec::new(),
        }
    }
}

impl From<&Config> for AdvantageConfig {
    fn from(config: &Config) -> Self {
        Self {
            estimator: config.objective.advantage_estimator,
            scale: config.scale_rewards,
            aggregation: config.objective.multi_objective_aggregation,
            reward_weights: config.reward_weights.clone(),
        }
    }
}

/// Computes the `advantage` of every completion. With the rewards of its group, minus their KL penalties:
///
/// - grpo: `(reward - mean) / (std + 1e-4)` (arXiv 2402.03300, section 4.1), where `std` is the group's (`Group`), the whole generation batch's
///   (`Batch`, arXiv 2508.08221) or absent (`None`, arXiv 2503.20783);
/// - rloo: `reward - mean of the others` (arXiv 2402.14740), with `Batch` scaled to `(x - mean(x)) / (std(x) + 1e-4)` over the batch;
/// - `NormalizeThenSum` (GDPO, arXiv 2601.05242): `(x - mean(x)) / (std(x) + 1e-4)` over the batch, where x is the sum, weighted by `reward_weights`,
///   of `(reward - mean) / (std + 1e-4)` of each reward function.
///
/// Standard deviations have Bessel's correction. Completions without a reward are excluded from mean and std and get advantage 0; the caller must
/// exclude their tokens from the loss, too. If fewer than two rewards remain, or if [`rewards_are_equal`], the advantage is exactly 0 before any
/// scaling over the batch.
///
/// With `ranks`, batch statistics are over the groups of all these ranks, which must call this together; else over `groups` only.
///
/// # Errors
/// The errors of [`Collective`].
pub fn assign_advantages(
    groups: &mut [RolloutGroup],
    config: &AdvantageConfig,
    ranks: Option<&dyn Collective>,
) -> Result<AdvantageStats> {
    let scored = match (config.aggregation, config.estimator) {
        (MultiObjectiveAggregation::NormalizeThenSum, _) => decoupled(groups, &config.reward_weights, ranks)?,
        (_, AdvantageEstimator::Grpo) => relative(groups, config.scale, ranks)?,
        (_, AdvantageEstimator::Rloo) => leave_one_out(groups, config.scale, ranks)?,
    };
    let mut stats = AdvantageStats::default();
    for (group, scored) in groups.iter_mut().zip(scored) {
        for (completion, advantage) in group.completions.iter_mut().zip(scored.advantages) {
            completion.advantage = advantage.filter(|advantage| !advantage.is_nan()).unwrap_or(0.0) as f32;
        }
        stats.book(group, scored.has_zero_std);
    }
    Ok(stats)
}

/// Advantages of one group, in order, and whether the standard deviation relevant to them is zero.
#[derive(Debug)]
struct GroupAdvantages {
    advantages: Vec<Option<f64>>,
    has_zero_std: bool,
}

fn rewards(group: &RolloutGroup) -> impl Iterator<Item = Option<f64>> {
    group.completions.iter().map(|completion| completion.penalized_reward().map(f64::from))
}

fn relative(
    groups: &[RolloutGroup],
    scale: ScaleRewards,
    ranks: Option<&dyn Collective>,
) -> Result<Vec<GroupAdvantages>> {
    let mut batch = BatchStats::of_groups(groups);
    if let Some(ranks) = ranks.filter(|_| scale == ScaleRewards::Batch) {
        BatchStats::merge_ranks(&mut [&mut batch], ranks)?;
    }
    let of_group = |group: &RolloutGroup| {
        let (own, are_equal) = (BatchStats::of_group(group), rewards_are_equal(group));
        let std = if scale == ScaleRewards::Batch { batch.std() } else { own.std() };
        let divisor = if scale == ScaleRewards::None { 1.0 } else { std + EPSILON };
        let advantage = |reward: f64| if are_equal { 0.0 } else { (reward - own.mean()) / divisor };
        GroupAdvantages {
            advantages: rewards(group).map(|reward| reward.map(advantage)).collect(),
            has_zero_std: if scale == ScaleRewards::Batch { is_zero(batch.std()) } else { are_equal },
        }
    };
    Ok(groups.iter().map(of_group).collect())
}

fn leave_one_out(
    groups: &[RolloutGroup],
    scale: ScaleRewards,
    ranks: Option<&dyn Collective>,
) -> Result<Vec<GroupAdvantages>> {
    let of_group = |group: &RolloutGroup| {
        let (own, are_equal) = (BatchStats::of_group(group), rewards_are_equal(group));
        // reward - (sum - reward) / (count - 1), without subtracting large sums
        let unbiased = own.count / (own.count - 1.0);
        let advantage = |reward: f64| if are_equal { 0.0 } else { (reward - own.mean()) * unbiased };
        let is_compared = |_: &f64| own.count > 1.0;
        let advantages = rewards(group).map(|reward| reward.filter(is_compared).map(advantage)).collect();
        GroupAdvantages { advantages, has_zero_std: are_equal }
    };
    let mut scored: Vec<GroupAdvantages> = groups.iter().map(of_group).collect();
    if scale == ScaleRewards::Batch {
        scale_over_batch(&mut scored, ranks)?;
    }
    Ok(scored)
}

fn decoupled(groups: &[RolloutGroup], weights: &[f64], ranks: Option<&dyn Collective>) -> Result<Vec<GroupAdvantages>> {
    let of_group = |group: &RolloutGroup| {
        let num_rewards = group.completions.iter().map(|completion| completion.rewards.len()).max().unwrap_or(0);
        let mut sums: Vec<Option<f64>> = rewards(group).map(|reward| reward.map(|_| 0.0)).collect();
        for index in 0..num_rewards {
            let scores = || group.completions.iter().map(|completion| completion.rewards.get(index).copied().flatten());
            let (own, weight) = (BatchStats::of(scores()), weights.get(index).copied().unwrap_or(1.0));
            if own.std().is_nan() || is_zero(own.std()) {
                continue; // fewer than two scores, or equal ones: adds 0
            }
            for (sum, score) in sums.iter_mut().zip(scores()) {
                let scaled = score.map_or(0.0, |score| (f64::from(score) - own.mean()) / (own.std() + EPSILON));
                *sum = sum.map(|sum| sum + weight * scaled);
            }
        }
        GroupAdvantages { advantages: sums, has_zero_std: false }
    };
    let mut scored: Vec<GroupAdvantages> = groups.iter().map(of_group).collect();
    let has_zero_std = is_zero(scale_over_batch(&mut scored, ranks)?);
    scored.iter_mut().for_each(|scored| scored.has_zero_std = has_zero_std);
    Ok(scored)
}

/// Scales all scores to mean 0 and standard deviation 1; returns the original standard deviation.
fn scale_over_batch(scored: &mut [GroupAdvantages], ranks: Option<&dyn Collective>) -> Result<f64> {
    let mut batch = BatchStats::of_values(scored.iter().flat_map(|scored| scored.advantages.iter().copied()));
    if let Some(ranks) = ranks {
        BatchStats::merge_ranks(&mut [&mut batch], ranks)?;
    }
    let (mean, std) = (batch.mean(), batch.std());
    for advantage in scored.iter_mut().flat_map(|scored| scored.advantages.iter_mut().flatten()) {
        *advantage = (*advantage - mean) / (std + EPSILON);
    }
    Ok(std)
}

/// Whether the rewards of a group are all equal, so that it has no learning signal. The advantage, the metric `frac_reward_zero_std` and dynamic
/// sampling all use this function.
///
/// Equal means that the standard deviation is at most 1e-8, like TRL's `torch.isclose(std, 0)`. Rewards are compared as the float32 numbers that they
/// are stored as. Noise of float64 arithmetic (0.1 + 0.2 against 0.3) has vanished by then, because weighted sums are rounded to float32 at the end.
/// Different float32 numbers of 1 and above differ by at least 1.2e-7, which exceeds the bound in groups of up to 140: the last digit of a reward of
/// 1e5 counts as a difference, where a bound relative to the rewards would treat it as noise. Smaller differences of small rewards are negligible
/// against the 1e-4 in the divisor.
///
/// The function follows TRL in special cases: a group with one completion returns true, and a group with fewer than two rewards because of
/// failures returns false.
///
/// ```
/// use std::sync::Arc;
/// use colo_grpo::data::{Prompt, RolloutGroup, Trajectory};
/// use colo_grpo::grpo::rewards_are_equal;
///
/// let prompt = Prompt { id: 0, text: "2 + 3 =".to_owned(), token_ids: vec![5, 6], columns: Arc::default() };
/// let rewarded = |reward| Trajectory { reward: Some(reward), ..Trajectory::default() };
/// let group = RolloutGroup { completions: vec![rewarded(0.5), rewarded(0.5)], ..RolloutGroup::new(prompt) };
/// assert!(rewards_are_equal(&group));
/// ```
pub fn rewards_are_equal(group: &RolloutGroup) -> bool {
    group.completions.len() == 1 || is_zero(BatchStats::of_group(group).std())
}

fn is_zero(std: f64) -> bool {
    std <= ZERO_STD
}

/// Sums over groups for the metrics `reward`, `reward_std`, `rewards/{name}/{mean,std}` and `frac_reward_zero_std`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AdvantageStats {
    /// The weighted reward, without KL penalties.
    pub reward: BatchStats,
    /// Each reward function, in configured order.
    pub rewards: Vec<BatchStats>,
    /// Number of groups.
    pub num_groups: f64,
    /// Number of groups whose standard deviation is zero, so that they have no learning signal.
    pub num_zero_std_groups: f64,
    /// Number of completions without a reward.
    pub num_failed: f64,
}

impl AdvantageStats {
    fn book(&mut self, group: &RolloutGroup, has_zero_std: bool) {
        self.num_groups += 1.0;
        self.num_zero_std_groups += f64::from(u8::from(has_zero_std));
        self.reward.merge(&BatchStats::of(group.completions.iter().map(|completion| completion.reward)));
        self.num_failed += group.completions.iter().filter(|completion| completion.reward.is_none()).count() as f64;
        let num_rewards = group.completions.iter().map(|completion| completion.rewards.len()).max().unwrap_or(0);
        self.rewards.resize(self.rewards.len().max(num_rewards), BatchStats::default());
        for (index, stats) in self.rewards.iter_mut().enumerate() {
            let scores = group.completions.iter().map(|completion| completion.rewards.get(index).copied().flatten());
            stats.merge(&BatchStats::of(scores));
        }
    }
}

#[cfg(test)]
mod tests;
