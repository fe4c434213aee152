//! Runs of the program whose model calls tools between its turns, with the calculator's model.

use std::fs;
use std::path::Path;

use colo_grpo::internal::metrics::read_completions;

use crate::program::{command, end, metrics, run, signal, wait_until};

const CALCULATOR: &str = "--config configs/calculator.toml eval_steps=none eval_file=none max_steps=1 log_completions=true \
    save_steps=none max_train_samples=64";

/// Completions of the first step, sorted.
fn completions(output: &Path) -> Vec<String> {
    let rows = read_completions(&output.join("completions/completions_00001.parquet")).unwrap();
    let mut texts: Vec<String> = rows.into_iter().map(|row| format!("{} {}", row.prompt, row.completion)).collect();
    texts.sort();
    texts
}

/// Trajectories depend only on their random keys: neither the number of ranks of an engine, nor the time at which tools answer, changes a token. The
/// trainer's log-probabilities equal the sampler's for every sampled token.
#[test]
fn tool_turns_are_equal_on_one_rank_and_on_two() {
    let folder = tempfile::tempdir().unwrap();
    let mut all = Vec::new();
    for (name, keys) in [
        ("alone", "--nproc 1 per_device_train_batch_size=64 full_determinism=true"),
        ("each", "--nproc 2 per_device_train_batch_size=32"),
        ("tight", "--nproc 1 per_device_train_batch_size=64 kv_cache_bytes=131072 max_num_seqs=24"),
        ("drafted", "--nproc 1 per_device_train_batch_size=64 speculation=ngram num_speculative_tokens=3"),
        ("shared", "--nproc 2 per_device_train_batch_size=32 tensor_parallel_size=2 zero.stage=3"),
        ("apart", "--nproc 2 per_device_train_batch_size=32 mode=split split.rollout_gpus=1"),
    ] {
        let output = folder.path().join(name);
        let ended = run(&format!("{CALCULATOR} {keys} output_dir={}", output.display()));
        assert_eq!(ended.code, Some(0), "{name}\n{}", ended.stderr);
        let lines = metrics(&output);
        let value = |metric: &str| lines[0][metric].as_f64().unwrap();
        assert!(value("sampling/sampling_logp_difference/max") < 1e-4, "{name}: {:?}", lines[0]);
        assert!(value("tools/call_frequency") > 0.1 && value("tools/failure_frequency") == 0.0, "{name}");
        assert_eq!(value("tools/mean_turns"), 1.0 + value("tools/call_frequency"), "{name}");
        let [kept, recomputed] = ["kept", "recomputed"].map(|tokens| value(&format!("tools/{tokens}_tokens")));
        assert!(
            if name == "tight" { recomputed > 0.0 } else { kept > 100.0 && recomputed == 0.0 },
            "{name}: {kept}, {recomputed}"
        );
        all.push(completions(&output));
    }
    assert!(all[0].iter().filter(|text| text.contains("[add(a=")).count() > 6, "{:?}", all[0]);
    all[1..].iter().for_each(|others| assert_eq!(*others, all[0]));

    let rows = read_completions(&folder.path().join("alone/completions/completions_00001.parquet")).unwrap();
    let with_calls: Vec<_> = rows.iter().filter(|row| row.messages.len() > 1).collect();
    assert!(with_calls.len() > 6 && rows.iter().all(|row| !row.messages.is_empty()));
    for row in with_calls {
        let [asked, told, ..] = row.messages.as_slice() else { panic!("{row:?}") };
        let call = &asked["tool_calls"][0]["function"];
        let sum = ["a", "b"].map(|name| call["arguments"][name].as_i64().unwrap()).iter().sum::<i64>();
        assert_eq!(
            (&call["name"], &told["role"], told["content"].as_str()),
            (&"add".into(), &"tool".into(), Some(&*sum.to_string()))
        );
        assert!(
            asked["sampled"].as_str().unwrap().contains("[add(a=") && asked["num_tokens"].as_u64() > Some(3),
            "{asked}"
        );
    }
    let report = fs::read_to_string(folder.path().join("alone/report.html")).unwrap();
    assert!(report.contains("<ol class=\"turns\">") && report.contains("<h5>assistant <span>"));
}

