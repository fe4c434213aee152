//! Updates of a policy that is its own teacher, compared with TRL's `SDFTTrainer` and `SDPOTrainer` by `scripts/golden_self_distillation.py`.

use std::sync::Arc;

use colo_grpo::internal::config::LrSchedulerType;
use colo_grpo::internal::grpo::{Distillation, EntropyControl, LossConfig, TopDivergence};
use colo_grpo::internal::ranks::World;
use colo_grpo::internal::train::{Schedule, Sequence};
use colo_grpo::internal::update::{Learner, UpdateOptions};
use serde_json::Value;
use tch::Device;

use super::run::unpadded;
use super::updates::{DemoModel, check_changes};

/// The teacher's scores are float32 here, which limits the precision.
const TOLERANCE: f64 = 1e-5;

#[test]
fn self_distillation_trains_as_in_trl() {
    tch::set_num_threads(1);
    let golden: Value = serde_json::from_slice(&std::fs::read("tests/golden/self_distillation.json").unwrap()).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 14);
    let world = Arc::new(World::single());
    for case in cases {
        // All sequences in one micro-batch, and few in each.
        for max_tokens in [1000, 40] {
            check(&golden, case, &world, max_tokens);
        }
    }
}

fn check(golden: &Value, case: &Value, world: &Arc<World>, max_tokens_per_micro_batch: usize) {
    let what = format!("{} {}, {max_tokens_per_micro_batch} tokens", case["kind"], case["name"]);
    let mesh = world.mesh(1, 1).unwrap();
    let config = &case["config"];
    let number = |key: &str| config[key].as_f64();
    let DemoModel { policy, table, .. } = DemoModel::open(&mesh, number("adam_epsilon").unwrap());
    let before = unpadded(&table, |unit| policy.unit_weights(unit).unwrap());
    let mut learner = Learner::new(world.clone(), mesh, policy, None);
    let num_skipped = config["num_loss_tokens_to_skip"].as_u64().unwrap_or(0) as usize;
    let sequences: Vec<Sequence> =
        case["sequences"].as_array().unwrap().iter().map(|row| sequence(row, num_skipped)).collect();
    let top = config["distillation_topk"].as_u64().map(|num_tokens| TopDivergence {
        alpha: number("distillation_alpha").unwrap(),
        adds_tail: false,
        num_tokens: num_tokens as usize,
    });
    let loss_type = config["loss_type"].as_str().unwrap_or("dapo");
    let update = UpdateOptions {
        loss: LossConfig {
            loss_type: serde_json::from_value(loss_type.into()).unwrap(),
            importance_sampling_correction: false,
            max_completion_length: golden["max_completion_length"].as_u64().unwrap() as usize,
            distillation: Some(Distillation {
                weight: number("distillation_weight").unwrap_or(1.0),
                clip_max: Some(2.0),
                top,
            }),
            ..LossConfig::default()
        },
        loss_function: None,
        entropy_control: EntropyControl::default(),
        teaches_itself: true,
        router_aux_loss_coef: None,
        max_token_age: 0,
        exact: false,
        temperature: number("temperature").unwrap(),
        num_iterations: 1,
        updates_per_generation: 1,
        reference_sync: None,
        max_tokens_per_micro_batch,
        bnpo_batch_size: sequences.len(),
        share_prompts: true,
        schedule: Schedule {
            kind: LrSchedulerType::Constant,
            peak: number("learning_rate").unwrap(),
            warmup_steps: 0,
            total_steps: 100,
            min_rate: 0.0,
        },
        global_step: 0,
        max_grad_norm: 0.0,
        device: Device::Cpu,
    };
    let outcome = learner.train(&sequences, &update, &()).unwrap();
    let near = |got: f64, expected: &Value, scale: f64, name: &str| {
        let expected = expected.as_f64().unwrap();
        assert!((got - expected).abs() < TOLERANCE * expected.abs().max(scale), "{what}: {name} {got}, not {expected}");
    };
    near(outcome.loss, &case["loss"], 0.1, "loss");
    near(outcome.grad_norm, &case["grad_norm"], 0.0, "gradient norm");
    let after = unpadded(&table, |unit| learner.policy().unit_weights(unit).unwrap());
    check_changes(case, &table, (&before, &after), &near);
}

/// A sequence of a row: prompt, completion, the teacher's prompt (if it has one), and advantage.
fn sequence(row: &Value, teacher_skips: usize) -> Sequence {
    let ids = |value: &Value| -> Vec<u32> { serde_json::from_value(value.clone()).unwrap() };
    let prompt = ids(&row[0]);
    Sequence {
        teacher_prompt: (row[3] == true).then(|| ids(&row[2])),
        teacher_skips,
        advantage: row[4].as_f64().unwrap() as f32,
        ..Sequence::of_tokens([&prompt[..], &ids(&row[1])].concat(), prompt.len())
    }
}
