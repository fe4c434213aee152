//! Runs in split mode, in which ranks either train or generate, compared with colocated runs.

use crate::checkpoint::Runs;

/// Settings for three ranks with 24 completions per step.
const THREE_RANKS: [&str; 3] = ["per_device_train_batch_size=8", "tensor_parallel_size=1", "residency.optimizer=auto"];
const ONE_GENERATES: [&str; 2] = ["mode=split", "split.rollout_gpus=1"];

/// Four ranks in each mode: two tensor-parallel engines and ZeRO-2 on all ranks, compared with ZeRO-3 on two ranks and one engine on the two others.
/// A checkpoint of the split run can be resumed in colocated mode.
#[test]
fn split_mode_trains_like_colocated_mode() {
    let runs = Runs::new();
    let evaluated = [
        "eval_file=configs/arithmetic/eval.jsonl",
        "eval_num_generations=1",
        "eval_steps=4",
        "max_steps=5",
        "per_device_train_batch_size=8",
    ];
    runs.train_to_the_end("both", 4, &evaluated);
    let split = ["mode=split", "split.rollout_gpus=2", "residency.optimizer=auto", "zero.stage=3"];
    let split = [&evaluated[..], &split, &["save_steps=4"]].concat();
    runs.train_to_the_end("split", 4, &split);
    (1..=5).for_each(|step| runs.assert_close("split", "both", step));
    let evaluation = |run: &str, step| runs.metrics(run)[&(step, true)].values["eval_reward"];
    [0, 4].into_iter().for_each(|step| assert_eq!(evaluation("split", step), evaluation("both", step), "step {step}"));
    let line = &runs.metrics("split")[&(5, false)];
    for name in ["timing_s/idle_trainers", "timing_s/idle_generators"] {
        assert!(line.values[name] > 0.0, "{name}: {line:?}");
    }
    runs.train_to_the_end("back", 4, &[&evaluated[..], &[&runs.resume("split", 4)]].concat());
    runs.assert_close("back", "both", 5);
}

#[test]
fn split_mode_engines_receive_adapters() {
    let runs = Runs::new();
    let adapters = ["max_steps=3", "lora.r=4", "learning_rate=1e-3", "zero.stage=2"];
    let penalty = ["use_kl_in_reward=true", "beta=0.5", "kl_estimator=k1"];
    let common = [&THREE_RANKS[..], &adapters, &penalty].concat();
    runs.train_to_the_end("both", 3, &common);
    runs.train_to_the_end("split", 3, &[&common[..], &ONE_GENERATES].concat());
    (1..=3).for_each(|step| runs.assert_close("split", "both", step));
    let last = &runs.metrics("both")[&(3, false)].values;
    assert!(
        last["kl"].abs() > 1e-6 && last["frac_reward_zero_std"] == 0.0,
        "the divergence tells completions apart: {last:?}"
    );
}

/// Policy, reference and the separate engine all use the configured residual dtype.
#[test]
fn split_mode_engines_use_the_trainers_residual_dtype() {
    let runs = Runs::new();
    let keys = [
        "dtype=bfloat16",
        "max_steps=1",
        "save_steps=none",
        "beta=0.05",
        "residency.reference=host",
        "max_train_samples=4096",
    ];
    let [narrow, wide] = ["auto", "float32"].map(|residual| {
        let key = format!("residual_dtype={residual}");
        runs.train_to_the_end(residual, 3, &[&THREE_RANKS[..], &ONE_GENERATES, &keys, &[&key]].concat());
        let first = runs.metrics(residual).remove(&(1, false)).unwrap();
        assert!(first.values["kl"].abs() < 1e-6, "{first:?}");
        first.values["sampling/sampling_logp_difference/mean"]
    });
    println!("{wide:.2e} apart with a float32 stream, {narrow:.2e} without");
    assert!(0.0 < wide && wide < 0.8 * narrow, "{wide}, not below {narrow}");
}

