//! Interrupted and resumed runs equal uninterrupted ones: bit for bit in the same layout, up to rounding in another.

mod curriculum;
mod files;
mod partial;
mod reference;
mod shards;
mod supervised;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use colo_grpo::internal::checkpoint::claim;
use colo_grpo::internal::metrics::{CompletionRow, MetricLine, read_completions, read_metrics};
use colo_grpo::internal::ranks::World;

/// Prefixes of metrics that depend on time or on the layout.
const TIMES: [&str; 5] = ["step_time", "timing_s/", "perf/", "transition/", "pipeline/"];
/// Settings of all runs: two ranks train 32 completions per step. The learning rate falls, so that a wrong step number changes the result.
const COMMON: [&str; 8] = [
    "eval_file=none",
    "eval_steps=none",
    "max_train_samples=256",
    "per_device_train_batch_size=16",
    "max_steps=6",
    "save_steps=2",
    "lr_scheduler_type=linear",
    "log_completions=true",
];

/// Output folders of several runs.
pub struct Runs {
    root: tempfile::TempDir,
}

/// Result of a run.
pub struct Ended {
    pub code: Option<i32>,
    pub output: String,
}

impl Runs {
    pub fn new() -> Self {
        Self { root: tempfile::tempdir().unwrap() }
    }

    pub fn path(&self, run: &str) -> PathBuf {
        self.root.path().join(run)
    }

    /// The argument that resumes from a checkpoint of the run `run`.
    pub fn resume(&self, run: &str, step: u64) -> String {
        format!("resume_from_checkpoint={}", self.path(run).join(format!("checkpoint-{step}")).display())
    }

    /// Runs configs/tiny-cpu.toml with [`COMMON`] and `overrides`.
    pub fn train(&self, run: &str, num_ranks: usize, overrides: &[&str]) -> Ended {
        let output = Command::new(env!("CARGO_BIN_EXE_colo-grpo"))
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .args(["--nproc", &num_ranks.to_string(), "--config", "configs/tiny-cpu.toml"])
            .args(COMMON)
            .args(overrides)
            .arg(format!("output_dir={}", self.path(run).display()))
            .env("OMP_NUM_THREADS", "1")
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
        Ended { code: output.status.code(), output: text }
    }

    pub fn train_to_the_end(&self, run: &str, num_ranks: usize, overrides: &[&str]) -> Ended {
        let ended = self.train(run, num_ranks, overrides);
        assert_eq!(ended.code, Some(0), "{run}: {}", ended.output);
        ended
    }

    /// The lines of metrics.jsonl by step and by whether they belong to an evaluation.
    pub fn metrics(&self, run: &str) -> BTreeMap<(u64, bool), MetricLine> {
        let lines = read_metrics(&self.path(run).join("metrics.jsonl")).unwrap();
        let num_lines = lines.len();
        let key = |line: &MetricLine| (line.step, line.values.contains_key("eval_reward"));
        let by_step: BTreeMap<_, _> = lines.into_iter().map(|line| (key(&line), line)).collect();
        assert_eq!(by_step.len(), num_lines, "{run}: a step was written twice");
        by_step
    }

    pub fn completions(&self, run: &str, step: u64) -> Vec<CompletionRow> {
        read_completions(&self.path(run).join(format!("completions/completions_{step:05}.parquet"))).unwrap()
    }

    fn final_weights(&self, run: &str) -> Vec<u8> {
        let weights =
            ["model.safetensors", "adapter_model.safetensors"].map(|name| self.path(run).join("final").join(name));
        std::fs::read(weights.iter().find(|path| path.exists()).unwrap()).unwrap()
    }

    /// Asserts that both runs are equal in `steps`, bit for bit.
    pub fn assert_same(&self, run: &str, straight: &str, steps: &[u64]) {
        assert!(self.final_weights(run) == self.final_weights(straight), "{run}: other weights than {straight}");
        let (own, expected) = (self.metrics(run), self.metrics(straight));
        for (key, line) in &own {
            assert_eq!(without_times(line), without_times(&expected[key]), "{run}, (step, evaluation) = {key:?}");
        }
        let written: BTreeSet<u64> = own.keys().map(|(step, _)| *step).collect();
        assert!(written.iter().eq(steps), "{run}: {written:?}");
        for step in steps {
            assert_eq!(self.completions(run, *step), self.completions(straight, *step), "{run}, step {step}");
        }
    }

