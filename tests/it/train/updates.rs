//! Whole updates of a real model compared with TRL's trainer by `scripts/golden_updates.py`, with gradient accumulation and on several ranks.

use std::path::Path;
use std::sync::Arc;

use colo_grpo::internal::config::{GradientCheckpointing, ImportanceSamplingLevel, LossType, LrSchedulerType};
use colo_grpo::internal::grpo::{EntropyControl, LossConfig};
use colo_grpo::internal::model::{ModelSpec, ParamTable, Plain, Unit, UnitLayout, WeightFiles};
use colo_grpo::internal::ranks::{Mesh, ReduceOp, World, all_reduce_f64};
use colo_grpo::internal::train::{
    AdamOptions, GradientOptions, NetworkOptions, Optim, OptimizerHome, Policy, PolicyOptions, Reference, Schedule,
    Sequence,
};
use colo_grpo::internal::update::{Learner, UpdateOptions};
use serde_json::Value;
use tch::{Device, Kind};

use super::run::unpadded;
use crate::program::MODEL;
use crate::ranks;

fn golden() -> Value {
    serde_json::from_slice(&std::fs::read("tests/golden/updates.json").unwrap()).unwrap()
}

#[test]
fn updates_on_one_rank_equal_trl_for_any_micro_batch_size() {
    let (golden, world) = (golden(), Arc::new(World::single()));
    let mesh = world.mesh(1, 1).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    let names: Vec<&str> = LossType::ALL.iter().map(|loss_type| loss_type.name()).collect();
    assert!(names.iter().all(|name| cases.iter().filter(|case| case["name"] == *name).count() >= 5));
    for case in cases {
        check(&golden, case, (&world, &mesh), 40);
    }
    for case in cases.iter().filter(|case| case["layout"] == serde_json::json!([1, 2, 2])) {
        check(&golden, case, (&world, &mesh), 1000);
    }
}

#[test]
fn updates_on_two_ranks_equal_trl() {
    ranks::run(2, "train::updates::updates_on_two_ranks_equal_trl", |world: World| {
        let (golden, world) = (golden(), Arc::new(world));
        let mesh = world.mesh(1, 2).unwrap();
        for case in golden["cases"].as_array().unwrap() {
            check(&golden, case, (&world, &mesh), 40);
        }
    });
}

/// Both ranks share every micro-batch.
#[test]
fn updates_on_two_sequence_parallel_ranks_equal_trl() {
    ranks::run(2, "train::updates::updates_on_two_sequence_parallel_ranks_equal_trl", |world: World| {
        let (golden, world) = (golden(), Arc::new(world));
        let mesh = world.mesh(1, 2).unwrap().with_sequence_groups(&world, 2, 2).unwrap();
        for case in golden["cases"].as_array().unwrap() {
            check(&golden, case, (&world, &mesh), 40);
        }
    });
}

/// Trains on a case's generation batch, of which every rank has a part in order. Loss, gradient norm and weights must equal TRL's.
fn check(golden: &Value, case: &Value, (world, mesh): (&Arc<World>, &Mesh), max_tokens_per_micro_batch: usize) {
    tch::set_num_threads(1);
    let (size, rank) = (world.size(), world.rank());
    let what = format!("{} {} on {size} ranks, {max_tokens_per_micro_batch} tokens", case["name"], case["layout"]);
    let mesh = mesh.clone();
    let config = &case["config"];
    let number = |key: &str| config[key].as_f64();
    let DemoModel { policy, table, files } = DemoModel::open(&mesh, number("adam_epsilon").unwrap());
    let weights = |layout: &UnitLayout| files.read_unit(layout, Kind::Double);
    let before = unpadded(&table, |unit| policy.unit_weights(unit).unwrap());
    let beta = number("beta").unwrap_or(0.0);
    let reference = (beta > 0.0).then(|| Reference::new(table.clone(), &mesh, NETWORK, &weights).unwrap());
    let mut learner = Learner::new(world.clone(), mesh, policy, reference);

    let is_masking = config["mask_truncated_completions"] == true;
    let all: Vec<Sequence> = case["sequences"].as_array().unwrap().iter().map(sequence).collect();
    assert_eq!(all.iter().any(|sequence| sequence.masked), is_masking, "{what}");
    let per_rank = all.len().div_ceil(size);
    let own = &all[(rank * per_rank).min(all.len())..((rank + 1) * per_rank).min(all.len())];
    let level = config["importance_sampling_level"].as_str().unwrap_or("token");
    let epsilon = number("epsilon").unwrap();
    let count = |place: usize| case["layout"][place].as_u64().unwrap() as usize;
    let update = UpdateOptions {
        loss: LossConfig {
            loss_type: serde_json::from_value(config["loss_type"].clone()).unwrap(),
            importance_sampling_level: serde_json::from_value::<ImportanceSamplingLevel>(level.into()).unwrap(),
            epsilon,
            epsilon_high: number("epsilon_high").unwrap_or(epsilon),
            beta,
            importance_sampling_correction: false,
            max_completion_length: golden["max_completion_length"].as_u64().unwrap() as usize,
            ..LossConfig::default()
        },
        loss_function: None,
        entropy_control: EntropyControl::default(),
        teaches_itself: false,
        router_aux_loss_coef: None,
        max_token_age: 0,
        exact: false,
        temperature: number("temperature").unwrap(),
        num_iterations: config["num_iterations"].as_u64().unwrap() as usize,
        updates_per_generation: count(2),
        reference_sync: None,
        max_tokens_per_micro_batch,
        bnpo_batch_size: golden["batch"].as_u64().unwrap() as usize,
        share_prompts: true,
        schedule: Schedule {
            kind: LrSchedulerType::Constant,
            peak: number("learning_rate").unwrap(),
            warmup_steps: 0,
            total_steps: 100,
            min_rate: 0.0,
        },
        global_step: 0,
        max_grad_norm: number("max_grad_norm").unwrap(),
        device: Device::Cpu,
    };
    let outcome = learner.train(own, &update, &()).unwrap();
    let mut loss = [outcome.loss];
    all_reduce_f64(&*learner.mesh().world, &mut loss, ReduceOp::Sum).unwrap();
    let near = |got: f64, expected: &Value, scale: f64, name: &str| {
        let expected = expected.as_f64().unwrap();
        assert!((got - expected).abs() < TOLERANCE * expected.abs().max(scale), "{what}: {name} {got}, not {expected}");
    };
    near(loss[0], &case["loss"], 0.1, "loss");
    near(outcome.grad_norm, &case["grad_norm"], 0.0, "gradient norm");
    let after = unpadded(&table, |unit| learner.policy().unit_weights(unit).unwrap());
    check_changes(case, &table, (&before, &after), &near);
}

