//! Runs with speculative decoding: samples, training and answers are the same as without.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use safetensors::SafeTensors;
use serde_json::Value;

use colo_grpo::internal::data::{Dataset, DatasetOptions, Tokenizer};
use colo_grpo::internal::types::{Prompt, SamplingParams};

use crate::program::{MODEL, SMALL_RUN, json_lines, metrics, run, stdout_of};
use crate::rollout::draft_head::DraftAgreement;
use crate::rollout::setup::{Model, options};

/// Metrics that depend on the samples and on training.
const KEYS: [&str; 6] = ["loss", "reward", "grad_norm", "entropy", "completions/mean_length", "num_tokens"];

/// The metrics of all steps and evaluations of a run in `folder`, which must succeed.
fn lines(folder: &std::path::Path, keys: &str) -> Vec<Value> {
    let line = format!("{SMALL_RUN} {keys} output_dir={}", folder.display());
    let ended = run(&line);
    assert_eq!(ended.code, Some(0), "{line}\n{}", ended.stderr);
    metrics(folder)
}

fn steps(keys: &str) -> Vec<Value> {
    lines(tempfile::tempdir().unwrap().path(), keys)
}

/// Bits of the metrics in [`KEYS`], line by line.
fn outcomes(lines: &[Value]) -> Vec<Vec<Option<u64>>> {
    let keys = || KEYS.iter().chain(&["eval_reward"]);
    lines.iter().map(|line| keys().map(|key| line[*key].as_f64().map(f64::to_bits)).collect()).collect()
}

fn sum(lines: &[Value], key: &str) -> f64 {
    lines.iter().filter_map(|line| line[key].as_f64()).sum()
}

/// With `exact` a row has the same bits in every step, so whole runs are equal: two ranks with an engine each, few rows that occur repeatedly, an
/// evaluation, penalties and stop strings.
#[test]
fn a_run_trains_equally_with_draft_tokens() {
    for more in [
        "--nproc 2 max_train_samples=4 learning_rate=1e-3 repetition_penalty=1.2 stop=[\"5\"]",
        "max_train_samples=4 learning_rate=1e-3 max_completion_length=24 temperature=0.6",
        "max_train_samples=32 learning_rate=1e-5 dynamic_sampling=replace",
    ] {
        let keys = format!(
            "{more} exact=true max_steps=4 eval_steps=2 eval_file=configs/arithmetic/eval.jsonl max_eval_samples=4"
        );
        let expected = steps(&keys);
        let with = steps(&format!("{keys} speculation=ngram"));
        assert_eq!(outcomes(&with), outcomes(&expected), "{keys}");
        let (drafts, accepted) = (sum(&with, "speculation/draft_tokens"), sum(&with, "speculation/accepted_tokens"));
        assert!(accepted > 0.0 && accepted <= drafts, "{accepted} of {drafts}");
        let auto = steps(&format!("{keys} speculation=auto num_speculative_tokens=3"));
        assert_eq!(outcomes(&auto), outcomes(&expected), "{keys}");
    }
}

/// Speculative decoding can be switched on or off when a run is resumed.
#[test]
fn speculation_may_be_switched_on_at_resume() {
    let [straight, resumed] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let keys = "exact=true save_steps=1 max_train_samples=4 learning_rate=1e-3";
    let expected = lines(straight.path(), &format!("{keys} max_steps=3"));
    lines(resumed.path(), &format!("{keys} max_steps=1 speculation=ngram"));
    lines(resumed.path(), &format!("{keys} max_steps=2 resume_from_checkpoint=latest"));
    let got = lines(resumed.path(), &format!("{keys} max_steps=3 resume_from_checkpoint=latest speculation=auto"));
    let of_steps = |lines: &[Value]| {
        let steps: Vec<Value> = lines.iter().filter(|line| line["loss"].is_number()).cloned().collect();
        outcomes(&steps)
    };
    assert_eq!(of_steps(&got), of_steps(&expected));
}

/// Engines on several ranks, and engines in split mode.
#[test]
fn engines_of_several_ranks_support_speculation() {
    for more in
        ["--nproc 2 tensor_parallel_size=2", "--nproc 2 mode=split split.rollout_gpus=1 residency.optimizer=resident"]
    {
        for method in ["ngram", "auto"] {
            let with = steps(&format!("{more} max_steps=3 max_train_samples=4 speculation={method}"));
            let without = steps(&format!("{more} max_steps=3 max_train_samples=4"));
            let lens = |lines: &[Value]| sum(lines, "num_tokens");
            assert_eq!(lens(&with), lens(&without), "{more} {method}");
            if method == "ngram" {
                assert!(sum(&with, "speculation/draft_tokens") > 0.0, "{more}");
            }
        }
    }
}

