//! Tests advantages against their definitions in float64, over offsets, groups and ranks.

use super::*;
use crate::ranks::testing;
use crate::types::fixtures::scored;

fn advantages(groups: &[RolloutGroup]) -> Vec<f32> {
    groups.iter().flat_map(|group| &group.completions).map(|completion| completion.advantage).collect()
}

/// Computes GRPO's advantages of groups that are the whole batch.
fn scaled(groups: &mut [RolloutGroup], scale: ScaleRewards) -> AdvantageStats {
    assign_advantages(groups, &AdvantageConfig { scale, ..AdvantageConfig::default() }, None).unwrap()
}

/// Mean and standard deviation by their definitions, in float64.
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

/// Groups of one size whose rewards are an offset up to 1e6 plus a few steps; some steps are one unit in the last place.
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
fn advantages_match_float64_for_large_reward_offsets() {
    for case in 0..2000 {
        let batch = random_batch(case);
        let (_, batch_std) = mean_and_std(&batch.concat());
        for scale in [ScaleRewards::Group, ScaleRewards::Batch, ScaleRewards::None] {
            let mut groups = groups_of(&batch);
            let stats = scaled(&mut groups, scale);
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
fn small_differences_of_large_rewards_are_kept() {
    for (offset, step, expected) in [(1e5, 1.0 / 128.0, 2.39), (2e4, 1.0 / 512.0, 2.16), (1e3, 1.0 / 8192.0, 0.75)] {
        let mut rewards = [Some(offset); 8];
        rewards[7] = Some(offset + step);
        let mut groups = [scored(&rewards)];
        let stats = scaled(&mut groups, ScaleRewards::Group);
        let got = groups[0].completions[7].advantage;
        assert!((got - expected).abs() < 0.01, "{offset} + {step}: {got}");
        assert_eq!(stats.num_zero_std_groups, 0.0);
    }
}

#[test]
fn groups_with_equal_rewards_have_zero_advantage_and_are_counted() {
    let mut groups = [scored(&[Some(0.1); 7]), scored(&[Some(0.0), Some(1.0)])];
    let stats = scaled(&mut groups, ScaleRewards::Group);
    assert!(groups[0].completions.iter().all(|completion| completion.advantage == 0.0));
    assert_eq!((stats.num_groups, stats.num_zero_std_groups), (2.0, 1.0));
    for scale in [ScaleRewards::Group, ScaleRewards::Batch, ScaleRewards::None] {
        let mut noise = [scored(&[Some(1e-9), Some(2e-9)]), scored(&[Some(0.0), Some(1.0)])];
        scaled(&mut noise, scale);
        assert_eq!(advantages(&noise)[..2], [0.0, 0.0], "{scale:?}");
    }
}

#[test]
fn batch_statistics_are_reduced_over_ranks() {
    testing::threads(3, |group| {
        for case in 0..200 {
            let batch = random_batch(case);
            let (_, std) = mean_and_std(&batch.concat());
            let of_rank = batch.chunks(batch.len().div_ceil(3)).nth(group.rank()).unwrap_or(&[]);
            let mut groups = groups_of(of_rank);
            let config = AdvantageConfig { scale: ScaleRewards::Batch, ..AdvantageConfig::default() };
            let _ = assign_advantages(&mut groups, &config, Some(&*group)).unwrap();
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
fn failed_rewards_are_excluded_from_statistics() {
    let mut with = [scored(&[Some(1.0), None, Some(3.0)])];
    let mut without = [scored(&[Some(1.0), Some(3.0)])];
    let stats = scaled(&mut with, ScaleRewards::Group);
    scaled(&mut without, ScaleRewards::Group);
    let (with, without) = (advantages(&with), advantages(&without));
    assert_eq!([with[0], with[2]], [without[0], without[1]]);
    assert_eq!((with[1], stats.num_failed), (0.0, 1.0));
}

/// With two rewards and each estimator, batches spread over ranks must give the same advantages as on one rank.
#[test]
fn every_advantage_estimator_is_equal_on_all_ranks() {
    let rloo = AdvantageEstimator::Rloo;
    let decoupled = MultiObjectiveAggregation::NormalizeThenSum;
    let configs = [
        AdvantageConfig { estimator: rloo, scale: ScaleRewards::None, ..AdvantageConfig::default() },
        AdvantageConfig { estimator: rloo, scale: ScaleRewards::Batch, ..AdvantageConfig::default() },
        AdvantageConfig { aggregation: decoupled, reward_weights: vec![1.0, 0.5], ..AdvantageConfig::default() },
    ];
    testing::threads(3, |group| {
        for (case, config) in (0..50).flat_map(|case| configs.iter().map(move |config| (case, config))) {
            let mut whole = groups_of(&random_batch(case));
            for (index, completion) in whole.iter_mut().flat_map(|group| &mut group.completions).enumerate() {
                completion.rewards.push((index % 5 != 0).then_some((index % 3) as f32));
            }
            let per_rank = whole.len().div_ceil(3);
            let mut own = whole.chunks(per_rank).nth(group.rank()).unwrap_or(&[]).to_vec();
            let _ = assign_advantages(&mut whole, config, None).unwrap();
            let _ = assign_advantages(&mut own, config, Some(&*group)).unwrap();
            let expected = advantages(whole.chunks(per_rank).nth(group.rank()).unwrap_or(&[]));
            for (got, expected) in advantages(&own).into_iter().zip(expected) {
                let near = (got - expected).abs() <= 1e-5 * expected.abs().max(1e-3);
                assert!(near, "case {case}, {config:?}: {got}, {expected}");
            }
        }
    });
}
