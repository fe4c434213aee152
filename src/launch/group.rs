//! The workers of one attempt: started, watched and ended together.
#![allow(unsafe_code)]

use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant, SystemTime};

use super::output::PipeReaders;
use super::report::{ERROR_FILE_VARIABLE, FailureReport, ReportFile, in_order};
use super::signals::{SignalInbox, StopRequest, process_end};
use super::way_on::OnStop;
use super::worker::{Inherited, LaunchOptions, Rendezvous, worker_command};
use crate::console;
use crate::error::{Error, ExitCode, Result};
use crate::phase::{Pulse, SharedPage, Stall, Watch, awake_now};
use crate::process::{ended, kill_group};
use crate::ranks::{RESTART_COUNT_VARIABLE, SharedSegment};

/// Maximum wait for a signal or the end of a process before heartbeats are checked.
const LOOK: Duration = Duration::from_millis(50);
/// How long the other workers may continue after one has failed, to report what they know.
const GRACE: Duration = Duration::from_millis(700);
/// How long they may continue while no worker has reported the cause: those that ended only know of another rank's failure.
const LONG_GRACE: Duration = Duration::from_secs(5);

struct RankProcess {
    rank: usize,
    child: Child,
    exit: OwnedFd,
    pulse: SharedPage,
    report: ReportFile,
    end: Option<ProcessEnd>,
}

struct ProcessEnd {
    status: ExitStatus,
    at: SystemTime,
    /// Whether the launcher killed it, so that its end is not a failure of its own.
    killed: bool,
}

impl ProcessEnd {
    fn is_failure(&self) -> bool {
        !matches!(self.status.code(), Some(0)) && self.status.code() != Some(ExitCode::Preempted as i32)
    }
}

/// All workers. Dropping it kills the remaining ones.
pub(super) struct Workers {
    workers: Vec<RankProcess>,
    watch: Watch,
    hang: Option<FailureReport>,
    /// The signal that was passed on to the workers.
    signal: Option<i32>,
}

/// The outcome of an attempt.
pub(super) struct AttemptOutcome {
    pub(super) code: ExitCode,
    /// Messages, in the order in which to print them.
    pub(super) messages: Vec<String>,
    was_asked_to_stop: bool,
}

impl AttemptOutcome {
    /// Prints the failures, the earliest first.
    pub(super) fn print(&self) {
        self.messages.iter().for_each(console::say);
    }

    /// Whether a user or a scheduler stopped the run.
    pub(super) fn was_stopped(&self) -> bool {
        self.was_asked_to_stop && matches!(self.code, ExitCode::Preempted | ExitCode::Interrupted)
    }

    /// Whether the same run may succeed when restarted.
    pub(super) fn is_worth_a_restart(&self) -> bool {
        !self.was_asked_to_stop && matches!(self.code, ExitCode::RankDied | ExitCode::Hang)
    }
}

impl Workers {
    pub(super) fn start(options: &LaunchOptions, num_restarts: usize, output: &mut PipeReaders) -> Result<Self> {
        let rendezvous = Rendezvous::of(options)?;
        let mut watch = Watch::new(options.num_workers, options.limits.clone(), awake_now());
        if options.num_nodes > 1 {
            watch = watch.with_peers_elsewhere();
        }
        let segment = SharedSegment::new(options.num_workers)?;
        let mut all = Self { workers: Vec::new(), watch, hang: None, signal: None };
        for local_rank in 0..options.num_workers {
            let rank = options.node_rank * options.num_workers + local_rank;
            let (pulse, report) = (SharedPage::new()?, ReportFile::new()?);
            let inherited =
                Inherited { pulse: Some(pulse.fd()), report: Some(report.fd()), segment: Some(segment.fd()) };
            let mut command = worker_command(options, &rendezvous, local_rank, inherited);
            command.env(ERROR_FILE_VARIABLE, report.path());
            command.env(RESTART_COUNT_VARIABLE, num_restarts.to_string());
            PipeReaders::prepare(&mut command, rank);
            let mut child = command.spawn().map_err(Error::io(&options.program))?;
            let exit = process_end(child.id()).inspect_err(|_| kill_group(&child))?;
            output.follow(&mut child, rank);
            all.workers.push(RankProcess { rank, child, exit, pulse, report, end: None });
        }
        Ok(all) // this drops the launcher's copy of the store's socket
    }

    fn running(&self) -> impl Iterator<Item = &RankProcess> {
        self.workers.iter().filter(|worker| worker.end.is_none())
    }

