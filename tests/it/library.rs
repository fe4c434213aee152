//! Use of the library by another program.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use colo_grpo::grpo::{Denominators, LossInput};
use colo_grpo::internal::metrics::{read_completions, read_metrics};
use colo_grpo::internal::ranks::all_gather_bytes;
use colo_grpo::reward::RewardInput;
use colo_grpo::trainer::{RunSummary, StepReport, TrainerBuilder};
use colo_grpo::{Config, ExitCode, Result, Trainer, World};
use tch::Kind;

use crate::ranks;

const NUM_STEPS: usize = 3;

/// A builder of a run with three steps on one rank that uses functions of this program.
fn builder(folder: &Path, keys: &[&str]) -> TrainerBuilder {
    builder_in(Arc::new(World::single()), folder, keys)
}

fn builder_in(world: Arc<World>, folder: &Path, keys: &[&str]) -> TrainerBuilder {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let paths = [("model_name_or_path", "model"), ("train_file", "train.jsonl"), ("eval_file", "eval.jsonl")];
    let fixed = [
        "eval_steps=2",
        "eval_num_generations=1",
        "max_eval_samples=4",
        "max_steps=3",
        "save_steps=2",
        "per_device_train_batch_size=16",
        "reward_funcs=[\"remainder\"]",
        "reward_weights=[1.0]",
        "log_completions=true",
        "tensor_parallel_size=1",
        "kv_cache_bytes=4194304",
    ];
    let overrides = paths
        .map(|(key, file)| format!("{key}={}", root.join("configs/arithmetic").join(file).display()))
        .into_iter()
        .chain([format!("output_dir={}", folder.display())])
        .chain(fixed.iter().chain(keys).map(|key| (*key).to_owned()));
    let config = Config::load(Some(&root.join("configs/tiny-cpu.toml")), &overrides.collect::<Vec<_>>()).unwrap();
    let remainder = |input: &RewardInput<'_>| Ok((input.token_ids.iter().sum::<u32>() % 5) as f32); // completions differ
    Trainer::builder(config, world).reward("remainder", remainder)
}

fn own_loop(trainer: &mut Trainer) -> Result<RunSummary> {
    trainer.start()?;
    while !trainer.is_finished() {
        let (prompts, params) = (trainer.next_prompts()?, trainer.sampling_params());
        let groups = trainer.with_rollout(|engine| engine.generate(&prompts, &params, |_| ()))?;
        let batch = trainer.score(groups)?;
        let metrics = trainer.update(batch)?;
        assert!(metrics.value("grad_norm").unwrap() > 0.0);
        trainer.finish_step(&metrics)?;
    }
    trainer.finish()
}

type Files = (Vec<BTreeMap<String, u64>>, Vec<Vec<u8>>, String);

/// The files of a run without times: bits of the metrics, weights, completions.
fn files(folder: &Path) -> Files {
    let is_time = |name: &str| ["step_time", "timing_s/", "perf/", "transition/"].iter().any(|it| name.starts_with(it));
    let values = |values: BTreeMap<String, f64>| {
        values.into_iter().filter(|(name, _)| !is_time(name)).map(|(name, value)| (name, value.to_bits())).collect()
    };
    let lines = read_metrics(&folder.join("metrics.jsonl")).unwrap().into_iter().map(|line| values(line.values));
    let models = ["final", "checkpoint-2", "checkpoint-3"];
    let weights = models.map(|name| std::fs::read(folder.join(name).join("model.safetensors")).unwrap());
    let completions = folder.join(format!("completions/completions_{NUM_STEPS:05}.parquet"));
    (lines.collect(), weights.into(), format!("{:?}", read_completions(&completions).unwrap()))
}

