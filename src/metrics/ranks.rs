//! The state of every rank: one small file a rank, `ranks/00000.json` in the output folder, for those who watch a run.

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

/// The folder of the ranks' files.
const FOLDER: &str = "ranks";
/// How often a rank looks at itself.
const LOOK: Duration = Duration::from_secs(1);
/// Longest time between two writes.
const SIGN_OF_LIFE: Duration = Duration::from_secs(5);
/// Most ranks that are read of one run.
const MAX_RANKS: usize = 4096;
/// Largest file of a rank, in bytes.
const MAX_BYTES: u64 = 64 << 10;

/// One rank as it was when it wrote its file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankState {
    /// The rank.
    pub rank: usize,
    /// Ranks of the run.
    pub world_size: usize,
    /// Number of its process.
    pub process: u32,
    /// When this was written, in seconds since 1970.
    pub time: f64,
    /// Updates done before the step under way.
    pub step: u64,
    /// Updates in all.
    pub max_steps: u64,
    /// Running phases, outermost first.
    pub phases: Vec<String>,
    /// How long the innermost phase has been the same, in seconds.
    pub phase_s: f64,
    /// The collective in which it may be waiting for others.
    pub waits_in: Option<String>,
    /// Host memory of the process, in bytes.
    pub resident_bytes: u64,
    /// Memory of its GPU; nothing on a CPU, and where the driver does not say.
    #[serde(default)]
    pub gpu_memory: Option<GpuMemory>,
    /// Owners of memory, largest first.
    pub held: Vec<HeldBytes>,
    /// The newest warnings.
    pub warnings: Vec<RankWarning>,
    /// How the run ended; nothing while it is under way.
    pub end: Option<RankEnd>,
}

/// Memory of one owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldBytes {
    /// Whose it is: `weights`, `kv_cache`.
    pub owner: String,
    /// Whether it is memory that tensors are computed in; host memory beside it otherwise.
    pub on_device: bool,
    /// How much.
    pub bytes: u64,
}

/// A line that warned.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankWarning {
    /// When, in seconds since 1970.
    pub time: f64,
    /// The line, secrets redacted.
    pub text: String,
}

/// How a run ended on a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankEnd {
    /// The exit code, where it is known.
    pub code: Option<i32>,
    /// The error; empty where there was none.
    pub message: String,
}

/// Writes this rank's file from a thread, until it is dropped.
#[derive(Debug)]
pub struct RankReporter {
    ends: Sender<RankEnd>,
    thread: Option<JoinHandle<()>>,
}

impl RankReporter {
    /// Starts the thread. A file that cannot be written is left out, and nobody is told: it is for watchers alone.
    ///
    /// # Errors
    /// [`Error::Environment`] if there is no thread; [`Error::Cuda`] for a GPU that does not exist.
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

    /// Says how the run ended.
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

/// Reads the ranks of a run, by rank. Files that are half written or no such files are left out, and those of ranks that an earlier,
/// larger run had.
///
/// # Errors
/// The system's, if the folder cannot be listed; none is no rank.
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

/// Takes files away that an earlier run with more ranks left.
fn remove_others(folder: &Folder, world_size: usize) {
    let own: HashSet<OsString> = (0..world_size).map(|rank| name(rank).into()).collect();
    let others = folder.names(usize::MAX).into_iter().flatten().filter(|name| !own.contains(name));
    others.filter_map(|name| name.into_string().ok()).for_each(|name| drop(folder.remove(&name)));
}

#[derive(Debug)]
struct RankFile {
    /// Which is not made again where the output folder was deleted.
    folder: Folder,
    rank: usize,
    world_size: usize,
    max_steps: u64,
    meter: Option<MemoryMeter>,
    /// Innermost phase and step, and since when.
    seen: Option<(Pulse, Instant)>,
    /// The text that was written last, and when.
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

    /// Nobody needs the file to train: one that cannot be written is left out.
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
        run.folder(FOLDER).write(&name(7), "{}").unwrap(); // of a larger run before this one
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