#[test]
fn unsupported_speculation_settings_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |keys: &str, fragments: &[&str]| {
        let ended = run(&format!("{SMALL_RUN} output_dir={} {keys}", folder.path().display()));
        ended.assert_error(keys, 2, fragments);
    };
    refused(
        "speculation=mtp",
        &[
            "speculation",
            "only the draft heads of Qwen3.5, Qwen3.6 and Qwen3-Next are supported; ngram and auto need no draft head",
        ],
    );
    refused("speculation=auto full_determinism=true", &["depends on measured times"]);
    refused("num_speculative_tokens=5", &["there are no draft tokens"]);
    refused("speculation=ngram num_speculative_tokens=65", &["num_speculative_tokens", "64"]);
}

#[test]
fn generate_prints_the_same_with_draft_tokens() {
    let line =
        format!("generate --model {MODEL} --prompt what --prompt two -n 4 --max_completion_length 40 --device cpu");
    let texts = |more: &str| -> Vec<String> {
        let lines = json_lines(&stdout_of(&format!("{line} {more}")));
        lines.iter().map(|line| line["completion"].to_string()).collect()
    };
    let expected = texts("");
    assert_eq!(
        (expected.len(), texts("--speculation ngram"), texts("--speculation auto")),
        (8, expected.clone(), expected)
    );
}

/// The benchmark of speculative decoding with the demo's model.
#[test]
fn bench_speculation_compares_methods() {
    let result = stdout_of(&format!(
        "bench speculation --model {MODEL} --rows configs/arithmetic/train.jsonl --device cpu --sequences 4 --group 2 \
         --max_completion_length 12 --repeats 1 --same_rows"
    ));
    let result: Value = serde_json::from_str(&result).unwrap();
    let methods = result["sizes"][0]["methods"].as_array().unwrap();
    let of = |key: &str| methods.iter().map(|method| method[key].clone()).collect::<Vec<_>>();
    assert_eq!(of("speculation"), ["none", "ngram", "auto"]);
    assert_eq!(of("differing_completions"), [0.0, 0.0, 0.0]);
    assert!(methods[1]["draft_tokens"].as_u64() > Some(0) && methods[0]["draft_tokens"] == 0, "{result}");
}

/// Text of random weights does not repeat, so the benchmark accepts draft tokens at the given rate, which was measured on real text.
#[test]
fn bench_generate_replays_an_acceptance_rate() {
    let line = "bench generate --preset micro --device cpu --repeats 1 --prompts 1 --group 2 --completion_len 64";
    let result = stdout_of(&format!("{line} --speculation ngram --replayed_acceptance 0.8"));
    let result: Value = serde_json::from_str(&result).unwrap();
    let of = |key: &str| result["speculation"][key].as_f64().unwrap();
    let share = of("accepted_tokens") / of("draft_tokens");
    assert!(of("replayed_acceptance") == 0.8 && (0.3..0.6).contains(&share), "{result}");
    let ended = run(&format!("{line} --replayed_acceptance 0.8"));
    ended.assert_error("without drafts", 2, &["--replayed_acceptance", "there are no draft tokens"]);
}

/// Prompts of the demo's first problems.
fn arithmetic_prompts(count: usize) -> Vec<Prompt> {
    let tokenizer = Arc::new(Tokenizer::from_folder(Path::new(MODEL)).unwrap());
    let rows = Path::new("configs/arithmetic/train.jsonl");
    let dataset = Dataset::from_file(rows, &tokenizer, &DatasetOptions::default()).unwrap();
    (0..count).map(|row| dataset.prompt(row).clone()).collect()
}

