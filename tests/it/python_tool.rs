//! The tool `python`: sandboxed interpreters that keep their variables, called directly as a run does, and a run whose model calls it.

use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use colo_grpo::internal::config::{RewardConfig, SandboxLayer};
use colo_grpo::internal::metrics::read_completions;
use serde_json::{Value, json};

use crate::program::{command, metrics, run, wait_until};
use crate::rewards::sandbox::{NAMESPACES, refuse_namespaces};

/// Time limit of a call in seconds: for calls that end, and for those that do not.
const PATIENT_S: f64 = 30.0;
const HASTY_S: f64 = 0.5;

/// The worker process of all interpreters, with its pipes.
struct Interpreters {
    worker: Child,
    num_asked: u64,
}

impl Interpreters {
    fn started(may_lack: &[SandboxLayer], timeout_s: f64, around: impl FnOnce(&mut Command)) -> Self {
        let mut code = RewardConfig::default().code;
        (code.timeout_s, code.memory_bytes, code.may_lack) = (timeout_s, 256 << 20, may_lack.to_vec());
        if !may_lack.is_empty() && Path::new("/usr/bin/python3").exists() {
            code.command.0[0] = "/usr/bin/python3".to_owned();
        }
        let settings = json!({"code": code, "turn_timeout_s": 10.0 * timeout_s, "max_chars": 1000, "workers": 4});
        let mut worker = command("python-worker");
        worker.arg(settings.to_string()).stdin(Stdio::piped());
        around(&mut worker);
        Self { worker: worker.spawn().unwrap(), num_asked: 0 }
    }

    /// Starts a worker with every sandbox layer that this machine permits: all, or Landlock and seccomp. If neither works, checks the error instead.
    fn new(timeout_s: f64) -> Option<Self> {
        for (may_lack, is_alone) in [(&[][..], false), (&NAMESPACES, true)] {
            let around = |command: &mut Command| {
                if is_alone {
                    refuse_namespaces(command)
                }
            };
            let mut interpreters = Self::started(may_lack, timeout_s, around);
            interpreters.send(&json!({"id": 0}));
            let ready = interpreters.reply();
            let Some(error) = ready["error"].as_str() else { return Some(interpreters) };
            println!("not every layer is allowed here: {error}");
            assert!(error.starts_with("the sandbox cannot use "), "{error}");
        }
        None
    }

    fn send(&mut self, request: &Value) {
        let (request, input) = (request.to_string(), self.worker.stdin.as_mut().unwrap());
        input.write_all(&(request.len() as u32).to_be_bytes()).unwrap();
        input.write_all(request.as_bytes()).unwrap();
    }

    fn reply(&mut self) -> Value {
        let (mut head, output) = ([0; 4], self.worker.stdout.as_mut().unwrap());
        output.read_exact(&mut head).unwrap();
        let mut reply = vec![0; u32::from_be_bytes(head) as usize];
        output.read_exact(&mut reply).unwrap();
        serde_json::from_slice(&reply).unwrap()
    }

    /// Begins a turn of a trajectory. Returns the request's number.
    fn begin(&mut self, trajectory: u64, codes: &[&str]) -> u64 {
        self.num_asked += 1;
        let arguments: Vec<Value> = codes.iter().map(|code| json!({"code": code})).collect();
        self.send(&json!({"id": self.num_asked, "trajectory": trajectory, "arguments": arguments}));
        self.num_asked
    }

    /// Makes one call. Returns its output, whether it failed, and whether it exceeded the time limit.
    fn call(&mut self, trajectory: u64, code: &str) -> (String, bool, bool) {
        let id = self.begin(trajectory, &[code]);
        let reply = self.reply();
        assert_eq!(reply["id"], id, "{reply}");
        let result = &reply["results"][0];
        let content = result["content"].as_str().unwrap().to_owned();
        (content, result["failed"].as_bool().unwrap(), reply["kind"] == "timeout")
    }

    fn content(&mut self, trajectory: u64, code: &str) -> String {
        self.call(trajectory, code).0
    }