    /// Asserts that both runs sampled the same in `step`, and that their metrics differ only by rounding.
    pub fn assert_close(&self, run: &str, straight: &str, step: u64) {
        let texts = |run| -> Vec<_> {
            let rows = self.completions(run, step).into_iter();
            rows.map(|row| (row.prompt, row.completion, row.rewards)).collect()
        };
        assert_eq!(texts(run), texts(straight), "{run}, step {step}");
        let (own, expected) = (self.metrics(run), self.metrics(straight));
        let (own, expected) = (without_times(&own[&(step, false)]), without_times(&expected[&(step, false)]));
        assert!(own.keys().eq(expected.keys()), "{run}: {:?}", own.keys());
        for (name, value) in &own {
            let difference = (value - expected[name]).abs();
            assert!(
                difference <= 1e-5 + 1e-4 * expected[name].abs(),
                "{run}, step {step}: {name} is {value}, was {}",
                expected[name]
            );
        }
    }
}

fn without_times(line: &MetricLine) -> BTreeMap<String, f64> {
    let values = line.values.iter().filter(|(name, _)| !TIMES.iter().any(|time| name.starts_with(time)));
    values.map(|(name, value)| (name.clone(), *value)).collect()
}

fn flip_a_byte(path: &Path) {
    let mut bytes = std::fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(path, bytes).unwrap();
}

fn cut_short(path: &Path) {
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.set_len(file.metadata().unwrap().len() - 1).unwrap();
}

/// With ZeRO-2, one tensor-parallel engine on both ranks, and swapped optimizer state.
#[test]
fn a_killed_and_resumed_run_equals_an_uninterrupted_one() {
    let runs = Runs::new();
    runs.train_to_the_end("straight", 2, &[]);
    runs.train_to_the_end("resumed", 2, &[&runs.resume("straight", 4)]);
    runs.assert_same("resumed", "straight", &[5, 6]);

    // Killed in step 5 and its newest checkpoint damaged: the one before it serves.
    let killed = runs.train("killed", 2, &["fault=0:4:forward_backward:kill", "save_async=false"]);
    assert_eq!(killed.code, Some(10), "{}", killed.output);
    let (folder, leftover) = (runs.path("killed"), runs.path("killed/.checkpoint-6.tmp"));
    std::fs::create_dir(&leftover).unwrap();
    flip_a_byte(&folder.join("checkpoint-4/optimizer/rank_00001_of_00002.safetensors"));
    let resumed = runs.train_to_the_end("killed", 2, &["resume_from_checkpoint=latest"]);
    let warning = format!(
        "warning: checkpoint {}: optimizer/rank_00001_of_00002.safetensors: the file was changed after the checkpoint \
         was written (its SHA-256 differs); copy it again or use another checkpoint; trying the checkpoint before it",
        folder.join("checkpoint-4").display()
    );
    assert!(resumed.output.contains(&warning), "{}", resumed.output);
    assert!(
        resumed.output.contains(&format!("resumed from {}/checkpoint-2\n", folder.display())),
        "{}",
        resumed.output
    );
    runs.assert_same("killed", "straight", &[1, 2, 3, 4, 5, 6]);
    assert!(!leftover.exists(), "the next save cleans up");

    // The damaged checkpoint was written anew, and the last step's; now nothing valid is left.
    cut_short(&folder.join("checkpoint-4/model.safetensors"));
    cut_short(&folder.join("checkpoint-6/optimizer/rank_00000_of_00002.safetensors"));
    std::fs::remove_file(folder.join("checkpoint-2/manifest.json")).unwrap();
    let refused = runs.train("killed", 2, &["resume_from_checkpoint=latest"]);
    assert_eq!(refused.code, Some(5), "{}", refused.output);
    let messages =
        ["no valid checkpoint among 3", "checkpoint-2: manifest.json: ", "checkpoint-4: model.safetensors: "];
    assert!(messages.iter().all(|message| refused.output.contains(message)), "{}", refused.output);
}