/// Compares both training loops on two ranks, to which prompts, rewards and optimizer state are distributed.
#[test]
fn a_custom_loop_writes_the_same_bytes_as_run_on_two_ranks() {
    ranks::run(2, "library::a_custom_loop_writes_the_same_bytes_as_run_on_two_ranks", |world: World| {
        let (world, folder) = (Arc::new(world), tempfile::tempdir().unwrap());
        let paths = all_gather_bytes(&*world.group(), folder.path().to_str().unwrap().as_bytes()).unwrap();
        let shared = Path::new(std::str::from_utf8(&paths[0]).unwrap());
        let keys = ["zero.stage=2"];
        builder_in(world.clone(), &shared.join("run"), &keys).build().unwrap().run().unwrap();
        builder_in(world.clone(), &shared.join("loop"), &keys).build().unwrap().run_with(own_loop).unwrap();
        let (run, own) = (files(&shared.join("run")), files(&shared.join("loop")));
        assert!(run == own, "the files differ");
        assert!(run.1[0] != run.1[1], "nothing is learned");
        world.group().barrier().unwrap(); // the folder is rank 0's
    });
}

#[test]
fn a_custom_loop_writes_the_same_bytes_as_run() {
    tch::set_num_threads(1);
    let folder = tempfile::tempdir().unwrap();
    let bonus = ["entropy_coef=0.02", "use_adaptive_entropy=true", "entropy_target=9", "entropy_coef_delta=0.01"];
    let steps = Arc::new(Mutex::new(Vec::new()));
    let heard = steps.clone();
    let on_step = move |report: &StepReport<'_>| {
        heard.lock().unwrap().push((report.step, report.metrics["entropy_coef"]));
        Ok(())
    };
    let summary = builder(&folder.path().join("run"), &bonus).on_step(on_step).build().unwrap().run().unwrap();
    let own = builder(&folder.path().join("loop"), &bonus).build().unwrap().run_with(own_loop).unwrap();
    let expected = files(&folder.path().join("run"));
    assert!(expected == files(&folder.path().join("loop")), "the files differ");
    assert_eq!(
        expected.0.len(),
        2 * NUM_STEPS,
        "a line each step, and evaluations before, after step 2 and at the end"
    );
    assert!(expected.1[0] != expected.1[1], "nothing is learned");
    let rewards = |summary: &RunSummary| (summary.eval_reward_before, summary.eval_reward_after);
    assert_eq!(rewards(&own), rewards(&summary));
    let steps = steps.lock().unwrap();
    let coefs: Vec<f64> = steps.iter().map(|(_, coef)| *coef).collect();
    assert_eq!(steps.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [1, 2, 3]);
    assert!(coefs.windows(2).all(|pair| pair[1] > pair[0]), "{coefs:?}");

    // Functions of the program replace advantages and the loss: with advantages of 0 nothing is learned.
    let reinforce = |input: &LossInput<'_>, over: &Denominators| {
        let advantages = input.advantages.index_select(0, input.sequence_of_token);
        Ok(-(input.logprobs * advantages).sum(Kind::Float) / over.num_tokens)
    };
    let silent = folder.path().join("silent");
    let trainer = builder(&silent, &[]).loss(reinforce).advantages(|groups| {
        groups.iter_mut().flat_map(|group| &mut group.completions).for_each(|completion| completion.advantage = 0.0);
        Ok(())
    });
    trainer.build().unwrap().run().unwrap();
    let lines = read_metrics(&silent.join("metrics.jsonl")).unwrap();
    let norms: Vec<f64> = lines.iter().filter_map(|line| line.values.get("grad_norm")).copied().collect();
    assert_eq!(norms, [0.0; NUM_STEPS]);

    let refused = |builder: TrainerBuilder, key: &str| {
        let error = builder.build().unwrap_err();
        assert_eq!((error.exit_code(), error.to_string().starts_with(key)), (ExitCode::Configuration, true), "{error}");
    };
    refused(builder(&silent, &["entropy_coef=0.1"]).loss(reinforce), "entropy_coef");
    refused(builder(&silent, &[]).reward("unnamed", |_| Ok(0.0)), "reward_funcs");
    let oversampled = folder.path().join("oversampled");
    let mut trainer = builder(&oversampled, &["oversample=1.0"]).build().unwrap();
    assert!(trainer.next_prompts().unwrap_err().to_string().starts_with("oversample"));
    assert!(trainer.score(Vec::new()).unwrap_err().to_string().contains("next_prompts"));
}

