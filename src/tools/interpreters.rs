//! The worker process of the tool `python`. Each trajectory that calls it has its own Python interpreter in a sandbox, which keeps variables and
//! imports until the trajectory ends.
//!
//! If a call takes too long, the interpreter itself raises an exception in it, so that variables are kept. An interpreter that does not react
//! or that ends is replaced by a new one at the next call.
//!
//! The model's code runs in the interpreter's process and can control it completely. The worker therefore treats its output only as text and
//! the end of a call, and enforces the limits on length and time itself.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::reply::CallResult;
use crate::config::{CodeConfig, INTERPRETER};
use crate::error::{Error, Result};
use crate::process::{do_not_block, moved, wait_for};
use crate::reward::{frame, take_frame};
use crate::sandbox::{Sandbox, SandboxSession};

/// Hidden subcommand with which a run starts this program as the worker.
pub const COMMAND: &str = "python-worker";

/// The Python program that runs in the sandbox.
const PROGRAM: &str = include_str!("python.py");
/// Time after the limit of a call in which the interpreter must raise its exception.
const GRACE: Duration = Duration::from_secs(1);
/// Longest wait when no call is running.
const IDLE: Duration = Duration::from_secs(3600);
/// Largest size of a UTF-8 character in bytes.
const CHAR_BYTES: usize = 4;

/// Settings of the worker, passed as JSON.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct InterpreterSettings {
    /// Settings of the sandbox.
    pub code: CodeConfig,
    /// Time limit for all calls of one turn, in seconds.
    pub turn_timeout_s: f64,
    /// Longest result of a call in characters.
    pub max_chars: usize,
    /// Number of turns that run concurrently.
    pub workers: usize,
}

/// A request: the calls of a turn, the end of a trajectory, or the question whether the worker is ready.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Wanted {
    Drop { drop: u64 },
    Turn { id: u64, trajectory: u64, arguments: VecDeque<Value> },
    Ready { id: u64 },
}

/// A turn whose calls are running.
#[derive(Debug)]
struct Turn {
    id: u64,
    trajectory: u64,
    /// Arguments of the remaining calls.
    arguments: VecDeque<Value>,
    results: Vec<CallResult>,
    /// Number of characters of the results so far.
    num_chars: usize,
    began: Instant,
    /// Start of the running call. `deadline` is when its interpreter is killed.
    call_began: Instant,
    deadline: Instant,
    /// Random bytes that mark the end of the running call's output; a byte after them says whether the call failed.
    mark: [u8; 16],
    is_late: bool,
}

/// The JSON schema of the tool, in the same form as those of functions.
pub(super) fn schema() -> Value {
    json!({"type": "function", "function": {
        "name": INTERPRETER,
        "description": "Runs Python code and returns what it prints and the value of its last expression. Variables and imports are kept for \
                        the next call. There is no network.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The code to run."}},
            "required": ["code"],
        },
        "return": {"type": "string", "description": "The output, or a traceback."},
    }})
}

/// The code of a call; `None` if the arguments do not follow the schema.
fn code(arguments: &Value) -> Option<&str> {
    arguments.as_object().filter(|given| given.len() == 1)?.get("code")?.as_str()
}

/// An unpredictable random number.
fn random() -> u64 {
    RandomState::new().hash_one(0)
}

/// Serves requests on standard input and output until the input ends; `settings` are `InterpreterSettings` as JSON. If the sandbox cannot be
/// set up, the first request is answered with the reason.
///
/// # Errors
/// [`Error::InvalidArgument`] for malformed settings; [`Error::Environment`] if the process that sends requests has ended.
pub fn serve(settings: &str) -> Result<()> {
    let settings: InterpreterSettings = serde_json::from_str(settings).map_err(|error| Error::InvalidArgument {
        op: COMMAND,
        expected: "settings of the tool 'python' as JSON".to_owned(),
        got: error.to_string(),
    })?;
    Interpreters::new(settings).serve().map_err(|error| Error::Environment { message: format!("{COMMAND}: {error}") })
}