#[test]
fn a_rank_that_fails_while_saving_leaves_no_partial_checkpoint() {
    let runs = Runs::new();
    let failed = runs.train("failed", 2, &["fault=1:3:checkpoint:error"]);
    assert_eq!(failed.code, Some(10), "{}", failed.output);
    assert!(failed.output.contains("rank 1, step 3, checkpoint: injected fault"), "{}", failed.output);
    assert_eq!(files::names(&runs.path("failed")).iter().filter(|name| name.contains("checkpoint-")).count(), 1);
}

/// The learning rate falls over all 20 steps, and prompts come from shuffled epochs, so that only a complete resume gives the same result.
/// On one rank, the next steps are the same up to rounding.
#[test]
fn ten_steps_and_ten_resumed_steps_equal_twenty() {
    let runs = Runs::new();
    let common = ["max_steps=20", "save_steps=10"];
    runs.train_to_the_end("straight", 2, &common);
    let resume = runs.resume("straight", 10);
    runs.train_to_the_end("resumed", 2, &[&common[..], &[&resume]].concat());
    runs.assert_same("resumed", "straight", &(11..=20).collect::<Vec<_>>());
    // Nothing is left to do after the last step but to export.
    runs.train_to_the_end("done", 2, &[&common[..], &[&runs.resume("straight", 20)]].concat());
    assert!(runs.final_weights("done") == runs.final_weights("straight"));
    let alone = ["per_device_train_batch_size=32", "tensor_parallel_size=1", "zero.stage=1", &resume];
    runs.train_to_the_end("alone", 1, &[&common[..], &alone].concat());
    (11..=13).for_each(|step| runs.assert_close("alone", "straight", step));
}

/// With ZeRO-3, a reference model, a growing entropy bonus, and four updates per generation batch (the last batch has only two).
/// An evaluation made before the checkpoint is not repeated.
#[test]
fn a_resumed_sharded_run_with_several_updates_equals_an_uninterrupted_one() {
    let runs = Runs::new();
    let common = [
        "zero.stage=3",
        "tensor_parallel_size=1",
        "steps_per_generation=2",
        "num_iterations=2",
        "beta=0.01",
        "top_entropy_quantile=0.5",
        "entropy_coef=0.01",
        "use_adaptive_entropy=true",
        "entropy_target=9",
        "max_steps=10",
        "save_steps=4",
        "eval_file=configs/arithmetic/eval.jsonl",
        "eval_num_generations=1",
        "eval_steps=4",
    ];
    let straight = runs.train_to_the_end("straight", 2, &common);
    let resume = runs.resume("straight", 4);
    let resumed = runs.train_to_the_end("resumed", 2, &[&common[..], &[&resume]].concat());
    runs.assert_same("resumed", "straight", &[8, 10]);
    let rewards =
        |ended: &Ended| ended.output.lines().find(|line| line.contains("held-out mean reward: ")).map(str::to_owned);
    assert!(rewards(&resumed).is_some() && rewards(&resumed) == rewards(&straight), "{}", resumed.output);
}

/// A line has averages over the steps since the previous line, including steps before the interruption.
#[test]
fn a_logging_interval_may_span_a_resume() {
    let runs = Runs::new();
    let common = ["tensor_parallel_size=1", "logging_steps=4"];
    runs.train_to_the_end("straight", 1, &common);
    runs.train_to_the_end("resumed", 1, &[&common[..], &[&runs.resume("straight", 2)]].concat());
    runs.assert_same("resumed", "straight", &[4, 6]);
}

