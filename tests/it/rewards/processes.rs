//! Reward functions and commands in a pool. Numbers in comments are rows of docs/faults.md.

use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use colo_grpo::internal::reward::{FailureCount, FailureKind, RewardPool};
use colo_grpo::internal::types::{FinishReason, Prompt, RolloutGroup, Trajectory};
use colo_grpo::{Config, ExitCode};
use serde_json::{Value, json};

use crate::program::{processes_of, wait_until};

/// For each completion, the weighted reward and the single rewards.
pub(super) type Scores = Vec<(Option<f32>, Vec<Option<f32>>)>;

pub(super) fn group(columns: Value, completions: &[&str]) -> RolloutGroup {
    let columns = columns.as_object().unwrap().clone();
    let prompt = Prompt { id: 0, text: "rendered".into(), token_ids: vec![1], columns: Arc::new(columns) };
    let completion = |text: &&str| Trajectory {
        token_ids: text.bytes().map(u32::from).collect(),
        finish_reason: Some(FinishReason::Eos),
        text: text.to_string(),
        ..Trajectory::default()
    };
    RolloutGroup { completions: completions.iter().map(completion).collect(), ..RolloutGroup::new(prompt) }
}

pub(super) fn pool(keys: &[String]) -> RewardPool {
    let required = ["model_name_or_path=m", "train_file=t"].map(str::to_owned);
    RewardPool::new(&Config::load(None, &[&required, keys].concat()).unwrap()).unwrap()
}

pub(super) fn scores(pool: &mut RewardPool, group: RolloutGroup) -> Scores {
    let mut groups = [group];
    pool.score(&mut groups).unwrap();
    groups[0].completions.iter().map(|completion| (completion.reward, completion.rewards.clone())).collect()
}

fn write(folder: &Path, name: &str, text: &str) -> String {
    let path = folder.join(name);
    fs::write(&path, text).unwrap();
    path.display().to_string()
}

const FUNCTIONS: &str = r#"
import math

def trl(prompts, completions, completion_ids, answer, **columns):
    print("seen by nobody")
    assert prompts == ["raw"] * len(completions) and set(columns) == {"level", "trainer_state"}
    assert columns["trainer_state"].global_step == 0
    return [len(ids) + float(a) for ids, a in zip(completion_ids, answer)]

def chat(prompts, completions):
    assert prompts[0][0]["content"] == "hello"
    return [len(completion[0]["content"]) for completion in completions]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0 if solution_str == ground_truth else 0.0, "pred": solution_str}

async def some(prompts, completions, **columns):
    return [None if c == "skip" else float(c) for c in completions]

def among(prompts, completions, **columns):
    return [float(len(completions))] * len(completions)
"#;

#[test]
fn reward_functions_of_trl_and_verl_work_unchanged() {
    let folder = tempfile::tempdir().unwrap();
    let file = write(folder.path(), "mine.py", FUNCTIONS);
    let mut trl = pool(&[format!("reward_funcs=[\"{file}:trl\", \"format\"]"), "reward_weights=[1, 0]".into()]);
    trl.start().unwrap();
    assert_eq!(trl.names(), ["trl", "format"]);
    let of_trl = scores(&mut trl, group(json!({"prompt": "raw", "answer": "2", "level": 3}), &["abc", ""]));
    assert_eq!(of_trl, [(Some(5.0), vec![Some(5.0), Some(0.0)]), (Some(2.0), vec![Some(2.0), Some(0.0)])]);

    let mut chat = pool(&[format!("reward_funcs=[\"{file}:chat\"]")]);
    let messages = json!({"prompt": [{"role": "user", "content": "hello"}], "answer": "2"});
    assert_eq!(scores(&mut chat, group(messages, &["abc"]))[0].0, Some(3.0));

    let mut verl = pool(&[format!("reward_funcs=[\"{file}:compute_score\"]"), "reward.answer_column=solution".into()]);
    let row = json!({"prompt": "p", "data_source": "x", "answer": "8", "solution": "7"});
    let of_verl: Vec<_> = scores(&mut verl, group(row, &["7", "8"])).into_iter().map(|score| score.0).collect();
    assert_eq!(of_verl, [Some(1.0), Some(0.0)]);

    let tables = ["reward_funcs=[\"some\", \"among\"]".to_owned(), "rewards.among.batch=group".to_owned()];
    let functions = ["some", "among"].map(|name| format!("rewards.{name}.function={file}:{name}"));
    let mut both = pool(&[&tables[..], &functions[..]].concat());
    let of_both = scores(&mut both, group(json!({"prompt": "p"}), &["1", "skip", "nan"]));
    assert_eq!(of_both[0], (Some(4.0), vec![Some(1.0), Some(3.0)]));
    assert_eq!(of_both[1], (Some(3.0), vec![None, Some(3.0)]), "a reward that does not apply masks nothing");
    assert_eq!(of_both[2], (None, vec![None, Some(3.0)]));
    assert_eq!(both.take_failures(), [FailureCount::new("some", FailureKind::NonFinite, 1)]);
}

