//! Helpers of this module's tests: packed batches, configurations from a case's keys, comparisons.

mod distillation;
mod golden;
mod properties;

use serde_json::Value;
use tch::{Device, Kind, Tensor};

use super::{Denominators, Distillation, EntropyTerm, LossConfig, LossInput};
use crate::config::ObjectiveConfig;

/// A packed batch that owns its tensors.
#[derive(Debug)]
struct LossBatch {
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

impl LossBatch {
    fn input(&self, use_old: bool) -> LossInput<'_> {
        LossInput {
            logprobs: &self.logprobs,
            old_logprobs: use_old.then_some(&self.old_logprobs),
            ref_logprobs: Some(&self.ref_logprobs),
            teacher_logprobs: Some(&self.teacher_logprobs),
            top: None,
            rollout_logprobs: Some(&self.rollout_logprobs),
            advantages: &self.advantages,
            bnpo_divisors: None,
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

    /// Sequences `from..to` as a separate micro-batch.
    fn slice(&self, from: usize, to: usize) -> LossBatch {
        let start: i64 = self.lengths[..from].iter().sum();
        let count: i64 = self.lengths[from..to].iter().sum();
        let tokens = |x: &Tensor| x.narrow(0, start, count);
        LossBatch {
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

    /// A batch of random log-probabilities. Sequence 2 is masked and has no tokens.
    fn random(kind: Kind) -> LossBatch {
        tch::manual_seed(1);
        let lengths = vec![4, 1, 0, 9, 2, 3];
        let options = (kind, Device::Cpu);
        let count: i64 = lengths.iter().sum();
        let logprobs = -Tensor::rand([count], options) * 2.0;
        let near = |scale: f64| &logprobs + Tensor::randn([count], options) * scale;
        let sequence_of_token = indices(&lengths);
        LossBatch {
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

/// The objective of a case; missing keys have TRL's defaults.
fn objective(value: &Value) -> ObjectiveConfig {
    let number = |key: &str| value[key].as_f64();
    let default = ObjectiveConfig::default();
    ObjectiveConfig {
        importance_sampling_clip_min: number("importance_sampling_clip_min"),
        off_policy_mask_threshold: number("off_policy_mask_threshold"),
        sapo_temperature_neg: number("sapo_temperature_neg").unwrap_or(default.sapo_temperature_neg),
        sapo_temperature_pos: number("sapo_temperature_pos").unwrap_or(default.sapo_temperature_pos),
        vespo_k_pos: number("vespo_k_pos").unwrap_or(default.vespo_k_pos),
        vespo_lambda_pos: number("vespo_lambda_pos").unwrap_or(default.vespo_lambda_pos),
        vespo_k_neg: number("vespo_k_neg").unwrap_or(default.vespo_k_neg),
        vespo_lambda_neg: number("vespo_lambda_neg").unwrap_or(default.vespo_lambda_neg),
        top_entropy_quantile: number("top_entropy_quantile").unwrap_or(1.0),
        entropy_coef: number("entropy_coef").unwrap_or(0.0),
        ..default
    }
}

/// The configuration of a case; missing keys have TRL's defaults.
pub(crate) fn parse_config(value: &Value) -> LossConfig {
    let number = |key: &str| value[key].as_f64();
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
        objective: objective(value),
        distillation: number("distillation_weight").map(|weight| Distillation {
            weight,
            clip_max: number("distillation_is_clip"),
            top: None,
        }),
        max_completion_length: value["max_completion_length"].as_u64().unwrap() as usize,
    }
}

/// The entropy term of an update over tokens with `entropies`, with a constant bonus coefficient.
pub(crate) fn entropy_term(config: &LossConfig, entropies: &[f64]) -> Option<EntropyTerm> {
    let coef = config.objective.entropy_coef;
    let of_all = EntropyTerm { least: None, coef, num_tokens: entropies.len() as f64 };
    if !config.selects_by_entropy() {
        return config.has_entropy_bonus().then_some(of_all);
    }
    let entropies = entropies.iter().map(|entropy| *entropy as f32).collect();
    Some(EntropyTerm::of_highest(entropies, config.objective.top_entropy_quantile, coef))
}

/// Panics unless `got` is within a relative error of `relative` of `expected`, element by element; NaN equals NaN.
fn assert_close(got: &[f64], expected: &[f64], relative: f64, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}: length");
    for (got, expected) in got.iter().zip(expected) {
        let close = (got - expected).abs() <= relative * expected.abs().max(1e-3);
        assert!(close || (got.is_nan() && expected.is_nan()), "{what}: got {got}, expected {expected}");
    }
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(&tensor.to_kind(Kind::Double)).unwrap()
}