/// The command samples the same as the run's own evaluation, with the run's tools.
#[test]
fn eval_runs_tool_turns_like_training() {
    let folder = tempfile::tempdir().unwrap();
    let (output, samples) = (folder.path().join("run"), folder.path().join("samples.jsonl"));
    let keys = "--nproc 1 eval_file=configs/calculator/eval.jsonl eval_steps=1 max_eval_samples=12 per_device_train_batch_size=16";
    let ended = run(&format!("{CALCULATOR} {keys} output_dir={}", output.display()));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let before = metrics(&output).into_iter().find(|line| line.get("eval_reward").is_some()).unwrap();
    let mut lines = Vec::new();
    for ranks in ["--nproc 1", "--nproc 2 --tensor_parallel_size 2"] {
        let eval = format!(
            "eval {ranks} --model configs/calculator/model --config configs/calculator.toml --device cpu --dtype float32"
        );
        let ended = run(&format!("{eval} --output {} max_eval_samples=12", samples.display()));
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        let line: serde_json::Value = serde_json::from_str(ended.stdout.lines().last().unwrap()).unwrap();
        assert_eq!(line["avg@4"]["mean"], before["eval_reward"], "{line}");
        assert_eq!(line["tools/call_frequency"], before["eval_tools/call_frequency"], "{line}");
        lines.push(fs::read_to_string(&samples).unwrap());
    }
    assert_eq!(lines[0], lines[1]);
    assert!(lines[0].contains("\"role\":\"tool\"") && lines[0].lines().count() == 48, "{}", lines[0]);
}

/// The launcher checks the tools first; then ranks take long to load them. A stop request takes effect meanwhile.
#[test]
fn ranks_react_to_a_signal_while_loading_tools() {
    let folder = tempfile::tempdir().unwrap();
    let text = r#"
import pathlib, time
first, again = (pathlib.Path(__file__).with_name(name) for name in ("first", "again"))
if first.exists():
    again.touch()
    time.sleep(1000)
first.touch()

def add(a: int, b: int) -> int:
    """
    Adds.

    Args:
        a: One.
        b: Another.
    """
    return a + b
"#;
    let (file, again) = (folder.path().join("slow.py"), folder.path().join("again"));
    fs::write(&file, text).unwrap();
    let output = folder.path().join("run");
    let keys = format!("--nproc 2 tools=[\"{}:add\"] output_dir={}", file.display(), output.display());
    let mut run = command(&format!("{CALCULATOR} {keys}")).spawn().unwrap();
    wait_until(|| again.exists() || run.try_wait().unwrap().is_some());
    signal(run.id(), "-TERM");
    let ended = end(run);
    assert_eq!(ended.code, Some(75), "{}", ended.stderr);
    assert!(ended.stderr.contains("stopped by a signal before there was anything to save"), "{}", ended.stderr);
}

/// A hanging tool affects only its own turn, and rewards receive the messages.
#[test]
fn a_failing_tool_is_reported_to_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mine.py");
    let text = r#"
import os, time

def add(a: int, b: int) -> int:
    """
    Adds.

    Args:
        a: One.
        b: Another.
    """
    if a % 3 == 0:
        time.sleep(1000)
    if a % 3 == 1:
        os._exit(3)
    return a + b

def called(completions, **columns):
    for messages in completions:
        roles = [message["role"] for message in messages]
        assert roles == ["assistant", "tool"] * (len(roles) // 2) + ["assistant"], roles
        assert all("tool_calls" in message for message in messages[:-1:2])
    return [float(len(messages) > 1) for messages in completions]
"#;
    fs::write(&file, text).unwrap();
    let (mine, output) = (file.display(), folder.path().join("run"));
    let keys = format!("tools=[\"{mine}:add\"] reward_funcs=[\"{mine}:called\"] tool_timeout_s=2");
    let ended = run(&format!("{CALCULATOR} {keys} output_dir={}", output.display()));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let lines = metrics(&output);
    let value = |metric: &str| lines[0][metric].as_f64().unwrap();
    assert!(value("tools/num_timeouts") >= 1.0 && value("tools/max_latency_s") >= 0.5, "{:?}", lines[0]);
    let failed = value("tools/failure_frequency");
    assert!(failed > 0.2 && failed < 1.0, "{failed}");
    assert!((value("reward") - value("tools/call_frequency")).abs() < 0.05, "{:?}", lines[0]);
}

