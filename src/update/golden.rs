//! Tests the path from sequences to metrics against TRL's numbers: distribution over ranks, packing, loss, masked sequences.

use serde_json::Value;
use tch::{Device, Tensor};

use super::denominators::denominators;
use super::loss::UpdateSums;
use super::options::{UpdateOptions, UpdateOutcome};
use crate::config::LrSchedulerType;
use crate::grpo::tests::{entropy_term, parse_config};
use crate::grpo::{EntropyControl, EntropyTerm, LossConfig, LossStats};
use crate::model::ModelSpec;
use crate::train::{MicroBatch, PackOptions, Schedule, Scores, Sequence, balanced_share, pack};

const NUM_RANKS: [usize; 3] = [1, 2, 9]; // with nine ranks some have no sequences

/// A generation batch and the log-probabilities that a network would return for it.
struct Table {
    sequences: Vec<Sequence>,
    logprobs: Vec<Vec<f64>>,
    entropy: Vec<Vec<f64>>,
}

impl Table {
    /// Runs one update; returns the sum of the ranks' losses, and the statistics that the ranks report together.
    fn update(&self, config: &LossConfig, num_ranks: usize) -> (f64, LossStats) {
        let options = options(config);
        let divisors = denominators(std::slice::from_ref(&self.sequences), config.loss_type)[0];
        let (spec, mut loss, mut stats) = (ModelSpec::preset("qwen2.5-0.5b").unwrap(), 0.0, LossStats::default());
        for rank in 0..num_ranks {
            let share = balanced_share(&self.sequences, &spec, false, rank, num_ranks);
            let share: Vec<Sequence> = share.into_iter().map(|index| self.sequences[index].clone()).collect();
            let (mut sums, mut outcome) =
                (UpdateSums::new(self.entropy_term(config), 0.0, true), UpdateOutcome::default());
            sums.count_masked(&share, &options).unwrap();
            let packing = PackOptions { max_tokens: 12, share_prompts: false, device: Device::Cpu };
            for micro_batch in pack(&share, &packing).unwrap() {
                let scores = self.scores(&micro_batch, &share);
                let _ = sums.differentiate(&micro_batch, &scores, None, &divisors, &options).unwrap();
            }
            sums.read_into(&mut outcome).unwrap();
            loss += outcome.loss;
            if !outcome.stats.entries().is_empty() {
                stats.merge(&outcome.stats).unwrap();
            }
        }
        (loss, stats)
    }

    fn entropy_term(&self, config: &LossConfig) -> Option<EntropyTerm> {
        let rows = self.sequences.iter().zip(&self.entropy).filter(|(sequence, _)| !sequence.masked);
        entropy_term(config, &rows.flat_map(|(_, row)| row.clone()).collect::<Vec<_>>())
    }

    /// Looks up a sequence's scores; its first prompt token is its row in the table.
    fn scores(&self, micro_batch: &MicroBatch, share: &[Sequence]) -> Scores {
        let rows = || micro_batch.sequences.iter().map(|&index| share[index].token_ids[0] as usize);
        let of_rows =
            |values: &[Vec<f64>]| Tensor::from_slice(&rows().flat_map(|row| values[row].clone()).collect::<Vec<_>>());
        Scores {
            logprobs: of_rows(&self.logprobs),
            entropy: of_rows(&self.entropy),
            top: None,
            aux_loss: None,
            differing_experts: None,
        }
    }
}

fn options(config: &LossConfig) -> UpdateOptions {
    UpdateOptions {
        loss: config.clone(),
        loss_function: None,
        entropy_control: EntropyControl::default(),
        teaches_itself: false,
        temperature: 1.0,
        num_iterations: 1,
        reference_sync: None,
        updates_per_generation: 1,
        max_tokens_per_micro_batch: 12,
        bnpo_batch_size: 8,
        share_prompts: false,
        schedule: Schedule {
            kind: LrSchedulerType::Constant,
            peak: 0.0,
            warmup_steps: 0,
            total_steps: 1,
            min_rate: 0.0,
        },
        global_step: 0,
        max_grad_norm: 1.0,
        router_aux_loss_coef: None,
        max_token_age: 0,
        exact: false,
        device: Device::Cpu,
    }
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|value| value.as_f64().unwrap_or(f64::NAN)).collect()
}