/// A hybrid with a draft head, both with random weights, is trained while a negative entropy bonus sharpens the policy. Draft tokens of the head
/// that is trained with it are accepted far more often than those of the head as it was after ten steps.
#[test]
fn a_draft_head_is_trained_with_its_policy() {
    let folder = tempfile::tempdir().unwrap();
    let (model, run) = (folder.path().join("model"), folder.path().join("run"));
    let shape = "configs/arithmetic/config-hybrid.json";
    stdout_of(&format!("init --config_json {shape} --tokenizer {MODEL} --draft_head --output {}", model.display()));
    let names = |folder: &Path| -> Vec<String> {
        let bytes = fs::read(folder.join("model.safetensors")).unwrap();
        let files = SafeTensors::deserialize(&bytes).unwrap();
        files.names().into_iter().filter(|name| name.starts_with("mtp.")).map(str::to_owned).collect()
    };
    assert!(names(&model).contains(&"mtp.layers.0.self_attn.q_proj.weight".to_owned()), "{:?}", names(&model));
    let keys = format!(
        "model_name_or_path={} max_train_samples=32 max_steps=30 save_steps=10 learning_rate=1e-3 entropy_coef=-0.002 \
         max_completion_length=24 per_device_train_batch_size=16 speculation=mtp num_speculative_tokens=2",
        model.display()
    );
    let all = lines(&run, &keys);
    let of_steps = |steps: std::ops::Range<usize>| {
        let own: Vec<&Value> = all.iter().filter(|line| line["loss"].is_number()).collect();
        let sum = |key: &str| own[steps.clone()].iter().map(|line| line[key].as_f64().unwrap()).sum::<f64>();
        sum("speculation/accepted_tokens") / sum("speculation/draft_tokens")
    };
    let (middle, last) = (of_steps(12..15), of_steps(27..30));
    assert!(middle > 0.3 && last > middle, "{middle} {last}");

    let (own, frozen) = (run.join("final"), folder.path().join("frozen"));
    fs::create_dir(&frozen).unwrap();
    for entry in own.read_dir().unwrap().map(Result::unwrap).filter(|entry| entry.path().is_file()) {
        fs::copy(entry.path(), frozen.join(entry.file_name())).unwrap();
    }
    let [newest, older] = [&own, &run.join("checkpoint-10")].map(|of| fs::read(of.join("model.safetensors")).unwrap());
    let [newest, older] = [&newest, &older].map(|bytes| SafeTensors::deserialize(bytes).unwrap());
    let mixed = newest.tensors().into_iter().map(|(name, tensor)| {
        let tensor = if name.starts_with("mtp.") { older.tensor(&name).unwrap() } else { tensor };
        (name, tensor)
    });
    fs::write(frozen.join("model.safetensors"), safetensors::serialize(mixed, None).unwrap()).unwrap();
    let acceptance = |model: &Path| {
        let result = stdout_of(&format!(
            "bench speculation --model {} --rows configs/arithmetic/train.jsonl --device cpu --sequences 16 --group 4 \
             --max_completion_length 24 --repeats 1 --methods none,mtp --num_speculative_tokens 1",
            model.display()
        ));
        let result: Value = serde_json::from_str(&result).unwrap();
        assert_eq!(result["sizes"][0]["methods"][1]["differing_completions"], 0.0);
        result["sizes"][0]["methods"][1]["acceptance"].as_f64().unwrap()
    };
    let asked = arithmetic_prompts(8);
    let params = SamplingParams { num_generations: 4, max_completion_length: 24, ..SamplingParams::default() };
    let agreement = DraftAgreement::of(&Model::of_folder(&own), &asked, &options(), &params);
    println!("the head that follows: {agreement:?}");
    agreement.check();
    let (own, frozen) = (acceptance(&own), acceptance(&frozen));
    assert!(own > frozen + 0.2, "{own}, frozen {frozen}");
}

/// On a GPU in bfloat16, where the engine's head drafts what it has learned in training, and the drafts stay on the device.
#[test]
#[ignore = "needs a GPU"]
fn gpu_a_draft_head_follows_its_policy() {
    let folder = tempfile::tempdir().unwrap();
    let (model, run) = (folder.path().join("model"), folder.path().join("run"));
    let shape = "configs/arithmetic/config-hybrid.json";
    stdout_of(&format!("init --config_json {shape} --tokenizer {MODEL} --draft_head --output {}", model.display()));
    let keys = format!(
        "model_name_or_path={} device=cuda dtype=bfloat16 max_train_samples=32 max_steps=30 learning_rate=1e-3 entropy_coef=-0.002 \
         max_completion_length=24 per_device_train_batch_size=16 speculation=mtp num_speculative_tokens=2",
        model.display()
    );
    let all = lines(&run, &keys);
    let own: Vec<&Value> = all.iter().filter(|line| line["loss"].is_number()).collect();
    let of_steps = |steps: std::ops::Range<usize>| {
        let sum = |key: &str| own[steps.clone()].iter().map(|line| line[key].as_f64().unwrap()).sum::<f64>();
        sum("speculation/accepted_tokens") / sum("speculation/draft_tokens")
    };
    let (first, last) = (of_steps(0..3), of_steps(27..30));
    println!("{first:.3} of the first drafts are drawn, {last:.3} of the last");
    assert!(last > 0.3 && last > first, "{first} {last}");
}
