//! Tests the loss against libtorch's autograd, and whole batches against micro-batches.

use tch::Kind;

use super::super::{Distillation, LossConfig, LossInput, LossOutput, LossStats, policy_loss};
use super::{LossBatch, assert_close, entropy_term, values};
use crate::config::{ImportanceSamplingLevel, ImportanceSamplingMode, KlEstimator, LossType, ObjectiveConfig};

fn assert_same_stats(got: &LossStats, expected: &LossStats, what: &str) {
    assert_eq!(got.entries().len(), expected.entries().len(), "{what}");
    for ((name, got), (other, expected)) in got.entries().iter().zip(expected.entries()) {
        assert_eq!(name, other, "{what}");
        assert_close(&[got.value()], &[expected.value()], 1e-9, &format!("{what}: {name}"));
    }
}

/// Every loss type at every level with all options on, with each estimator of the KL divergence.
fn configurations() -> impl Iterator<Item = LossConfig> {
    let levels = [ImportanceSamplingLevel::Token, ImportanceSamplingLevel::Sequence];
    let pairs = LossType::ALL.iter().flat_map(move |loss_type| levels.map(|level| (*loss_type, level)));
    pairs.flat_map(|(loss_type, importance_sampling_level)| {
        let objective = |kl_estimator: &KlEstimator| ObjectiveConfig {
            kl_estimator: *kl_estimator,
            importance_sampling_clip_min: Some(0.9),
            off_policy_mask_threshold: Some(0.02),
            ..ObjectiveConfig::default()
        };
        KlEstimator::ALL.iter().map(objective).map(move |objective| LossConfig {
            loss_type,
            importance_sampling_level,
            delta: Some(1.3),
            beta: 0.2,
            importance_sampling_mode: ImportanceSamplingMode::TokenTruncate,
            objective,
            ..LossConfig::default()
        })
    })
}

#[test]
fn analytic_gradients_equal_autograd() {
    // Autograd does not treat the ratios of cispo and vespo as constants; TRL's numbers test these.
    for (config, kind) in configurations()
        .filter(|config| !matches!(config.loss_type, LossType::Cispo | LossType::Vespo))
        .flat_map(|config| [(config.clone(), Kind::Double), (config, Kind::Float)])
    {
        let mut batch = LossBatch::random(kind);
        batch.logprobs = batch.logprobs.set_requires_grad(true);
        batch.entropy = batch.entropy.set_requires_grad(true);
        let objective = ObjectiveConfig { top_entropy_quantile: 0.6, entropy_coef: 0.3, ..config.objective };
        let config = LossConfig { objective, ..config };
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
fn losses_of_micro_batches_sum_to_the_full_batch() {
    let batch = LossBatch::random(Kind::Double);
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
fn wrong_shapes_and_missing_inputs_are_refused_by_name() {
    let batch = LossBatch::random(Kind::Double);
    let short = batch.entropy.narrow(0, 0, 3);
    let error = |input: LossInput, beta: f64| {
        let config = LossConfig { beta, ..LossConfig::default() };
        policy_loss(&input, &config, &batch.denominators()).unwrap_err().to_string()
    };
    assert!(error(LossInput { entropy: Some(&short), ..batch.input(true) }, 0.0).contains("entropy of shape [19]"));
    assert!(error(LossInput { ref_logprobs: None, ..batch.input(true) }, 0.1).contains("ref_logprobs"));
    assert!(error(LossInput { teacher_logprobs: Some(&short), ..batch.input(true) }, 0.0).contains("teacher_logprobs"));
}

/// With the policy as its own teacher, the divergence and its gradient are exactly 0, so nothing is learned.
#[test]
fn distillation_from_the_policy_itself_has_zero_gradient() {
    let batch = LossBatch::random(Kind::Float);
    let distillation = Some(Distillation { weight: 1.0, clip_max: Some(2.0), top: None });
    let config = LossConfig { distillation, beta: 0.1, ..LossConfig::default() };
    let input = LossInput { teacher_logprobs: Some(&batch.logprobs), ..batch.input(true) };
    let output = policy_loss(&input, &config, &batch.denominators()).unwrap();
    assert_eq!(output.loss.double_value(&[]), 0.0);
    assert_eq!(output.dlogprobs.abs().max().double_value(&[]), 0.0);
    let other = policy_loss(&batch.input(true), &config, &batch.denominators()).unwrap();
    assert!(other.dlogprobs.abs().max().double_value(&[]) > 1e-3);
}