/// With LoRA adapters and dropout: only the adapters are saved, and dropout masks continue as without interruption.
#[test]
fn a_resumed_lora_run_equals_an_uninterrupted_one() {
    let runs = Runs::new();
    let common = ["zero.stage=3", "lora.r=4", "lora.dropout=0.1", "beta=0.01", "learning_rate=1e-3"];
    runs.train_to_the_end("straight", 2, &common);
    let resume = runs.resume("straight", 4);
    runs.train_to_the_end("resumed", 2, &[&common[..], &[&resume]].concat());
    runs.assert_same("resumed", "straight", &[5, 6]);
    assert!(!runs.path("straight/checkpoint-4/model.safetensors").exists());
    let full = runs.train("full", 2, &["zero.stage=3", "force_resume=true", &resume]);
    assert_eq!(full.code, Some(2), "{}", full.output);
    for fragment in [
        "lora.r = \"none\": expected 4, as in ",
        "belongs to LoRA adapters of rank 4 and cannot be used for full weights",
        "export --merge",
    ] {
        assert!(full.output.contains(fragment), "{}", full.output);
    }
}

#[test]
fn a_run_resumes_with_another_number_of_ranks_and_zero_stage() {
    let runs = Runs::new();
    runs.train_to_the_end("straight", 2, &["zero.stage=3", "save_steps=3"]);
    let resume = runs.resume("straight", 3);
    let alone = ["per_device_train_batch_size=32", "zero.stage=0", "tensor_parallel_size=1", "save_steps=5", &resume];
    runs.train_to_the_end("alone", 1, &alone);
    runs.assert_close("alone", "straight", 4);
    runs.assert_close("alone", "straight", 5);

    let resume = runs.resume("alone", 5);
    let hybrid = ["per_device_train_batch_size=8", "zero.stage=2", "zero.shard_group_size=2", &resume];
    runs.train_to_the_end("hybrid", 4, &hybrid);
    runs.assert_close("hybrid", "straight", 6);

    // The batch of the whole world would be another.
    let refused = runs.train("refused", 1, &["tensor_parallel_size=1", &runs.resume("straight", 3)]);
    assert_eq!(refused.code, Some(2), "{}", refused.output);
    let message = "generation_batch_size (completions): was 32 on 2 ranks, is 16 on 1";
    assert!(refused.output.contains(message), "{}", refused.output);
}

#[test]
fn an_output_folder_is_used_by_one_run_at_a_time() {
    let runs = Runs::new();
    let folder = runs.path("shared");
    let held = claim(&folder, &World::single(), false).unwrap();
    let refused = runs.train("shared", 2, &["max_steps=1"]);
    assert_eq!(refused.code, Some(2), "{}", refused.output);
    let told = format!(
        "process {} writes to this one; wait until it ends, stop it, or choose another folder",
        std::process::id()
    );
    assert!(refused.output.contains(&told), "{}", refused.output);
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "something was written");
    drop(held);
    runs.train_to_the_end("shared", 2, &["max_steps=1"]);
}

#[test]
fn a_changed_configuration_is_refused_on_resume_unless_forced() {
    let runs = Runs::new();
    runs.train_to_the_end("straight", 1, &["tensor_parallel_size=1", "max_steps=3"]);
    let resume = runs.resume("straight", 2);
    let changed = ["tensor_parallel_size=1", "max_steps=3", "learning_rate=5e-4", "logging_steps=2", &resume];
    let refused = runs.train("changed", 1, &changed);
    assert_eq!(refused.code, Some(2), "{}", refused.output);
    assert!(
        refused.output.contains("these differ: learning_rate was 0.0001, is 0.0005. Restore them, "),
        "{}",
        refused.output
    );
    let forced = runs.train_to_the_end("changed", 1, &[&changed[..], &["force_resume=true"]].concat());
    assert!(forced.output.contains("checkpoint-2: learning_rate was 0.0001, is 0.0005\n"), "{}", forced.output);
    let adapters = runs.train("adapters", 1, &[&changed[..], &["lora.r=4", "force_resume=true"]].concat());
    assert_eq!(adapters.code, Some(2), "{}", adapters.output);
    for fragment in [
        "lora.r = 4: expected \"none\", as in ",
        "belongs to full weights and cannot be used for LoRA adapters of rank 4, not even with force_resume",
    ] {
        assert!(adapters.output.contains(fragment), "{}", adapters.output);
    }
    let folder = tempfile::tempdir().unwrap();
    let rows = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/configs/arithmetic/train.jsonl")).unwrap();
    let fewer: Vec<&str> = rows.lines().take(255).collect();
    std::fs::write(folder.path().join("train.jsonl"), fewer.join("\n")).unwrap();
    let rows = format!("train_file={}/train.jsonl", folder.path().display());
    let other_rows = runs.train("rows", 1, &[&changed[..], &["force_resume=true", &rows]].concat());
    assert_eq!(other_rows.code, Some(5), "{}", other_rows.output);
    assert!(other_rows.output.contains("written with 256 training rows, "), "{}", other_rows.output);
}

