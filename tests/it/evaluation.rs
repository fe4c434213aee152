//! Evaluations that determine when a run ends and which weights it saves, and their repetition with the command `eval`.

use std::fs;
use std::path::Path;

use colo_grpo::internal::metrics::read_completions;
use serde_json::Value;

use crate::program::{SMALL_RUN, json_lines, metrics, run, stdout_of};

/// Step and mean reward of each evaluation after the first step.
fn evaluations(folder: &Path) -> Vec<(u64, f64)> {
    let lines = metrics(folder);
    let of = |line: &Value| Some((line["step"].as_u64()?, line.get("eval_reward")?.as_f64()?));
    lines.iter().filter_map(of).filter(|(step, _)| *step > 0).collect()
}

#[test]
fn early_stopping_keeps_the_best_weights() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let line = format!(
        "{SMALL_RUN} num_generations=8 max_steps=60 eval_file=configs/arithmetic/eval.jsonl max_eval_samples=8 eval_steps=1 \
         learning_rate=3e-3 early_stopping_patience=2 load_best_model_at_end=true save_steps=1 save_total_limit=1 output_dir={}",
        out.display()
    );
    let ended = run(&line);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let evaluations = evaluations(&out);
    let highest = evaluations.iter().map(|(_, reward)| *reward).fold(f64::NEG_INFINITY, f64::max);
    let (best, _) = *evaluations.iter().find(|(_, reward)| *reward == highest).unwrap();
    let last = evaluations.last().unwrap().0;
    assert_eq!(last, best + 2, "two evaluations in a row were no better: {evaluations:?}");
    assert!(
        last < 60
            && ended.stderr.contains(&format!("step {last}: stopped early: eval_reward was best at step {best} "))
    );
    let weights = |name: &str| fs::read(out.join(name).join("model.safetensors")).unwrap();
    assert!(weights("final") == weights(&format!("checkpoint-{best}")), "the final model is the best one");
    assert!(weights("final") != weights(&format!("checkpoint-{last}")), "training had changed the weights since");
    let saved = fs::read_dir(&out).unwrap().filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    assert_eq!(saved.filter(|name| name.starts_with("checkpoint-")).count(), 2, "the best and the newest");

    for (name, again) in [("samples.jsonl", 8), ("samples.parquet", 8)] {
        let (samples, final_model) = (folder.path().join(name), out.join("final"));
        let line = format!(
            "eval --config {}/run_config.json --model {} --output {} --device cpu",
            out.display(),
            final_model.display(),
            samples.display()
        );
        let measured: Value = serde_json::from_str(&stdout_of(&line)).unwrap();
        let mean = measured["avg@4"]["mean"].as_f64().unwrap_or_else(|| panic!("{measured}"));
        assert!((mean - highest).abs() < 1e-6, "{mean} is the run's own {highest}");
        assert_eq!(measured["solved_by"], serde_json::json!(["numeric_answer"]));
        let references: Vec<Option<String>> = match name.ends_with("parquet") {
            true => read_completions(&samples).unwrap().into_iter().map(|row| row.reference_answer).collect(),
            false => {
                let lines = json_lines(&fs::read_to_string(&samples).unwrap());
                assert!(lines.iter().all(|line| line["numeric_answer"].is_number() && line["reward"].is_number()));
                lines.iter().map(|line| line["reference_answer"].as_str().map(str::to_owned)).collect()
            }
        };
        assert_eq!(references.len(), again * 4);
        assert!(references.iter().all(Option::is_some), "{references:?}");
    }
}

/// Holds for the evaluation in a run and for its repetition with `eval`.
#[test]
fn greedy_evaluations_do_not_depend_on_the_seed() {
    let folder = tempfile::tempdir().unwrap();
    let completions = |keys: &str| {
        let samples = folder.path().join("samples.parquet");
        let line = format!(
            "eval --config configs/tiny-cpu.toml --model configs/arithmetic/model --device cpu --output {} max_eval_samples=8 \
             eval_num_generations=1 max_completion_length=8 {keys}",
            samples.display()
        );
        let measured: Value = serde_json::from_str(&stdout_of(&line)).unwrap();
        let texts: Vec<_> = read_completions(&samples).unwrap().into_iter().map(|row| row.completion).collect();
        fs::remove_file(samples).unwrap();
        (texts, measured["avg@1"]["mean"].as_f64().unwrap())
    };
    let (greedy, mean) = completions("eval_temperature=0 seed=1");
    assert_eq!(completions("eval_temperature=0 seed=2").0, greedy);
    assert_ne!(completions("seed=1").0, completions("seed=2").0);
    assert_eq!(completions("eval_temperature=1.0 seed=1").0, completions("seed=1").0);
    let out = folder.path().join("out");
    stdout_of(&format!(
        "{SMALL_RUN} eval_file=configs/arithmetic/eval.jsonl max_eval_samples=8 eval_steps=1 eval_num_generations=1 eval_temperature=0 \
         max_completion_length=8 output_dir={}",
        out.display()
    ));
    let first = metrics(&out).into_iter().find(|line| line["step"] == 0 && line["eval_reward"].is_number()).unwrap();
    assert_eq!(first["eval_reward"].as_f64().unwrap(), mean);
}

