//! The connection to a process that serves tool requests: enforces its time limits and replaces it if it ends.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::reply::ToolReply;
use crate::error::{Error, Result};
use crate::phase;
use crate::reward::{FailureKind, Program, RewardFailure, RewardWorker, frame};

/// Time limit for loading all tools. Importing Python packages may take long.
const START: Duration = Duration::from_secs(120);
/// Longest interval between two heartbeats.
const BEAT: Duration = Duration::from_millis(200);
/// How long a process may be silent beyond the time limit of a request.
const GRACE: Duration = Duration::from_secs(60);
/// Number of times in a row that the process may end without a reply before the run ends.
const MAX_ENDS: usize = 3;

/// A process that answers requests in any order and enforces their time limit itself; this side checks that it does.
/// If it ends, a new one replaces it. Its open requests, and later ones for trajectories whose state it kept, are answered as lost.
#[derive(Debug)]
pub(super) struct ToolWorker {
    program: Program,
    worker: RewardWorker,
    /// The process's answer to the first request. A replacement must give the same answer.
    loaded: Vec<u8>,
    /// Name of the service for error messages. `key` is the configuration key with the time limit of a request.
    name: &'static str,
    key: &'static str,
    timeout: Duration,
    pub grace: Duration,
    /// Open requests, each with the trajectory to which it belongs, if any.
    asked: HashMap<u64, Option<u64>>,
    /// Trajectories whose state the process may keep.
    kept: HashSet<u64>,
    /// Trajectories whose process has ended, with the reason.
    lost: HashMap<u64, String>,
    /// Requests to be answered as lost, with the reason.
    unserved: Vec<(u64, String)>,
    /// Number of times that the process ended since its last reply.
    num_ends: usize,
    /// How long the process has not replied while replies were awaited. `polled` is when it was last polled.
    silence: Duration,
    polled: Instant,
    _parent: Sender<()>, // of the thread that started the process, with which it would die
}

impl ToolWorker {
    /// Starts a process that serves `name` and loads its tools. A request may take `timeout_s` seconds, the value of configuration key `key`.
    ///
    /// # Errors
    /// The error that `refuse` creates for a cause; [`Error::StoppedEarly`] if a stop was requested.
    pub fn start(
        program: Program,
        name: &'static str,
        key: &'static str,
        timeout_s: f64,
        refuse: &dyn Fn(&str) -> Error,
    ) -> Result<Self> {
        let (mut worker, parent) = started(&program).map_err(|failure| refuse(&failure.cause))?;
        let loaded = first_reply(&mut worker, refuse)?;
        Ok(Self {
            program,
            worker,
            loaded,
            name,
            key,
            timeout: Duration::from_secs_f64(timeout_s),
            grace: GRACE,
            asked: HashMap::new(),
            kept: HashSet::new(),
            lost: HashMap::new(),
            unserved: Vec::new(),
            num_ends: 0,
            silence: Duration::ZERO,
            polled: Instant::now(),
            _parent: parent,
        })
    }

    /// The process's description of its tools.
    pub fn loaded(&self) -> &[u8] {
        &self.loaded
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.worker.pid()
    }

    /// Sends a message that gets no reply.
    pub fn tell(&mut self, message: &Value) {
        self.worker.send(&frame(message));
    }

    /// Sends a request with number `id`. `trajectory` is the one to which it belongs, if any.
    pub fn ask(&mut self, id: u64, trajectory: Option<u64>, request: &Value) {
        if let Some(reason) = trajectory.and_then(|trajectory| self.lost.get(&trajectory)) {
            self.unserved.push((id, reason.clone()));
            return;
        }
        self.kept.extend(trajectory);
        self.asked.insert(id, trajectory);
        self.worker.send(&frame(request));
    }

    /// Cancels a request: its reply is not expected any more.
    pub fn give_up(&mut self, id: u64) {
        self.asked.remove(&id);
        self.unserved.retain(|(unserved, _)| *unserved != id);
    }

    /// Discards a trajectory: replies to its requests are not expected any more.
    pub fn forget(&mut self, trajectory: u64) {
        self.asked.retain(|_, of| *of != Some(trajectory));
        self.kept.remove(&trajectory);
        self.lost.remove(&trajectory);
    }

    /// The replies that have arrived, including those for lost requests.
    ///
    /// # Errors
    /// [`Error::ToolService`] if the process and its replacements have ended repeatedly; [`Error::Silent`] if it replies to
    /// nothing for longer than any request may take.
    pub fn received(&mut self) -> Result<Vec<ToolReply>> {
        let mut replies: Vec<ToolReply> = Vec::new();
        let mut next = self.worker.poll();
        let end = loop {
            match next {
                Ok(Some(reply)) => match serde_json::from_slice(&reply) {
                    Ok(reply) => replies.push(reply),
                    Err(error) => break Some(error.to_string()),
                },
                Ok(None) => break None,
                Err(failure) => break Some(failure.cause),
            }
            next = self.worker.reply_at_hand();
        };
        if !replies.is_empty() {
            self.num_ends = 0;
        }
        replies.iter().for_each(|reply| self.give_up(reply.id));
        if let Some(cause) = end {
            self.replace(cause)?;
        }
        replies.extend(self.unserved.drain(..).map(|(id, reason)| ToolReply::lost(id, reason)));
        self.watch(!replies.is_empty())?;
        Ok(replies)
    }

