//! Tests losses, advantages and their metrics against TRL's numbers from `scripts/golden_trl.py`.

use serde_json::Value;
use tch::Tensor;

use super::super::{
    AdvantageConfig, EntropyControl, LossConfig, LossInput, assign_advantages, kl_of_sequence, policy_loss,
};
use super::{LossBatch, assert_close, entropy_term, indices, parse_config, values};
use crate::config::{AdvantageEstimator, KlEstimator, LossType, ObjectiveConfig};
use crate::types::fixtures::scored;

fn golden() -> Value {
    serde_json::from_str(include_str!("../../../tests/golden/grpo.json")).unwrap()
}

fn numbers(values: &Value) -> Vec<f64> {
    values.as_array().unwrap().iter().map(|value| value.as_f64().unwrap_or(f64::NAN)).collect()
}

fn golden_batch(golden: &Value, case: &Value) -> LossBatch {
    let packed = packed_tokens(golden, case);
    let tokens = |key: &str| Tensor::from_slice(&packed(&numbers(&golden["batch"][key])));
    let mut lengths: Vec<i64> = numbers(&golden["batch"]["lengths"]).iter().map(|length| *length as i64).collect();
    if case["mask_truncated"].as_bool().unwrap() {
        lengths[golden["truncated"].as_u64().unwrap() as usize] = 0;
    }
    let sequence_of_token = indices(&lengths);
    LossBatch {
        logprobs: tokens("logprobs"),
        old_logprobs: tokens("old_logprobs"),
        ref_logprobs: tokens("ref_logprobs"),
        teacher_logprobs: tokens("teacher_logprobs"),
        rollout_logprobs: tokens("rollout_logprobs"),
        entropy: tokens("entropy"),
        advantages: Tensor::from_slice(&numbers(&case["advantages"])),
        sequence_of_token,
        lengths,
    }
}

/// Removes the tokens of the masked sequence from per-token values, if the case has one.
fn packed_tokens(golden: &Value, case: &Value) -> impl Fn(&[f64]) -> Vec<f64> {
    let lengths: Vec<i64> = numbers(&golden["batch"]["lengths"]).iter().map(|length| *length as i64).collect();
    let masked = case["mask_truncated"].as_bool().unwrap().then(|| golden["truncated"].as_i64().unwrap());
    let rows: Vec<i64> = Vec::try_from(indices(&lengths)).unwrap();
    move |values| rows.iter().zip(values).filter(|(row, _)| Some(**row) != masked).map(|(_, value)| *value).collect()
}

#[test]
fn losses_gradients_and_metrics_equal_trl() {
    let golden = golden();
    let cases = golden["losses"].as_array().unwrap();
    assert!(cases.len() > 150);
    for loss_type in LossType::ALL {
        let has_case = cases.iter().any(|case| case["config"]["loss_type"] == loss_type.name());
        assert!(has_case, "{}: no case; scripts/golden_trl.py makes them", loss_type.name());
    }
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let batch = golden_batch(&golden, case);
        let config = parse_config(&case["config"]);
        let entropy_term = entropy_term(&config, &values(&batch.entropy));
        let input = LossInput { entropy_term, ..batch.input(case["use_old"].as_bool().unwrap()) };
        let output = policy_loss(&input, &config, &batch.denominators()).unwrap();
        assert_close(&[output.loss.double_value(&[])], &[case["loss"].as_f64().unwrap()], 1e-10, name);
        let expected = packed_tokens(&golden, case)(&numbers(&case["dlogprobs"]));
        assert_close(&values(&output.dlogprobs), &expected, 1e-10, name);
        assert_eq!(output.dentropy.is_some(), case["dentropy"].is_array(), "{name}");
        if let (Some(dentropy), Some(term)) = (&output.dentropy, entropy_term) {
            let expected = packed_tokens(&golden, case)(&numbers(&case["dentropy"]));
            assert_close(&values(dentropy), &expected, 1e-10, name);
            let bonus = term.coef * output.mean_entropy.unwrap().double_value(&[]);
            let policy_loss = output.loss.double_value(&[]) + bonus;
            assert_close(&[policy_loss], &[case["policy_loss"].as_f64().unwrap()], 1e-10, name);
        }
        let metrics = case["metrics"].as_object().unwrap();
        let stats = output.stats.read().unwrap();
        assert_eq!(metrics.len(), stats.entries().len(), "{name}: {metrics:?}");
        for (metric, got) in stats.entries() {
            let expected = metrics[*metric].as_f64().unwrap_or(f64::NAN);
            // TRL averages its counts in float32.
            assert_close(&[got.value()], &[expected], 1e-6, &format!("{name}: {metric}"));
        }
    }
}