/// Builds the table of a golden case. With `has_turns`, every completion also contains tokens that were not sampled, as marked by TRL's `tool_mask`;
/// TRL's numbers must not change.
fn golden_table(golden: &Value, case: &Value, has_turns: bool) -> Table {
    let lengths: Vec<usize> = numbers(&golden["batch"]["lengths"]).iter().map(|length| *length as usize).collect();
    let rows = |key: &str| -> Vec<Vec<f64>> {
        let values = numbers(&golden["batch"][key]);
        let mut rest = values.as_slice();
        let row = |length: &usize| rest.split_off(..*length).unwrap().to_vec();
        lengths.iter().map(row).collect()
    };
    let floats = |row: &Vec<f64>| row.iter().map(|value| *value as f32).collect::<Vec<_>>();
    let masked = case["mask_truncated"].as_bool().unwrap().then(|| golden["truncated"].as_u64().unwrap() as usize);
    let (rollout, old, reference) = (rows("rollout_logprobs"), rows("old_logprobs"), rows("ref_logprobs"));
    let teacher = rows("teacher_logprobs");
    let (uses_old, advantages) = (case["use_old"].as_bool().unwrap(), numbers(&case["advantages"]));
    let sequence = |index: usize| {
        let (first_turn, num_context) = (lengths[index].min(1 + index % 3), if has_turns { 1 + index % 4 } else { 0 });
        let mut loss_mask = vec![true; lengths[index]];
        drop(loss_mask.splice(first_turn..first_turn, vec![false; num_context]));
        Sequence {
            advantage: advantages[index] as f32,
            masked: masked == Some(index),
            rollout_logprobs: Some(floats(&rollout[index])),
            old_logprobs: uses_old.then(|| floats(&old[index])),
            ref_logprobs: Some(floats(&reference[index])),
            teacher_logprobs: Some(floats(&teacher[index])),
            loss_mask,
            ..Sequence::of_tokens(vec![index as u32; 1 + lengths[index] + num_context], 1)
        }
    };
    Table {
        sequences: (0..lengths.len()).map(sequence).collect(),
        logprobs: rows("logprobs"),
        entropy: rows("entropy"),
    }
}

fn value(stats: &LossStats, name: &str) -> f64 {
    stats.entries().iter().find(|(known, _)| *known == name).unwrap_or_else(|| panic!("no {name}")).1.value()
}

#[test]
fn update_metrics_equal_trl_on_the_same_sequences() {
    let golden: Value = serde_json::from_str(include_str!("../../tests/golden/grpo.json")).unwrap();
    let cases = golden["losses"].as_array().unwrap();
    assert!(cases.iter().filter(|case| case["mask_truncated"] == true).count() >= 20);
    let variants = NUM_RANKS.into_iter().flat_map(|num_ranks| [(num_ranks, false), (num_ranks, true)]);
    for (case, (num_ranks, has_turns)) in cases.iter().flat_map(|case| variants.clone().map(move |it| (case, it))) {
        let what = format!("{}, {num_ranks} ranks, turns: {has_turns}", case["name"]);
        let config = parse_config(&case["config"]);
        let (loss, stats) = golden_table(&golden, case, has_turns).update(&config, num_ranks);
        let near = |got: f64, expected: f64, what: &str| {
            let close = (got - expected).abs() <= 1e-5 * expected.abs().max(1e-2); // here old log-probabilities are float32
            assert!(close || (got.is_nan() && expected.is_nan()), "{what}: got {got}, expected {expected}");
        };
        near(loss, case["loss"].as_f64().unwrap(), &what);
        for (metric, expected) in case["metrics"].as_object().unwrap() {
            near(value(&stats, metric), expected.as_f64().unwrap_or(f64::NAN), &format!("{what}: {metric}"));
        }
    }
}