    /// States of all interpreters' processes according to /proc.
    fn states(&self) -> Vec<char> {
        let pids = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().into_string().ok());
        let stat = |pid: String| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            let mut fields = stat.rsplit_once(") ")?.1.split(' ');
            let state = fields.next()?.chars().next()?;
            Some((pid.parse::<u32>().ok()?, fields.next()?.parse::<u32>().ok()?, state))
        };
        let all: Vec<(u32, u32, char)> = pids.filter_map(stat).collect();
        let mut below = vec![self.worker.id()];
        let mut states = Vec::new();
        while let Some(parent) = below.pop() {
            for (pid, _, state) in all.iter().filter(|(_, of, _)| *of == parent) {
                below.push(*pid);
                states.push(*state);
            }
        }
        assert!(states.len() >= 2, "two trajectories have interpreters");
        states
    }
}

impl Drop for Interpreters {
    fn drop(&mut self) {
        drop(self.worker.stdin.take());
        assert!(self.worker.wait().unwrap().success());
    }
}

#[test]
fn python_variables_persist_within_one_trajectory_only() {
    let Some(mut python) = Interpreters::new(PATIENT_S) else { return };
    let defined = "import math\nx = 3\ndef twice(y):\n    return 2 * y\nclass Point:\n    pass\nprint('é', x)";
    assert_eq!(python.call(1, defined), ("é 3".to_owned(), false, false));
    assert_eq!(python.content(1, "twice(x) + math.floor(2.5)"), "8");
    assert_eq!(python.content(1, "import pickle; pickle.loads(pickle.dumps(Point())).__class__ is Point"), "True");
    let (other, failed, _) = python.call(2, "x = x + 1");
    assert!(failed && other.ends_with("NameError: name 'x' is not defined"), "{other}");
    assert_eq!(python.content(2, "x = 'mine'; x"), "'mine'");
    assert_eq!(python.content(1, "x"), "3");
    // Both at once, and several calls of one turn in their order.
    let (first, second) = (python.begin(1, &["x += 1", "x += 10", "x"]), python.begin(2, &["x += '!'", "x"]));
    let mut replies = [python.reply(), python.reply()];
    replies.sort_by_key(|reply| reply["id"].as_u64());
    assert_eq!((&replies[0]["id"], &replies[1]["id"]), (&json!(first), &json!(second)));
    let contents = |reply: &Value| -> Vec<String> {
        let results = reply["results"].as_array().unwrap();
        results.iter().map(|result| result["content"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(contents(&replies[0]), ["", "", "14"]);
    assert_eq!(contents(&replies[1]), ["", "'mine!'"]);
    // A trajectory that has ended leaves nothing to the next one, whatever its number.
    python.send(&json!({"drop": 1}));
    assert!(python.content(1, "x").ends_with("NameError: name 'x' is not defined"));
}

#[test]
fn python_exceptions_are_tool_results_and_keep_variables() {
    let Some(mut python) = Interpreters::new(PATIENT_S) else { return };
    let (raised, failed, is_late) = python.call(1, "x = 5\nprint('before')\nx / 0");
    let expected = "before\nTraceback (most recent call last):\n  File \"<call 1>\", line 3, in <module>\n    x / 0\n";
    assert!(raised.starts_with(expected) && raised.ends_with("ZeroDivisionError: division by zero"), "{raised}");
    assert!(failed && !is_late);
    let (wrong, failed, _) = python.call(1, "x = = 1");
    assert!(failed && wrong.ends_with("SyntaxError: invalid syntax") && !wrong.contains("main.py"), "{wrong}");
    assert_eq!(python.call(1, "raise SystemExit"), (String::new(), false, false));
    assert!(python.call(1, "import sys; sys.exit(3)").1);
    assert_eq!(python.call(1, "x"), ("5".to_owned(), false, false));
    assert_eq!(python.call(1, ""), (String::new(), false, false));
    python.num_asked += 1;
    python.send(&json!({"id": python.num_asked, "trajectory": 1, "arguments": [{"source": "1"}, "x", {"code": "x"}]}));
    let reply = python.reply();
    let expected = "{'error': 'expected one argument of the tool python, code, as text; got {\"source\":\"1\"}'}";
    assert_eq!(reply["results"][0], json!({"content": expected, "failed": true}));
    assert_eq!((&reply["results"][1]["failed"], &reply["results"][2]["content"]), (&json!(true), &json!("5")));
}

#[test]
fn a_python_call_has_the_limits_of_reward_code() {
    let Some(mut python) = Interpreters::new(PATIENT_S) else { return };
    let failure = |python: &mut Interpreters, code: &str| {
        let (content, failed, _) = python.call(1, code);
        assert!(failed, "{code}: {content}");
        content
    };
    assert_eq!(python.content(1, "x = 7"), "");
    assert!(failure(&mut python, "b = bytearray(1 << 30)").ends_with("MemoryError"));
    assert!(failure(&mut python, "import socket; socket.socket()").contains("Error: "));
    assert!(failure(&mut python, "import os; os.fork()").contains("Error: "));
    assert!(failure(&mut python, "open('/etc/passwd').read()").contains("Error: "));
    assert!(failure(&mut python, "import os; os.kill(os.getppid(), 9)").contains("Error: "));
    let flood = "while True:\n    try:\n        print('y' * 99)\n    except OSError:\n        break";
    assert_eq!(failure(&mut python, flood), "{'error': 'more than 1000 characters of output'}");
    let long = failure(&mut python, "raise ValueError('z' * 2000)");
    assert!(long.starts_with("{'error': 'the result has 2") && long.ends_with("more than 1000'}"), "{long}");
    // What is written past `print` reaches nobody, least of all the replies.
    assert_eq!(python.content(1, "import os; os.write(1, b'no'); os.write(2, b'no'); x"), "7");
    assert!(failure(&mut python, "input()").contains("EOFError"));
}

#[test]
fn a_hanging_python_call_affects_only_its_own_trajectory() {
    let Some(mut python) = Interpreters::new(HASTY_S) else { return };
    assert_eq!(python.content(1, "x = 1"), "");
    assert_eq!(python.content(2, "x = 2"), "");
    // It heeds its time: the exception ends the call, and what was assigned stays.
    let (content, failed, is_late) = python.call(1, "x = 3\nwhile True:\n    pass");
    assert!(content.ends_with("TimeoutError: the call took longer than 0.5 s") && failed && is_late, "{content}");
    assert_eq!(python.content(1, "x"), "3");
    let deaf = "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True:\n    pass";
    for (code, reason, is_late) in [
        (deaf, "it did not reply before its deadline", true),
        ("import os\nos._exit(0)", "its process ended", false),
        ("import ctypes\nctypes.string_at(0)", "its process ended", false),
        (
            "import os\nfor fd in range(3, 9):\n    try:\n        for _ in range(9): os.write(fd, b'y' * 2000)\n    except OSError:\n        pass",
            "its output is longer than 1000 characters",
            false,
        ),
    ] {
        let expected = format!("{{'error': 'the interpreter was ended and its variables are lost: {reason}'}}");
        // The other trajectory's call runs beside it.
        let (lost, other) = (python.begin(1, &[code, "'x' in globals()"]), python.begin(2, &["x"]));
        let mut replies = [python.reply(), python.reply()];
        replies.sort_by_key(|reply| reply["id"].as_u64());
        assert_eq!((&replies[0]["id"], &replies[1]["id"]), (&json!(lost), &json!(other)));
        assert_eq!(replies[0]["results"][0], json!({"content": expected, "failed": true}), "{code}");
        assert_eq!(replies[0]["results"][1]["content"], "False", "a fresh interpreter");
        assert_eq!(replies[0]["kind"] == "timeout", is_late, "{code}");
        assert_eq!(replies[1]["results"][0]["content"], "2");
        assert_eq!(python.content(1, "x = 1"), "");
    }
    // No thread computes on between two calls.
    let thread = "import threading\ndef spin():\n    while True:\n        pass\nthreading.Thread(target=spin, daemon=True).start()";
    assert_eq!(python.content(1, thread), "");
    wait_until(|| python.states().iter().all(|state| *state == 'T'));
    assert_eq!(python.content(1, "'x' in globals()"), "True");
}

/// Output that a program writes without `print` is plain text, even if it looks like a reply, and does not end the call.
#[test]
fn a_program_cannot_forge_the_interpreters_reply() {
    let Some(mut python) = Interpreters::new(PATIENT_S) else { return };
    let forged = r#"
import json, os, struct
reply = json.dumps({"content": "forged", "failed": True, "is_late": True, "id": 99, "results": []}).encode()
for fd in range(64):
    try: os.write(fd, struct.pack(">I", len(reply)) + reply)
    except OSError: pass
    try: os.write(fd, bytes(16) + b"1")
    except OSError: pass
x = 5
"#;
    let (content, failed, is_late) = python.call(1, forged);
    assert!(content.contains("\"content\": \"forged\"") && !failed && !is_late, "{content:?}");
    assert_eq!(python.call(1, "x"), ("5".to_owned(), false, false));
    // A program that finds the mark of its call ends that call, and no more.
    let found = r#"
import os, sys
frame = sys._getframe()
while "mark" not in frame.f_locals: frame = frame.f_back
os.write(frame.f_locals["sink"].fileno(), b"early" + frame.f_locals["mark"] + b"0")
import time
time.sleep(60)
"#;
    assert_eq!(python.call(2, found), ("early".to_owned(), false, false));
    assert_eq!(python.call(1, "x"), ("5".to_owned(), false, false), "another trajectory");
}

/// The results of a turn, however many calls it has, share the length limit of one call.
#[test]
fn all_tool_results_of_a_turn_share_one_limit() {
    let Some(mut python) = Interpreters::new(PATIENT_S) else { return };
    python.begin(1, &["print('a' * 600)", "print('b' * 600)", "print('c' * 400)"]);
    let reply = python.reply();
    let contents: Vec<&str> = (0..3).map(|call| reply["results"][call]["content"].as_str().unwrap()).collect();
    assert_eq!((contents[0].len(), contents[2].len()), (600, 400));
    assert_eq!(contents[1], "{'error': 'the results of this turn are longer than 1000 characters in all'}");
}

/// The calculator's model with a renamed tool: its text `[add(a=23, b=41)]` becomes a call of `python`.
fn model_that_computes(folder: &Path) -> std::path::PathBuf {
    let (from, to) = (Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/calculator/model"), folder.join("model"));
    fs::create_dir(&to).unwrap();
    for file in from.read_dir().unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), to.join(file.file_name())).unwrap();
    }
    let mut tokenizer = fs::read_to_string(to.join("tokenizer.json")).unwrap();
    for (word, renamed) in [("▁[add(a=", "▁[python(code='"), (",", "+"), ("▁b=", "▁0+"), (")]", "')]")] {
        let (word, renamed) = (format!("\"{word}\": "), format!("\"{renamed}\": "));
        assert_eq!(tokenizer.matches(&word).count(), 1, "{word}");
        tokenizer = tokenizer.replace(&word, &renamed);
    }
    fs::write(to.join("tokenizer.json"), tokenizer).unwrap();
    to
}

#[test]
fn a_run_trains_on_trajectories_with_the_python_tool() {
    if Interpreters::new(PATIENT_S).is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (model, output) = (model_that_computes(folder.path()), folder.path().join("run"));
    let ended = run(&format!(
        "--config configs/calculator.toml eval_steps=none eval_file=none max_steps=1 log_completions=true save_steps=none \
         max_train_samples=64 tools=[\"python\",\"configs/calculator/tools.py:add\"] model_name_or_path={} output_dir={}",
        model.display(),
        output.display()
    ));
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let lines = metrics(&output);
    let value = |metric: &str| lines[0][metric].as_f64().unwrap();
    assert!(value("tools/call_frequency") > 0.1 && value("tools/failure_frequency") < 0.2, "{:?}", lines[0]);
    assert!(value("sampling/sampling_logp_difference/max") < 1e-4, "{:?}", lines[0]);
    let rows = read_completions(&output.join("completions/completions_00001.parquet")).unwrap();
    let called = rows.iter().filter(|row| row.completion.contains("[python(code="));
    let scores: Vec<f32> = called.filter_map(|row| row.rewards[0].1).collect();
    assert!(scores.len() > 6 && scores.iter().sum::<f32>() > 0.5 * scores.len() as f32, "{scores:?}");
}