/// The interpreters of all trajectories, and the turns that call them.
struct Interpreters {
    settings: InterpreterSettings,
    /// The sandbox, or why it cannot be set up.
    sandbox: std::result::Result<Sandbox, String>,
    /// The interpreter's program with its limits inserted.
    program: String,
    sessions: HashMap<u64, SandboxSession>,
    running: Vec<Turn>,
    waiting: VecDeque<Turn>,
    received: Vec<u8>,
    unsent: Vec<u8>,
}

impl Interpreters {
    fn new(settings: InterpreterSettings) -> Self {
        let sandbox = Sandbox::new(&settings.code);
        let program = format!("{PROGRAM}\n\nserve({}, {})\n", settings.code.timeout_s, settings.max_chars);
        Self {
            settings,
            sandbox,
            program,
            sessions: HashMap::new(),
            running: Vec::new(),
            waiting: VecDeque::new(),
            received: Vec::new(),
            unsent: Vec::new(),
        }
    }

    fn serve(&mut self) -> io::Result<()> {
        let (mut input, mut output) = (io::stdin().lock(), io::stdout().lock());
        do_not_block(0)?;
        do_not_block(1)?;
        let mut part = [0; 1 << 16];
        loop {
            self.wait();
            match moved(input.read(&mut part))? {
                Some(0) => return Ok(()),
                num_read => self.received.extend_from_slice(&part[..num_read.unwrap_or(0)]),
            }
            while let Some(request) = take_frame(&mut self.received) {
                self.take(serde_json::from_slice(&request)?);
            }
            let mut running = std::mem::take(&mut self.running);
            running.retain_mut(|turn| self.goes_on(turn));
            self.running = running;
            while self.running.len() < self.settings.workers
                && let Some(mut turn) = self.waiting.pop_front()
            {
                turn.began = Instant::now();
                if self.begin_call(&mut turn) {
                    self.running.push(turn);
                }
            }
            if !self.unsent.is_empty() {
                let num_sent = moved(output.write(&self.unsent))?.unwrap_or(0);
                output.flush()?;
                self.unsent.drain(..num_sent);
            }
        }
    }

    /// Waits until an input, an output or a deadline is ready.
    fn wait(&self) {
        let sessions = || self.running.iter().filter_map(|turn| self.sessions.get(&turn.trajectory));
        let readable: Vec<_> = std::iter::once(0).chain(sessions().map(SandboxSession::readable)).collect();
        let output = if self.unsent.is_empty() { -1 } else { 1 };
        let writable: Vec<_> = std::iter::once(output).chain(sessions().map(SandboxSession::writable)).collect();
        let next = self.running.iter().map(|turn| turn.deadline).min();
        wait_for(&readable, &writable, next.map_or(IDLE, |next| next.saturating_duration_since(Instant::now())));
    }

    fn take(&mut self, wanted: Wanted) {
        match wanted {
            Wanted::Ready { id } => {
                let error = self.sandbox.as_ref().err();
                self.unsent.extend(frame(&json!({"id": id, "error": error})));
            }
            Wanted::Drop { drop: trajectory } => {
                self.sessions.remove(&trajectory);
                self.running.retain(|turn| turn.trajectory != trajectory);
                self.waiting.retain(|turn| turn.trajectory != trajectory);
            }
            Wanted::Turn { id, trajectory, arguments } => {
                self.waiting.push_back(Turn::new(id, trajectory, arguments));
            }
        }
    }

