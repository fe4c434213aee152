//! Runs with environments from hubs, with fake Python packages. scripts/environments.sh tests the real packages.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use colo_grpo::internal::metrics::read_completions;

use crate::program::{SMALL_RUN, metrics, run, wait_until};

/// A fake of reasoning-gym: a generator of problems from a seed, and its scorer.
const REASONING_GYM: &str = r#"
import random, types

def extract_answer(completion, tag_name="answer"):
    before, opened, rest = completion.rpartition(f"<{tag_name}>")
    return rest.partition(f"</{tag_name}>")[0].strip() if opened else None

utils = types.SimpleNamespace(extract_answer=extract_answer)
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]

class Sums:
    def __init__(self, seed, size, most=9):
        self.seed, self.size, self.most = seed, size, most

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        draw = random.Random(self.seed + index)
        a, b = draw.randint(0, self.most), draw.randint(0, self.most)
        question = f"what is {WORDS[a]} plus {WORDS[b]} ?"
        return {"question": question, "answer": str(a + b), "metadata": {"terms": (a, b)}}  # JSON has no tuples

    def score_answer(self, answer, entry):
        assert isinstance(entry["metadata"]["terms"], tuple)
        return 1.0 if answer == f"the answer is {entry['answer']}" else 0.01 * len(answer)

def create_dataset(name, **config):
    if name == "words":
        raise LookupError("""
**********************************************************************
  Resource \x1b[93mwords\x1b[0m not found.
  Please use the NLTK Downloader to obtain the resource:

  \x1b[31m>>> import nltk
  >>> nltk.download('words')
  \x1b[0m
  Attempted to load \x1b[93mcorpora/words.zip/words/\x1b[0m
""")
    if name != "sums":
        raise ValueError(f"Dataset '{name}' not registered")
    return Sums(**config)
"#;

/// A fake of OpenEnv's client for a server with an MCP tool, without the server.
const OPENENV: &str = r#"
import types

class GenericEnvClient:
    def __init__(self, base_url):
        assert base_url.startswith("http://127.0.0.1:")
        self.is_open, self.row, self.steps = False, None, 0

    async def connect(self):
        self.is_open = True

    async def disconnect(self):
        self.is_open = False

    def result(self, observation, reward=None, done=False):
        assert self.is_open
        return types.SimpleNamespace(observation=observation, reward=reward, done=done)

    async def reset(self, **row):
        assert "prompt" not in row and row["level"] == 3
        self.row = row
        return self.result({"reward": None, "done": False})

    async def step(self, action):
        if action["type"] == "list_tools":
            schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
            return self.result({"tools": [{"name": "add", "description": "Adds.", "input_schema": schema}]})
        assert action["type"] == "call_tool" and action["tool_name"] == "add"
        total = action["arguments"]["a"] + action["arguments"]["b"]
        return self.result({"tool_name": "add", "result": {"data": str(total)}, "error": None}, float(str(total) == self.row["answer"]), True)
"#;

/// A Python interpreter that finds a fake package.
fn python(folder: &Path, package: &str, text: &str) -> PathBuf {
    let place = folder.join(package);
    fs::create_dir_all(&place).unwrap();
    fs::write(place.join("__init__.py"), text).unwrap();
    let python = folder.join("python");
    fs::write(&python, format!("#!/bin/sh\nPYTHONPATH={} exec python3 \"$@\"\n", folder.display())).unwrap();
    fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
    python
}

