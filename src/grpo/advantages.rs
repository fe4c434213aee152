//! Group-relative advantages.

use super::moments::BatchStats;
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
/// advantage 0; the caller leaves their tokens out of the loss too. Where fewer than two rewards are left, or where
/// [`rewards_are_equal`], the advantage is exactly 0.
///
/// `batch` holds the statistics of all ranks and is read only by `Batch`; `None` says that `groups` are the whole batch.
pub fn assign_advantages(
    groups: &mut [RolloutGroup],
    scale: ScaleRewards,
    batch: Option<BatchStats>,
) -> AdvantageStats {
    let batch_std = batch.unwrap_or_else(|| BatchStats::of_groups(groups)).std();
    let mut stats = AdvantageStats::default();
    for group in groups {
        let (rewards, are_equal) = (BatchStats::of_group(group), rewards_are_equal(group));
        let std = if scale == ScaleRewards::Batch { batch_std } else { rewards.std() };
        let divisor = if scale == ScaleRewards::None { 1.0 } else { std + EPSILON };
        for completion in &mut group.completions {
            let advantage = completion.reward.map_or(0.0, |reward| (f64::from(reward) - rewards.mean()) / divisor);
            completion.advantage = if are_equal || advantage.is_nan() { 0.0 } else { advantage as f32 };
        }
        let has_zero_std = if scale == ScaleRewards::Batch { is_zero(batch_std) } else { are_equal };
        stats.book(group, has_zero_std);
    }
    stats
}

/// Whether the rewards of a group are all equal, so that its completions teach nothing. Everything that asks this asks here: the
/// advantage, the metric `frac_reward_zero_std`, and whatever leaves groups out of a batch.
///
/// Equal means that their standard deviation is at most 1e-8, which is TRL's `torch.isclose(std, 0)`. Rewards are compared as
/// the float32 numbers that they are stored as. Noise of float64 arithmetic (0.1 + 0.2 against 0.3) is gone by then, since
/// weighted sums are rounded to float32 last. Float32 numbers of 1 and above that differ at all differ by 1.2e-7, which is above
/// the bound in groups of up to 140: the last digit of a reward of 1e5 counts as a difference, where a bound relative to the
/// rewards would take it for noise. Differences of small rewards below the bound vanish beside the 1e-4 that divides them.
///
/// Of a group with one completion this is true, and of a group in which failures left fewer than two rewards it is false, both
/// as TRL counts them.
pub fn rewards_are_equal(group: &RolloutGroup) -> bool {
    group.completions.len() == 1 || is_zero(BatchStats::of_group(group).std())
}

