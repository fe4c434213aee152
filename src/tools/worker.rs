//! A process that answers for tools, and how long it may be silent.

use std::collections::HashMap;
use std::fs;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::process::ToolReply;
use crate::error::{Error, Result};
use crate::phase;
use crate::reward::{FailureKind, Program, RewardFailure, RewardWorker, frame};

/// Longest time until all tools are loaded: a file may import much.
const START: Duration = Duration::from_secs(120);
/// Longest time between two heartbeats.
const BEAT: Duration = Duration::from_millis(200);
/// How long a process may be silent beyond the time that any request takes.
const GRACE: Duration = Duration::from_secs(60);

/// A process that answers requests in any order, each within a time. It ends by itself what takes longer; whether it does is watched here.
#[derive(Debug)]
pub(super) struct ToolWorker {
    worker: RewardWorker,
    /// What it serves, for errors, and the key that bounds the time of a request.
    name: &'static str,
    key: &'static str,
    timeout: Duration,
    pub grace: Duration,
    /// Requests that are not answered, each with the trajectory that it is of, if it has one.
    asked: HashMap<u64, Option<u64>>,
    /// How long the process has answered none of them while it was looked for replies, and when it last was.
    silence: Duration,
    polled: Instant,
    _parent: Sender<()>, // of the thread that started the process, with which it would die
}

impl ToolWorker {
    /// Starts a process that serves `name`, whose requests take as long as the key says, in seconds.
    pub fn start(
        program: Program,
        name: &'static str,
        (key, timeout_s): (&'static str, f64),
    ) -> Result<Self, RewardFailure> {
        let (parent, end) = channel::<()>();
        let (started, worker) = channel();
        let work = move || {
            let _ = started.send(RewardWorker::start(&program));
            let _ = end.recv();
        };
        let thread = std::thread::Builder::new().name("tools".into()).spawn(work);
        let failed = |what: String| RewardFailure::new(FailureKind::Died, what);
        thread.map_err(|error| failed(format!("no thread for it: {error}")))?;
        let worker = worker.recv().map_err(|_| failed("its thread ended".to_owned()))??;
        Ok(Self {
            worker,
            name,
            key,
            timeout: Duration::from_secs_f64(timeout_s),
            grace: GRACE,
            asked: HashMap::new(),
            silence: Duration::ZERO,
            polled: Instant::now(),
            _parent: parent,
        })
    }

    /// The process's number.
    pub fn pid(&self) -> u32 {
        self.worker.pid()
    }

    /// Sends what has no answer.
    pub fn tell(&mut self, message: &Value) {
        self.worker.send(&frame(message));
    }

    /// Sends a request with its number `id`, for a trajectory if it is one of that.
    pub fn ask(&mut self, id: u64, trajectory: Option<u64>, request: &Value) {
        self.asked.insert(id, trajectory);
        self.worker.send(&frame(request));
    }

    /// Expects no answer to a request any more.
    pub fn give_up(&mut self, id: u64) {
        self.asked.remove(&id);
    }

    /// Expects no answer to requests of a trajectory any more.
    pub fn forget(&mut self, trajectory: u64) {
        self.asked.retain(|_, of| *of != Some(trajectory));
    }

    /// The answer to the first request, which loads tools.
    ///
    /// # Errors
    /// The error that `refuse` makes of a cause; [`Error::StoppedEarly`] if a stop was asked for.
    pub fn first_reply(&mut self, refuse: &dyn Fn(&str) -> Error) -> Result<Vec<u8>> {
        let end = Instant::now() + START;
        loop {
            phase::beat();
            match self.worker.receive(end.min(Instant::now() + BEAT)) {
                Ok(Some(reply)) => return Ok(reply),
                Ok(None) if phase::stop_requested() => return Err(Error::StoppedEarly),
                Ok(None) if Instant::now() >= end => return Err(refuse(&self.worker.overdue().cause)),
                Ok(None) => {}
                Err(failure) => return Err(refuse(&failure.cause)),
            }
        }
    }

    /// The replies that have come.
    ///
    /// # Errors
    /// [`Error::Environment`] if the process has ended or writes what is no reply; [`Error::Silent`] if it answers nothing for longer
    /// than any request takes.
    pub fn received(&mut self) -> Result<Vec<ToolReply>> {
        let gone = |cause: &str| Error::Environment { message: format!("{} cannot go on: {cause}", self.name) };
        let mut replies: Vec<ToolReply> = Vec::new();
        let mut next = self.worker.poll();
        while let Some(reply) = next.map_err(|failure| gone(&failure.cause))? {
            replies.push(serde_json::from_slice(&reply).map_err(|error| gone(&error.to_string()))?);
            next = self.worker.reply_at_hand();
        }
        replies.iter().for_each(|reply| self.give_up(reply.id));
        self.watch(!replies.is_empty())?;
        Ok(replies)
    }

    /// Counts the time in which replies are looked for. That between two looks counts up to a heartbeat: nobody reads them while the trainer
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

    /// Waits until one of `workers` can move bytes, for `limit` or a heartbeat at most.
    pub fn wait_any(workers: &[&Self], limit: Duration) {
        let workers: Vec<&RewardWorker> = workers.iter().map(|worker| &worker.worker).collect();
        RewardWorker::wait_any(&workers, limit.min(BEAT));
    }
}

/// The state of a process as the kernel names it.
fn state(pid: u32) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let state = status.lines().find_map(|line| line.strip_prefix("State:"));
    state.map_or_else(|| "unknown".to_owned(), |state| state.trim().to_owned())
}