#[test]
fn other_rows_of_the_same_number_are_refused_on_resume() {
    let runs = Runs::new();
    let folder = tempfile::tempdir().unwrap();
    let rows = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/configs/arithmetic/train.jsonl")).unwrap();
    let rows: Vec<&str> = rows.lines().take(64).collect();
    let write = |name: &str, rows: &[&str]| std::fs::write(folder.path().join(name), rows.join("\n")).unwrap();
    let of = |name: &str| format!("train_file={}/{name}.jsonl", folder.path().display());
    write("rows.jsonl", &rows);
    write("renamed.jsonl", &rows);
    let run = ["tensor_parallel_size=1", "max_steps=2", "save_steps=1"];
    runs.train_to_the_end("straight", 1, &[&run[..], &[&of("rows")]].concat());
    let (resume, forced) = (runs.resume("straight", 1), "force_resume=true");
    runs.train_to_the_end("same", 1, &[&run[..], &[&of("rows"), &resume]].concat());
    runs.assert_same("same", "straight", &[2]);
    runs.train_to_the_end("renamed", 1, &[&run[..], &[&of("renamed"), &resume, forced]].concat());
    runs.assert_same("renamed", "straight", &[2]);
    let mut other = rows.clone();
    other.swap(3, 4);
    write("rows.jsonl", &other);
    for forced in ["force_resume=false", forced] {
        let refused = runs.train("other", 1, &[&run[..], &[&of("rows"), &resume, forced]].concat());
        assert_eq!(refused.code, Some(5), "{}", refused.output);
        assert!(refused.output.contains("with other training rows: there are 64 of them"), "{}", refused.output);
    }
}

/// Adapters and a fixed reference read the base again; full weights without a reference do not.
#[test]
fn another_base_at_the_same_path_is_refused_on_resume_unless_forced() {
    let runs = Runs::new();
    let base = tempfile::tempdir().unwrap();
    for file in Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/arithmetic/model").read_dir().unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), base.path().join(file.file_name())).unwrap();
    }
    let model = format!("model_name_or_path={}", base.path().display());
    let run = ["tensor_parallel_size=1", "max_steps=2", "save_steps=1", &model];
    let kinds = [("adapters", "lora.r=4"), ("reference", "beta=0.05"), ("alone", "beta=0.0")];
    for (name, kind) in kinds {
        runs.train_to_the_end(name, 1, &[&run[..], &[kind]].concat());
        let resume = runs.resume(name, 1);
        let again = [&run[..], &[kind, &resume]].concat();
        runs.train_to_the_end(&format!("{name}-same"), 1, &again);
        runs.assert_same(&format!("{name}-same"), name, &[2]);
    }
    let weights = base.path().join("model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    let last = bytes.len() - 2; // in the last number's mantissa
    bytes[last] ^= 1;
    std::fs::write(&weights, bytes).unwrap();
    for (name, kind) in kinds {
        let resume = runs.resume(name, 1);
        let again = [&run[..], &[kind, &resume]].concat();
        let ended = runs.train(&format!("{name}-other"), 1, &again);
        if name == "alone" {
            assert_eq!(ended.code, Some(0), "{}", ended.output);
            continue;
        }
        assert_eq!(ended.code, Some(2), "{name}: {}", ended.output);
        let told = "the folder of model_name_or_path contains other weights";
        assert!(ended.output.contains(told), "{}", ended.output);
        let forced =
            runs.train_to_the_end(&format!("{name}-forced"), 1, &[&again[..], &["force_resume=true"]].concat());
        assert!(forced.output.contains("warning: force_resume from ") && forced.output.contains(told));
    }
}
