//! The functions of this room held to TRL's own numbers (`scripts/golden_trl.py`), to libtorch's autograd, and to
//! themselves over micro-batches.

use serde_json::Value;
use tch::{Device, Kind, Tensor};

use super::{
    AdvantageConfig, Denominators, Distillation, EntropyControl, EntropyTerm, LossConfig, LossInput, LossOutput,
    LossStats, assign_advantages, kl_of_sequence, policy_loss,
};
use crate::config::{AdvantageEstimator, ImportanceSamplingLevel, ImportanceSamplingMode, KlEstimator, LossType};
use crate::types::fixtures::scored;

fn golden() -> Value {
    serde_json::from_str(include_str!("../../tests/golden/grpo.json")).unwrap()
}

fn numbers(values: &Value) -> Vec<f64> {
    values.as_array().unwrap().iter().map(|value| value.as_f64().unwrap_or(f64::NAN)).collect()
}

/// A packed batch whose tensors live together.
#[derive(Debug)]
struct Batch {
    lengths: Vec<i64>,
    logprobs: Tensor,          // [C]
    old_logprobs: Tensor,      // [C]
    ref_logprobs: Tensor,      // [C]
    teacher_logprobs: Tensor,  // [C]
    rollout_logprobs: Tensor,  // [C]
    entropy: Tensor,           // [C]
    advantages: Tensor,        // [N]
    sequence_of_token: Tensor, // [C]
}

impl Batch {
    fn input(&self, use_old: bool) -> LossInput<'_> {
        LossInput {
            logprobs: &self.logprobs,
            old_logprobs: use_old.then_some(&self.old_logprobs),
            ref_logprobs: Some(&self.ref_logprobs),
            teacher_logprobs: Some(&self.teacher_logprobs),
            rollout_logprobs: Some(&self.rollout_logprobs),
            advantages: &self.advantages,
            sequence_of_token: &self.sequence_of_token,
            entropy: Some(&self.entropy),
            entropy_term: None,
        }
    }

    fn denominators(&self) -> Denominators {
        let num_tokens = self.logprobs.numel() as f64;
        Denominators {
            num_sequences: self.lengths.len() as f64,
            num_tokens,
            num_update_tokens: num_tokens,
            num_sequence_tokens: num_tokens,
        }
    }

    /// Sequences `from..to` as a micro-batch of its own.
    fn slice(&self, from: usize, to: usize) -> Batch {
        let start: i64 = self.lengths[..from].iter().sum();
        let count: i64 = self.lengths[from..to].iter().sum();
        let tokens = |x: &Tensor| x.narrow(0, start, count);
        Batch {
            lengths: self.lengths[from..to].to_vec(),
            logprobs: tokens(&self.logprobs),
            old_logprobs: tokens(&self.old_logprobs),
            ref_logprobs: tokens(&self.ref_logprobs),
            teacher_logprobs: tokens(&self.teacher_logprobs),
            rollout_logprobs: tokens(&self.rollout_logprobs),
            entropy: tokens(&self.entropy),
            advantages: self.advantages.narrow(0, from as i64, (to - from) as i64),
            sequence_of_token: tokens(&self.sequence_of_token) - from as i64,
        }
    }

    /// Log-probabilities of all sorts around one another; sequence 2 is masked and has no tokens.
    fn random(kind: Kind) -> Batch {
        tch::manual_seed(1);
        let lengths = vec![4, 1, 0, 9, 2, 3];
        let options = (kind, Device::Cpu);
        let count: i64 = lengths.iter().sum();
        let logprobs = -Tensor::rand([count], options) * 2.0;
        let near = |scale: f64| &logprobs + Tensor::randn([count], options) * scale;
        let sequence_of_token = indices(&lengths);
        Batch {
            old_logprobs: near(0.3),
            ref_logprobs: near(0.5),
            teacher_logprobs: near(0.4),
            rollout_logprobs: near(0.2),
            entropy: Tensor::rand([count], options),
            advantages: Tensor::from_slice(&[1.0, -0.7, 0.4, -1.2, 0.0, 1.5]).to_kind(kind),
            sequence_of_token,
            logprobs,
            lengths,
        }
    }
}

