//! Agents that play episodes against the policy's own server, in runs of the program with the calculator's model.

use std::fs;

use colo_grpo::internal::metrics::read_completions;

use crate::program::{metrics, run};

const CALCULATOR: &str = "--config configs/calculator.toml tools=[] eval_steps=none eval_file=none max_steps=1 log_completions=true \
    save_steps=none max_train_samples=64";

/// An agent without an HTTP client library. It records the prompt ids and sampled ids that the server reports.
const HARNESS: &str = r#"
import json, time, urllib.error, urllib.request

ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {
    "a": {"type": "integer"}, "b": {"type": "integer"}}}}}

def ask(base_url, messages, **more):
    body = {"model": "any", "messages": messages, "tools": [ADD], "return_token_ids": True, **more}
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(base_url + "/chat/completions", json.dumps(body).encode(), head)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)

def converse(base_url, messages, told=None):
    """Goes on until nothing is called. Returns all ids, how many were sampled, and the messages."""
    messages, num_sampled, whole = list(messages), 0, []
    while True:
        answer = ask(base_url, messages)
        choice = answer["choices"][0]
        assert answer["prompt_token_ids"][:len(whole)] == whole, "ids that were sampled are those that are prompted with"
        whole, num_sampled = answer["prompt_token_ids"] + choice["token_ids"], num_sampled + len(choice["token_ids"])
        messages.append(choice["message"])
        calls = choice["message"].get("tool_calls") or []
        for call in calls:
            sum = json.loads(call["function"]["arguments"])
            content = told or str(sum["a"] + sum["b"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        if not calls or len(messages) > 4:
            return {"whole": whole, "sampled": num_sampled}, messages

def play(row, base_url):
    first, messages = converse(base_url, row["prompt"])
    played = [first, converse(base_url, row["prompt"])[0]]  # once more from the beginning
    if len(messages) > 2:  # and from the first call, with another answer
        assert messages[1]["tool_calls"] and messages[2]["role"] == "tool"
        called = messages[:2] + [{**messages[2], "content": "1"}]
        played.append(converse(base_url, called, told="1")[0])
    return {"reward": float(row["answer"] in (messages[-1]["content"] or "")), "played": played}

def sampled(completions, completion_ids, environments, **columns):
    """The number of tokens that the harness saw being sampled, of a conversation whose ids are those that it saw."""
    found = []
    for messages, ids, end in zip(completions, completion_ids, environments):
        assert messages[0]["role"] == "assistant" and messages[-1]["role"] == "assistant"
        same = [played for played in end["played"] if played["whole"][-len(ids):] == ids]
        found.append(float(same[0]["sampled"]))
    return found

def failing(row, base_url):
    kind = int(base_url.split("/")[-2], 16) % 5  # each episode has an address of its own
    if kind == 1:
        raise ValueError("no way")
    if kind == 2:
        return 1.0  # without any request
    if kind == 3:
        ask(base_url, row["prompt"])
        time.sleep(1000)
    try:
        ask(base_url, row["prompt"], temperature=0.1)
    except urllib.error.HTTPError as error:
        assert error.code == 400 and b"temperature" in error.read()
    ask(base_url, row["prompt"])
    try:
        ask(base_url, row["prompt"])
    except urllib.error.HTTPError as error:
        assert error.code == 400 and b"agent_max_requests" in error.read()
        return 0.25
"#;

/// The trained token ids are those reported to the agent, the loss mask marks the sampled ones, and the trainer's log-probabilities equal
/// the sampler's. Each branch is trained on once.
#[test]
fn agent_conversations_are_trained_with_their_sampled_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let (file, output) = (folder.path().join("mine.py"), folder.path().join("run"));
    fs::write(&file, HARNESS).unwrap();
    let keys = format!("agent={0}:play reward_funcs=[\"{0}:sampled\"]", file.display());
    let ended = run(&format!(
        "--nproc 2 {CALCULATOR} {keys} per_device_train_batch_size=32 eval_file=configs/calculator/eval.jsonl max_eval_samples=8 \
         eval_num_generations=2 eval_steps=1 output_dir={}",
        output.display()
    ));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let lines = metrics(&output);
    let line = lines.iter().find(|line| line.get("loss").is_some()).unwrap();
    let value = |metric: &str| line[metric].as_f64().unwrap_or_else(|| panic!("no {metric} in {line:?}"));
    assert!(value("sampling/sampling_logp_difference/max") < 1e-4, "{line:?}");
    assert_eq!((value("agent/num_failed"), value("rewards/num_failed"), value("agent/num_refused")), (0.0, 0.0, 0.0));
    assert!((value("rewards/sampled/mean") - value("completions/mean_length")).abs() < 1e-4, "{line:?}");
    let per_episode = value("agent/mean_trajectories");
    assert!(per_episode > 2.1 && per_episode < 3.0 && value("agent/mean_requests") > per_episode + 0.1, "{line:?}");
    assert!(value("rewards/play/mean") > 0.05, "{line:?}");
    let rows = read_completions(&output.join("completions/completions_00001.parquet")).unwrap();
    assert_eq!(rows.len() as f64, 64.0 * per_episode, "each conversation is a completion");
    assert!(lines.iter().any(|line| line["eval_rewards/sampled/mean"].is_number()), "{lines:?}");
}

/// Checks ranks that share an engine, groups that continue in the next step, are dropped or replaced, and engines on other ranks than the trainers:
/// the trained ids are those that the agent saw, and the trainer's log-probabilities equal the sampler's.
#[test]
fn agent_episodes_work_with_every_way_of_sampling_groups() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mine.py");
    fs::write(&file, HARNESS).unwrap();
    let common = format!(
        "--nproc 2 {CALCULATOR} max_steps=3 agent={0}:play reward_funcs=[\"{0}:sampled\"] reward_weights=[0.0] learning_rate=1e-9 \
         per_device_train_batch_size=16 max_num_seqs=10 max_train_samples=256",
        file.display()
    );
    for (name, keys) in [
        ("shared", "tensor_parallel_size=2 eval_file=configs/calculator/eval.jsonl eval_steps=1 max_eval_samples=8"),
        (
            "carried",
            "oversample=1.0 partial_rollout=true eval_file=configs/calculator/eval.jsonl eval_steps=1 max_eval_samples=8",
        ),
        ("shared, kept", "oversample=1.0 partial_rollout=true carried_kv=keep tensor_parallel_size=2 zero.stage=3"),
        ("dropped", "oversample=1.0 tensor_parallel_size=2"),
        ("replaced", "dynamic_sampling=replace dynamic_sampling_range=[0.35,1.0]"),
        ("shared, replaced", "dynamic_sampling=replace dynamic_sampling_range=[0.35,1.0] tensor_parallel_size=2"),
        ("apart", "mode=split split.rollout_gpus=1"),
        ("ahead", "mode=split split.rollout_gpus=1 split.async_steps=2 split.in_flight_updates=true"),
        (
            "ahead, replaced",
            "mode=split split.rollout_gpus=1 split.async_steps=1 dynamic_sampling=replace dynamic_sampling_range=[0.35,1.0]",
        ),
    ] {
        let output = folder.path().join(name.replace(", ", "-"));
        let ended = run(&format!("{common} {keys} output_dir={}", output.display()));
        assert_eq!(ended.code, Some(0), "{name}\n{}", ended.stderr);
        let lines: Vec<_> = metrics(&output).into_iter().filter(|line| line.get("loss").is_some()).collect();
        assert_eq!(lines.len(), 3, "{name}");
        for line in &lines {
            let value =
                |metric: &str| line[metric].as_f64().unwrap_or_else(|| panic!("{name}: no {metric} in {line:?}"));
            assert_eq!((value("agent/num_failed"), value("rewards/num_failed")), (0.0, 0.0), "{name}: {line:?}");
            assert!(value("sampling/sampling_logp_difference/max") < 1e-4, "{name}: {line:?}");
            assert!(
                (value("rewards/sampled/mean") - value("completions/mean_length")).abs() < 1e-4,
                "{name}: {line:?}"
            );
        }
        let sum = |metric: &str| lines.iter().filter_map(|line| line[metric].as_f64()).sum::<f64>();
        assert!(sum("agent/mean_trajectories") > 4.0 && sum("agent/kept_tokens") > 0.0, "{name}: {lines:?}");
        if keys.contains("oversample") {
            let shares = ["continued_token_share", "discarded_token_share"];
            let shares = shares.map(|share| sum(&format!("partial_rollout/{share}")) > 0.0);
            assert_eq!(shares, [name != "dropped", name == "dropped"], "{name}: {lines:?}");
        }
        if name.contains("replaced") {
            assert!(sum("dynamic_sampling/replaced_groups") > 0.0, "{name}: {lines:?}");
        }
    }
}

