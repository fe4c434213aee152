//! Interrupted and resumed supervised runs (SFT).

use std::path::Path;

use serde_json::{Map, Value};

use crate::program::{MODEL, metrics, run, stdout_of};

/// Lines of metrics.jsonl without times.
fn lines(output_dir: &Path) -> Vec<Map<String, Value>> {
    let line = |line: Value| {
        let numbers = line.as_object().unwrap().clone().into_iter();
        numbers.filter(|(name, _)| name != "time" && name != "step_time").collect()
    };
    metrics(output_dir).into_iter().map(line).collect()
}

/// LoRA with dropout at ZeRO-2, shuffled conversations and a falling learning rate: only a complete resume gives the same result.
#[test]
fn a_resumed_supervised_run_equals_an_uninterrupted_one() {
    let folder = tempfile::tempdir().unwrap();
    let row = |answer: usize| {
        format!(
            r#"{{"messages": [{{"role": "user", "content": "what is one plus {} ?"}}, {{"role": "assistant", "content": "the answer is {answer}"}}]}}"#,
            ["one", "two", "three", "four", "five"][answer - 2]
        )
    };
    std::fs::write(folder.path().join("rows.jsonl"), (2..7).map(|answer| row(answer) + "\n").collect::<String>())
        .unwrap();
    let line = |name: &str, more: &str| {
        format!(
            "sft --nproc 2 --config configs/arithmetic/warmup.toml model_name_or_path={MODEL} lora.r=4 lora.dropout=0.1 \
             train_file={place}/rows.jsonl eval_file={place}/rows.jsonl output_dir={place}/{name} max_steps=6 warmup_steps=2 \
             per_device_train_batch_size=2 logging_steps=1 save_steps=4 {more}",
            place = folder.path().display()
        )
    };
    let (straight, resumed) = (folder.path().join("straight"), folder.path().join("resumed"));
    let told = stdout_of(&line("straight", ""));
    let resume = format!("resume_from_checkpoint={}", straight.join("checkpoint-4").display());
    let weights = |run: &Path| std::fs::read(run.join("final/adapter_model.safetensors")).unwrap();
    assert_eq!(stdout_of(&line("resumed", &resume)).lines().next(), told.lines().next(), "the same losses");
    assert!(weights(&resumed) == weights(&straight), "other weights than undisturbed");
    assert_eq!(lines(&resumed), lines(&straight)[4..]);

    stdout_of(&line("interval", "logging_steps=2"));
    let losses = |run: &Path| -> Vec<f64> { lines(run).iter().filter_map(|line| line.get("loss")?.as_f64()).collect() };
    let means: Vec<f64> = losses(&straight).chunks(2).map(|pair| pair.iter().sum::<f64>() / 2.0).collect();
    let pairs = losses(&folder.path().join("interval"));
    assert!(pairs.len() == 3 && pairs.iter().zip(&means).all(|(a, b)| (a - b).abs() < 1e-9), "{pairs:?} {means:?}");

    let more = format!("{resume} learning_rate=1e-4 per_device_train_batch_size=1");
    let changed = ["learning_rate was 0.001, is 0.0001", "rows per update: was 4 on 2 ranks, is 2 on 2"];
    run(&line("changed", &more)).assert_error("changed", 2, &changed);
    let other_rank = line("changed", &format!("{resume} force_resume=true")).replace("lora.r=4", "lora.r=8");
    run(&other_rank).assert_error(
        "another rank",
        2,
        &["lora.r = 8: expected 4, as in ", "to train LoRA adapters of rank 8"],
    );
    run(&line("straight", "")).assert_error("beside another run's checkpoints", 2, &["output_dir", "checkpoint-6"]);
    let other = format!(
        "--config configs/tiny-cpu.toml tensor_parallel_size=1 {resume} output_dir={}",
        folder.path().join("other").display()
    );
    let named = format!("model_name_or_path = {}", straight.join("checkpoint-4").display());
    run(&other).assert_error("a supervised run's checkpoint", 5, &["written by a supervised run", &named]);
    for (given, expected, said) in [
        ("straight", "the folder of one checkpoint", "straight/checkpoint-6"),
        ("straight/final", "a checkpoint's folder", "model_name_or_path"),
    ] {
        let more = format!("resume_from_checkpoint={}", folder.path().join(given).display());
        run(&line("other", &more)).assert_error(given, 2, &["resume_from_checkpoint = ", expected, said]);
    }
    let whole = format!("model_name_or_path={}", straight.display());
    run(&line("other", &whole)).assert_error(
        "a run's folder as a model",
        3,
        &["config.json: the file is missing", "straight/final"],
    );
}
