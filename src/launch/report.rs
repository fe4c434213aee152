//! The error of a failing worker, passed to its launcher, which finds the earliest failure.

use std::collections::HashSet;
use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::MemfdFlags;

use super::way_on;
use crate::console::{self, redact};
use crate::error::{Error, ExitCode, Result};
use crate::phase::{self, Phase, Pulse};

/// Environment variable with the path of the file to which a failing worker writes its error; a launcher sets it to its `ReportFile`.
pub const ERROR_FILE_VARIABLE: &str = "COLO_GRPO_ERROR_FILE";

/// Reports why this process ends, to the launcher or, without one, on standard error. `rank` is set for a worker.
pub fn report_error(error: &Error, rank: Option<usize>) {
    let report = FailureReport::of(error, rank);
    let Some(path) = std::env::var_os(ERROR_FILE_VARIABLE).map(PathBuf::from) else {
        console::say(&report);
        if let (Error::Preempted { .. }, None) = (error, rank) {
            console::say(format_args!("to continue: {}", way_on::resume_command()));
        }
        return;
    };
    let json = serde_json::to_vec(&report).map_err(std::io::Error::from);
    let written = json.and_then(|json| std::fs::write(&path, json));
    if let Err(problem) = written {
        console::say(format_args!("{report} (and it could not be written to {}: {problem})", path.display()));
    }
}

/// A failure, as passed from a worker to its launcher.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) struct FailureReport {
    /// Time in seconds since 1970.
    pub time_s: f64,
    /// The worker's rank; `None` for a process without a world.
    pub rank: Option<usize>,
    /// The phase; empty if it is not known.
    pub phase: String,
    pub step: u64,
    pub code: ExitCode,
    pub message: String,
    /// The failed rank, if this rank only reports another rank's failure.
    pub peer: Option<usize>,
}

impl FailureReport {
    fn of(error: &Error, rank: Option<usize>) -> Self {
        let phase = Some(phase::at_failure()).filter(|phase| *phase != Phase::Startup);
        Self {
            time_s: seconds(SystemTime::now()),
            rank,
            phase: phase.map(|phase| phase.name().to_owned()).unwrap_or_default(),
            step: phase::step(),
            code: error.exit_code(),
            message: redact(&error.to_string()),
            peer: match error {
                Error::PeerFailed { rank, .. } => Some(*rank),
                _ => None,
            },
        }
    }

    /// The report for a worker that died without one, from its last known activity.
    pub(super) fn of_death(rank: usize, at: SystemTime, how: String, code: ExitCode, pulse: &Pulse) -> Self {
        Self { code, ..Self::of_rank(&Error::RankDied { rank, how }, rank, at, pulse) }
    }

    /// The report for a worker that hangs.
    pub(super) fn of_hang(error: &Error, rank: usize, pulse: &Pulse) -> Self {
        Self::of_rank(error, rank, SystemTime::now(), pulse)
    }

    fn of_rank(error: &Error, rank: usize, at: SystemTime, pulse: &Pulse) -> Self {
        Self {
            time_s: seconds(at),
            rank: Some(rank),
            phase: pulse.place(),
            step: pulse.step,
            code: error.exit_code(),
            message: error.to_string(),
            peer: None,
        }
    }
}

/// Anonymous memory to which a worker writes its error, so that no file remains if the launcher is killed.
#[derive(Debug)]
pub(super) struct ReportFile(File);

impl ReportFile {
    /// Creates an empty report file.
    ///
    /// # Errors
    /// [`Error::Environment`] if the kernel has no memory for the file.
    pub(super) fn new() -> Result<Self> {
        let file = rustix::fs::memfd_create(c"colo-grpo-report", MemfdFlags::CLOEXEC);
        let failed = |error| Error::Environment {
            message: format!("cannot create shared memory for a worker's error report: {error}"),
        };
        Ok(Self(File::from(file.map_err(failed)?)))
    }

    /// The descriptor that the worker inherits.
    pub(super) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// The path of the file in the worker process.
    pub(super) fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.fd()).into()
    }

    /// Reads the worker's report; `None` before it is completely written.
    pub(super) fn read(&self) -> Option<FailureReport> {
        let mut json = vec![0; self.0.metadata().ok()?.len() as usize];
        self.0.read_exact_at(&mut json, 0).ok()?;
        serde_json::from_slice(&json).ok()
    }
}

/// Formats like `error: rank 1, step 3, wake: ` followed by the message; unknown parts of the place are left out.
impl std::fmt::Display for FailureReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.code != ExitCode::Preempted {
            f.write_str("error: ")?;
        }
        if !self.phase.is_empty() {
            let rank = self.rank.map(|rank| format!("rank {rank}, ")).unwrap_or_default();
            write!(f, "{rank}step {}, {}: ", self.step, self.phase)?;
        }
        f.write_str(&self.message)
    }
}

/// Sorts ranks' own failures by time, without repetitions. If there are none, returns the reports of other ranks' failures.
pub(super) fn in_order(reports: Vec<FailureReport>) -> Vec<FailureReport> {
    let (mut heard, mut own): (Vec<_>, Vec<_>) = reports.into_iter().partition(|report| report.peer.is_some());
    let by_time = |a: &FailureReport, b: &FailureReport| a.time_s.total_cmp(&b.time_s);
    own.sort_by(by_time);
    heard.sort_by(by_time);
    let mut told = if own.is_empty() { heard } else { own };
    let mut messages = HashSet::new();
    told.retain(|report| messages.insert(report.message.clone()));
    told
}

fn seconds(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_failure_is_never_reported_as_the_first_cause() {
        let report = |rank, time_s, is_of_peer: bool| {
            let error = Error::Environment { message: format!("of rank {rank}") };
            let peer = is_of_peer.then_some(5);
            FailureReport { time_s, peer, ..FailureReport::of(&error, Some(rank)) }
        };
        let ordered = in_order(vec![report(0, 1.0, true), report(2, 3.0, false), report(1, 2.0, false)]);
        assert_eq!(ordered.iter().filter_map(|report| report.rank).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(in_order(vec![report(1, 2.0, true), report(0, 1.0, true)])[0].rank, Some(0));
        assert_eq!(in_order(vec![report(1, 2.0, false), report(1, 1.0, false)]).len(), 1);
    }

    #[test]
    fn failure_reports_round_trip_through_the_file() {
        let file = ReportFile::new().unwrap();
        assert_eq!(file.read(), None);
        let error = Error::PeerFailed { rank: 1, code: ExitCode::Hang, message: "slow".into() };
        // JSON does not preserve the last bit of every number, but it does for this one.
        let report = FailureReport { time_s: 1.5, ..FailureReport::of(&error, Some(0)) };
        let json = serde_json::to_vec(&report).unwrap();
        std::fs::write(file.path(), &json[..9]).unwrap();
        assert_eq!(file.read(), None, "half a report is none");
        std::fs::write(file.path(), &json).unwrap();
        assert_eq!(file.read(), Some(report.clone()));
        assert!(report.peer == Some(1) && report.code == ExitCode::Hang);
        assert!(report.to_string().ends_with("rank 1 failed: slow"), "{report}");
    }
}