/// Uses random tables, and TRL's `global_masked_mean`, `masked_seq_mean` and sampler ratios on padded rows, written as in TRL's code.
#[test]
fn means_over_sequences_count_masked_ones() {
    for (num_masked, seed) in (0..=6).flat_map(|num_masked| (0..8).map(move |seed| (num_masked, seed))) {
        let mut word: u64 = seed;
        let mut draw = |scale: f64| {
            word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            scale * ((word >> 11) as f64 / (1u64 << 52) as f64 - 1.0)
        };
        let sequence = |index: usize, draw: &mut dyn FnMut(f64) -> f64| {
            let length = 1 + (draw(4.0).abs() as usize);
            let old: Vec<f32> = (0..length).map(|_| draw(1.0) as f32 - 2.0).collect();
            let rollout = old.iter().map(|old| old + draw(0.3) as f32).collect();
            let logprobs: Vec<f64> = old.iter().map(|old| f64::from(*old) + draw(0.8)).collect();
            let sequence = Sequence {
                advantage: draw(1.0) as f32,
                masked: index < num_masked,
                rollout_logprobs: Some(rollout),
                old_logprobs: Some(old),
                ..Sequence::of_tokens(vec![index as u32; 1 + length], 1)
            };
            (sequence, logprobs)
        };
        let (sequences, logprobs): (Vec<_>, Vec<_>) = (0..6).map(|index| sequence(index, &mut draw)).unzip();
        let config = LossConfig {
            importance_sampling_level: crate::config::ImportanceSamplingLevel::Sequence,
            importance_sampling_clip_max: 1.2,
            ..LossConfig::default()
        };
        let table = Table { entropy: logprobs.clone(), sequences, logprobs };
        let counts = |index: usize| if table.sequences[index].masked { 0.0 } else { 1.0 };
        let sum = |index: usize, difference: &dyn Fn(usize) -> f64| -> f64 {
            (0..table.logprobs[index].len()).map(|at| counts(index) * difference(at)).sum()
        };
        let old = |index: usize, at: usize| f64::from(table.sequences[index].old_logprobs.as_ref().unwrap()[at]);
        let sampled =
            |index: usize, at: usize| f64::from(table.sequences[index].rollout_logprobs.as_ref().unwrap()[at]);
        let length = |index: usize| (counts(index) * table.logprobs[index].len() as f64).max(1.0);
        let ratio = |index: usize| (sum(index, &|at| table.logprobs[index][at] - old(index, at)) / length(index)).exp();
        let advantage = |index: usize| table.sequences[index].advantage;
        let flag = |is: bool| f64::from(u8::from(is));
        let low: Vec<f64> = (0..6).map(|index| flag(ratio(index) < 0.8 && advantage(index) < 0.0)).collect();
        let high: Vec<f64> = (0..6).map(|index| flag(ratio(index) > 1.2 && advantage(index) > 0.0)).collect();
        let weight = |index: usize| sum(index, &|at| old(index, at) - sampled(index, at)).exp();
        let weights: Vec<f64> = (0..6).map(weight).map(|weight| if weight > 1.2 { 0.0 } else { weight }).collect();
        let least = |values: &[f64]| values.iter().copied().fold(f64::INFINITY, f64::min);
        let most = |values: &[f64]| values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let mean = |values: &[f64]| values.iter().sum::<f64>() / 6.0;
        for num_ranks in NUM_RANKS {
            let (_, stats) = table.update(&config, num_ranks);
            for (name, expected) in [
                ("clip_ratio/low_mean", mean(&low)),
                ("clip_ratio/high_mean", mean(&high)),
                ("clip_ratio/low_min", least(&low)),
                ("clip_ratio/high_max", most(&high)),
                ("sampling/importance_sampling_ratio/min", least(&weights)),
                ("sampling/importance_sampling_ratio/mean", mean(&weights)),
                ("sampling/importance_sampling_ratio/max", most(&weights)),
            ] {
                let got = value(&stats, name);
                assert!(
                    (got - expected).abs() < 1e-6,
                    "{num_masked} masked, {num_ranks} ranks, {name}: {got}, {expected}"
                );
            }
        }
    }
}
