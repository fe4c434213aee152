//! Starting the workers and waiting for them.
#![allow(unsafe_code)]

use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant, SystemTime};

use super::output::Output;
use super::report::{ERROR_FILE_VARIABLE, Report, in_order};
use super::signals::Inbox;
use super::worker::{LaunchOptions, Rendezvous, worker_command};
use crate::error::{Error, ExitCode, Result};

/// Longest wait for a signal or the end of a child before all children are looked at.
const LOOK: Duration = Duration::from_millis(50);
/// How long the others may go on after one has failed, to say what they know.
const GRACE: Duration = Duration::from_millis(700);

/// Starts the workers, waits for all of them, and returns the exit code of the run: done; preempted, if a worker left so; or
/// that of the failure that came first, which is printed. When a worker fails, the rest is killed within a second.
///
/// TERM, INT and USR1 are passed on; a second one kills.
pub fn run(options: &LaunchOptions) -> ExitCode {
    launch(options).unwrap_or_else(|error| {
        eprintln!("error: {error}");
        error.exit_code()
    })
}

fn launch(options: &LaunchOptions) -> Result<ExitCode> {
    options.check()?;
    let mut inbox = Inbox::open()?;
    let folder = tempfile::Builder::new().prefix("colo-grpo-").tempdir();
    let folder = folder.map_err(Error::io(std::env::temp_dir()))?;
    let mut output = Output::default();
    let mut workers = Workers::start(options, folder.path().into(), &mut output)?;
    let interrupted = workers.wait(&mut inbox);
    output.finish(Duration::from_secs(1));
    Ok(workers.verdict(interrupted))
}

struct Worker {
    rank: usize,
    child: Child,
    end: Option<End>,
}

struct End {
    status: ExitStatus,
    at: SystemTime,
    /// The launcher ended it: its death says nothing.
    killed: bool,
}

impl End {
    fn is_failure(&self) -> bool {
        !matches!(self.status.code(), Some(0)) && self.status.code() != Some(ExitCode::Preempted as i32)
    }
}

/// All workers. Dropping it kills those that are left.
struct Workers {
    workers: Vec<Worker>,
    reports: PathBuf,
}

impl Workers {
    fn start(options: &LaunchOptions, reports: PathBuf, output: &mut Output) -> Result<Self> {
        let rendezvous = Rendezvous::bind(&options.master_addr, options.master_port)?;
        let mut all = Self { workers: Vec::new(), reports };
        for rank in 0..options.num_workers {
            let mut command = worker_command(options, &rendezvous, rank);
            command.env(ERROR_FILE_VARIABLE, all.report_file(rank));
            Output::prepare(&mut command, rank);
            let mut child = command.spawn().map_err(Error::io(&options.program))?;
            output.follow(&mut child, rank);
            all.workers.push(Worker { rank, child, end: None });
        }
        Ok(all) // and the store's socket is rank 0's alone
    }

    fn report_file(&self, rank: usize) -> PathBuf {
        self.reports.join(format!("rank-{rank}.json"))
    }

    /// Waits for all workers; true if a second signal ended them.
    fn wait(&mut self, inbox: &mut Inbox) -> bool {
        let mut signalled = false;
        let mut deadline: Option<Instant> = None;
        while self.workers.iter().any(|worker| worker.end.is_none()) {
            let left = deadline.map_or(LOOK, |deadline| deadline.saturating_duration_since(Instant::now()).min(LOOK));
            for signal in inbox.wait(left) {
                if signalled {
                    self.kill();
                    return true;
                }
                signalled = true;
                self.forward(signal);
            }
            self.reap(false);
            let failed = self.workers.iter().any(|worker| worker.end.as_ref().is_some_and(End::is_failure));
            if failed && Instant::now() >= *deadline.get_or_insert_with(|| Instant::now() + GRACE) {
                self.kill();
            }
        }
        false
    }

    fn forward(&self, signal: i32) {
        for worker in self.workers.iter().filter(|worker| worker.end.is_none()) {
            // SAFETY: the child is not yet reaped, so that its id is its own.
            unsafe { libc::kill(worker.child.id() as i32, signal) };
        }
    }

    /// Kills what is left, with all descendants.
    fn kill(&mut self) {
        for worker in self.workers.iter().filter(|worker| worker.end.is_none()) {
            kill_group(&worker.child);
        }
        self.reap(true);
    }

    /// Books the workers that have ended; `killed` waits for all.
    fn reap(&mut self, killed: bool) {
        for worker in self.workers.iter_mut().filter(|worker| worker.end.is_none()) {
            if !killed && !has_ended(&worker.child) {
                continue;
            }
            kill_group(&worker.child); // descendants that outlived it; its id is still its own
            if let Ok(status) = worker.child.wait() {
                worker.end = Some(End { status, at: SystemTime::now(), killed });
            }
        }
    }

    fn verdict(&self, interrupted: bool) -> ExitCode {
        if interrupted {
            eprintln!("error: killed by a second signal");
            return ExitCode::RankDied;
        }
        let failures = in_order(self.workers.iter().filter_map(|worker| self.failure(worker)).collect());
        for failure in &failures {
            eprintln!("{failure}");
        }
        let mut preempted = self.workers.iter().filter(|worker| {
            worker.end.as_ref().is_some_and(|end| end.status.code() == Some(ExitCode::Preempted as i32))
        });
        match (failures.first(), preempted.next()) {
            (Some(first), _) => first.code,
            (None, Some(worker)) => {
                if let Some(report) = Report::read(&self.report_file(worker.rank)) {
                    eprintln!("{report}");
                }
                ExitCode::Preempted
            }
            (None, None) => ExitCode::Done,
        }
    }

    fn failure(&self, worker: &Worker) -> Option<Report> {
        let end = worker.end.as_ref().filter(|end| end.is_failure())?;
        if let Some(report) = Report::read(&self.report_file(worker.rank)) {
            return Some(report);
        }
        let (how, code) = match (end.status.code(), end.status.signal()) {
            (Some(status), _) => {
                (format!("exit status {status}"), ExitCode::from_number(status).unwrap_or(ExitCode::RankDied))
            }
            (None, signal) => (signal_name(signal.unwrap_or(0)), ExitCode::RankDied),
        };
        (!end.killed).then(|| Report::of_death(worker.rank, end.at, how, code))
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Whether a child has ended, without reaping it.
fn has_ended(child: &Child) -> bool {
    // SAFETY: a zeroed siginfo is valid, outlives the call and is filled by it; its pid stays 0 if the child lives.
    unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
        libc::waitid(libc::P_PID, child.id(), &raw mut info, options) == 0 && info.si_pid() != 0
    }
}

fn kill_group(child: &Child) {
    // SAFETY: the child leads its group and is not yet reaped, so that the group's id is its own.
    unsafe { libc::kill(-(child.id() as i32), libc::SIGKILL) };
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
        libc::SIGPIPE => "SIGPIPE",
        _ => return format!("signal {signal}"),
    };
    format!("signal {signal} ({name})")
}