fn is_zero(std: f64) -> bool {
    std <= ZERO_STD
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
    fn book(&mut self, group: &RolloutGroup, has_zero_std: bool) {
        self.num_groups += 1.0;
        self.num_zero_std_groups += f64::from(u8::from(has_zero_std));
        self.reward.merge(&BatchStats::of_group(group));
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
mod tests {
    use super::*;
    use crate::dist::testing;
    use crate::types::fixtures::scored;

    fn advantages(groups: &[RolloutGroup]) -> Vec<f32> {
        groups.iter().flat_map(|group| &group.completions).map(|completion| completion.advantage).collect()
    }

    /// The formulas in float64, from the definition.
    fn mean_and_std(rewards: &[f32]) -> (f64, f64) {
        let count = rewards.len() as f64;
        let mean = rewards.iter().map(|reward| f64::from(*reward)).sum::<f64>() / count;
        let squares: f64 = rewards.iter().map(|reward| (f64::from(*reward) - mean).powi(2)).sum();
        (mean, (squares / (count - 1.0)).sqrt())
    }

    fn assert_near(got: f32, expected: f64, what: &str) {
        let error = (f64::from(got) - expected).abs();
        assert!(error <= 1e-6 * expected.abs(), "{what}: got {got}, expected {expected}");
    }

    /// Groups of one size whose rewards are an offset up to 1e6 and a few steps, some of the steps a last digit.
    fn random_batch(mut word: u64) -> Vec<Vec<f32>> {
        let mut draw = |below: u64| {
            word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (word >> 33) % below
        };
        let offset = [0.0, 1.0, -30.0, 1e3, -2e4, 1e5, 1e6][draw(7) as usize];
        let last_digit = f64::from((offset as f32).abs().max(4.0)) * f64::from(f32::EPSILON);
        let step = last_digit * [1.0, 3.0, 64.0, 1e4][draw(4) as usize];
        let (num_groups, size, num_steps) = (1 + draw(6), 2 + draw(63), 1 + draw(8));
        let mut reward = || (offset + step * draw(num_steps + 1) as f64) as f32;
        (0..num_groups).map(|_| (0..size).map(|_| reward()).collect()).collect()
    }

    fn groups_of(batch: &[Vec<f32>]) -> Vec<RolloutGroup> {
        batch.iter().map(|rewards| scored(&rewards.iter().copied().map(Some).collect::<Vec<_>>())).collect()
    }

    #[test]
    fn advantages_are_those_of_float64_at_any_offset() {
        for case in 0..2000 {
            let batch = random_batch(case);
            let (_, batch_std) = mean_and_std(&batch.concat());
            for scale in [ScaleRewards::Group, ScaleRewards::Batch, ScaleRewards::None] {
                let mut groups = groups_of(&batch);
                let stats = assign_advantages(&mut groups, scale, None);
                let mut num_zero = 0.0;
                for (rewards, group) in batch.iter().zip(&groups) {
                    let (mean, std) = mean_and_std(rewards);
                    let are_equal = rewards.iter().all(|reward| *reward == rewards[0]);
                    assert_eq!(rewards_are_equal(group), are_equal, "case {case}: {rewards:?}");
                    let divisor = match scale {
                        ScaleRewards::Group => std + EPSILON,
                        ScaleRewards::Batch => batch_std + EPSILON,
                        ScaleRewards::None => 1.0,
                    };
                    for (reward, completion) in rewards.iter().zip(&group.completions) {
                        let expected = if are_equal { 0.0 } else { (f64::from(*reward) - mean) / divisor };
                        assert_near(completion.advantage, expected, &format!("case {case}, {scale:?}: {rewards:?}"));
                    }
                    let is_counted = if scale == ScaleRewards::Batch { batch_std == 0.0 } else { are_equal };
                    num_zero += f64::from(u8::from(is_counted));
                }
                assert_eq!(stats.num_zero_std_groups, num_zero, "case {case}, {scale:?}");
            }
        }
    }

    #[test]
    fn the_last_digit_of_a_large_reward_counts() {
        for (offset, step, expected) in [(1e5, 1.0 / 128.0, 2.39), (2e4, 1.0 / 512.0, 2.16), (1e3, 1.0 / 8192.0, 0.75)]
        {
            let mut rewards = [Some(offset); 8];
            rewards[7] = Some(offset + step);
            let mut groups = [scored(&rewards)];
            let stats = assign_advantages(&mut groups, ScaleRewards::Group, None);
            let got = groups[0].completions[7].advantage;
            assert!((got - expected).abs() < 0.01, "{offset} + {step}: {got}");
            assert_eq!(stats.num_zero_std_groups, 0.0);
        }
    }

    #[test]
    fn equal_rewards_teach_nothing_and_are_counted() {
        let mut groups = [scored(&[Some(0.1); 7]), scored(&[Some(0.0), Some(1.0)])];
        let stats = assign_advantages(&mut groups, ScaleRewards::Group, None);
        assert!(groups[0].completions.iter().all(|completion| completion.advantage == 0.0));
        assert_eq!((stats.num_groups, stats.num_zero_std_groups), (2.0, 1.0));
        for scale in [ScaleRewards::Group, ScaleRewards::Batch, ScaleRewards::None] {
            let mut noise = [scored(&[Some(1e-9), Some(2e-9)]), scored(&[Some(0.0), Some(1.0)])];
            assign_advantages(&mut noise, scale, None);
            assert_eq!(advantages(&noise)[..2], [0.0, 0.0], "{scale:?}");
        }
    }

    #[test]
    fn batch_statistics_span_the_ranks() {
        testing::threads(3, |group| {
            for case in 0..200 {
                let batch = random_batch(case);
                let (_, std) = mean_and_std(&batch.concat());
                let of_rank = batch.chunks(batch.len().div_ceil(3)).nth(group.rank()).unwrap_or(&[]);
                let mut groups = groups_of(of_rank);
                let mut stats = BatchStats::of_groups(&groups);
                BatchStats::merge_ranks(&mut [&mut stats], &*group).unwrap();
                assign_advantages(&mut groups, ScaleRewards::Batch, Some(stats));
                for (rewards, group) in of_rank.iter().zip(&groups) {
                    let (mean, _) = mean_and_std(rewards);
                    for (reward, completion) in rewards.iter().zip(&group.completions) {
                        let expected = (f64::from(*reward) - mean) / (std + EPSILON);
                        assert_near(completion.advantage, expected, &format!("case {case}: {rewards:?}"));
                    }
                }
            }
        });
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
