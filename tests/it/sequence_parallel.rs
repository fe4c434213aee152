//! Whole runs whose ranks share micro-batches, compared with runs in which each rank has its own.

use crate::checkpoint::Runs;
use crate::program::{metrics, random_model_of, run};

const SHARED: &str = "sequence_parallel_size=2";

/// The reward curve of a run with a reference model and two passes over every batch, with sharding and recomputation of everything but attention.
#[test]
fn sequence_parallel_runs_have_the_same_reward_curve() {
    let runs = Runs::new();
    let keys = ["beta=0.05", "num_iterations=2", "save_steps=none", "max_steps=16", "max_tokens_per_micro_batch=400"];
    runs.train_to_the_end("own", 2, &keys);
    let shared = ["zero.stage=3", "gradient_checkpointing=keep_attention", SHARED];
    runs.train_to_the_end("shared", 2, &[&keys[..], &shared].concat());
    let (own, other) = (runs.metrics("own"), runs.metrics("shared"));
    let mut worst: f64 = 0.0;
    for step in (2..=16).step_by(2) {
        let [own, other] = [&own, &other].map(|lines| &lines[&(step, false)].values);
        let difference = |name: &str| (own[name] - other[name]).abs();
        if step <= 6 {
            runs.assert_close("shared", "own", step);
        }
        worst = worst.max(difference("reward"));
    }
    println!("mean rewards of 16 steps are at most {worst} apart");
    assert!(worst < 0.1, "{worst}");
}

/// KL divergence in the rewards, token selection by entropy, and a teacher's most probable tokens.
#[test]
fn sequence_parallel_scoring_equals_separate_micro_batches() {
    let runs = Runs::new();
    let once = ["save_steps=none", "max_steps=1"];
    let teacher = "teacher_model_name_or_path=configs/arithmetic/model";
    let start = "learning_rate=1e-3";
    for (name, keys) in [
        ("rewards", &["beta=0.1", "use_kl_in_reward=true", "num_iterations=2", "max_steps=2"][..]),
        ("entropies", &["use_adaptive_entropy=true", "entropy_coef=0.01", "share_prompts=false"]),
        ("quantile", &["top_entropy_quantile=0.5"]),
        ("sequences", &["importance_sampling_level=sequence", "loss_type=bnpo", "mask_truncated_completions=true"]),
        ("teacher", &[teacher, "distillation_mode=topk_logits", "distillation_topk=4", start, "beta=0.1"]),
    ] {
        let keys = [&once[..], keys].concat();
        let shared = format!("{name}-shared");
        runs.train_to_the_end(name, 2, &keys);
        runs.train_to_the_end(&shared, 2, &[&keys[..], &[SHARED]].concat());
        let last = if keys.contains(&"max_steps=2") { 2 } else { 1 };
        runs.assert_close(&shared, name, last);
    }
}

