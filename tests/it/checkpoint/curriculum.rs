//! Curriculum: rows that are drawn less often because of their solve rates.

use std::collections::BTreeSet;

use super::Runs;

/// Solve rates are saved in checkpoints, and a resumed run with another number of ranks draws the same rows.
#[test]
fn curriculum_solve_rates_are_resumed_and_equal_for_any_number_of_ranks() {
    let runs = Runs::new();
    let common = ["max_train_samples=12", "curriculum.solve_rate=[0.3, 0.6]", "curriculum.every=3", "max_steps=8"];
    runs.train_to_the_end("straight", 2, &[&common[..], &["save_steps=4"]].concat());
    let resume = runs.resume("straight", 4);
    runs.train_to_the_end("resumed", 2, &[&common[..], &[&resume]].concat());
    runs.assert_same("resumed", "straight", &[5, 6, 7, 8]);
    let alone = ["per_device_train_batch_size=32", "tensor_parallel_size=1"];
    runs.train_to_the_end("alone", 1, &[&common[..], &alone].concat());

    let prompts = |run: &str, step| -> BTreeSet<String> {
        runs.completions(run, step).into_iter().map(|row| row.prompt).collect()
    };
    let first_epoch: BTreeSet<String> = (1..=3).flat_map(|step| prompts("straight", step)).collect();
    assert_eq!(first_epoch.len(), 12, "nothing is known in the first epoch");
    for step in 1..=8 {
        assert_eq!(prompts("straight", step).len(), 4, "step {step}");
        assert_eq!(prompts("alone", step), prompts("straight", step), "step {step}");
    }
    let value = |step, name: &str| runs.metrics("straight")[&(step, false)].values[&format!("curriculum/{name}")];
    assert!(value(3, "hard_rows") > 0.0 && value(3, "easy_rows") > 0.0, "a model that was warmed up on wrong sums");
    assert!((0.1..0.5).contains(&value(3, "solve_rate")));
    assert!(runs.metrics("straight")[&(8, false)].values["epoch"] > 3.0, "epochs in which rows rest are shorter");
}
