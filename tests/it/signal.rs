//! Groups without a gradient, because all rewards are equal: they are replaced in the same rollout or left out of the update; a batch may contain
//! only
//! such groups.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use colo_grpo::Config;
use colo_grpo::internal::data::PromptSampler;
use colo_grpo::internal::metrics::{CompletionRow, read_completions, read_metrics};
use colo_grpo::internal::ranks::World;
use colo_grpo::internal::trainer::Trainer;
use colo_grpo::reward::RewardInput;

use crate::checkpoint::Runs;
use crate::ranks;

const NUM_STEPS: u64 = 3;
const NUM_GROUPS: usize = 4;
const NUM_ROWS: usize = 96;

/// A hash of a prompt's or completion's bytes.
fn mixed(bytes: impl Iterator<Item = u64>) -> u64 {
    bytes.fold(0x9e37_79b9, |word: u64, byte| (word ^ byte).wrapping_mul(0x0100_0000_01b3).rotate_left(17))
}

/// A reward for which a quarter of the rows is always solved, a quarter never; completions of the others are right by chance.
fn known_rate(input: &RewardInput<'_>) -> f32 {
    let of_row = mixed(input.prompt.bytes().map(u64::from)) >> 7;
    let of_completion = mixed(input.token_ids.iter().map(|id| u64::from(*id))) >> 9;
    match of_row % 4 {
        0 => 0.0,
        1 => 1.0,
        _ => (of_completion % 2) as f32,
    }
}

/// Results of a run: its metrics without times, completions of each step in the order of prompts, final weights.
struct Trained {
    metrics: Vec<BTreeMap<String, f64>>,
    completions: Vec<Vec<CompletionRow>>,
    weights: Vec<u8>,
}

/// Trains with a reward of known solve rates, which takes `delay` for a prompt. Returns the results on the first rank.
fn train(world: Arc<World>, folder: &Path, delay: fn(u64) -> u64, keys: &[&str]) -> Option<Trained> {
    let (rank, size) = (world.rank(), world.size());
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let overrides = [
        format!("model_name_or_path={}", root.join("configs/arithmetic/model").display()),
        format!("train_file={}", root.join("configs/arithmetic/train.jsonl").display()),
        format!("output_dir={}", folder.display()),
        format!("max_train_samples={NUM_ROWS}"),
        format!("per_device_train_batch_size={}", 8 * NUM_GROUPS / size),
        format!("max_steps={NUM_STEPS}"),
    ];
    let fixed = [
        "eval_file=none",
        "eval_steps=none",
        "save_steps=none",
        "reward_funcs=[\"known_rate\"]",
        "reward_weights=[1.0]",
        "dynamic_sampling=replace",
        "log_completions=true",
        "tensor_parallel_size=1",
        "kv_cache_bytes=4194304",
    ];
    let overrides: Vec<String> =
        overrides.into_iter().chain(fixed.iter().chain(keys).map(|key| (*key).to_owned())).collect();
    let config = Config::load(Some(&root.join("configs/tiny-cpu.toml")), &overrides).unwrap();
    let trainer = Trainer::builder(config, world).reward("known_rate", move |input| {
        std::thread::sleep(Duration::from_millis(delay(mixed(input.prompt.bytes().map(u64::from)))));
        Ok(known_rate(input))
    });
    trainer.build().unwrap().run().unwrap();
    if rank > 0 {
        return None;
    }
    let is_time = |name: &str| ["step_time", "timing_s/", "perf/", "transition/"].iter().any(|it| name.starts_with(it));
    let lines = read_metrics(&folder.join("metrics.jsonl")).unwrap().into_iter();
    let metrics = lines.map(|line| line.values.into_iter().filter(|(name, _)| !is_time(name)).collect()).collect();
    let completions = |step| {
        let mut rows = read_completions(&folder.join(format!("completions/completions_{step:05}.parquet"))).unwrap();
        rows.sort_by(|a, b| a.prompt.cmp(&b.prompt)); // stable: the completions of a group stay in order
        rows
    };
    let weights = std::fs::read(folder.join("final/model.safetensors")).unwrap();
    Some(Trained { metrics, completions: (1..=NUM_STEPS).map(completions).collect(), weights })
}

fn fast(_: u64) -> u64 {
    0
}

