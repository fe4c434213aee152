//! Rewards in runs of the program.

use std::fs;
use std::path::Path;

use crate::program::{SMALL_RUN, await_line, command, end, metrics, processes_of, run, stdout_of, wait_until};

/// A reward function that counts the calls of all ranks in a file. While a mark file exists, it crashes in the second step, after 16 completions
/// in the first.
const COUNTING: &str = r#"
import os, subprocess

def counting(prompts, completions, trainer_state, **columns):
    assert trainer_state.global_step < trainer_state.max_steps == 3
    with open(__file__ + ".calls", "a+") as calls:
        calls.write("." * len(completions))
        calls.seek(0)
        count = len(calls.read())
    if os.path.exists(__file__ + ".broken") and count > 20:
        os._exit(3)
    return [float(len(completion[0]["content"]) % 3) for completion in completions]

def starts_others(prompts, completions, **columns):
    sleeper = ["sh", "-c", "sleep 1000; :", __file__]
    for options in ({}, {"start_new_session": True}):
        subprocess.Popen(sleeper, **options)
    subprocess.Popen(["setsid", "--fork", *sleeper]).wait()
    return [float(len(completion[0]["content"]) % 3) for completion in completions]

def picky(prompts, completions, completion_ids, **columns):
    if sum(completion_ids[0]) % 2:
        raise ValueError("an odd sum")
    return [1.0]

def boom(completions, **columns):
    raise ValueError("never")
"#;

/// Row 31: the run saves a checkpoint and can be resumed when the service works again, as if it had not been interrupted.
#[test]
fn a_run_with_a_dying_reward_is_saved_and_can_be_resumed() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mine.py");
    fs::write(&file, COUNTING).unwrap();
    let broken = folder.path().join("mine.py.broken");
    fs::write(&broken, "").unwrap();
    let line = |output: &str| {
        format!(
            "--nproc 2 {SMALL_RUN} max_steps=3 save_steps=none reward.max_worker_failures=3 reward_weights=[] \
             reward_funcs=[\"{}:counting\"] output_dir={}/{output}",
            file.display(),
            folder.path().display()
        )
    };
    let ended = run(&line("run"));
    ended.assert_error("dead in the second step", 14, &["error: rank ", "step 1, reward: reward 'counting'"]);
    assert!(folder.path().join("run/checkpoint-1").exists(), "{}", ended.stderr);

    fs::remove_file(&broken).unwrap();
    let resumed = run(&format!("{} resume_from_checkpoint=latest", line("run")));
    assert_eq!(resumed.code, Some(0), "{}", resumed.stderr);
    let straight = run(&line("straight"));
    assert_eq!(straight.code, Some(0), "{}", straight.stderr);
    let left = |run: &str| fs::read(folder.path().join(run).join("final/model.safetensors")).unwrap();
    assert!(left("run") == left("straight"), "other weights than undisturbed");

    // A save that fails, too, is told and hides nothing.
    fs::write(&broken, "").unwrap();
    fs::remove_file(folder.path().join("mine.py.calls")).unwrap();
    let ended = run(&format!("{} fault=0:1:checkpoint:error", line("unsaved")));
    ended.assert_error(
        "unsaved",
        14,
        &["step 1, reward: reward 'counting'", "the progress since the last checkpoint could not be saved: "],
    );
}

#[test]
fn a_reward_function_with_unknown_columns_is_refused_early() {
    const NEEDING: &str = "def misspelt(completions, answr, level=1, **columns): pass\n\
                           def honest(completions, prompts, completion_ids, trainer_state, answer, *, level=1):\n    return [1.0] * len(completions)\n";
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mine.py");
    fs::write(&file, NEEDING).unwrap();
    let line = |name: &str| {
        let output = folder.path().join(name);
        let file = file.display();
        format!(
            "{SMALL_RUN} max_steps=1 save_steps=none reward_weights=[] reward_funcs=[{file}:{name}] output_dir={}",
            output.display()
        )
    };
    let told = ["reward_funcs = misspelt", "has a column 'answr'; its columns are answer"];
    run(&line("misspelt")).assert_error("an argument that is no column", 2, &told);
    assert!(!folder.path().join("misspelt/metrics.jsonl").exists());
    let ended = run(&line("honest"));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
}