/// `prompts` and the form of `completions` follow the configured column, not another one with a usual name.
#[test]
fn python_rewards_get_the_prompt_from_the_configured_column() {
    const FUNCTION: &str = r#"
def asked(prompts, completions, instruction, question):
    assert prompts == instruction
    return [len(completion if isinstance(prompt, str) else completion[0]["content"])
            for prompt, completion in zip(prompts, completions)]
"#;
    let folder = tempfile::tempdir().unwrap();
    let file = write(folder.path(), "asked.py", FUNCTION);
    let mut asked = pool(&[format!("reward_funcs=[\"{file}:asked\"]"), "dataset_prompt_column=instruction".into()]);
    let messages = json!([{"role": "user", "content": "hello"}]);
    for row in [
        json!({"instruction": "add 1", "question": messages}),
        json!({"question": "what?", "instruction": messages}),
        json!({"prompt": messages, "question": "what?", "instruction": "add 1"}),
    ] {
        assert_eq!(scores(&mut asked, group(row.clone(), &["abc"]))[0].0, Some(3.0), "{row}: {:?}", asked.take_cause());
    }
}

/// A reward function that fails in the way that the completion names.
const FAULTY: &str = r#"
import os, signal, subprocess, time

def faulty(prompts, completions, **columns):
    what = completions[0]
    if what == "hang":
        subprocess.Popen(["sleep", columns["mark"][0]])
        subprocess.Popen(["sleep", columns["mark"][0]], start_new_session=True, env={})
        subprocess.Popen(["setsid", "--fork", "sleep", columns["mark"][0]]).wait()
        time.sleep(1000)
    if what == "exit":
        os._exit(3)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "raise":
        raise ValueError("asked for")
    if what == "half":
        raise ValueError("half a character: \ud800")
    if what == "nameless":
        exec(compile("1 / 0", "", "exec"))
    if what == "short":
        return []
    if what == "long":
        return [1.0, 1.0]
    if what == "text":
        return ["one"]
    return [{"nan": float("nan"), "inf": float("-inf")}.get(what, 1.0)]
"#;

/// Rows 29 and 30: each failure masks only its own sample and is counted by kind; processes started by a hanging reward are killed.
#[test]
fn a_failing_reward_function_masks_its_sample_and_is_restarted() {
    let folder = tempfile::tempdir().unwrap();
    let file = write(folder.path(), "faulty.py", FAULTY);
    let mut pool = pool(&[
        "reward_funcs=[\"faulty\"]".into(),
        format!("rewards.faulty.function={file}:faulty"),
        "rewards.faulty.timeout_s=5".into(),
        "rewards.faulty.workers=2".into(),
    ]);
    pool.start().unwrap();
    let mark = format!("1000.{}", std::process::id());
    let bad = ["hang", "exit", "kill", "raise", "half", "nameless", "short", "long", "text", "nan", "inf"];
    let completions: Vec<&str> = bad.iter().flat_map(|bad| [*bad, "good"]).collect();
    let scores = scores(&mut pool, group(json!({"prompt": "p", "mark": mark}), &completions));
    for (text, (reward, _)) in completions.iter().zip(&scores) {
        assert_eq!(*reward, (*text == "good").then_some(1.0), "{text}");
    }
    let faulty = |kind, count| FailureCount::new("faulty", kind, count);
    let expected = [
        faulty(FailureKind::Error, 6),
        faulty(FailureKind::Timeout, 1),
        faulty(FailureKind::NonFinite, 2),
        faulty(FailureKind::Died, 2),
    ];
    assert_eq!(pool.take_failures(), expected);
    wait_until(|| processes_of(Path::new(&mark)).is_empty()); // what hung leaves no process
    drop(pool);
    wait_until(|| processes_of(Path::new(&file)).is_empty());
}