/// Checks replaced and kept groups of every step against the rows in the order of the data.
fn check_batches(trained: &Trained) {
    let mut sampler = PromptSampler::new(NUM_ROWS, 42, true).dropping_last(NUM_GROUPS);
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/arithmetic/train.jsonl"));
    let questions: Vec<String> = text
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["prompt"][0]["content"].to_string())
        .collect();
    let mut num_replaced = 0;
    for (rows, metrics) in trained.completions.iter().zip(&trained.metrics) {
        let groups: Vec<&[CompletionRow]> = rows.chunk_by(|a, b| a.prompt == b.prompt).collect();
        assert!(groups.iter().all(|group| group.len() == 8), "no prompt comes twice");
        let mut drawn = sampler.next_batch(NUM_GROUPS).unwrap();
        while drawn.len() < groups.len() {
            let next = sampler.next_batch_beside(1, &drawn).unwrap();
            drawn.extend(next);
        }
        let mut num_kept = 0;
        for (index, row) in drawn.iter().enumerate() {
            let question = questions[*row].trim_matches('"');
            let group = groups.iter().find(|group| group[0].prompt.contains(question)).unwrap();
            let has_signal = group.iter().any(|row| row.reward != group[0].reward);
            assert!(group.iter().all(|row| row.dropped == Some(!has_signal)), "{question}");
            assert!(group.iter().all(|row| has_signal == (row.advantage != 0.0)), "{question}");
            num_kept += usize::from(has_signal);
            assert_eq!(
                num_kept == NUM_GROUPS,
                index + 1 == drawn.len(),
                "the last row that is drawn completes the batch"
            );
        }
        num_replaced += groups.len() - NUM_GROUPS;
        let count = |name: &str| metrics[&format!("dynamic_sampling/{name}")];
        assert_eq!(count("generated_groups"), groups.len() as f64);
        assert_eq!(count("kept_groups"), NUM_GROUPS as f64);
        assert_eq!(count("no_signal_groups"), count("replaced_groups"));
        assert_eq!(count("gen_batches"), groups.len() as f64 / NUM_GROUPS as f64);
        assert_eq!(metrics["frac_reward_zero_std"], 0.0);
    }
    assert!(num_replaced >= 3, "{num_replaced} of {NUM_STEPS} steps");
}

/// The batch contains the first groups with different rewards in the order of the data, regardless of which reward is computed first.
#[test]
fn groups_with_equal_rewards_are_replaced_in_data_order() {
    tch::set_num_threads(1);
    let folder = tempfile::tempdir().unwrap();
    let run = |name: &str, delay: fn(u64) -> u64| {
        train(Arc::new(World::single()), &folder.path().join(name), delay, &[]).unwrap()
    };
    let straight = run("straight", fast);
    check_batches(&straight);
    for (name, delay) in [("early", (|word| word % 23) as fn(u64) -> u64), ("late", |word| 23 - word % 23)] {
        let other = run(name, delay);
        assert_eq!(format!("{:?}", other.metrics), format!("{:?}", straight.metrics), "{name}"); // NaN equals itself
        assert!(other.completions == straight.completions && other.weights == straight.weights, "{name}");
    }
}

#[test]
fn two_engines_replace_groups_like_one() {
    ranks::run(2, "signal::two_engines_replace_groups_like_one", |world: World| {
        tch::set_num_threads(1);
        let (world, folder) = (Arc::new(world), tempfile::tempdir().unwrap());
        let rank = world.rank();
        let slow = |word| word % 11;
        let several =
            [("apart", "tensor_parallel_size=1"), ("together", "tensor_parallel_size=2")].map(|(name, tp)| {
                train(world.clone(), &folder.path().join(name), slow, &[tp, "gradient_accumulation_steps=2"])
            });
        if rank > 0 {
            return;
        }
        let keys = ["gradient_accumulation_steps=2"];
        let alone = train(Arc::new(World::single()), &folder.path().join("alone"), fast, &keys).unwrap();
        for several in several.into_iter().flatten() {
            for (own, expected) in several.completions.iter().zip(&alone.completions) {
                let texts = |rows: &[CompletionRow]| -> Vec<_> {
                    rows.iter().map(|row| (row.prompt.clone(), row.completion.clone(), row.dropped)).collect()
                };
                assert_eq!(texts(own), texts(expected));
            }
            for (own, expected) in several.metrics.iter().zip(&alone.metrics) {
                for name in ["loss", "reward", "grad_norm", "dynamic_sampling/reward", "num_tokens"] {
                    let difference = (own[name] - expected[name]).abs();
                    assert!(
                        difference <= 1e-6 + 1e-4 * expected[name].abs(),
                        "{name}: {} for {}",
                        own[name],
                        expected[name]
                    );
                }
            }
        }
    });
}