    /// Begins the next call of a turn. If no call is left, sends the turn's reply and returns false.
    fn begin_call(&mut self, turn: &mut Turn) -> bool {
        let end = turn.began + Duration::from_secs_f64(self.settings.turn_timeout_s);
        while let Some(arguments) = turn.arguments.pop_front() {
            let Some(code) = code(&arguments) else {
                turn.fail(&format!("expected one argument of the tool python, code, as text; got {arguments}"));
                continue;
            };
            if Instant::now() >= end {
                turn.fail(&format!("no answer within {} s", self.settings.turn_timeout_s));
                turn.is_late = true;
                continue;
            }
            let opened = match &self.sandbox {
                _ if self.sessions.contains_key(&turn.trajectory) => Ok(()),
                Ok(sandbox) => sandbox.open(&self.program).map(|session| {
                    self.sessions.insert(turn.trajectory, session);
                }),
                Err(error) => Err(error.clone()),
            };
            if let Err(error) = opened {
                turn.fail(&error);
                continue;
            }
            let session = self.sessions.get_mut(&turn.trajectory).expect("opened");
            turn.mark = (u128::from(random()) << 64 | u128::from(random())).to_be_bytes();
            session.ask(&[&(code.len() as u32).to_be_bytes(), &turn.mark[..], code.as_bytes()].concat());
            turn.call_began = Instant::now();
            turn.deadline = end.min(turn.call_began + self.call_timeout() + GRACE);
            return true;
        }
        let seconds = turn.began.elapsed().as_secs_f64();
        let kind = turn.is_late.then_some("timeout");
        let reply = json!({"id": turn.id, "results": turn.results, "seconds": seconds, "kind": kind});
        self.unsent.extend(frame(&reply));
        false
    }

    /// Processes the output of a turn's running call. Returns false once the turn's reply was sent.
    fn goes_on(&mut self, turn: &mut Turn) -> bool {
        let session = self.sessions.get_mut(&turn.trajectory).expect("another call is still running in it");
        let is_alive = session.transfer();
        if session.received.len() > CHAR_BYTES * self.settings.max_chars + turn.mark.len() + 1 {
            self.lose(turn, &format!("its output is longer than {} characters", self.settings.max_chars));
        } else if let Some((text, failed)) = turn.ended_output(&mut session.received) {
            session.pause();
            turn.is_late |= failed && turn.call_began.elapsed() >= self.call_timeout();
            turn.add(&text, failed, self.settings.max_chars);
        } else if !is_alive {
            self.lose(turn, "its process ended");
        } else if Instant::now() >= turn.deadline {
            turn.is_late = true;
            self.lose(turn, "it did not reply before its deadline");
        } else {
            return true;
        }
        self.begin_call(turn)
    }

    /// Time limit of a call, which the interpreter itself enforces.
    fn call_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.settings.code.timeout_s)
    }

    /// Kills the interpreter of a turn. The next call gets a new one.
    fn lose(&mut self, turn: &mut Turn, reason: &str) {
        self.sessions.remove(&turn.trajectory);
        turn.fail(&format!("the interpreter was ended and its variables are lost: {reason}"));
    }
}

impl Turn {
    fn new(id: u64, trajectory: u64, arguments: VecDeque<Value>) -> Self {
        let now = Instant::now();
        Self {
            id,
            trajectory,
            arguments,
            results: Vec::new(),
            num_chars: 0,
            began: now,
            call_began: now,
            deadline: now,
            mark: [0; 16],
            is_late: false,
        }
    }

    /// Removes the complete output of an ended call from `received`. Returns it and whether the call failed; `None` while the call is running.
    fn ended_output(&self, received: &mut Vec<u8>) -> Option<(String, bool)> {
        let (said, failed) = received
            .strip_suffix(b"0")
            .map(|said| (said, false))
            .or_else(|| received.strip_suffix(b"1").map(|said| (said, true)))?;
        let text = String::from_utf8_lossy(said.strip_suffix(&self.mark)?).into_owned();
        received.clear();
        Some((text, failed))
    }

    /// Appends the result of a call, or an error if the turn's results are too long.
    fn add(&mut self, text: &str, failed: bool, max_chars: usize) {
        let num_chars = text.chars().count();
        if self.num_chars + num_chars > max_chars {
            return self.fail(&format!("the results of this turn are longer than {max_chars} characters in all"));
        }
        self.num_chars += num_chars;
        self.results.push(CallResult { content: text.to_owned(), failed });
    }

    fn fail(&mut self, error: &str) {
        self.results.push(CallResult::error(error));
    }
}
