//! Checkpoints of runs that start more groups than a step uses.

use colo_grpo::internal::metrics::CompletionRow;

use super::Runs;

/// Unfinished groups are saved in the checkpoint, also for a resume on another number of ranks.
#[test]
fn a_resumed_run_with_partial_rollouts_equals_an_uninterrupted_one() {
    let runs = Runs::new();
    let common = ["oversample=1.0", "partial_rollout=true", "max_num_seqs=24"];
    runs.train_to_the_end("straight", 2, &common);
    let state = std::fs::read_to_string(runs.path("straight/checkpoint-4/trainer_state.json")).unwrap();
    let state: serde_json::Value = serde_json::from_str(&state).unwrap();
    let carried = state["carried"].as_array().unwrap();
    let is_begun = |group: &&serde_json::Value| group["completions"].as_array().is_some_and(|begun| begun.len() == 8);
    let num_begun = carried.iter().filter(is_begun).count();
    assert!(num_begun > 0, "{} carried, none of them begun", carried.len());

    let resume = runs.resume("straight", 4);
    runs.train_to_the_end("resumed", 2, &[&common[..], &[&resume]].concat());
    runs.assert_same("resumed", "straight", &[5, 6]);
    let metrics = &runs.metrics("resumed")[&(5, false)].values;
    let value = |name: &str| metrics[&format!("partial_rollout/{name}")];
    assert_eq!(value("carried_groups"), 4.0, "4 of 8 groups are taken");
    assert!(value("continued_token_share") > 0.0 && value("staleness_mean") > 0.0 && value("staleness_max") >= 1.0);
    assert_eq!(value("discarded_token_share"), 0.0);

    let alone = ["per_device_train_batch_size=32", "tensor_parallel_size=1", &resume];
    runs.train_to_the_end("alone", 1, &[&common[..], &alone].concat());
    assert_eq!(runs.completions("alone", 5).len(), 32);

    let smaller = [&common[..], &["num_generations=4", "force_resume=true", &resume]].concat();
    let anew =
        format!("{num_begun} unfinished groups of the checkpoint are sampled from the start: num_generations differs");
    let smaller = runs.train_to_the_end("smaller", 2, &smaller);
    assert!(smaller.output.contains(&anew), "{}", smaller.output);
    assert_eq!(runs.completions("smaller", 5).len(), 32);

    let forced = runs.train_to_the_end("forced", 2, &[&resume, "force_resume=true", "max_num_seqs=24"]);
    let dropped = format!("{} unfinished groups of the checkpoint are dropped: oversample is 0", carried.len());
    assert!(forced.output.contains(&dropped), "{}", forced.output);
    let state = std::fs::read_to_string(runs.path("forced/checkpoint-6/trainer_state.json")).unwrap();
    let state: serde_json::Value = serde_json::from_str(&state).unwrap();
    assert_eq!(state["carried"], serde_json::json!([]));
}

/// With two engines that keep the KV cache of unfinished groups, nothing is recomputed, with or without evaluations. A resumed run, whose caches
/// are empty, recomputes once.
#[test]
fn a_kept_kv_cache_is_recomputed_only_after_a_resume() {
    let runs = Runs::new();
    let keep = ["oversample=0.5", "partial_rollout=true", "carried_kv=keep", "tensor_parallel_size=1"];
    let long = ["per_device_train_batch_size=128", "lr_scheduler_type=constant", "max_steps=24", "save_steps=4"];
    let evaluated = ["eval_file=configs/arithmetic/eval.jsonl", "eval_steps=10"];
    runs.train_to_the_end("kept", 2, &[&keep[..], &long, &evaluated].concat());
    let metrics = runs.metrics("kept");
    let value = |step, name: &str| metrics[&(step, false)].values[name];
    let reward = |steps: std::ops::RangeInclusive<u64>| steps.map(|step| value(step, "reward")).sum::<f64>() / 4.0;
    assert!(reward(21..=24) > reward(1..=4) + 0.2, "{} after {}", reward(21..=24), reward(1..=4));
    let kept = |step| value(step, "partial_rollout/kept_tokens");
    assert!((1..=24).all(|step| value(step, "partial_rollout/recomputed_tokens") == 0.0));
    // In some steps all groups that are carried are complete already.
    let resumed_after = (1..6).map(|save| 4 * save).rev().find(|&step| kept(step + 1) > 0.0).unwrap();

    runs.train_to_the_end(
        "resumed",
        2,
        &[&keep[..], &long, &evaluated, &[&runs.resume("kept", resumed_after)]].concat(),
    );
    let metrics = runs.metrics("resumed");
    let value = |step, name: &str| metrics[&(step, false)].values[&format!("partial_rollout/{name}_tokens")];
    let first = resumed_after + 1;
    assert!(value(first, "kept") == 0.0 && value(first, "recomputed") >= kept(first));
    assert!((first + 1..=24).all(|step| value(step, "recomputed") == 0.0));
}

/// With completions of one token, the surplus groups never begin. Their rows are used later in the usual order.
#[test]
fn oversampling_changes_no_data_when_all_lengths_are_equal() {
    let runs = Runs::new();
    let common = ["max_completion_length=1", "max_num_seqs=32", "max_steps=3", "save_steps=none"];
    runs.train_to_the_end("plain", 2, &common);
    runs.train_to_the_end("surplus", 2, &[&common[..], &["oversample=0.5"]].concat());
    for step in 1..=3 {
        let sorted = |run| {
            let mut rows: Vec<_> = runs.completions(run, step).into_iter().map(text_and_reward).collect();
            rows.sort_by(|a, b| a.partial_cmp(b).unwrap());
            rows
        };
        assert_eq!(sorted("surplus"), sorted("plain"), "step {step}");
    }
    let metrics = &runs.metrics("surplus")[&(3, false)].values;
    assert_eq!(metrics["partial_rollout/carried_groups"], 2.0);
    assert_eq!(metrics["partial_rollout/discarded_token_share"], 0.0);
}

/// Without `partial_rollout`, no group sampled in an earlier step is trained on.
#[test]
fn surplus_groups_are_dropped_and_counted_without_partial_rollouts() {
    let runs = Runs::new();
    let keys = ["oversample=1.0", "max_steps=2", "save_steps=none", "max_num_seqs=64"];
    runs.train_to_the_end("dropped", 2, &keys);
    let metrics = &runs.metrics("dropped")[&(2, false)].values;
    let value = |name: &str| metrics[&format!("partial_rollout/{name}")];
    assert!(value("discarded_token_share") > 0.0);
    assert_eq!((value("continued_token_share"), value("staleness_max")), (0.0, 0.0));
}

fn text_and_reward(row: CompletionRow) -> (String, String, Option<f32>) {
    (row.prompt, row.completion, row.reward)
}