#[test]
fn adaptive_entropy_bonus_equals_trl() {
    let golden = golden();
    let case = &golden["adaptive_entropy"];
    let number = |value: &Value, key: &str| value[key].as_f64().unwrap();
    let objective = ObjectiveConfig {
        entropy_coef: number(case, "entropy_coef"),
        use_adaptive_entropy: true,
        entropy_coef_min: number(case, "entropy_coef_min"),
        entropy_coef_max: number(case, "entropy_coef_max"),
        entropy_coef_delta: number(case, "entropy_coef_delta"),
        entropy_target: number(case, "entropy_target"),
        ..ObjectiveConfig::default()
    };
    let config = LossConfig { objective, ..LossConfig::default() };
    let mut control = EntropyControl::new(&config);
    let updates = case["updates"].as_array().unwrap();
    assert!(updates.len() >= 8);
    for (index, update) in updates.iter().enumerate() {
        assert_close(&[control.applied(&config)], &[number(update, "applied")], 1e-9, &format!("update {index}"));
        control.observe(f64::NAN, &config);
        control.observe(number(update, "entropy"), &config);
        assert_close(&[control.coef], &[number(update, "coef")], 1e-9, &format!("after update {index}"));
    }
}

/// The divergence that TRL's `RLOOTrainer` subtracts from the rewards, times beta: the sum of k1 over a sequence.
fn divergences(batch: &Value) -> Vec<f64> {
    let tokens = |name: &str| numbers(&batch[name]).iter().map(|value| *value as f32).collect::<Vec<_>>();
    let (old, reference) = (tokens("old_logprobs"), tokens("ref_logprobs"));
    let mut end = 0;
    let of_sequence = |length: f64| {
        let tokens = end..end + length as usize;
        end = tokens.end;
        kl_of_sequence(KlEstimator::K1, &old[tokens.clone()], &reference[tokens])
    };
    numbers(&batch["lengths"]).into_iter().map(of_sequence).collect()
}

#[test]
fn advantages_and_reward_metrics_equal_trl() {
    let golden = golden();
    let cases = golden["advantages"].as_array().unwrap();
    assert!(cases.len() >= 24);
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let weights = numbers(&case["reward_weights"]);
        let rows = case["rewards"].as_array().unwrap().iter().map(numbers);
        let (mut rewards, mut weighted) = (Vec::new(), Vec::new());
        for row in rows {
            let valid = row.iter().zip(&weights).filter(|(reward, _)| !reward.is_nan());
            let total: f64 = valid.clone().map(|(reward, weight)| reward * weight).sum();
            weighted.push((valid.count() > 0).then_some(total as f32));
            rewards.push(row.iter().map(|reward| (!reward.is_nan()).then_some(*reward as f32)).collect::<Vec<_>>());
        }
        let size = case["num_generations"].as_u64().unwrap() as usize;
        let mut groups: Vec<_> = weighted.chunks(size).map(scored).collect();
        let (beta, divergences) = (case["beta"].as_f64().unwrap(), divergences(&golden["batch"]));
        let completions = groups.iter_mut().flat_map(|group| &mut group.completions);
        for ((completion, rewards), divergence) in completions.zip(rewards).zip(&divergences) {
            completion.rewards = rewards;
            completion.kl_penalty = (beta * divergence) as f32;
        }
        let estimator: Option<AdvantageEstimator> =
            serde_json::from_value(case["advantage_estimator"].clone()).unwrap();
        let config = AdvantageConfig {
            estimator: estimator.unwrap_or(AdvantageEstimator::Grpo),
            scale: serde_json::from_value(case["scale_rewards"].clone()).unwrap(),
            aggregation: serde_json::from_value(case["multi_objective_aggregation"].clone()).unwrap(),
            reward_weights: weights,
        };
        let stats = assign_advantages(&mut groups, &config, None).unwrap();
        let completions = groups.iter().flat_map(|group| &group.completions);
        let got: Vec<f64> = completions.map(|completion| f64::from(completion.advantage)).collect();
        assert_close(&got, &numbers(&case["advantages"]), if beta > 0.0 { 1e-5 } else { 1e-6 }, name);

        let mut metrics = vec![
            ("reward".to_owned(), stats.reward.mean()),
            ("reward_std".to_owned(), stats.reward.std()),
            ("frac_reward_zero_std".to_owned(), stats.num_zero_std_groups / stats.num_groups),
        ];
        for (index, sums) in stats.rewards.iter().enumerate() {
            metrics.push((format!("rewards/reward_{index}/mean"), sums.mean()));
            metrics.push((format!("rewards/reward_{index}/std"), sums.std()));
        }
        if beta > 0.0 {
            let num_tokens: f64 = numbers(&golden["batch"]["lengths"]).iter().sum();
            metrics.push(("kl".to_owned(), divergences.iter().sum::<f64>() / num_tokens));
        }
        assert_eq!(metrics.len(), case["metrics"].as_object().unwrap().len(), "{name}");
        for (metric, got) in metrics {
            let expected = case["metrics"][&metric].as_f64().unwrap_or(f64::NAN);
            assert_close(&[got], &[expected], 1e-6, &format!("{name}: {metric}"));
        }
    }
}