/// Each rank keeps its pipeline stage's layers of the received weights. The engine samples the same tokens as one on a single rank, also ahead of the
/// trainer and with adapters. 24 completions per step.
#[test]
fn split_mode_engines_in_stages_sample_like_single_ranks() {
    let runs = Runs::new();
    let common = ["max_steps=3", "save_steps=none", "tensor_parallel_size=1", "residency.optimizer=auto", "mode=split"];
    let run = |name: &str, num_ranks: usize, more: &[&str]| {
        let share = format!("per_device_train_batch_size={}", 24 / num_ranks);
        let engines = format!("split.rollout_gpus={}", num_ranks - 1);
        runs.train_to_the_end(name, num_ranks, &[&common[..], &[&share, &engines], more].concat());
    };
    let stages = ["pipeline_parallel_size=3", "pipeline_partition=2,1,1"];
    let ahead = ["lora.r=4", "learning_rate=1e-3", "split.async_steps=2"];
    run("one", 2, &[]);
    run("stages", 4, &stages);
    run("ahead", 2, &ahead);
    run("stages-ahead", 3, &[&ahead[..], &["pipeline_parallel_size=2"]].concat());
    for (staged, one) in [("stages", "one"), ("stages-ahead", "ahead")] {
        (1..=3).for_each(|step| runs.assert_close(staged, one, step));
        let idle = runs.metrics(staged)[&(1, false)].values["pipeline/idle_share"];
        assert!(idle > 0.0 && idle < 1.0, "{idle}");
    }
    run("in-flight", 3, &[&ahead[..], &["pipeline_parallel_size=2", "split.in_flight_updates=true"]].concat());
    let oldest = |step| runs.metrics("in-flight")[&(step, false)].values["staleness/max"];
    assert!([1, 2, 3].into_iter().zip([0.0, 1.0, 2.0]).all(|(step, most)| oldest(step) <= most));
}

/// The batch of a step was sampled with the weights before the previous step. Exceptions are the first batches after the start, a
/// checkpoint or an evaluation, which are sampled with the newest weights.
#[test]
fn split_mode_engines_sample_one_step_ahead() {
    let runs = Runs::new();
    let evaluated = ["eval_file=configs/arithmetic/eval.jsonl", "eval_num_generations=1", "eval_steps=4"];
    let ahead = ["split.async_steps=1", "save_steps=3", "learning_rate=1e-3"];
    let ahead = [&THREE_RANKS[..], &ONE_GENERATES, &evaluated, &ahead].concat();
    runs.train_to_the_end("ahead", 3, &ahead);
    let metrics = runs.metrics("ahead");
    let gap = |step| metrics[&(step, false)].values["sampling/sampling_logp_difference/mean"];
    for (step, is_newest) in [(1, true), (2, false), (3, false), (4, true), (5, true), (6, false)] {
        assert_eq!(gap(step) < 1e-5, is_newest, "step {step}: {}", gap(step));
    }
    runs.train_to_the_end("resumed", 3, &[&ahead[..], &[&runs.resume("ahead", 3)]].concat());
    runs.assert_same("resumed", "ahead", &[4, 5, 6]);
}

