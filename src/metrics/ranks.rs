//! The state of every rank, for `watch`: one small file per rank in the output folder, like `ranks/00000.json`.

use std::collections::HashSet;
use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use tch::Device;

use crate::console;
use crate::console::redact;
use crate::cuda::{GpuMemory, MemoryMeter};
use crate::error::{Error, Result};
use crate::memory::{Account, Ledger, MemoryKind, resident_bytes};
use crate::phase::{self, Pulse};
use crate::types::Place;
use crate::untrusted::Folder;

/// Name of the folder of the ranks' files.
const FOLDER: &str = "ranks";
/// Interval at which a rank checks its own state.
const LOOK: Duration = Duration::from_secs(1);
/// Maximum time between two writes.
const SIGN_OF_LIFE: Duration = Duration::from_secs(5);
/// Maximum number of ranks that are read for one run.
const MAX_RANKS: usize = 4096;
/// Maximum size of a rank's file, in bytes.
const MAX_BYTES: u64 = 64 << 10;

/// The state of a rank when it wrote its file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankState {
    /// Number of the rank.
    pub rank: usize,
    /// Number of ranks of the run.
    pub world_size: usize,
    /// Process id.
    pub process: u32,
    /// Time of writing, in seconds since 1970.
    pub time: f64,
    /// Updates done before the step under way.
    pub step: u64,
    /// Total updates of the run.
    pub max_steps: u64,
    /// Running phases, outermost first.
    pub phases: Vec<String>,
    /// Seconds since the innermost phase last changed.
    pub phase_s: f64,
    /// The collective in which it may be waiting for others.
    pub waits_in: Option<String>,
    /// Host memory of the process, in bytes.
    pub resident_bytes: u64,
    /// Memory of its GPU; `None` on a CPU, or if the driver does not report it.
    #[serde(default)]
    pub gpu_memory: Option<GpuMemory>,
    /// Memory by owner, largest first.
    pub held: Vec<HeldBytes>,
    /// The newest warnings.
    pub warnings: Vec<RankWarning>,
    /// How the run ended; `None` while it is under way.
    pub end: Option<RankEnd>,
}

/// Memory of one owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldBytes {
    /// The owner, such as `weights` or `kv_cache`.
    pub owner: String,
    /// Whether it is device memory; otherwise additional host memory.
    pub on_device: bool,
    /// Number of bytes.
    pub bytes: u64,
}

/// A warning in the log.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankWarning {
    /// Time in seconds since 1970.
    pub time: f64,
    /// The text, with secrets redacted.
    pub text: String,
}

/// How a run ended on a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankEnd {
    /// The exit code, if known.
    pub code: Option<i32>,
    /// The error; empty if there was none.
    pub message: String,
}

/// Writes this rank's file from a thread, until it is dropped.
#[derive(Debug)]
pub struct RankReporter {
    ends: Sender<RankEnd>,
    thread: Option<JoinHandle<()>>,
}

impl RankReporter {
    /// Starts the thread. If the file cannot be written, nothing is reported, because only `watch` reads it.
    ///
    /// # Errors
    /// [`Error::Environment`] if no thread can be started; [`Error::Cuda`] for a GPU that does not exist.
    pub fn start(
        output_dir: &Path,
        Place { rank, size: world_size }: Place,
        max_steps: u64,
        device: Device,
    ) -> Result<Self> {
        let (ends, ended) = channel();
        let meter = match device {
            Device::Cuda(ordinal) => MemoryMeter::new(ordinal)?,
            _ => None,
        };
        let folder = Folder::existing(output_dir).folder(FOLDER);
        if rank == 0 {
            remove_others(&folder, world_size);
        }
        let mut writer = RankFile { folder, rank, world_size, max_steps, meter, seen: None, written: None };
        let work = move || loop {
            writer.look();
            match ended.recv_timeout(LOOK) {
                Err(RecvTimeoutError::Timeout) => {}
                end => return writer.end(end.ok()),
            }
        };
        let thread = std::thread::Builder::new().name("ranks".to_owned()).spawn(work);
        let failed = |error| Error::Environment {
            message: format!("cannot start the thread that writes this rank's state: {error}"),
        };
        Ok(Self { ends, thread: Some(thread.map_err(failed)?) })
    }

    /// Records how the run ended.
    pub fn end<T>(&mut self, outcome: &Result<T>) {
        let end = match outcome {
            Ok(_) => RankEnd { code: Some(0), message: String::new() },
            Err(error) => RankEnd { code: Some(error.exit_code() as i32), message: redact(&error.to_string()) },
        };
        self.finish(end);
    }

    fn finish(&mut self, end: RankEnd) {
        let Some(thread) = self.thread.take() else { return };
        let _ = self.ends.send(end);
        let _ = thread.join();
    }
}

impl Drop for RankReporter {
    fn drop(&mut self) {
        self.finish(RankEnd { code: None, message: String::new() });
    }
}

/// Reads the states of a run's ranks, by rank. Invalid or partial files are skipped, and so are those of an earlier run with more ranks.
///
/// # Errors
/// Errors of listing the folder; a missing folder means no ranks.
pub(crate) fn read_ranks(output_dir: &Folder) -> io::Result<Vec<RankState>> {
    let folder = output_dir.folder(FOLDER);
    let read = |name: OsString| {
        let name = name.to_str().filter(|name| name.ends_with(".json"))?;
        serde_json::from_slice::<RankState>(&folder.read(name, MAX_BYTES).ok()?).ok()
    };
    let mut ranks: Vec<RankState> = folder.names(MAX_RANKS)?.into_iter().filter_map(read).collect();
    ranks.sort_by_key(|state| state.rank);
    let world_size = ranks.first().map_or(0, |first| first.world_size);
    ranks.retain(|state| state.rank < world_size);
    Ok(ranks)
}

