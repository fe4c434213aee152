//! Whole training runs: the same run on different numbers of processes, and the metrics that it writes.

use std::path::Path;
use std::sync::Arc;

use colo_grpo::Config;
use colo_grpo::internal::metrics::{MetricLine, read_metrics};
use colo_grpo::internal::ranks::World;
use colo_grpo::internal::trainer::Trainer;

use crate::ranks;

const NUM_STEPS: u64 = 3;
const COMPLETIONS: usize = 32;

#[test]
fn two_processes_train_like_one() {
    ranks::run(2, "colocate::trainer::two_processes_train_like_one", |world: World| trains_like_one(world, 2, 1, &[]));
}

#[test]
fn four_processes_train_like_one() {
    ranks::run(4, "colocate::trainer::four_processes_train_like_one", |world: World| trains_like_one(world, 3, 2, &[]));
}

/// Each rank of the engine has two of the four layers, and gathers only those.
#[test]
fn two_processes_train_like_one_in_stages() {
    ranks::run(2, "colocate::trainer::two_processes_train_like_one_in_stages", |world: World| {
        trains_like_one(world, 3, 1, &["pipeline_parallel_size=2".to_owned()]);
    });
}

#[test]
fn four_processes_train_like_one_in_uneven_stages() {
    ranks::run(4, "colocate::trainer::four_processes_train_like_one_in_uneven_stages", |world: World| {
        let keys = ["pipeline_parallel_size=2", "pipeline_partition=3,1", "max_num_seqs=12"].map(str::to_owned);
        trains_like_one(world, 3, 2, &keys);
    });
}

/// Policy, reference and both ranks of the engine use the configured residual dtype: sampler and trainer are closer
/// to each other, and policy and reference stay equal at the start.
#[test]
fn two_processes_train_like_one_with_a_float32_residual_stream() {
    ranks::run(2, "colocate::trainer::two_processes_train_like_one_with_a_float32_residual_stream", |world: World| {
        tch::set_num_threads(1);
        let (world, folder) = (Arc::new(world), tempfile::tempdir().unwrap());
        let runs = ["auto", "float32"].map(|residual| {
            let keys = ["dtype=bfloat16".to_owned(), format!("residual_dtype={residual}")];
            run(world.clone(), &folder.path().join(residual), (2, 2), &keys)
        });
        if world.rank() > 0 {
            return;
        }
        let [narrow, wide] = runs.map(|lines| {
            let first = lines.iter().find(|line| line.values.contains_key("loss")).unwrap();
            assert!(first.values["kl"].abs() < 1e-6, "{first:?}");
            first.values["sampling/sampling_logp_difference/mean"]
        });
        println!("{wide:.2e} apart with a float32 stream, {narrow:.2e} without");
        assert!(0.0 < wide && wide < 0.8 * narrow, "{wide}, not below {narrow}");
    });
}

/// Compares rewards and losses of each step with those of a run on one process with the same number of samples.
fn trains_like_one(world: World, stage: u8, tp_size: usize, keys: &[String]) {
    tch::set_num_threads(1);
    let (rank, folder) = (world.rank(), tempfile::tempdir().unwrap());
    // Only the first rank writes, so that its folder is the run's.
    let own = run(Arc::new(world), &folder.path().join("several"), (stage, tp_size), keys);
    if rank > 0 {
        return;
    }
    let alone = run(Arc::new(World::single()), &folder.path().join("alone"), (0, 1), &[]);
    assert_eq!(own.len(), (2 * NUM_STEPS + 1) as usize, "an evaluation before the first step and after each");
    let evaluations = own.iter().filter(|line| line.values.contains_key("eval_reward"));
    assert_eq!(evaluations.count() as u64, NUM_STEPS + 1);
    assert_same_steps(&own, &alone, "");
    let trained: Vec<&MetricLine> = own.iter().filter(|line| line.values.contains_key("loss")).collect();
    assert_eq!(trained.iter().map(|line| line.step).collect::<Vec<_>>(), [1, 2, 3]);
    trained.iter().for_each(|line| check_metrics(line));
    for line in &trained {
        let idle = ["", "_max"].map(|name| line.values.get(&format!("pipeline/idle_share{name}")).copied());
        match keys {
            [] => assert_eq!(idle, [None; 2]),
            _ => assert!(idle[0] > Some(0.0) && idle[0] <= idle[1] && idle[1] < Some(1.0), "{idle:?}"),
        }
    }
    let text = std::fs::read_to_string(folder.path().join("several/metrics.jsonl")).unwrap();
    let step = text.lines().find(|line| line.contains("\"loss\"")).unwrap();
    let written: serde_json::Map<String, serde_json::Value> = serde_json::from_str(step).unwrap();
    for name in NAMES {
        assert!(written.contains_key(*name), "{name} is missing in {step}");
    }
}