/// One of the tools kills the process that forks all tools. Trajectories with running tools are masked, and the run continues with a new
/// process. If this happens repeatedly, the run saves a checkpoint and ends.
#[test]
fn a_killed_tool_process_affects_only_its_trajectories() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mine.py");
    let text = r#"
import os, pathlib, signal, time
once, always = (pathlib.Path(__file__).with_name(name) for name in ("once", "always"))

def add(a: int, b: int) -> int:
    """
    Adds.

    Args:
        a: One.
        b: Another.
    """
    try:
        once.rename(once.with_name("done"))
        is_first = True
    except FileNotFoundError:
        is_first = False
    if is_first or always.exists():
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)
    return a + b

def called(completions, trainer_state, **columns):
    if trainer_state.global_step > 0 and once.with_name("may").exists():
        always.touch()
    return [float(len(messages) > 1) for messages in completions]
"#;
    fs::write(&file, text).unwrap();
    fs::write(folder.path().join("once"), "").unwrap();
    let (mine, output) = (file.display(), folder.path().join("run"));
    let keys = format!("tools=[\"{mine}:add\"] reward_funcs=[\"{mine}:called\"] reward_weights=[]");
    let ended = run(&format!("{CALCULATOR} {keys} output_dir={}", output.display()));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stderr.contains("the process of the tools is replaced"), "{}", ended.stderr);
    let lines = metrics(&output);
    let value = |metric: &str| lines[0][metric].as_f64().unwrap();
    assert!(value("tools/num_failed") >= 1.0 && value("tools/call_frequency") > 0.0, "{:?}", lines[0]);
    assert_eq!(value("rewards/num_failed"), value("tools/num_failed"), "{:?}", lines[0]);

    fs::write(folder.path().join("may"), "").unwrap();
    let output = folder.path().join("saved");
    let ended = run(&format!("{CALCULATOR} {keys} --nproc 2 max_steps=6 output_dir={}", output.display()));
    let times = "the process of the tools ended 3 times in a row without an answer in between";
    assert!(ended.code == Some(14) && ended.stderr.contains(times), "{}", ended.stderr);
    let mut names = fs::read_dir(&output).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert!(names.any(|name| name.starts_with("checkpoint-")), "{}", ended.stderr);
}

/// The row's column selects an environment, each in its own process. Ranks that share an engine begin a group when its environments are open.
#[test]
fn environments_give_rewards_and_reach_reward_functions() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("worlds.py");
    let text = r#"
import time

class Calculator:
    def reset(self, answer, **row):
        assert "environment" not in row and row["prompt"]
        self.answer, self.sums = int(answer), []

    def add(self, a: int, b: int) -> int:
        """
        Adds.

        Args:
            a: One.
            b: Another.
        """
        if a % 5 == 0:
            time.sleep(1000)
        self.sums.append(a + b)
        return a + b

    def get_reward(self):
        return float(self.answer in self.sums)

class Teller(Calculator):
    get_reward = None  # inherited, and not of this class

    def reset(self, **row):
        super().reset(**row)
        return " please"

def used(completions, environments, **columns):
    assert all(environment is None or environment.answer >= 0 for environment in environments)
    return [float(len(environment.sums)) if environment else 0.0 for environment in environments]