fn indices(lengths: &[i64]) -> Tensor {
    let rows: Vec<i64> = (0..).zip(lengths).flat_map(|(row, count)| (0..*count).map(move |_| row)).collect();
    Tensor::from_slice(&rows)
}

/// The configuration of a case; keys that a case leaves out have the defaults, which are TRL's.
pub(crate) fn parse_config(value: &Value) -> LossConfig {
    let number = |key: &str| value[key].as_f64();
    let default = LossConfig::default();
    LossConfig {
        loss_type: serde_json::from_value(value["loss_type"].clone()).unwrap(),
        importance_sampling_level: serde_json::from_value(value["importance_sampling_level"].clone()).unwrap(),
        epsilon: number("epsilon").unwrap(),
        epsilon_high: number("epsilon_high").unwrap(),
        delta: number("delta"),
        beta: number("beta").unwrap(),
        use_bias_correction_kl: value["use_bias_correction_kl"].as_bool().unwrap(),
        importance_sampling_correction: value["importance_sampling_correction"].as_bool().unwrap(),
        importance_sampling_mode: serde_json::from_value(value["importance_sampling_mode"].clone()).unwrap(),
        importance_sampling_clip_max: number("importance_sampling_clip_max").unwrap(),
        importance_sampling_clip_min: number("importance_sampling_clip_min"),
        off_policy_mask_threshold: number("off_policy_mask_threshold"),
        kl_estimator: KlEstimator::K3,
        sapo_temperature_neg: number("sapo_temperature_neg").unwrap_or(default.sapo_temperature_neg),
        sapo_temperature_pos: number("sapo_temperature_pos").unwrap_or(default.sapo_temperature_pos),
        vespo_k_pos: number("vespo_k_pos").unwrap_or(default.vespo_k_pos),
        vespo_lambda_pos: number("vespo_lambda_pos").unwrap_or(default.vespo_lambda_pos),
        vespo_k_neg: number("vespo_k_neg").unwrap_or(default.vespo_k_neg),
        vespo_lambda_neg: number("vespo_lambda_neg").unwrap_or(default.vespo_lambda_neg),
        top_entropy_quantile: number("top_entropy_quantile").unwrap_or(1.0),
        entropy_coef: number("entropy_coef").unwrap_or(0.0),
        distillation: number("distillation_weight")
            .map(|weight| Distillation { weight, clip_max: number("distillation_is_clip") }),
        max_completion_length: value["max_completion_length"].as_u64().unwrap() as usize,
        ..default
    }
}

/// The entropy term of an update over tokens of `entropies`, with a bonus of constant weight.
pub(crate) fn entropy_term(config: &LossConfig, entropies: &[f64]) -> Option<EntropyTerm> {
    let coef = config.entropy_coef;
    let of_all = EntropyTerm { least: None, coef, num_tokens: entropies.len() as f64 };
    if !config.selects_by_entropy() {
        return config.has_entropy_bonus().then_some(of_all);
    }
    let entropies = entropies.iter().map(|entropy| *entropy as f32).collect();
    Some(EntropyTerm::of_highest(entropies, config.top_entropy_quantile, coef))
}