    /// Replaces a process that ended because of `cause`.
    fn replace(&mut self, mut cause: String) -> Result<()> {
        let reason = format!("{} has ended: {cause}", self.name);
        self.unserved.extend(self.asked.drain().map(|(id, _)| (id, reason.clone())));
        self.lost.extend(self.kept.drain().map(|trajectory| (trajectory, reason.clone())));
        loop {
            self.num_ends += 1;
            let failed = |message: &str| Error::ToolService {
                name: self.name,
                num_failures: self.num_ends,
                message: message.to_owned(),
            };
            if self.num_ends >= MAX_ENDS {
                return Err(failed(&cause));
            }
            tracing::warn!("{} is replaced, and the samples of its open requests are masked: {cause}", self.name);
            let again = started(&self.program).map_err(|failure| failed(&failure.cause));
            let again = again.and_then(|(mut worker, parent)| Ok((first_reply(&mut worker, &failed)?, worker, parent)));
            match again {
                Ok((loaded, worker, parent)) if loaded == self.loaded => {
                    (self.worker, self._parent) = (worker, parent);
                    return Ok(());
                }
                Ok(_) => {
                    return Err(failed("its files have changed: its tools differ from those at the start of the run"));
                }
                Err(Error::ToolService { message, .. }) => cause = message,
                Err(error) => return Err(error), // a stop
            }
        }
    }

    /// Counts the time without replies. The time between two calls counts only up to two heartbeats, because nobody reads replies while the trainer
    /// computes, or while this process is stopped.
    fn watch(&mut self, has_replied: bool) -> Result<()> {
        let now = Instant::now();
        let since = now.duration_since(std::mem::replace(&mut self.polled, now)).min(2 * BEAT);
        if has_replied || self.asked.is_empty() {
            self.silence = Duration::ZERO;
            return Ok(());
        }
        self.silence += since;
        if self.silence <= self.timeout + self.grace {
            return Ok(());
        }
        Err(Error::Silent {
            process: self.name,
            pid: self.pid(),
            silent_s: self.silence.as_secs_f64(),
            key: self.key,
            limit_s: self.timeout.as_secs_f64(),
            state: state(self.pid()),
        })
    }

    /// Waits until one of `workers` can read or write, at most for `limit` or a heartbeat.
    pub fn wait_any(workers: &[&Self], limit: Duration) {
        let workers: Vec<&RewardWorker> = workers.iter().map(|worker| &worker.worker).collect();
        RewardWorker::wait_any(&workers, limit.min(BEAT));
    }
}

/// Starts the process on a thread that lives until the returned sender is dropped; the process would end with its parent thread.
fn started(program: &Program) -> Result<(RewardWorker, Sender<()>), RewardFailure> {
    let (parent, end) = channel::<()>();
    let (started, worker) = channel();
    let program = program.clone();
    let work = move || {
        let _ = started.send(RewardWorker::start(&program));
        let _ = end.recv();
    };
    let thread = std::thread::Builder::new().name("tools".into()).spawn(work);
    let failed = |what: String| RewardFailure::new(FailureKind::Died, what);
    thread.map_err(|error| failed(format!("cannot start its thread: {error}")))?;
    let worker = worker.recv().map_err(|_| failed("its thread ended".to_owned()))??;
    Ok((worker, parent))
}

/// Waits for the answer to the first request, which loads tools.
fn first_reply(worker: &mut RewardWorker, refuse: &dyn Fn(&str) -> Error) -> Result<Vec<u8>> {
    worker.send(&frame(&json!({"id": 0})));
    let end = Instant::now() + START;
    loop {
        phase::beat();
        match worker.receive(end.min(Instant::now() + BEAT)) {
            Ok(Some(reply)) => return Ok(reply),
            Ok(None) if phase::stop_requested() => return Err(Error::StoppedEarly),
            Ok(None) if Instant::now() >= end => return Err(refuse(&worker.overdue().cause)),
            Ok(None) => {}
            Err(failure) => return Err(refuse(&failure.cause)),
        }
    }
}

/// The state of a process according to the kernel, such as `S (sleeping)`.
fn state(pid: u32) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let state = status.lines().find_map(|line| line.strip_prefix("State:"));
    state.map_or_else(|| "unknown".to_owned(), |state| state.trim().to_owned())
}