    /// Waits for all workers; returns true if a second stop request ended them.
    pub(super) fn wait(&mut self, inbox: &mut SignalInbox, on_stop: OnStop) -> bool {
        let mut failed_at: Option<Instant> = None;
        while self.running().next().is_some() {
            let left = failed_at.map_or(LOOK, |at| self.grace().saturating_sub(at.elapsed()).min(LOOK));
            for request in inbox.wait(self.running().map(|worker| &worker.exit), left) {
                let StopRequest::First(signal) = request else {
                    self.kill();
                    return true;
                };
                self.signal = Some(signal);
                self.forward(signal);
                let name = signal_name(signal);
                let (what, lost) = on_stop.describe();
                console::say(format_args!(
                    "{name}: passed on to all ranks: {what}; send it again after a second to end them at once{lost}"
                ));
            }
            self.reap(false);
            let failed = self.workers.iter().any(|worker| worker.end.as_ref().is_some_and(ProcessEnd::is_failure));
            if failed && failed_at.is_none() {
                self.tell_deaths();
            }
            let is_over = match failed {
                true => failed_at.get_or_insert_with(Instant::now).elapsed() >= self.grace(),
                false => self.hangs(),
            };
            if is_over {
                self.kill();
            }
        }
        false
    }

    /// How long ranks may continue after the first failure.
    fn grace(&self) -> Duration {
        let tells_cause = |worker: &RankProcess| {
            let is_failure = worker.end.as_ref().is_some_and(ProcessEnd::is_failure);
            // A failure on another node is reported by that node's launcher, and a suspended process reports nothing.
            let may_tell = |rank: usize| {
                let peer = self.workers.iter().find(|worker| worker.rank == rank);
                peer.is_some_and(|peer| peer.end.is_some() || !is_stopped(&peer.child))
            };
            let waits_for = |report: FailureReport| report.peer.is_some_and(may_tell);
            is_failure && !worker.report.read().is_some_and(waits_for)
        };
        if self.workers.iter().any(tells_cause) { GRACE } else { LONG_GRACE }
    }

    /// Whether a rank has made no progress for too long. If so, prints at once what every rank is doing.
    fn hangs(&mut self) -> bool {
        let pulses: Vec<Option<Pulse>> =
            self.workers.iter().map(|worker| worker.end.is_none().then(|| worker.pulse.read())).collect();
        let stalls = self.watch.look(&pulses, awake_now());
        // A suspended process blocks its peers, whatever it was doing.
        let of_stopped = |stall: &&Stall| is_stopped(&self.workers[stall.rank].child);
        let Some(cause) = stalls.iter().find(of_stopped).or(stalls.first()) else { return false };
        let rank = self.workers[cause.rank].rank;
        tracing::debug!("rank {rank} hangs");
        self.tell_every_rank("no progress");
        let pulse = pulses[cause.rank].clone().expect("a rank that stalls is running");
        let error = Error::Hang {
            phase: pulse.phase().name(),
            stood_s: cause.stood.as_secs_f64(),
            limit_s: cause.limit.as_secs_f64(),
            state: process_state(&self.workers[cause.rank].child),
        };
        self.hang = Some(FailureReport::of_hang(&error, rank, &pulse));
        true
    }

    /// Prints what every rank is doing if one of them has died without an error message.
    fn tell_deaths(&self) {
        let is_silent = |worker: &&RankProcess| {
            let is_failure = worker.end.as_ref().is_some_and(ProcessEnd::is_failure);
            is_failure && !self.died_of_our_signal(worker) && worker.report.read().is_none()
        };
        if let Some(dead) = self.workers.iter().find(is_silent) {
            self.tell_every_rank(&format!("rank {} died", dead.rank));
        }
    }

    fn tell_every_rank(&self, why: &str) {
        console::say(format_args!("{why}; state of every rank, before all are killed:"));
        for worker in &self.workers {
            let state = match &worker.end {
                None => format!("process {}", process_state(&worker.child)),
                Some(end) => format!("ended, {}", end.status),
            };
            console::say(format_args!("  rank {}: {}; {state}", worker.rank, worker.pulse.read()));
        }
    }

    fn forward(&self, signal: i32) {
        for worker in self.running() {
            // SAFETY: the child has not been reaped, so its process id is still valid.
            unsafe { libc::kill(worker.child.id() as i32, signal) };
        }
    }