/// The demo's model in float64.
pub(super) struct DemoModel {
    pub policy: Policy,
    pub table: Arc<ParamTable>,
    pub files: WeightFiles,
}

const NETWORK: NetworkOptions =
    NetworkOptions { kind: Kind::Double, residual: Kind::Double, device: Device::Cpu, format: &Plain };

impl DemoModel {
    pub fn open(mesh: &Mesh, adam_epsilon: f64) -> Self {
        let spec = Arc::new(ModelSpec::from_folder(Path::new(MODEL)).unwrap());
        let table = Arc::new(ParamTable::new(spec.clone(), mesh.shard.size()));
        let files = WeightFiles::open(MODEL, spec).unwrap();
        let options = PolicyOptions {
            stage: 2,
            network: NETWORK,
            gradient_checkpointing: GradientCheckpointing::None,
            optim: Optim::AdamW,
            adam: AdamOptions { beta1: 0.9, beta2: 0.999, eps: adam_epsilon, weight_decay: 0.0 },
            gradients: GradientOptions::default(),
        };
        let weights = |layout: &UnitLayout| files.read_unit(layout, Kind::Double);
        let policy = Policy::with_home(table.clone(), mesh, options, OptimizerHome::Resident, &weights).unwrap();
        Self { policy, table, files }
    }
}

/// Asserts that sum and norm of the change of each layer's weights, and of all other weights, equal the case's. `near` compares a number with an
/// expected one, relative to a scale.
pub(super) fn check_changes(
    case: &Value,
    table: &ParamTable,
    (before, after): (&[Vec<f64>], &[Vec<f64>]),
    near: &dyn Fn(f64, &Value, f64, &str),
) {
    let units = table.units.iter().flat_map(|layout| layout.params.iter().map(|_| layout.unit));
    let changes: Vec<(Unit, Vec<f64>)> = units
        .zip(before.iter().zip(after))
        .map(|(unit, (before, after))| (unit, before.iter().zip(after).map(|(before, after)| after - before).collect()))
        .collect();
    for (layer, expected) in case["changes"].as_object().unwrap() {
        let is_of = |unit: &Unit| match unit {
            Unit::Block(layer_of) => *layer == layer_of.to_string(),
            _ => layer == "rest",
        };
        let of_layer = changes.iter().filter(|(unit, _)| is_of(unit)).flat_map(|(_, change)| change);
        let norm = of_layer.clone().map(|change| change * change).sum::<f64>().sqrt();
        near(norm, &expected[1], 0.0, &format!("change of layer {layer}"));
        near(of_layer.sum(), &expected[0], norm, &format!("sum of the change of layer {layer}"));
    }
}

/// Old log-probabilities are float32 here, and vespo's loss takes the exponential of their sums; the largest error was 3.2e-5.
const TOLERANCE: f64 = 1e-4;

/// A sequence of a row: prompt, completion, whether it is masked, and its advantage.
fn sequence(row: &Value) -> Sequence {
    let ids = |value: &Value| -> Vec<u32> { serde_json::from_value(value.clone()).unwrap() };
    let prompt = ids(&row[0]);
    Sequence {
        masked: row[2] == true,
        advantage: row[3].as_f64().unwrap() as f32,
        ..Sequence::of_tokens([&prompt[..], &ids(&row[1])].concat(), prompt.len())
    }
}