/// A reward command that replies as the completion says. With an argument, its replies have no ids.
const COMMAND: &str = r#"
import json, os, struct, sys, time
requests, replies = sys.stdin.buffer, sys.stdout.buffer
num_errors = 0

def write(number, **what):
    reply = json.dumps({**({} if sys.argv[1:] else {"id": number}), **what}).encode()
    replies.write(struct.pack(">I", len(reply)) + reply)
    replies.flush()

while len(head := requests.read(4)) == 4:
    request = json.loads(requests.read(struct.unpack(">I", head)[0]))
    what, number = request["completions"][0], request["id"]
    if what == "garbage":
        replies.write(b"Traceback: no frame at all\n")
    elif what == "huge":
        replies.write(struct.pack(">I", 1 << 31) + b"x" * (1 << 22))
    elif what == "nan":
        replies.write(struct.pack(">I", 18) + b'{"rewards": [NaN]}')
    elif what == "more":
        write(number, rewards=[1.0], weight=9)
    elif what == "other":
        write(number + 1, rewards=[1.0])
    elif what == "error":
        write(number, error="no")
        num_errors += 1
        if num_errors == 2:
            os._exit(3)
    elif what == "before":
        write(number - 1, rewards=[9.0])
    elif what == "hang":
        time.sleep(1000)
    elif what == "noise":
        while True:
            sys.stderr.write("noise" * 1000)
    else:
        write(number, rewards=[1.0])
    if what in ("twice", "trailing"):
        write(number, rewards=[9.0]) if what == "twice" else replies.write(b"and more of it")
    replies.flush()
"#;

/// A pool with the reward `own`, computed by [`COMMAND`] with these arguments.
fn command_pool(folder: &Path, arguments: &str) -> RewardPool {
    let file = write(folder, "command.py", COMMAND);
    pool(&[
        "reward_funcs=[\"own\"]".into(),
        format!("rewards.own.command=[\"python3\", \"{file}\"{arguments}]"),
        "rewards.own.timeout_s=10".into(),
    ])
}

fn rewards(pool: &mut RewardPool, completions: &[&str]) -> Vec<Option<f32>> {
    scores(pool, group(json!({"prompt": "p"}), completions)).iter().map(|score| score.0).collect()
}

/// Row 30: malformed output of any length is never taken for a reply.
#[test]
fn invalid_output_of_a_reward_command_is_a_failure() {
    let folder = tempfile::tempdir().unwrap();
    let mut pool = command_pool(folder.path(), "");
    let bad = ["garbage", "huge", "nan", "more", "noise", "other"];
    let completions: Vec<&str> = bad.iter().flat_map(|bad| [*bad, "good"]).collect();
    for (text, reward) in completions.iter().zip(rewards(&mut pool, &completions)) {
        assert_eq!(reward, (*text == "good").then_some(1.0), "{text}");
    }
    let own = |kind, count| FailureCount::new("own", kind, count);
    assert_eq!(pool.take_failures(), [own(FailureKind::Timeout, 1), own(FailureKind::Output, 5)]);
}