#[test]
fn evaluations_with_invalid_settings_are_refused() {
    let out = tempfile::tempdir().unwrap();
    let line = format!(
        "{SMALL_RUN} eval_file=configs/arithmetic/eval.jsonl max_eval_samples=2 eval_steps=1 early_stopping_patience=1 \
         metric_for_best_model=acuracy output_dir={}",
        out.path().join("out").display()
    );
    run(&line).assert_error("no such metric", 2, &["metric_for_best_model = eval_acuracy", "eval_reward"]);
    let eval = "eval --model configs/arithmetic/model";
    let rows = "--data configs/arithmetic/eval.jsonl";
    run(&format!("{eval} {rows} --output out.txt")).assert_error("extension", 2, &["--output = out.txt", "FILE.jsonl"]);
    let ended = run(&format!("{eval} {rows} --device cpu --output /proc/out.jsonl"));
    ended.assert_error("no file is made there", 12, &["/proc/out.jsonl"]);
    assert!(!ended.stderr.contains("KV cache"), "nothing is loaded before that: {}", ended.stderr);
    let both = run(&format!("{eval} {rows} --config configs/tiny-cpu.toml"));
    assert!(both.code == Some(2) && both.stderr.contains("cannot be used with"), "{}", both.stderr);
    let key = run(&format!("{eval} --config configs/tiny-cpu.toml --max_completion_length 16"));
    assert!(key.code == Some(2) && key.stderr.contains("max_completion_length=16"), "{}", key.stderr);
    let unread = "tensor_parallel_size=1 kv_cache_dtype=fp8 num_generations=4 temperature=0.5 reward.timeout_s=3";
    let unread = run(&format!("{eval} --config configs/tiny-cpu.toml {unread}"));
    for (part, times) in [
        ("tensor_parallel_size = 1: expected no such key here: use the option --tensor_parallel_size", 1),
        ("kv_cache_dtype = \"fp8\": expected no such key here", 1),
        ("num_generations = 4: expected no such key here: for an evaluation set eval_num_generations, or -n", 1),
        ("expected", 3),
    ] {
        assert!(unread.code == Some(2) && unread.stderr.matches(part).count() == times, "{part}: {}", unread.stderr);
    }
    run(&format!("{eval} {rows} learning_rate=3")).assert_error(
        "a key without a run",
        2,
        &["learning_rate=3", "--config"],
    );
    run(&format!("{eval} {rows} --base_model configs")).assert_error(
        "a base of no adapters",
        2,
        &["--base_model = configs", "is a full model"],
    );
    run(&format!("{eval} --config configs/tiny-cpu.toml temperature=-1")).assert_error(
        "key",
        2,
        &["temperature = -1: expected"],
    );
}

/// Without `max_prompt_length`, the plan uses the longest prompt of the rows instead of the model's whole context.
#[test]
fn the_plan_uses_the_longest_prompt_of_the_rows() {
    let plan = |more: &str| {
        let text = stdout_of(&format!("plan --config configs/tiny-cpu.toml tensor_parallel_size=1 {more}"));
        let line = text.lines().find(|line| line.starts_with("KV cache: ")).map(str::to_owned);
        line.unwrap_or_else(|| panic!("{text}"))
    };
    let free = plan("");
    let tokens = free.split("sequences of ").nth(1).and_then(|rest| rest.split(' ').next()?.parse::<usize>().ok());
    let longest = tokens.unwrap_or_else(|| panic!("{free}")) - 12; // max_completion_length
    assert_eq!(plan(&format!("max_prompt_length={longest}")), free);
    assert!(
        plan(&format!("max_prompt_length={}", longest + 16)).contains(&format!("sequences of {} tokens", longest + 28))
    );
}