fn name(rank: usize) -> String {
    format!("{rank:05}.json")
}

/// Removes files that an earlier run with more ranks left.
fn remove_others(folder: &Folder, world_size: usize) {
    let own: HashSet<OsString> = (0..world_size).map(|rank| name(rank).into()).collect();
    let others = folder.names(usize::MAX).into_iter().flatten().filter(|name| !own.contains(name));
    others.filter_map(|name| name.into_string().ok()).for_each(|name| drop(folder.remove(&name)));
}

#[derive(Debug)]
struct RankFile {
    /// The folder, which is not created again if the output folder is deleted.
    folder: Folder,
    rank: usize,
    world_size: usize,
    max_steps: u64,
    meter: Option<MemoryMeter>,
    /// Innermost phase and step, and the time since which they are the same.
    seen: Option<(Pulse, Instant)>,
    /// The state that was written last, and when.
    written: Option<(RankState, Instant)>,
}

impl RankFile {
    fn look(&mut self) {
        let now = Instant::now();
        let state = self.state(now);
        let is_new = |(written, at): &(RankState, Instant)| {
            let same_time = RankState { time: state.time, phase_s: state.phase_s, ..written.clone() };
            same_time != state || now - *at >= SIGN_OF_LIFE
        };
        if self.written.as_ref().is_none_or(is_new) {
            self.write(&state);
            self.written = Some((state, now));
        }
    }

    fn state(&mut self, now: Instant) -> RankState {
        let pulse = phase::pulse();
        let is_same = |(seen, _): &&(Pulse, Instant)| seen.stack == pulse.stack && seen.step == pulse.step;
        let since = self.seen.as_ref().filter(is_same).map_or(now, |(_, since)| *since);
        let mut held: Vec<HeldBytes> = Ledger::report()
            .into_iter()
            .filter(|account| account.bytes > 0)
            .map(|Account { kind, owner, bytes }| HeldBytes {
                owner: owner.to_owned(),
                on_device: kind == MemoryKind::Device,
                bytes: bytes as u64,
            })
            .collect();
        held.sort_by_key(|held| std::cmp::Reverse(held.bytes));
        let state = RankState {
            rank: self.rank,
            world_size: self.world_size,
            process: std::process::id(),
            time: seconds(SystemTime::now()),
            step: pulse.step,
            max_steps: self.max_steps,
            phases: pulse.stack.iter().map(|phase| phase.name().to_owned()).collect(),
            phase_s: (now - since).as_secs_f64(),
            waits_in: pulse.collective.as_ref().filter(|last| last.is_waiting).map(|last| last.op.clone()),
            resident_bytes: resident_bytes().unwrap_or(0) as u64,
            gpu_memory: self.meter.as_ref().and_then(MemoryMeter::read),
            held,
            warnings: console::recent_warnings()
                .into_iter()
                .map(|warning| RankWarning { time: seconds(warning.at), text: warning.text })
                .collect(),
            end: None,
        };
        self.seen = Some((pulse, since));
        state
    }

    fn end(&mut self, end: Option<RankEnd>) {
        let state = RankState { end, phases: Vec::new(), waits_in: None, ..self.state(Instant::now()) };
        self.write(&state);
    }

    /// Writes the file. Failures are ignored, because training does not need it.
    fn write(&self, state: &RankState) {
        if let Ok(text) = serde_json::to_vec(state) {
            let _ = self.folder.write(&name(self.rank), text);
        }
    }
}

fn seconds(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_files_show_the_activity_and_the_end_of_a_rank() {
        let folder = tempfile::tempdir().unwrap();
        let run = Folder::new(folder.path());
        assert_eq!(read_ranks(&run).unwrap(), []);
        run.folder(FOLDER).write(&name(7), "{}").unwrap(); // of an earlier run with more ranks
        let mut reporter = RankReporter::start(folder.path(), Place { rank: 0, size: 2 }, 9, Device::Cpu).unwrap();
        reporter.end::<()>(&Err(Error::Preempted { step: 3, saved: folder.path().to_owned() }));
        let again = RankReporter::start(folder.path(), Place { rank: 1, size: 2 }, 9, Device::Cpu).unwrap();
        drop(again);
        run.folder(FOLDER).write("00002.json", "{\"rank\":").unwrap();
        let ranks = read_ranks(&run).unwrap();
        assert_eq!((ranks.len(), ranks[0].max_steps, ranks[0].process), (2, 9, std::process::id()));
        let end = ranks[0].end.clone().unwrap();
        assert!(end.code == Some(75) && end.message.contains("step 3"), "{end:?}");
        assert!(ranks[0].resident_bytes > 1 << 20 && ranks[1].end.as_ref().unwrap().code.is_none());
        assert!(!run.folder(FOLDER).has(&name(7)));
    }

    #[test]
    fn rank_files_do_not_recreate_a_deleted_output_folder() {
        let folder = tempfile::tempdir().unwrap();
        let gone = folder.path().join("gone");
        drop(RankReporter::start(&gone, Place { rank: 0, size: 1 }, 1, Device::Cpu).unwrap());
        assert!(!gone.exists());
    }
}