/// Row 30: the metrics contain failures by reward and kind.
#[test]
fn reward_failures_appear_in_the_metrics() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mine.py");
    fs::write(&file, COUNTING).unwrap();
    let line = |name: &str| {
        format!(
            "{SMALL_RUN} max_steps=2 save_steps=none log_completions=true reward_funcs=[\"{}:picky\",\"numeric_answer\"] \
             output_dir={}",
            file.display(),
            folder.path().join(name).display()
        )
    };
    let ended = run(&line("run"));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("samples have no reward and are masked: reward 'picky' (error): ValueError: an odd sum"),
        "{}",
        ended.stderr
    );
    let lines = metrics(&folder.path().join("run"));
    for line in &lines {
        let failed = line["rewards/picky/failed/error"].as_f64().unwrap();
        assert!(failed > 0.0 && line["rewards/num_failed"].as_f64() == Some(failed), "{line}");
        assert_eq!(line["rewards/picky/mean"].as_f64(), Some(1.0), "{line}");
        assert!(line.get("rewards/numeric_answer/failed/error").is_none(), "{line}");
    }
    let _ = stdout_of(&format!("{} logging_steps=2", line("interval")));
    let interval = metrics(&folder.path().join("interval"));
    for name in ["rewards/num_failed", "rewards/picky/failed/error"] {
        let count = |line: &serde_json::Value| line[name].as_f64().unwrap();
        assert_eq!(interval.iter().map(count).collect::<Vec<_>>(), [lines.iter().map(count).sum::<f64>()], "{name}");
    }
}

/// A reward that fails for every sample is reported in each step, once for all ranks with its reason, and ends the run.
#[test]
fn a_run_ends_when_no_reward_gives_a_score() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mine.py");
    fs::write(&file, COUNTING).unwrap();
    let ended = run(&format!(
        "--nproc 2 {SMALL_RUN} max_steps=9 save_steps=none eval_file=configs/arithmetic/eval.jsonl reward_weights=[] \
         reward_funcs=[\"{}:boom\"] output_dir={}",
        file.display(),
        folder.path().join("run").display()
    ));
    let cause = format!("reward 'boom' (error): ValueError: never ({}:", file.display());
    let verdict = format!("no sample in 3 steps in a row could be scored: {cause}");
    ended.assert_error("boom", 14, &[&verdict, "no held-out sample could be scored"]);
    let told =
        "16 of 16 samples have no reward and are masked; this step trains on nothing, for the same reason as before";
    assert_eq!(ended.stderr.matches(told).count(), 3, "{}", ended.stderr);
    assert_eq!(ended.stderr.matches(&cause).count(), 2, "as it is found, and at the end\n{}", ended.stderr);
    assert!(
        !ended.stderr.contains("all groups have equal rewards"),
        "that is known of rewards alone\n{}",
        ended.stderr
    );
    assert_eq!(metrics(&folder.path().join("run")).len(), 4, "an evaluation and three steps");
}

/// However a rank fails while rewards are awaited, its worker processes end, too.
#[test]
fn reward_workers_die_with_their_rank() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mine.py");
    fs::write(&file, COUNTING).unwrap();
    for (kind, code) in [("kill", 10), ("segv", 10), ("exit", 10), ("oom", 11), ("stop", 15)] {
        let ended = run(&format!(
            "--nproc 2 {SMALL_RUN} save_steps=none heartbeat.reward_s=2 fault=1:0:reward:{kind} reward_weights=[] \
             reward_funcs=[\"{}:counting\"] output_dir={}/{kind}",
            file.display(),
            folder.path().display()
        ));
        assert_eq!(ended.code, Some(code), "{kind}\n{}", ended.stderr);
        assert!(ended.stderr.contains("error: rank 1, step 0, reward: "), "{kind}\n{}", ended.stderr);
        let is_alone = || processes_of(&file).is_empty();
        wait_until(is_alone);
    }
}