"#;
    fs::write(&file, text).unwrap();
    let rows =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/calculator/train.jsonl")).unwrap();
    let named = rows.lines().take(16).enumerate().map(|(index, row)| {
        row.replacen(
            '{',
            if index % 2 == 0 { "{\"environment\": \"sums\", " } else { "{\"environment\": \"told\", " },
            1,
        ) + "\n"
    });
    let train = folder.path().join("rows.jsonl");
    fs::write(&train, named.collect::<String>()).unwrap();
    let (worlds, output) = (file.display(), folder.path().join("run"));
    let keys = format!(
        "--nproc 2 tensor_parallel_size=2 per_device_train_batch_size=32 tools=[] environment_factory.sums={worlds}:Calculator \
         environment_factory.told={worlds}:Teller reward_funcs=[\"{worlds}:used\"] tool_timeout_s=3 max_prompt_length=88 \
         train_file={}",
        train.display()
    );
    let ended = run(&format!("{CALCULATOR} {keys} output_dir={}", output.display()));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let lines = metrics(&output);
    let value = |metric: &str| lines[0][metric].as_f64().unwrap();
    let lost = value("tools/num_failed");
    assert!(lost >= 1.0 && value("rewards/num_failed") == lost && value("tools/num_timeouts") >= 1.0, "{:?}", lines[0]);
    assert!(value("rewards/used/mean") > 0.1 && value("rewards/Calculator/mean") > 0.05, "{:?}", lines[0]);
    let rows = read_completions(&output.join("completions/completions_00001.parquet")).unwrap();
    let told = |row: &&colo_grpo::internal::metrics::CompletionRow| row.prompt.contains(" please");
    assert!(
        (1..rows.len()).contains(&rows.iter().filter(told).count()),
        "rows of both classes are drawn: {:?}",
        rows[0]
    );
    let own = |row: &colo_grpo::internal::metrics::CompletionRow| row.rewards[1].1;
    assert!(rows.iter().filter(told).all(|row| own(row).is_none()), "a class without get_reward has none of another's");
    assert!(rows.iter().any(|row| !told(&row) && own(row).is_some()), "a class with get_reward has its own");
}

/// A prompt longer than planned would shorten completions below `max_completion_length`; and all completions of a group must have the same prompt.
#[test]
fn environments_with_unusable_prompts_are_refused_with_the_key() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("talker.py");
    let class = |name: &str, text: &str| {
        format!(
            "class {name}:\n    def reset(self, **row):\n        return {text}\n\n    def get_reward(self):\n        return 1.0\n\n"
        )
    };
    fs::write(
        &file,
        class("Talker", "' please' * 30") + &class("Fickle", "f' {id(row)} {__import__(\"os\").getpid()}'"),
    )
    .unwrap();
    for (name, parts) in [
        ("Talker", ["max_prompt_length = ", "reset made a prompt of"]),
        ("Fickle", ["environment_factory = Fickle: expected a reset that depends only on the row", "for another"]),
    ] {
        let keys =
            format!("environment_factory={}:{name} output_dir={}", file.display(), folder.path().join("run").display());
        run(&format!("{CALCULATOR} {keys}")).assert_error(&keys, 2, &parts);
    }
}

/// An environment that records the calls it got, and a reward that compares them with the messages of its completion.
const COUNTED: &str = r#"
class Calculator:
    def reset(self, answer, **row):
        self.answer, self.sums = int(answer), []

    def add(self, a: int, b: int) -> int:
        """
        Adds.

        Args:
            a: One.
            b: Another.
        """
        self.sums.append(a + b)
        return a + b

    def get_reward(self):
        return float(self.answer in self.sums)