/// The rows of a sequence-parallel group form one share of recorded routes, and of an update in split mode, in which the engine's rank takes no part.
#[test]
fn sequence_parallelism_works_with_experts_and_split_mode() {
    let runs = Runs::new();
    let sizes = serde_json::json!({"num_hidden_layers": 2, "hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 4, "head_dim": 16});
    let model = random_model_of(&runs.path(""), "configs/arithmetic/config-moe.json", &sizes);
    let model = format!("model_name_or_path={}", model.display());
    let split = ["mode=split", "split.rollout_gpus=1", "tensor_parallel_size=1", "residency.optimizer=auto"];
    let common = ["max_steps=1", "save_steps=none", "router_aux_loss_coef=0", "reward_funcs=[\"format\"]"];
    let reward = ["reward_weights=[1.0]", "reward.format_pattern=.*(two|five|nine).*", &*model];
    for (name, num_ranks, keys) in
        [("experts", 2, &["router_replay=R3"][..]), ("split", 3, &[&split[..], &["router_replay=R3"]].concat()[..])]
    {
        let batch = if num_ranks == 3 { "per_device_train_batch_size=8" } else { "per_device_train_batch_size=16" };
        let keys = [&common[..], &reward, keys, &[batch]].concat();
        let shared = format!("{name}-shared");
        runs.train_to_the_end(name, num_ranks, &keys);
        runs.train_to_the_end(&shared, num_ranks, &[&keys[..], &[SHARED]].concat());
        let [own, other] = [name, &shared].map(|run| runs.metrics(run)[&(1, false)].values.clone());
        for name in ["loss", "grad_norm", "entropy", "router_replay/differing_share", "reward"] {
            let (own, other) = (own[name], other[name]);
            assert!((own - other).abs() <= 1e-5 + 1e-3 * own.abs(), "{shared}: {name} is {other}, was {own}");
        }
    }
}

/// `auto` chooses the smallest size that fits and prints it; a run that is resumed with another size says so. Also with activation offload.
#[test]
fn the_plan_chooses_sequence_parallel_size() {
    let runs = Runs::new();
    let keys = ["max_steps=2", "save_steps=1", "gradient_checkpointing=keep_attention"];
    runs.train_to_the_end("shared", 2, &[&keys[..], &[SHARED]].concat());
    let resumed = runs.resume("shared", 1);
    let auto = [&keys[..], &["sequence_parallel_size=auto", "activation_offload=true", &resumed]].concat();
    let said = runs.train_to_the_end("auto", 2, &auto).output;
    assert!(
        said.contains(
            "sequence_parallel_size: 1, the least that leaves a tenth of the memory free while training, of 1, 2"
        ),
        "{said}"
    );
    assert!(
        said.contains(
            "sequence_parallel_size was 2, is 1: from this step on sums over a sequence have another rounding order"
        ),
        "{said}"
    );
    runs.assert_close("auto", "shared", 2);
    let line = &runs.metrics("auto")[&(2, false)].values;
    assert!(line["transition/activation_bytes"] > 0.0 && !line.contains_key("timing_s/exposed_exchange"), "{line:?}");
    assert!(runs.metrics("shared")[&(2, false)].values["timing_s/exposed_exchange"] > 0.0);
}

/// Rows of one rank, on two ranks that share them; also for the held-out rows.
#[test]
fn sequence_parallelism_works_in_supervised_runs() {
    let folder = tempfile::tempdir().unwrap();
    let rows = |name: &str, count: usize| {
        let row = |index: usize| {
            let words = ["one", "two", "three", "four", "five"];
            let (a, b) = (words[index % 5], words[index * 2 % 5]);
            format!("{{\"prompt\": \"what is {a} plus {b} ?\", \"completion\": \"the answer is {}\"}}\n", index % 9)
        };
        let path = folder.path().join(name);
        std::fs::write(&path, (0..count).map(row).collect::<String>()).unwrap();
        path.display().to_string()
    };
    let (train, held_out) = (rows("rows.jsonl", 21), rows("eval.jsonl", 7));
    let lines = |name: &str, more: &str| {
        let out = folder.path().join(name);
        let ended = run(&format!(
            "sft --config configs/arithmetic/warmup.toml model_name_or_path=configs/arithmetic/model train_file={train} \
             eval_file={held_out} output_dir={} per_device_train_batch_size=5 max_steps=3 warmup_steps=0 logging_steps=1 \
             max_tokens_per_micro_batch=30 {more}",
            out.display()
        ));
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        metrics(&out)
    };
    let keys = format!("--nproc 2 {SHARED} gradient_checkpointing=keep_attention activation_offload=true");
    let (alone, shared) = (lines("alone", "--nproc 1"), lines("shared", &keys));
    assert_eq!(alone.len(), shared.len());
    assert!(shared[0]["transition/activation_hidden_share"].as_f64().is_some(), "{:?}", shared[0]);
    for (alone, shared) in alone.iter().zip(&shared) {
        for name in ["loss", "grad_norm", "num_tokens", "epoch", "eval_loss"] {
            let [own, other] = [alone, shared].map(|line| line[name].as_f64());
            let is_near = own.zip(other).map(|(own, other)| (own - other).abs() <= 1e-4 * own.abs());
            assert!(is_near.unwrap_or(own == other), "{name}: {own:?} and {other:?}");
        }
    }
    let refused = run(&format!(
        "sft --nproc 3 --config configs/arithmetic/warmup.toml model_name_or_path=configs/arithmetic/model \
        train_file={train} output_dir={} {SHARED}",
        folder.path().join("refused").display()
    ));
    refused.assert_error(
        "three ranks",
        2,
        &["sequence_parallel_size = 2: expected a divisor of the 3 ranks that train: 1, 3"],
    );
}