/// Row 42: a surplus reply masks only the sample to which it refers, whenever it arrives.
#[test]
fn an_extra_reply_of_a_reward_command_masks_only_its_sample() {
    let folder = tempfile::tempdir().unwrap();
    for arguments in ["", ", \"without ids\""] {
        let mut pool = command_pool(folder.path(), arguments);
        assert_eq!(rewards(&mut pool, &["twice", "good"]), [None, Some(1.0)], "{arguments}");
        assert_eq!(pool.take_failures(), [FailureCount::new("own", FailureKind::Output, 1)], "{arguments}");
        // Whether what follows is noticed with the reply or later: it is not the next request's.
        assert_eq!(rewards(&mut pool, &["trailing", "good"])[1], Some(1.0), "{arguments}");
    }
    // The second answer to the first request is all that the second one gets.
    let mut pool = command_pool(folder.path(), "");
    assert_eq!(rewards(&mut pool, &["good", "before", "good"]), [None, None, Some(1.0)]);
    let kinds: Vec<_> = pool.take_failures().into_iter().map(|failure| failure.kind).collect();
    assert_eq!(kinds, [FailureKind::Output]);
    // Its scores are taken: it can cost nobody anything any more, least of all those that were asked later.
    assert_eq!(rewards(&mut pool, &["good"]), [Some(1.0)]);
    assert_eq!(rewards(&mut pool, &["before", "good"]), [None, Some(1.0)]);
}

/// A command whose replies have no ids works: one process is started per request.
#[test]
fn a_reward_command_without_ids_is_restarted_for_every_request() {
    let folder = tempfile::tempdir().unwrap();
    let mut pool = command_pool(folder.path(), ", \"without ids\"");
    assert_eq!(
        rewards(&mut pool, &["good", "garbage", "good", "hang", "error", "good"]),
        [Some(1.0), None, Some(1.0), None, None, Some(1.0)]
    );
    let own = |kind| FailureCount::new("own", kind, 1);
    assert_eq!(pool.take_failures(), [own(FailureKind::Error), own(FailureKind::Timeout), own(FailureKind::Output)]);
}

/// A reward function that waits until all concurrent calls have begun, or fails in the way that the completion names.
const TOGETHER: &str = r#"
import asyncio, os, time

arrived = 0
everybody = asyncio.Event() if __import__("sys").version_info >= (3, 10) else None

async def together(prompts, completions, **columns):
    global arrived, everybody
    everybody = everybody or asyncio.Event()
    what = completions[0]
    if what == "hang":
        await asyncio.sleep(1000)
    if what == "stubborn":
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass
    if what == "block":
        time.sleep(1000)
    if what == "exit":
        os._exit(3)
    if what == "raise":
        raise ValueError("asked for")
    if what == "wait":
        arrived += 1
        if arrived == columns["size"][0]:
            everybody.set()
        await everybody.wait()
    return [1.0]
"#;

fn together(folder: &Path, keys: &[&str]) -> RewardPool {
    let file = write(folder, "together.py", TOGETHER);
    let own = ["reward_funcs=[\"own\"]".to_owned(), format!("rewards.own.function={file}:together")];
    pool(&[&own[..], &keys.iter().map(|key| (*key).to_owned()).collect::<Vec<_>>()].concat())
}

/// Requests to an asynchronous function run concurrently, up to the limit `concurrency`.
#[test]
fn asynchronous_rewards_run_concurrently() {
    let folder = tempfile::tempdir().unwrap();
    let all = |pool: &mut RewardPool| -> Vec<_> {
        scores(pool, group(json!({"prompt": "p", "size": 8}), &["wait"; 8])).iter().map(|score| score.0).collect()
    };
    assert_eq!(all(&mut together(folder.path(), &["rewards.own.timeout_s=60"])), [Some(1.0); 8]);
    let mut few = together(folder.path(), &["rewards.own.timeout_s=0.5", "rewards.own.concurrency=7"]);
    assert_eq!(all(&mut few).iter().filter(|reward| reward.is_none()).count(), 7, "seven wait for the eighth in vain");
}