#[test]
fn a_program_ends_with_the_message_and_the_code_of_its_error() {
    const VARIABLE: &str = "COLO_GRPO_LIBRARY";
    match std::env::var(VARIABLE).as_deref() {
        Ok("error") => colo_grpo::main(|| Config::load(None, &["nonsense=1".to_owned()]).map(drop)),
        Ok("panic") => colo_grpo::main(|| panic!("lost")),
        Ok(_) => colo_grpo::main(|| Ok(())),
        Err(_) => {}
    }
    for (kind, code, message) in [("error", 2, "nonsense"), ("panic", 10, "lost"), ("done", 0, "")] {
        let test = "library::a_program_ends_with_the_message_and_the_code_of_its_error";
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(VARIABLE, kind)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{kind}: {said}");
        assert!(said.contains(message) && said.contains("error: ") == (code != 0), "{kind}: {said}");
    }
}

/// Checks all names that users of the library can write: re-exports of lib.rs, and contents of public modules.
#[test]
fn every_public_name_is_used_by_an_example_that_compiles() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
    let pattern = |text: &str| regex::Regex::new(text).unwrap();
    let list = pattern(r"(?m)^( *#\[doc\(hidden\)\]\n)? *pub use (?:crate::)?([a-z_]+)::(\{[^}]*\}|\*|[A-Za-z_]+);");
    let (name, own) = (pattern("[A-Za-z_]+"), pattern("(?m)^pub (?:struct|enum|trait|fn|type|const) ([A-Za-z_]+)"));
    let words = pattern(r"(?m)^    ([A-Z][A-Za-z]+) \{$"); // of the macro that makes keys' words
    let named = |text: &str| name.find_iter(text).map(|found| found.as_str().to_owned()).collect::<Vec<_>>();
    let firsts = |pattern: &regex::Regex, text: &str| {
        pattern.captures_iter(text).map(|found| found[1].to_owned()).collect::<Vec<_>>()
    };
    let library = read("src/lib.rs");
    let rooms = firsts(&pattern("(?m)^pub mod ([a-z]+);"), &library).into_iter().filter(|room| room != "internal");
    let mut names = Vec::new();
    for room in rooms.map(Some).chain([None]) {
        let text = room.as_ref().map_or(library.clone(), |room| read(&format!("src/{room}/mod.rs")));
        names.extend(firsts(&own, &text));
        for found in list.captures_iter(&text).filter(|found| found.get(1).is_none()) {
            match (&found[3], &room) {
                ("*", Some(room)) => {
                    let text = read(&format!("src/{room}/{}.rs", &found[2]));
                    names.extend(firsts(&own, &text).into_iter().chain(firsts(&words, &text)));
                }
                (listed, _) => names.extend(named(listed)),
            }
        }
    }
    names.sort();
    names.dedup();
    assert!(names.len() > 100 && names.contains(&"LossType".to_owned()), "{names:?}");
    let mut code = read("examples/reinforce.rs");
    for file in files_of(&root.join("src")).into_iter().filter(|file| file.extension().is_some_and(|kind| kind == "rs"))
    {
        let text = std::fs::read_to_string(file).unwrap();
        let is_doc = |line: &&str| line.trim_start().starts_with("///") || line.trim_start().starts_with("//!");
        let docs: Vec<&str> = text.lines().filter(is_doc).map(|line| &line.trim_start()[3..]).collect();
        code.extend(docs.join("\n").split("```").skip(1).step_by(2));
    }
    code.extend(read("docs/library.md").split("```").skip(1).step_by(2));
    let code: String = code.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n");
    let used: std::collections::BTreeSet<_> = named(&code).into_iter().collect();
    names.retain(|name| !used.contains(name));
    assert!(names.is_empty(), "no example uses {names:?}: add them to the documentation of their room");
}

fn files_of(folder: &Path) -> Vec<std::path::PathBuf> {
    let paths = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    paths.flat_map(|path| if path.is_dir() { files_of(&path) } else { vec![path] }).collect()
}