    /// Kills the remaining workers with all their descendants.
    fn kill(&mut self) {
        self.running().for_each(|worker| kill_group(&worker.child));
        self.reap(true);
    }

    /// Records the workers that have ended; `killed` waits for all of them.
    fn reap(&mut self, killed: bool) {
        for worker in self.workers.iter_mut().filter(|worker| worker.end.is_none()) {
            if !killed && ended(worker.child.id()).is_none() {
                continue;
            }
            kill_group(&worker.child); // kill descendants that outlived it; its process id is still valid
            if let Ok(status) = worker.child.wait() {
                tracing::debug!("rank {} ended: {status}", worker.rank);
                worker.end = Some(ProcessEnd { status, at: SystemTime::now(), killed });
            }
        }
    }

    pub(super) fn outcome(&self, interrupted: bool) -> AttemptOutcome {
        let outcome = |code, messages| AttemptOutcome { code, messages, was_asked_to_stop: self.signal.is_some() };
        if interrupted {
            let message = "ended at once by a second signal; unsaved progress is lost";
            return outcome(ExitCode::Interrupted, vec![message.to_owned()]);
        }
        let failures =
            self.hang.clone().into_iter().chain(self.workers.iter().filter_map(|worker| self.failure(worker)));
        let failures = in_order(failures.collect());
        let messages = failures.iter().map(FailureReport::to_string).collect();
        if let Some(first) = failures.first() {
            return outcome(first.code, messages);
        }
        let has_code = |worker: &&RankProcess| {
            let status = worker.end.as_ref().map(|end| end.status);
            status.is_some_and(|status| status.code() == Some(ExitCode::Preempted as i32))
        };
        if let Some(preempted) = self.workers.iter().find(has_code) {
            let report = preempted.report.read();
            return outcome(ExitCode::Preempted, report.iter().map(FailureReport::to_string).collect());
        }
        match self.workers.iter().any(|worker| self.died_of_our_signal(worker)) {
            true => {
                outcome(ExitCode::Preempted, vec!["stopped by a signal before there was anything to save".to_owned()])
            }
            false => outcome(ExitCode::Done, Vec::new()),
        }
    }

    fn failure(&self, worker: &RankProcess) -> Option<FailureReport> {
        let end = worker.end.as_ref().filter(|end| end.is_failure())?;
        if let Some(report) = worker.report.read() {
            return Some(report);
        }
        let (how, code) = match (end.status.code(), end.status.signal()) {
            (Some(status), _) => {
                (format!("exit status {status}"), ExitCode::from_number(status).unwrap_or(ExitCode::RankDied))
            }
            (None, Some(libc::SIGKILL)) => {
                let hint = "if nobody sent it, the host ran out of memory: see dmesg, or memory.events of the cgroup";
                (format!("{}; {hint}", signal_name(libc::SIGKILL)), ExitCode::RankDied)
            }
            (None, signal) => (signal_name(signal.unwrap_or(0)), ExitCode::RankDied),
        };
        let tells = !end.killed && !self.died_of_our_signal(worker);
        tells.then(|| FailureReport::of_death(worker.rank, end.at, how, code, &worker.pulse.read()))
    }

    /// Whether the worker died of a signal that was passed on before it could handle it as a request.
    fn died_of_our_signal(&self, worker: &RankProcess) -> bool {
        let signal = worker.end.as_ref().and_then(|end| end.status.signal());
        signal.is_some() && signal == self.signal
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The kernel's description of a process's state, like `S (sleeping)` or `T (stopped)`.
fn process_state(child: &Child) -> String {
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("State:"));
    line.map_or_else(|| "unknown".to_owned(), |state| state.trim().to_owned())
}

fn is_stopped(child: &Child) -> bool {
    process_state(child).starts_with(['T', 't'])
}

fn signal_name(signal: i32) -> String {
    let name = match signal {
        libc::SIGKILL => "SIGKILL",
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGBUS => "SIGBUS",
        libc::SIGABRT => "SIGABRT",
        libc::SIGILL => "SIGILL",
        libc::SIGFPE => "SIGFPE",
        libc::SIGTERM => "SIGTERM",
        libc::SIGINT => "SIGINT",
        libc::SIGUSR1 => "SIGUSR1",
        libc::SIGHUP => "SIGHUP",
        libc::SIGXFSZ => "SIGXFSZ",
        libc::SIGPIPE => "SIGPIPE",
        _ => return format!("signal {signal}"),
    };
    format!("signal {signal} ({name})")
}