/// With the demo's own rewards and one engine on two ranks.
#[test]
fn a_resumed_run_with_replacement_equals_an_uninterrupted_one() {
    let runs = Runs::new();
    let replace = ["dynamic_sampling=replace"];
    runs.train_to_the_end("straight", 2, &replace);
    let value =
        |run: &str, step, name: &str| runs.metrics(run)[&(step, false)].values[&format!("dynamic_sampling/{name}")];
    assert!((1..=6).any(|step| value("straight", step, "replaced_groups") > 0.0));
    assert!((1..=6).all(|step| value("straight", step, "kept_groups") == 4.0));
    runs.train_to_the_end("resumed", 2, &[&replace[..], &[&runs.resume("straight", 4)]].concat());
    runs.assert_same("resumed", "straight", &[5, 6]);
    let apart = ["mode=split", "split.rollout_gpus=1", "residency.optimizer=auto", "tensor_parallel_size=1"];
    runs.train_to_the_end("split", 2, &[&replace[..], &apart].concat());
    (1..=6).for_each(|step| runs.assert_close("split", "straight", step));
}

/// Two of three ranks generate the next batch while the third one trains.
#[test]
fn split_mode_engines_replace_groups_while_others_train() {
    let runs = Runs::new();
    let ahead = [
        "mode=split",
        "split.rollout_gpus=2",
        "split.async_steps=1",
        "residency.optimizer=auto",
        "tensor_parallel_size=1",
    ];
    let keys = [&ahead[..], &["dynamic_sampling=replace", "per_device_train_batch_size=8", "save_steps=3"]].concat();
    runs.train_to_the_end("ahead", 3, &keys);
    let metrics = runs.metrics("ahead");
    let value = |step, name: &str| metrics[&(step, false)].values[&format!("dynamic_sampling/{name}")];
    assert!((1..=6).all(|step| value(step, "kept_groups") == 3.0));
    assert!((1..=6).any(|step| value(step, "replaced_groups") > 0.0));
    runs.train_to_the_end("resumed", 3, &[&keys[..], &[&runs.resume("ahead", 3)]].concat());
    runs.assert_same("resumed", "ahead", &[4, 5, 6]);
}

/// The samples are those of a run that keeps all groups, and only the other groups contribute to the gradient.
#[test]
fn filtered_groups_are_excluded_from_updates() {
    let runs = Runs::new();
    let one = ["max_steps=1", "save_steps=none", "per_device_train_batch_size=128"]; // 32 groups
    runs.train_to_the_end("all", 2, &one);
    runs.train_to_the_end("filtered", 2, &[&one[..], &["dynamic_sampling=filter"]].concat());
    let of = |run: &str| runs.metrics(run).remove(&(1, false)).unwrap().values;
    let (all, filtered) = (of("all"), of("filtered"));
    let num_kept = filtered["dynamic_sampling/kept_groups"];
    assert!(0.0 < num_kept && num_kept < 32.0, "{num_kept}");
    assert_eq!(filtered["dynamic_sampling/no_signal_groups"], all["frac_reward_zero_std"] * 32.0);
    assert!((filtered["dynamic_sampling/reward"] - all["reward"]).abs() < 1e-9);
    assert_eq!(filtered["frac_reward_zero_std"], 0.0);
    assert!(filtered["num_tokens"] < all["num_tokens"] && filtered["grad_norm"] > all["grad_norm"]);
}

/// The reward is constant, whatever the model writes.
#[test]
fn a_run_whose_groups_all_have_equal_rewards_ends_with_the_counts() {
    let runs = Runs::new();
    let solved = ["reward_funcs=[\"format\"]", "reward_weights=[1.0]", "reward.format_pattern=.*"];
    let replace = ["dynamic_sampling=replace", "dynamic_sampling_max_gen_batches=3"];
    let ended = runs.train("replace", 2, &[&solved[..], &replace].concat());
    assert_eq!(ended.code, Some(3), "{}", ended.output);
    let message = "no group of completions gives a training signal: 12 groups were sampled for a batch of 4 (at most 12: \
                   dynamic_sampling_max_gen_batches = 3 batches, or all 256 rows): 12 have equal rewards; their mean \
                   reward is 1.0000. Use rows";
    assert!(ended.output.contains(message), "{}", ended.output);
    let ended = runs.train("filter", 2, &[&solved[..], &["dynamic_sampling=filter"]].concat());
    assert_eq!(ended.code, Some(3), "{}", ended.output);
    assert!(
        ended.output.contains("3 steps in a row; 4 groups were sampled in the last one: 4 have equal"),
        "{}",
        ended.output
    );
    assert!(
        ended.output.contains("step 2: warning: only 0 of 4 sampled groups give a training signal"),
        "{}",
        ended.output
    );

    // A small data set: groups with a signal are there, but not for a whole batch.
    let few = ["max_train_samples=6", "dynamic_sampling=replace", "dynamic_sampling_range=[0.05, 0.2]", "max_steps=1"];
    let ended = runs.train("few", 2, &few);
    let seen = match ended.code {
        Some(0) => "of 6 sampled groups give a training signal, fewer than the 4 groups of a batch",
        _ => "(at most 6: dynamic_sampling_max_gen_batches = 10 batches, or all 6 rows)",
    };
    assert!(ended.output.contains(seen), "{}", ended.output);
}