/// Processes started by rewards end with the run, even if they left its process group: when the run ends by itself, and when its processes are
/// killed.
#[test]
fn processes_started_by_rewards_end_with_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mine.py");
    fs::write(&file, COUNTING).unwrap();
    let line = |output: &str| {
        format!(
            "--nproc 2 {SMALL_RUN} save_steps=none reward_weights=[] reward_funcs=[\"{}:starts_others\"] output_dir={}/{output}",
            file.display(),
            folder.path().display()
        )
    };
    let is_alone = || processes_of(&file).is_empty();
    let ended = run(&line("done"));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    wait_until(is_alone); // it ended
    let ended = run(&format!("{} fault=1:0:forward_backward:kill", line("rank")));
    assert_eq!(ended.code, Some(10), "{}", ended.stderr);
    wait_until(is_alone); // a rank was killed
    let mut launcher = command(&format!("{} max_steps=1000", line("launcher"))).spawn().unwrap();
    await_line(&mut launcher, "step 1/1000");
    launcher.kill().unwrap();
    end(launcher);
    wait_until(is_alone); // the launcher was killed
}

/// The example configuration with custom rewards runs.
#[test]
fn the_reward_example_runs() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    let ended = run(&format!(
        "--config configs/rewards.toml max_steps=1 save_steps=none per_device_train_batch_size=8 output_dir={}",
        out.display()
    ));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let line = &metrics(&out)[0];
    for name in ["closeness", "variety"] {
        assert!(line[format!("rewards/{name}/mean")].as_f64().is_some_and(|mean| mean > 0.0), "{line}");
    }
}

/// A reward that cannot be started is an error before a model is loaded.
#[test]
fn a_reward_that_cannot_be_started_is_refused_with_its_key() {
    let folder = tempfile::tempdir().unwrap();
    let out = |name: &str| format!("output_dir={}", folder.path().join(name).display());
    let broken = folder.path().join("broken.py");
    fs::write(&broken, "import os\ndef f(:\n").unwrap();
    let broken = format!("reward_funcs=[\"{}:f\"]", broken.display());
    for (rewards, code, parts) in [
        (&*broken, 2, ["SyntaxError: invalid syntax (", "broken.py:2)"]),
        ("reward_funcs=[\"rewards.py\"]", 2, ["reward_funcs = rewards.py", "rewards.py:FUNCTION"]),
        ("reward_funcs=[\"gsm8k\"]", 2, ["gsm8k", "here: numeric_answer, math"]),
        ("reward_funcs=[\"nowhere.py:f\"]", 2, ["reward_funcs = nowhere.py:f", "FileNotFoundError"]),
        ("reward_funcs=[\"math:pi\"]", 2, ["reward_funcs = math:pi", "pi is no function but a value of type float"]),
        ("reward_funcs=[\"json:f\"]", 2, ["reward_funcs = json:f", "has no attribute 'f'"]),
        ("reward_funcs=[\"a\"] rewards.a.command=[\"./nowhere\"]", 2, ["rewards.a.command", "No such file"]),
        ("reward_funcs=[\"a\"]", 2, ["reward_funcs = a", "numeric_answer"]),
        ("reward_funcs=[\"code\"] reward.code.command=[\"nowhere\"]", 4, ["reward 'code'", "no program nowhere"]),
    ] {
        let ended = run(&format!("{SMALL_RUN} reward_weights=[] {rewards} {}", out("refused")));
        ended.assert_error(rewards, code, &parts);
        assert!(!Path::new(&folder.path().join("refused")).exists(), "{rewards}");
    }
}

/// Tests that a program which does nothing would pass are an error.
#[test]
fn rows_whose_code_tests_expect_no_output_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let rows = folder.path().join("rows.jsonl");
    let tests = |outputs: [&str; 2]| serde_json::json!({"inputs": ["1", "2"], "outputs": outputs}).to_string();
    let row = |outputs| serde_json::json!({"prompt": "1 + 1 = ", "tests": tests(outputs)}).to_string() + "\n";
    fs::write(&rows, row(["", "2"]) + &row(["1", ""]) + &row([" \n", ""])).unwrap();
    let keys = format!(
        "{SMALL_RUN} reward_funcs=[\"code\"] reward_weights=[] train_file={} output_dir={}/run",
        rows.display(),
        folder.path().display()
    );
    run(&keys).assert_error(&keys, 3, &["rows.jsonl: row 3: every test expects an empty output"]);
}