fn golden_batch(golden: &Value, case: &Value) -> Batch {
    let packed = packed_tokens(golden, case);
    let tokens = |key: &str| Tensor::from_slice(&packed(&numbers(&golden["batch"][key])));
    let mut lengths: Vec<i64> = numbers(&golden["batch"]["lengths"]).iter().map(|length| *length as i64).collect();
    if case["mask_truncated"].as_bool().unwrap() {
        lengths[golden["truncated"].as_u64().unwrap() as usize] = 0;
    }
    let sequence_of_token = indices(&lengths);
    Batch {
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

/// Leaves the tokens of the masked sequence out of a value by token, if the case has one.
fn packed_tokens(golden: &Value, case: &Value) -> impl Fn(&[f64]) -> Vec<f64> {
    let lengths: Vec<i64> = numbers(&golden["batch"]["lengths"]).iter().map(|length| *length as i64).collect();
    let masked = case["mask_truncated"].as_bool().unwrap().then(|| golden["truncated"].as_i64().unwrap());
    let rows: Vec<i64> = Vec::try_from(indices(&lengths)).unwrap();
    move |values| rows.iter().zip(values).filter(|(row, _)| Some(**row) != masked).map(|(_, value)| *value).collect()
}

/// Fails unless `got` is within `relative` of `expected`, element by element; NaN equals NaN.
fn assert_close(got: &[f64], expected: &[f64], relative: f64, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}: length");
    for (got, expected) in got.iter().zip(expected) {
        let close = (got - expected).abs() <= relative * expected.abs().max(1e-3);
        assert!(close || (got.is_nan() && expected.is_nan()), "{what}: got {got}, expected {expected}");
    }
}

fn assert_same_stats(got: &LossStats, expected: &LossStats, what: &str) {
    assert_eq!(got.entries().len(), expected.entries().len(), "{what}");
    for ((name, got), (other, expected)) in got.entries().iter().zip(expected.entries()) {
        assert_eq!(name, other, "{what}");
        assert_close(&[got.value()], &[expected.value()], 1e-9, &format!("{what}: {name}"));
    }
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(&tensor.to_kind(Kind::Double)).unwrap()
}

#[test]
fn losses_gradients_and_metrics_are_those_of_trl() {
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
            // TRL averages what it counts in float32.
            assert_close(&[got.value()], &[expected], 1e-6, &format!("{name}: {metric}"));
        }
    }
}