#[test]
fn a_failed_episode_masks_only_its_own_completion() {
    let folder = tempfile::tempdir().unwrap();
    let (file, output) = (folder.path().join("mine.py"), folder.path().join("run"));
    fs::write(&file, HARNESS).unwrap();
    let keys = format!("agent={}:failing reward_funcs=[] agent_timeout_s=15 agent_max_requests=1", file.display());
    let ended = run(&format!("{CALCULATOR} {keys} output_dir={}", output.display()));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let lines = metrics(&output);
    let value = |metric: &str| lines[0][metric].as_f64().unwrap();
    let failed = value("agent/num_failed");
    assert!((8.0..=56.0).contains(&failed) && value("rewards/num_failed") == failed, "{:?}", lines[0]);
    assert!(value("agent/num_timeouts") >= 1.0 && value("agent/max_episode_s") >= 15.0, "{:?}", lines[0]);
    assert_eq!((value("rewards/failing/mean"), value("reward")), (0.25, 0.25));
    assert!(value("agent/num_refused") >= 8.0, "{:?}", lines[0]);
    let told = ended.stderr.matches("a request of the agent was refused: ").count();
    assert!(told == 1 && ended.stderr.contains("refused: temperature: "), "{}", ended.stderr);
}

/// The command evaluates with the run's agent, on one rank and on two ranks that share the model.
#[test]
fn eval_runs_agent_episodes_like_training() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mine.py");
    fs::write(&file, HARNESS).unwrap();
    let keys = format!("tools=[] agent={0}:play reward_funcs=[\"{0}:sampled\"] reward_weights=[0.0]", file.display());
    let eval = "eval --model configs/calculator/model --config configs/calculator.toml --device cpu --dtype float32";
    let scores = ["--nproc 1", "--nproc 2 --tensor_parallel_size 2"].map(|ranks| {
        let ended = run(&format!("{eval} {ranks} {keys} max_eval_samples=12"));
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        let line: serde_json::Value = serde_json::from_str(ended.stdout.lines().last().unwrap()).unwrap();
        assert_eq!((&line["agent/num_failed"], &line["agent/num_refused"]), (&0.0.into(), &0.0.into()), "{line}");
        assert!(line["agent/mean_trajectories"].as_f64() > Some(2.0), "{line}");
        line["avg@4"]["mean"].as_f64().unwrap()
    });
    assert!(scores[0] > 0.05 && (scores[0] - scores[1]).abs() < 0.2, "{scores:?}");
}

#[test]
fn an_agent_that_always_fails_ends_the_run_with_the_cause() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mine.py");
    fs::write(&file, "def play(row, base_url):\n    raise ValueError('no server for me')\n").unwrap();
    let output = folder.path().join("run");
    let keys = format!("agent={}:play reward_funcs=[] output_dir={}", file.display(), output.display());
    let parts = [
        "no sample in 3 steps in a row",
        "an episode failed, its completions are masked: agent: ValueError: no server for me",
        "mine.py:2",
    ];
    run(&format!("{CALCULATOR} max_steps=4 {keys}")).assert_error(&keys, 14, &parts);
}

#[test]
fn invalid_agents_are_refused_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mine.py");
    fs::write(&file, HARNESS).unwrap();
    let file = file.display();
    for (keys, code, parts) in [
        (format!("agent={file}:none"), 2, ["agent = ", "has no attribute 'none'"]),
        (format!("agent={file}:play full_determinism=true"), 2, ["full_determinism", "expected false, or no agent"]),
    ] {
        run(&format!("--nproc 2 {CALCULATOR} {keys}")).assert_error(&keys, code, &parts);
    }
}