fn assert_same_steps(got: &[MetricLine], expected: &[MetricLine], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (got, expected) in got.iter().zip(expected) {
        let expected = &expected.values;
        for (name, tolerance) in [
            ("eval_reward", 1e-6),
            ("reward", 1e-6),
            ("num_tokens", 0.0),
            ("loss", 1e-4),
            ("kl", 1e-4),
            ("policy_loss", 1e-4),
            ("entropy_coef", 1e-12),
        ] {
            match (got.values.get(name), expected.get(name)) {
                (Some(got), Some(expected)) => {
                    assert!((got - expected).abs() <= tolerance, "{what}: {name}: {got} for {expected}");
                }
                (got, expected) => assert_eq!(got, expected, "{what}: {name}"),
            }
        }
    }
}

/// Non-default losses, KL estimators, masks and advantages.
const OBJECTIVES: &[&str] = &[
    "loss_type=sapo off_policy_mask_threshold=0.01 advantage_estimator=rloo scale_rewards=batch",
    "loss_type=luspo importance_sampling_level=sequence kl_estimator=k2 importance_sampling_clip_min=0.9",
    "loss_type=vespo importance_sampling_mode=token_truncate multi_objective_aggregation=normalize_then_sum",
    "kl_estimator=k1 advantage_estimator=rloo scale_rewards=none",
];

#[test]
fn two_processes_train_like_one_with_sapo_and_luspo() {
    ranks::run(2, "colocate::trainer::two_processes_train_like_one_with_sapo_and_luspo", |world: World| {
        objectives_train_like_one(world, &OBJECTIVES[..2])
    });
}

#[test]
fn two_processes_train_like_one_with_vespo_and_k1() {
    ranks::run(2, "colocate::trainer::two_processes_train_like_one_with_vespo_and_k1", |world: World| {
        objectives_train_like_one(world, &OBJECTIVES[2..])
    });
}

#[test]
fn two_processes_train_like_one_with_an_entropy_bonus_and_the_tokens_of_highest_entropy() {
    let name = "two_processes_train_like_one_with_an_entropy_bonus_and_the_tokens_of_highest_entropy";
    ranks::run(2, &format!("colocate::trainer::{name}"), |world: World| {
        objectives_train_like_one(
            world,
            &[
                "top_entropy_quantile=0.4 entropy_coef=0.05",
                "entropy_coef=0.02 use_adaptive_entropy=true entropy_target=9 entropy_coef_delta=0.01",
            ],
        )
    });
}

fn objectives_train_like_one(world: World, objectives: &[&str]) {
    tch::set_num_threads(1);
    let (world, folder) = (Arc::new(world), tempfile::tempdir().unwrap());
    let mut norms = Vec::new();
    for (index, objective) in objectives.iter().enumerate() {
        let keys: Vec<String> = objective.split(' ').map(String::from).chain(["num_iterations=2".into()]).collect();
        let folder = folder.path().join(index.to_string());
        let own = run(world.clone(), &folder.join("several"), (2, 1), &keys);
        if world.rank() == 0 {
            let alone = run(Arc::new(World::single()), &folder.join("alone"), (0, 1), &keys);
            assert_same_steps(&own, &alone, objective);
            let step = own.iter().find(|line| line.values.contains_key("loss")).unwrap();
            check_entropy_coefs(&own, objective);
            assert_eq!(step.values.contains_key("vespo/phi_seq_mean"), objective.contains("vespo"), "{step:?}");
            norms.push(step.values["grad_norm"]);
        }
    }
    assert!(world.rank() > 0 || (norms[0] > 0.0 && norms[1] > 0.0 && norms[0] != norms[1]), "{norms:?}");
}

/// Checks that a constant entropy bonus keeps its weight, and that the weight of one with an unreachable target rises.
fn check_entropy_coefs(lines: &[MetricLine], objective: &str) {
    let coefs: Vec<f64> = lines.iter().filter_map(|line| line.values.get("entropy_coef").copied()).collect();
    assert_eq!(!coefs.is_empty(), objective.contains("entropy_coef"), "{objective}");
    if objective.contains("adaptive") {
        assert!(0.02 < coefs[0] && coefs.is_sorted_by(|a, b| a < b), "{coefs:?}");
    } else {
        assert!(coefs.iter().all(|coef| *coef == 0.05), "{coefs:?}");
    }
}