/// Row 29: among concurrent requests, one that hangs, blocks or crashes fails only its own sample.
#[test]
fn a_failed_asynchronous_reward_affects_no_other() {
    let folder = tempfile::tempdir().unwrap();
    for (what, kind) in [
        ("hang", FailureKind::Timeout),
        ("raise", FailureKind::Error),
        ("stubborn", FailureKind::Timeout),
        ("block", FailureKind::Timeout),
        ("exit", FailureKind::Died),
    ] {
        let mut pool = together(folder.path(), &["rewards.own.timeout_s=1"]);
        assert_eq!(
            rewards(&mut pool, &["good", what, "good", "good"]),
            [Some(1.0), None, Some(1.0), Some(1.0)],
            "{what}"
        );
        assert_eq!(pool.take_failures(), [FailureCount::new("own", kind, 1)], "{what}");
    }
}

/// The worker does not import modules from the current folder. The folder of the function's file is still searched first.
#[test]
fn reward_workers_import_nothing_from_the_current_folder() {
    let folder = tempfile::tempdir().unwrap();
    for module in ["json", "os", "struct", "types", "asyncio", "inspect", "traceback", "selectors", "threading"] {
        write(folder.path(), &format!("{module}.py"), "raise SystemExit('taken for the library')");
    }
    write(folder.path(), "sibling.py", "value = 0.5");
    let function = "import sibling\n\nasync def own(completions, **columns):\n    return [sibling.value]\n";
    write(folder.path(), "mine.py", function);
    for spec in ["mine.py:own", "mine:own"] {
        let worker = include_str!("../../../src/reward/worker.py");
        let mut child = Command::new("python3")
            .args(["-c", worker, spec, "answer", "10"])
            .current_dir(folder.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (mut requests, mut replies) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut reply = |completions: &[&str]| {
            let request = json!({"id": 3, "prompt": "p", "completions": completions, "completion_ids": [[]],
                "finish_reasons": ["eos"], "columns": {}, "trainer_state": {}})
            .to_string();
            requests.write_all(&(request.len() as u32).to_be_bytes()).unwrap();
            requests.write_all(request.as_bytes()).unwrap();
            let mut head = [0; 4];
            replies.read_exact(&mut head).unwrap();
            let mut reply = vec![0; u32::from_be_bytes(head) as usize];
            replies.read_exact(&mut reply).unwrap();
            serde_json::from_slice::<Value>(&reply).unwrap()
        };
        assert_eq!(reply(&[]), json!({"id": 3, "rewards": [], "is_async": true, "needed_columns": []}), "{spec}");
        assert_eq!(reply(&["x"]), json!({"id": 3, "rewards": [0.5]}), "{spec}");
        drop(requests);
        assert!(child.wait().unwrap().success(), "{spec}");
    }
}

/// Row 31: an error is not a score, so workers that crash between errors still count as consecutive failures.
#[test]
fn error_replies_do_not_reset_the_count_of_worker_failures() {
    let folder = tempfile::tempdir().unwrap();
    let file = write(folder.path(), "command.py", COMMAND);
    let mut pool = pool(&[
        "reward_funcs=[\"own\"]".into(),
        format!("rewards.own.command=[\"python3\", \"{file}\"]"),
        "reward.max_worker_failures=3".into(),
    ]);
    let error = pool.score(&mut [group(json!({}), &["error"; 12])]).unwrap_err();
    assert_eq!(error.exit_code(), ExitCode::RewardService, "{error}");
}

/// Row 31: a service that never answers ends the wait, after pauses of increasing length.
#[test]
fn a_reward_worker_that_keeps_dying_ends_the_wait() {
    let keys = ["reward_funcs=[\"own\"]", "rewards.own.command=[\"false\"]", "reward.max_worker_failures=4"];
    let mut pool = pool(&keys.map(str::to_owned));
    let mut groups = [group(json!({"prompt": "p"}), &["a"; 8])];
    let start = Instant::now();
    let error = pool.score(&mut groups).unwrap_err();
    assert!(start.elapsed() >= Duration::from_millis(20 + 40 + 80));
    assert_eq!(error.exit_code(), ExitCode::RewardService);
    let text = error.to_string();
    assert!(
        text.contains("reward 'own' failed 4 times in a row without a score (limit") && text.contains("exit status: 1"),
        "{text}"
    );
    let again = pool.score(&mut groups).unwrap_err().to_string();
    assert!(again.contains("expected a reward pool that still accepts work"), "{again}");
}