/// Engines sample two steps ahead: no token is older than that, queues are empty at checkpoints, and a resumed run is equal bit for bit.
/// Ages are at most as large with in-flight weight updates, and the same with replaced groups and a curriculum.
#[test]
fn split_mode_engines_sample_two_steps_ahead() {
    let runs = Runs::new();
    let ahead = ["split.async_steps=2", "save_steps=4", "max_steps=8", "learning_rate=1e-3"];
    let ahead = [&THREE_RANKS[..], &ONE_GENERATES, &ahead].concat();
    let ages = |run: &str, name: &str| -> Vec<f64> {
        (1..=8).map(|step| runs.metrics(run)[&(step, false)].values[name]).collect()
    };
    runs.train_to_the_end("ahead", 3, &ahead);
    assert_eq!(ages("ahead", "staleness/mean"), [0.0, 1.0, 2.0, 2.0, 0.0, 1.0, 2.0, 2.0]);
    let values = &runs.metrics("ahead")[&(4, false)].values;
    assert_eq!([0, 1, 2].map(|age| values[&format!("staleness/age_{age}/token_share")]), [0.0, 0.0, 1.0]);
    let (of_age, of_all) = ("staleness/age_2/sampling_logp_difference", "sampling/sampling_logp_difference/mean");
    assert!(values[of_age] > 1e-5 && (values[of_age] - values[of_all]).abs() < 1e-9, "{values:?}");
    runs.train_to_the_end("resumed", 3, &[&ahead[..], &[&runs.resume("ahead", 4)]].concat());
    runs.assert_same("resumed", "ahead", &[5, 6, 7, 8]);

    runs.train_to_the_end("in-flight", 3, &[&ahead[..], &["split.in_flight_updates=true"]].concat());
    let greatest = ages("in-flight", "staleness/max");
    assert!(
        greatest.iter().zip([0.0, 1.0, 2.0, 2.0, 0.0, 1.0, 2.0, 2.0]).all(|(got, most)| *got <= most),
        "{greatest:?}"
    );
    assert!(greatest[1] == 1.0 && greatest[5] == 1.0, "{greatest:?}");

    let replaced = ["dynamic_sampling=replace", "curriculum.solve_rate=[0.1, 0.9]", "learning_rate=1e-5"];
    runs.train_to_the_end("replaced", 3, &[&ahead[..], &replaced].concat());
    assert_eq!(ages("replaced", "staleness/mean"), ages("ahead", "staleness/mean"));
    runs.train_to_the_end("continued", 3, &[&ahead[..], &replaced, &[&runs.resume("replaced", 4)]].concat());
    runs.assert_same("continued", "replaced", &[5, 6, 7, 8]);
}

#[test]
fn a_failed_trainer_or_generator_ends_the_other() {
    let runs = Runs::new();
    let ahead = [&THREE_RANKS[..], &ONE_GENERATES, &["split.async_steps=1", "save_steps=none"]].concat();
    for (fault, message) in [
        ("fault=2:1:generate:error", "rank 2, step 1, generate: injected fault"),
        ("fault=2:1:sleep:panic", "rank 2, step 1, sleep: panic in training: injected panic in sleep"),
        ("fault=0:1:gather:error", "rank 0, step 1, gather: injected fault"),
        ("fault=1:1:forward_backward:error", "rank 1, step 1, forward_backward: injected fault"),
    ] {
        let failed = runs.train("failed", 3, &[&ahead[..], &[fault]].concat());
        assert_eq!(failed.code, Some(10), "{}", failed.output);
        assert!(failed.output.contains(message), "{}", failed.output);
    }
    let refused = runs.train("refused", 2, &["mode=split", "split.rollout_gpus=2", "residency.optimizer=auto"]);
    assert_eq!(refused.code, Some(2), "{}", refused.output);
    assert!(refused.output.contains("1 to 1: at least one of the 2 ranks has to train"), "{}", refused.output);
}

/// A run stopped between two checkpoints, with batches in the queue, equals an uninterrupted one bit for bit after its resume.
#[test]
fn a_run_stopped_with_batches_ahead_resumes_like_an_uninterrupted_one() {
    let runs = Runs::new();
    for (name, num_ahead, at) in [("one", 1, 2), ("two", 2, 3)] {
        let steps = &format!("split.async_steps={num_ahead}");
        let keys =
            [&THREE_RANKS[..], &ONE_GENERATES, &[steps, "save_steps=6", "max_steps=6", "learning_rate=1e-3"]].concat();
        runs.train_to_the_end(name, 3, &keys);
        let stopped = format!("{name}-stopped");
        let fault = format!("fault=0:{}:forward_backward:term", at - 1);
        let ended = runs.train(&stopped, 3, &[&keys[..], &[&fault]].concat());
        assert_eq!(ended.code, Some(75), "{}", ended.output);
        let resume = runs.resume(&stopped, at);
        let state =
            std::fs::read_to_string(format!("{}/trainer_state.json", resume.split_once('=').unwrap().1)).unwrap();
        let state: serde_json::Value = serde_json::from_str(&state).unwrap();
        assert_eq!(state["ahead"].as_array().unwrap().len(), num_ahead, "{name}");
        runs.train_to_the_end(&format!("{name}-resumed"), 3, &[&keys[..], &[&resume]].concat());
        runs.assert_same(&format!("{name}-resumed"), name, &((at + 1)..=6).collect::<Vec<_>>());
    }
}