/// Checks that required metrics exist and are consistent.
fn check_metrics(line: &MetricLine) {
    let value = |name: &str| *line.values.get(name).unwrap_or_else(|| panic!("no {name} in step {}", line.step));
    assert!(
        !line.values.keys().any(|name| ["timing_s/eval", "timing_s/load", "timing_s/checkpoint"].contains(&&name[..]))
    );
    let timings: f64 = line.values.iter().filter(|(name, _)| name.starts_with("timing_s/")).map(|(_, s)| s).sum();
    // Each phase is the slowest rank's.
    assert!(timings > 0.0 && value("timing_s/generate") < value("step_time"), "{line:?}");
    assert!(value("sampling/sampling_logp_difference/mean") < 1e-5, "{line:?}");
    assert!(value("transition/bytes") >= 12.0 * 796_800.0 && value("transition/gbps") > 0.0);
    assert!((0.01..10.0).contains(&value("perf/max_resident_gb")));
    assert_eq!(value("clip_ratio/region_mean"), 0.0, "one update a batch");
    match line.step {
        1 => assert!(value("kl").abs() < 1e-6),
        _ => assert!(value("kl") > 0.0),
    }
}

/// Names of the metrics of one step: TRL's and this program's own.
const NAMES: &[&str] = &[
    "loss",
    "reward",
    "reward_std",
    "frac_reward_zero_std",
    "rewards/format/mean",
    "rewards/format/std",
    "rewards/numeric_answer/mean",
    "rewards/numeric_answer/std",
    "kl",
    "entropy",
    "clip_ratio/low_mean",
    "clip_ratio/low_min",
    "clip_ratio/high_mean",
    "clip_ratio/high_max",
    "clip_ratio/region_mean",
    "grad_norm",
    "learning_rate",
    "completions/mean_length",
    "completions/min_length",
    "completions/max_length",
    "completions/mean_terminated_length",
    "completions/min_terminated_length",
    "completions/max_terminated_length",
    "completions/clipped_ratio",
    "num_tokens",
    "step_time",
    "epoch",
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    "sampling/importance_sampling_ratio/min",
    "sampling/importance_sampling_ratio/mean",
    "sampling/importance_sampling_ratio/max",
    "timing_s/offload",
    "timing_s/gather",
    "timing_s/wake",
    "timing_s/generate",
    "timing_s/sleep",
    "timing_s/reload",
    "timing_s/reward",
    "timing_s/pack",
    "timing_s/score",
    "timing_s/forward_backward",
    "timing_s/optimizer",
    "perf/tokens_per_second_per_gpu",
    "perf/generation_tokens_per_second",
    "perf/max_resident_gb",
    "transition/bytes",
    "transition/gbps",
];

/// Trains the demo's model for a few steps. Returns all lines of metrics.jsonl on the rank that writes them.
fn run(world: Arc<World>, output_dir: &Path, (stage, tp_size): (u8, usize), keys: &[String]) -> Vec<MetricLine> {
    let is_first = world.rank() == 0;
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let rows = std::fs::read_to_string(root.join("configs/arithmetic/eval.jsonl")).unwrap();
    std::fs::create_dir_all(output_dir).unwrap();
    let eval_file = output_dir.join("eval.jsonl");
    std::fs::write(&eval_file, rows.lines().take(8).map(|row| format!("{row}\n")).collect::<String>()).unwrap();
    let overrides = [
        format!("model_name_or_path={}", root.join("configs/arithmetic/model").display()),
        format!("train_file={}", root.join("configs/arithmetic/train.jsonl").display()),
        format!("eval_file={}", eval_file.display()),
        format!("output_dir={}", output_dir.display()),
        format!("per_device_train_batch_size={}", COMPLETIONS / world.size()),
        "num_generations=4".into(),
        "max_train_samples=256".into(),
        format!("max_steps={NUM_STEPS}"),
        "eval_steps=1".into(),
        "save_steps=none".into(),
        "eval_num_generations=1".into(),
        "beta=0.05".into(),
        "kv_cache_bytes=4194304".into(),
        format!("zero.stage={stage}"),
        format!("tensor_parallel_size={tp_size}"),
    ];
    let overrides = [&overrides[..], keys].concat();
    let config = Config::load(Some(&root.join("configs/tiny-cpu.toml")), &overrides).unwrap();
    let summary = Trainer::new(config, world).unwrap().run().unwrap();
    assert_eq!(summary.report.is_some(), is_first);
    if is_first { read_metrics(&output_dir.join("metrics.jsonl")).unwrap() } else { Vec::new() }
}