def agrees(completions, environments, **columns):
    for messages, environment in zip(completions, environments):
        roles = [message["role"] for message in messages]
        assert roles == ["assistant", "tool"] * (len(roles) // 2) + ["assistant"], roles
        told = [message["content"] for message in messages if message["role"] == "tool"]
        assert told == [str(sum) for sum in environment.sums], (told, environment.sums)
    return [float(len(messages) > 1) for messages in completions]
"#;

/// Unfinished groups continue in the next step with the state of their environments, and their sampled tokens do not change: with carried
/// groups, kept caches, replaced groups, and batches ahead of the trainer. After a restart they are played again.
#[test]
fn unfinished_trajectories_continue_with_their_tools() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("counted.py");
    fs::write(&file, COUNTED).unwrap();
    let file = file.display();
    let common = format!(
        "{CALCULATOR} max_steps=4 tools=[] environment_factory={file}:Calculator reward_funcs=[\"{file}:agrees\"] learning_rate=1e-9 \
         per_device_train_batch_size=16 max_num_seqs=10 max_train_samples=256"
    );
    for (name, keys) in [
        ("carried", "oversample=1.0 partial_rollout=true"),
        ("waits", "oversample=1.0 partial_rollout=true full_determinism=true"),
        (
            "kept",
            "oversample=1.0 partial_rollout=true carried_kv=keep eval_file=configs/calculator/eval.jsonl eval_steps=1 max_eval_samples=8",
        ),
        ("shared", "oversample=1.0 partial_rollout=true carried_kv=keep tensor_parallel_size=2"),
        ("dropped", "oversample=1.0"),
        ("replaced", "dynamic_sampling=replace"),
        ("filtered", "dynamic_sampling=filter"),
        ("ahead", "mode=split split.rollout_gpus=1 split.async_steps=2 split.in_flight_updates=true"),
        ("ahead, replaced", "mode=split split.rollout_gpus=1 split.async_steps=1 dynamic_sampling=replace"),
    ] {
        let output = folder.path().join(name.replace(", ", "-"));
        let ended = run(&format!("{common} --nproc 2 {keys} output_dir={}", output.display()));
        assert_eq!(ended.code, Some(0), "{name}\n{}", ended.stderr);
        let lines: Vec<_> = metrics(&output).into_iter().filter(|line| line.get("loss").is_some()).collect();
        assert_eq!(lines.len(), 4, "{name}");
        for line in &lines {
            let value = |metric: &str| line[metric].as_f64().unwrap();
            assert_eq!((value("rewards/num_failed"), value("tools/num_failed")), (0.0, 0.0), "{name}: {line:?}");
            assert!(
                value("sampling/sampling_logp_difference/max") < 1e-4 && value("rewards/agrees/mean") > 0.0,
                "{name}: {line:?}"
            );
        }
        if keys.contains("oversample") {
            let sum = |metric: &str| lines.iter().filter_map(|line| line[metric].as_f64()).sum::<f64>(); // null where nothing was sampled
            let goes_on = sum("partial_rollout/continued_token_share") > 0.0;
            assert_eq!(
                (goes_on, sum("partial_rollout/discarded_token_share") > 0.0),
                (name != "dropped", name == "dropped"),
                "{name}"
            );
            assert!(name == "dropped" || sum("partial_rollout/carried_groups") > 0.0, "{name}");
        }
    }
    // The checkpoint has the rows of groups under way and none of their tokens: nobody has their environments any more.
    let (output, keys) = (folder.path().join("saved"), "oversample=1.0 partial_rollout=true save_steps=2");
    let ended = run(&format!("{common} --nproc 2 {keys} output_dir={}", output.display()));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let state = fs::read_to_string(output.join("checkpoint-2/trainer_state.json")).unwrap();
    let state: serde_json::Value = serde_json::from_str(&state).unwrap();
    let carried = state["carried"].as_array().unwrap();
    assert!(
        !carried.is_empty() && carried.iter().all(|group| group["completions"] == serde_json::json!([])),
        "{carried:?}"
    );
    let from = format!("resume_from_checkpoint={}", output.join("checkpoint-2").display());
    let again = folder.path().join("again");
    let ended = run(&format!("{common} --nproc 2 {keys} {from} output_dir={}", again.display()));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let third = metrics(&again).into_iter().find(|line| line["step"] == 3.0 && line.get("loss").is_some()).unwrap();
    assert_eq!(third["partial_rollout/continued_token_share"], 0.0, "played anew: {third:?}");
    let straight = metrics(&output).into_iter().find(|line| line["step"] == 3.0 && line.get("loss").is_some()).unwrap();
    assert!(straight["partial_rollout/continued_token_share"].as_f64() > Some(0.0), "{straight:?}");
}

#[test]
fn unsupported_settings_with_tools_are_refused_at_the_start() {
    for (keys, code, parts) in [
        (
            "tools=configs/calculator/tools.py:subtract",
            2,
            &["tools = configs/calculator/tools.py:subtract", "no attribute 'subtract'"][..],
        ),
        (
            "reward_funcs=[] environment_factory=configs/calculator/tools.py:add",
            2,
            &["missing 2 required positional arguments"],
        ),
        (
            "tool_call_parser=auto",
            2,
            &["tool_call_parser = auto", "the format cannot be recognized from the chat template"],
        ),
        ("prompt_format=text train_file=nowhere/text.jsonl", 3, &["text.jsonl"]),
    ] {
        run(&format!("{CALCULATOR} {keys}")).assert_error(keys, code, parts);
    }
}
