//! The worker of the tool `python`: an interpreter in a sandbox of its own for each trajectory that calls it, which keeps its variables and
//! imports until the trajectory ends.
//!
//! The interpreter itself raises an exception in a call that takes too long, so that its variables stay. One that does not heed it, or
//! that ends, is replaced by a fresh one at the next call.
//!
//! The code of a model has the interpreter's process for itself, and could do whatever the interpreter does. So nothing that comes from
//! there is taken for more than text and the end of a call: its length and its time are bounded here, where results are put together.

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

/// The hidden subcommand that a run starts this program with.
pub const COMMAND: &str = "python-worker";

/// The interpreter, a Python program.
const PROGRAM: &str = include_str!("python.py");
/// Time that an interpreter has, past a call's own, to raise its exception.
const GRACE: Duration = Duration::from_secs(1);
/// Longest wait where nothing is to be done.
const IDLE: Duration = Duration::from_secs(3600);
/// Most bytes of a character.
const CHAR_BYTES: usize = 4;

/// Settings of the worker.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct InterpreterSettings {
    /// Settings of the sandbox.
    pub code: CodeConfig,
    /// Longest time of the calls of one turn, in seconds.
    pub turn_timeout_s: f64,
    /// Longest result of a call in characters.
    pub max_chars: usize,
    /// Turns that run at once.
    pub workers: usize,
}

/// A request: the calls of a turn, or the end of a trajectory.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Wanted {
    Drop { drop: u64 },
    Turn { id: u64, trajectory: u64, arguments: VecDeque<Value> },
    Ready { id: u64 },
}

/// A turn whose calls run.
#[derive(Debug)]
struct Turn {
    id: u64,
    trajectory: u64,
    /// Arguments of the calls that are to come.
    arguments: VecDeque<Value>,
    results: Vec<CallResult>,
    /// Characters of the results.
    num_chars: usize,
    began: Instant,
    /// When the call that runs began, and when its interpreter is ended.
    call_began: Instant,
    deadline: Instant,
    /// Ends the output of the call that runs, before the word whether it failed.
    mark: [u8; 16],
    is_late: bool,
}

/// The schema of the tool, as those of functions are.
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

/// The code of a call; none for other arguments than the schema's.
fn code(arguments: &Value) -> Option<&str> {
    arguments.as_object().filter(|given| given.len() == 1)?.get("code")?.as_str()
}

/// A number that nobody can guess.
fn random() -> u64 {
    RandomState::new().hash_one(0)
}

/// Serves requests on standard input and output until that ends; `settings` are the worker's as JSON. What keeps the sandbox from being
/// built is the answer to the first request.
///
/// # Errors
/// [`Error::InvalidArgument`] for other settings; [`Error::Environment`] if whoever asks is gone.
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
    /// The sandbox, or what keeps it from being built.
    sandbox: std::result::Result<Sandbox, String>,
    /// The interpreter's program, with its limits.
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

    /// Waits until there is something to do.
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

    /// Begins the next call of a turn; false if there is none left, and the turn is answered.
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

    /// Moves a turn on; false once it is answered.
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

    /// Longest time of a call that heeds it.
    fn call_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.settings.code.timeout_s)
    }

    /// Ends the interpreter of a turn; the next call has a fresh one.
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

    /// The whole output of a call that has ended, taken off `received`, and whether the call failed.
    fn ended_output(&self, received: &mut Vec<u8>) -> Option<(String, bool)> {
        let (said, failed) = received
            .strip_suffix(b"0")
            .map(|said| (said, false))
            .or_else(|| received.strip_suffix(b"1").map(|said| (said, true)))?;
        let text = String::from_utf8_lossy(said.strip_suffix(&self.mark)?).into_owned();
        received.clear();
        Some((text, failed))
    }

    /// Adds the result of a call, unless the turn's get too long.
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
