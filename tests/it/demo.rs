//! The demo: two processes train the tiny model, and the mean reward on held-out problems increases.

use std::path::Path;

use crate::program::{json_lines, metrics, run, stdout_of};

/// Whether `text` mentions a metric. In a table row with several names of the same prefix, only the first is written out.
fn is_told(text: &str, name: &str) -> bool {
    let is_in_row = |(prefix, last): (&str, &str)| {
        let has_both = |row: &str| row.contains(&format!("`{prefix}/")) && row.contains(&format!("`{last}`"));
        text.lines().any(has_both)
    };
    text.contains(&format!("`{name}`")) || name.starts_with("pass@") || name.rsplit_once('/').is_some_and(is_in_row)
}

#[test]
fn every_metric_is_documented_in_the_metrics_page() {
    let text = "| `a/mean`, `max` | one |\n| `b/mean` | another |";
    assert!(["a/mean", "a/max", "b/mean"].iter().all(|name| is_told(text, name)));
    assert!(!["b/max", "c/mean", "mean"].iter().any(|name| is_told(text, name)));
}

#[test]
fn the_demo_raises_the_held_out_reward() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().display();
    let ended = run(&format!("--nproc 2 --config configs/tiny-cpu.toml output_dir={out}"));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);

    let said = ended.stdout.lines().find_map(|line| line.strip_prefix("held-out mean reward: ")).expect("both figures");
    let figures: Vec<f64> = said.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [before, after] = figures[..] else { panic!("{said}") };
    assert!(before < 0.4 && after > 0.8, "{said}");

    let lines = metrics(folder.path());
    let evaluations: Vec<f64> = lines.iter().filter_map(|line| line["eval_reward"].as_f64()).collect();
    for (told, written) in [(before, evaluations.first()), (after, evaluations.last())] {
        assert!((told - written.unwrap()).abs() < 1e-3, "{said}, {evaluations:?}");
    }
    assert_eq!(lines.iter().filter(|line| line["loss"].is_number()).count(), 60);
    let explained = include_str!("../../docs/metrics.md");
    for full in lines.iter().flat_map(|line| line.as_object().unwrap().keys()) {
        let name =
            full.strip_prefix("eval_").unwrap_or(full).replace("numeric_answer", "NAME").replace("format", "NAME");
        assert!(is_told(explained, full) || is_told(explained, &name), "docs/metrics.md lacks {full}");
    }
    let named = |name: &str| ended.stdout.lines().find_map(|line| line.strip_prefix(name).map(Path::new)).unwrap();
    assert!(named("report: ").exists());

    // The model that was left is the one that was measured: the same samples, scored by the program's other command.
    let eval = stdout_of(&format!(
        "eval --model {} --data configs/arithmetic/eval.jsonl -n 4 --answer_pattern ([0-9]+) --max_completion_length 12",
        named("model: ").display()
    ));
    let answers =
        lines.iter().filter_map(|line| line["eval_rewards/numeric_answer/mean"].as_f64()).next_back().unwrap();
    let again = json_lines(&eval)[0]["avg@4"]["mean"].as_f64().unwrap();
    assert!((again - answers).abs() < 0.02, "{again} after loading, {answers} in the run");
}

#[test]
fn the_supervised_example_teaches_the_task() {
    let folder = tempfile::tempdir().unwrap();
    let ended = run(&format!("sft --nproc 2 --config configs/sft.toml output_dir={}", folder.path().display()));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let eval = stdout_of(&format!(
        "eval --model {}/final --data configs/arithmetic/eval.jsonl -n 4 --answer_pattern ([0-9]+) --max_completion_length 12",
        folder.path().display()
    ));
    let right = json_lines(&eval)[0]["avg@4"]["mean"].as_f64().unwrap();
    assert!(right > 0.85, "{right}");
}