/// Rows and rewards come from the generator: held-out rows differ from training rows, and each reward is the scorer's.
#[test]
fn a_reasoning_gym_environment_makes_rows_and_scores_completions() {
    let folder = tempfile::tempdir().unwrap();
    let (python, output) = (python(folder.path(), "reasoning_gym", REASONING_GYM), folder.path().join("run"));
    let keys = format!(
        "{SMALL_RUN} train_file=none reward_funcs=[] reward_weights=[] reward.python={} environment_args.most=5 max_train_samples=40 \
         max_eval_samples=6 log_completions=true max_steps=2",
        python.display()
    );
    let ended =
        run(&format!("--nproc 2 {keys} environment=reasoning_gym:sums eval_steps=1 output_dir={}", output.display()));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stderr.contains("reasoning_gym:sums (held out): 6 read, 6 kept"), "{}", ended.stderr);
    let lines = metrics(&output);
    assert!(lines.iter().any(|line| line["eval_rewards/sums/mean"].is_number()), "{lines:?}");
    let rows = read_completions(&output.join("completions/completions_00001.parquet")).unwrap();
    assert_eq!(rows.len(), 16);
    for row in &rows {
        let (prompt, completion) = (&row.prompt, row.completion.trim());
        let digits: Vec<usize> = prompt.split_whitespace().filter_map(number).collect();
        let answer = format!("the answer is {}", digits.iter().sum::<usize>());
        let expected = if completion == answer { 1.0 } else { 0.01 * completion.chars().count() as f32 };
        assert!((row.reward.unwrap() - expected).abs() < 1e-6, "{prompt}: {completion}: {:?}", row.reward);
        assert!(digits.iter().all(|digit| *digit <= 5), "{prompt}: an argument of the environment");
    }
    for (environment, part) in [
        ("reasoning_gym:products", "Dataset 'products' not registered"),
        ("reasoning_gym:words", "nltk's data words is missing and cannot be downloaded"),
        ("reasoning_gym:words", "-m nltk.downloader words; NLTK_DATA names the folder that then holds corpora/words"),
        ("verifiers:sums", "-m pip install verifiers"),
    ] {
        let refused =
            run(&format!("{keys} environment={environment} output_dir={}", folder.path().join("no").display()));
        refused.assert_error(environment, 2, &[&format!("environment = {environment}"), part]);
    }
}

/// The number in a prompt's word; `None` for other words.
fn number(word: &str) -> Option<usize> {
    let words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"];
    words.iter().position(|known| word.ends_with(known))
}

/// An HTTP server for static files, which is stopped when this is dropped.
struct Files(Child);

impl Drop for Files {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The model gets the server's tools, `reset` receives the rows, and the reward is the sum of the steps' rewards.
#[test]
fn an_openenv_servers_tools_and_rewards_are_used() {
    let folder = tempfile::tempdir().unwrap();
    let (python, output) = (python(folder.path(), "openenv", OPENENV), folder.path().join("run"));
    fs::write(folder.path().join("schema"), r#"{"action": {"title": "CallToolAction", "type": "object"}}"#).unwrap();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let server = Command::new("python3")
        .args(["-m", "http.server", "--bind", "127.0.0.1", &port.to_string()])
        .current_dir(folder.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let _server = Files(server.unwrap());
    wait_until(|| std::net::TcpStream::connect(("127.0.0.1", port)).is_ok());
    let keys = format!(
        "--nproc 2 --config configs/calculator.toml tools=[] reward_funcs=[] eval_steps=none eval_file=none max_steps=1 save_steps=none \
         max_train_samples=64 per_device_train_batch_size=32 log_completions=true environment_args.level=3 reward.python={}",
        python.display()
    );
    let ended = run(&format!("{keys} environment=openenv:http://127.0.0.1:{port} output_dir={}", output.display()));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let lines = metrics(&output);
    let line = lines.iter().find(|line| line.get("loss").is_some()).unwrap();
    let value = |metric: &str| line[metric].as_f64().unwrap_or_else(|| panic!("no {metric} in {line:?}"));
    assert!(value("tools/call_frequency") > 0.05 && value("tools/num_failed") == 0.0, "{line:?}");
    let rows = read_completions(&output.join("completions/completions_00001.parquet")).unwrap();
    let is_rewarded = rows.iter().filter(|row| row.reward == Some(1.0)).count();
    assert!(is_rewarded > 0 && rows.iter().all(|row| [Some(0.0), Some(1.0)].contains(&row.reward)), "{line:?}");
    assert!((value("rewards/openenv/mean") - is_rewarded as f64 / rows.len() as f64).abs() < 1e-6, "{line:?}");
    let refused = run(&format!("{keys} environment=openenv:coding_env output_dir={}", output.display()));
    refused.assert_error("an image", 2, &["environment = openenv:coding_env", "run in containers"]);
}