#[test]
fn an_adaptive_entropy_bonus_is_that_of_trl() {
    let golden = golden();
    let case = &golden["adaptive_entropy"];
    let number = |value: &Value, key: &str| value[key].as_f64().unwrap();
    let config = LossConfig {
        entropy_coef: number(case, "entropy_coef"),
        use_adaptive_entropy: true,
        entropy_coef_min: number(case, "entropy_coef_min"),
        entropy_coef_max: number(case, "entropy_coef_max"),
        entropy_coef_delta: number(case, "entropy_coef_delta"),
        entropy_target: number(case, "entropy_target"),
        ..LossConfig::default()
    };
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

/// The divergence that TRL's `RLOOTrainer` takes off the rewards, times beta: a sum of k1 by sequence.
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
fn advantages_and_reward_metrics_are_those_of_trl() {
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

/// Every loss at every level with everything switched on, with each estimator of the KL divergence.
fn configurations() -> impl Iterator<Item = LossConfig> {
    let levels = [ImportanceSamplingLevel::Token, ImportanceSamplingLevel::Sequence];
    let pairs = LossType::ALL.iter().flat_map(move |loss_type| levels.map(|level| (*loss_type, level)));
    pairs.flat_map(|(loss_type, importance_sampling_level)| {
        KlEstimator::ALL.iter().map(move |kl_estimator| LossConfig {
            loss_type,
            importance_sampling_level,
            delta: Some(1.3),
            beta: 0.2,
            kl_estimator: *kl_estimator,
            importance_sampling_mode: ImportanceSamplingMode::TokenTruncate,
            importance_sampling_clip_min: Some(0.9),
            off_policy_mask_threshold: Some(0.02),
            ..LossConfig::default()
        })
    })
}

#[test]
fn gradients_are_those_of_autograd() {
    // The ratios of cispo and vespo are constants that autograd would not know of: TRL's numbers hold those.
    for (config, kind) in configurations()
        .filter(|config| !matches!(config.loss_type, LossType::Cispo | LossType::Vespo))
        .flat_map(|config| [(config.clone(), Kind::Double), (config, Kind::Float)])
    {
        let mut batch = Batch::random(kind);
        batch.logprobs = batch.logprobs.set_requires_grad(true);
        batch.entropy = batch.entropy.set_requires_grad(true);
        let config = LossConfig { top_entropy_quantile: 0.6, entropy_coef: 0.3, ..config };
        let entropy_term = entropy_term(&config, &values(&batch.entropy.detach()));
        let input = LossInput { entropy_term, ..batch.input(true) };
        let output = policy_loss(&input, &config, &batch.denominators()).unwrap();
        output.loss.backward();
        let relative = if kind == Kind::Double { 1e-10 } else { 1e-4 };
        assert_close(&values(&output.dlogprobs), &values(&batch.logprobs.grad()), relative, &format!("{config:?}"));
        let dentropy = values(&output.dentropy.unwrap());
        assert!(dentropy.contains(&0.0) && dentropy.iter().any(|slope| *slope < 0.0), "{dentropy:?}");
        assert_close(&dentropy, &values(&batch.entropy.grad()), relative, &format!("{config:?}"));
    }
}

#[test]
fn micro_batches_add_up_to_the_whole() {
    let batch = Batch::random(Kind::Double);
    let denominators = batch.denominators();
    for config in configurations() {
        let whole = policy_loss(&batch.input(true), &config, &denominators).unwrap();
        let mut parts: Vec<LossOutput> = [(0, 1), (1, 4), (4, 6)]
            .map(|(from, to)| policy_loss(&batch.slice(from, to).input(true), &config, &denominators).unwrap())
            .into();
        let name = format!("{config:?}");
        let loss: f64 = parts.iter().map(|part| part.loss.double_value(&[])).sum();
        let dlogprobs: Vec<f64> = parts.iter().flat_map(|part| values(&part.dlogprobs)).collect();
        assert_close(&[loss], &[whole.loss.double_value(&[])], 1e-12, &name);
        assert_close(&dlogprobs, &values(&whole.dlogprobs), 1e-12, &name);
        let whole = whole.stats.read().unwrap();
        let mut on_host = LossStats::default();
        parts.iter().for_each(|part| on_host.merge(&part.stats.read().unwrap()).unwrap());
        assert_same_stats(&on_host, &whole, &name);
        let (first, others) = parts.split_first_mut().unwrap();
        others.iter().for_each(|part| first.stats.merge(&part.stats).unwrap());
        assert_same_stats(&first.stats.read().unwrap(), &whole, &name);
    }
}

#[test]
fn wrong_shapes_and_missing_references_are_named() {
    let batch = Batch::random(Kind::Double);
    let short = batch.entropy.narrow(0, 0, 3);
    let error = |input: LossInput, beta: f64| {
        let config = LossConfig { beta, ..LossConfig::default() };
        policy_loss(&input, &config, &batch.denominators()).unwrap_err().to_string()
    };
    assert!(error(LossInput { entropy: Some(&short), ..batch.input(true) }, 0.0).contains("entropy of shape [19]"));
    assert!(error(LossInput { ref_logprobs: None, ..batch.input(true) }, 0.1).contains("ref_logprobs"));
    assert!(error(LossInput { teacher_logprobs: Some(&short), ..batch.input(true) }, 0.0).contains("teacher_logprobs"));
}

/// The divergence from a teacher that is the policy, and its gradient, are exactly 0; without another weight nothing is learned.
#[test]
fn a_teacher_that_is_the_policy_teaches_nothing() {
    let batch = Batch::random(Kind::Float);
    let distillation = Some(Distillation { weight: 1.0, clip_max: Some(2.0) });
    let config = LossConfig { distillation, beta: 0.1, ..LossConfig::default() };
    let input = LossInput { teacher_logprobs: Some(&batch.logprobs), ..batch.input(true) };
    let output = policy_loss(&input, &config, &batch.denominators()).unwrap();
    assert_eq!(output.loss.double_value(&[]), 0.0);
    assert_eq!(output.dlogprobs.abs().max().double_value(&[]), 0.0);
    let other = policy_loss(&batch.input(true), &config, &batch.denominators()).unwrap();
    assert!(other.dlogprobs.abs().max().double_value(&[]) > 1e-3);
}
