//! The runs in the watched folders and their state.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::follow::Follower;
use super::samples;
use crate::metrics::ranks::{RankState, read_ranks};
use crate::metrics::report::{History, read_config};
use crate::untrusted::Folder;

/// Largest number of runs that are shown.
const MAX_RUNS: usize = 100;
/// Depth of subfolders of a watched folder that are searched for runs.
const MAX_DEPTH: usize = 3;
/// Largest number of folders visited by one search.
const MAX_FOLDERS: usize = 2000;
/// Interval between searches for new runs; `LOOK_INTERVAL` is the one between updates of a run's files.
const SEARCH_INTERVAL: Duration = Duration::from_secs(5);
const LOOK_INTERVAL: Duration = Duration::from_millis(400);
/// Seconds without an update after which a rank is shown as silent.
const SILENCE_S: f64 = 20.0;

/// All watched runs.
#[derive(Debug)]
pub(super) struct WatchedRuns {
    folders: Vec<PathBuf>,
    runs: Vec<WatchedRun>,
    searched: Option<Instant>,
    message: String,
}

/// A watched run, identified by its output folder.
#[derive(Debug)]
pub(super) struct WatchedRun {
    /// Path of the run relative to the watched folder, or the watched folder's name.
    pub name: String,
    pub folder: Folder,
    metrics: Follower,
    looked: Option<Instant>,
    /// State of each rank. Errors of their files are in `rank_message`.
    pub ranks: Vec<RankState>,
    rank_message: String,
    heard: BTreeMap<usize, Heard>,
    /// Steps with a file of completions.
    pub steps: Vec<u64>,
}

/// When the last update of a rank was seen, by this host's clock.
#[derive(Debug)]
struct Heard {
    /// The time written in the rank's file, by the clock of the rank's host.
    time: f64,
    at: Instant,
    /// Whether the file has changed since it was first read.
    is_new: bool,
}

impl WatchedRuns {
    pub fn new(folders: Vec<PathBuf>) -> Self {
        Self { folders, runs: Vec::new(), searched: None, message: String::new() }
    }

    /// Searches for new runs, if the last search is long enough ago, and returns all runs. A run keeps its number.
    pub fn search(&mut self) -> &[WatchedRun] {
        if self.searched.is_none_or(|at| at.elapsed() >= SEARCH_INTERVAL) {
            self.searched = Some(Instant::now());
            let mut left = MAX_FOLDERS;
            self.message.clear();
            for folder in self.folders.clone() {
                self.search_in(&folder, &folder, MAX_DEPTH, &mut left);
            }
            if left == 0 {
                self.message =
                    format!("stopped searching after {MAX_FOLDERS} folders; name the folders of the runs directly");
            } else if self.runs.is_empty() {
                let folders: Vec<_> = self.folders.iter().map(|folder| folder.display().to_string()).collect();
                self.message = format!("no run in {} yet; runs appear here once they start", folders.join(", "));
            }
        }
        &self.runs
    }

    /// A message about the search; empty if there is none.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Updates one run from its files, unless this was just done, and returns it.
    pub fn look(&mut self, number: usize) -> Option<&WatchedRun> {
        let run = self.runs.get_mut(number)?;
        if run.looked.is_none_or(|at| at.elapsed() >= LOOK_INTERVAL) {
            run.look();
        }
        Some(run)
    }

    /// One run without updating it from its files.
    pub fn get(&self, number: usize) -> Option<&WatchedRun> {
        self.runs.get(number)
    }

    fn search_in(&mut self, root: &Path, folder: &Path, depth: usize, left: &mut usize) {
        if *left == 0 || self.runs.len() >= MAX_RUNS {
            return;
        }
        *left -= 1;
        if ["metrics.jsonl", "run_config.json", "ranks"].iter().any(|name| folder.join(name).exists()) {
            if self.runs.iter().all(|run| run.folder.path() != folder) {
                self.runs.push(WatchedRun::new(root, folder));
            }
            return;
        }
        let entries = fs::read_dir(folder).into_iter().flatten().flatten().take(MAX_FOLDERS);
        let is_folder = |entry: &fs::DirEntry| {
            !entry.file_name().as_encoded_bytes().starts_with(b".") && entry.file_type().is_ok_and(|kind| kind.is_dir())
        };
        let mut inner: Vec<PathBuf> = entries.filter(is_folder).map(|entry| entry.path()).collect();
        inner.sort();
        for folder in inner.iter().take(if depth > 0 { inner.len() } else { 0 }) {
            self.search_in(root, folder, depth - 1, left);
        }
    }
}

/// Progress of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RunStep {
    /// Number of the latest update.
    pub newest: u64,
    /// Total number of updates, if known.
    pub last: Option<u64>,
}

impl WatchedRun {
    fn new(root: &Path, folder: &Path) -> Self {
        let below = folder.strip_prefix(root).ok().filter(|below| !below.as_os_str().is_empty());
        let opened = Folder::new(root).folder(below.unwrap_or(Path::new("")));
        let own = || folder.canonicalize().ok().and_then(|folder| Some(PathBuf::from(folder.file_name()?)));
        let name = below.map(Path::to_owned).or_else(own).unwrap_or_else(|| folder.to_owned());
        Self {
            name: name.display().to_string(),
            metrics: Follower::new(opened.clone()),
            folder: opened,
            looked: None,
            ranks: Vec::new(),
            rank_message: String::new(),
            heard: BTreeMap::new(),
            steps: Vec::new(),
        }
    }

    fn look(&mut self) {
        self.metrics.look();
        match read_ranks(&self.folder) {
            Ok(ranks) => self.hear(ranks),
            Err(error) => self.rank_message = format!("ranks: {error}"),
        }
        self.steps = samples::steps(&self.folder);
        self.looked = Some(Instant::now());
    }

    fn hear(&mut self, ranks: Vec<RankState>) {
        for RankState { rank, time, .. } in &ranks {
            let heard = |is_new| Heard { time: *time, at: Instant::now(), is_new };
            let known = self.heard.entry(*rank).or_insert_with(|| heard(false));
            if known.time.to_bits() != time.to_bits() {
                *known = heard(true);
            }
        }
        (self.ranks, self.rank_message) = (ranks, String::new());
    }

    /// Seconds since a rank last wrote its file. The clock of the rank's host may differ from this host's, so an update seen while watching is
    /// measured with this host's clock. For a file unchanged since it was first read, the time written in it is used.
    pub fn silence_s(&self, rank: &RankState, now: f64) -> f64 {
        match self.heard.get(&rank.rank).filter(|heard| heard.is_new) {
            Some(heard) => heard.at.elapsed().as_secs_f64(),
            None => now - rank.time,
        }
    }

    pub fn history(&self) -> &History {
        self.metrics.history()
    }

    /// A number that increases with every change of the history.
    pub fn revision(&self) -> u64 {
        self.metrics.revision()
    }

    /// Time of the last update of any file, in seconds since 1970.
    pub fn newest(&self) -> f64 {
        self.ranks.iter().map(|rank| rank.time).chain(self.metrics.newest()).fold(0.0, f64::max)
    }

    /// Keys and values of the configuration; an error message if the file is malformed.
    pub fn config(&self) -> Result<Vec<(String, String)>, String> {
        read_config(&self.folder).map_err(|error| error.to_string())
    }

    /// What is wrong with the run's files.
    pub fn messages(&self) -> impl Iterator<Item = &str> {
        [self.metrics.message(), self.rank_message.as_str()].into_iter().filter(|message| !message.is_empty())
    }

    /// Progress of the run.
    pub fn step(&self) -> RunStep {
        let step = self.history().last_step().unwrap_or(0.0) as u64;
        RunStep { newest: step, last: self.ranks.first().map(|first| first.max_steps) }
    }

    /// State of the run in words.
    pub fn state(&self) -> String {
        self.state_at(now())
    }

    fn state_at(&self, now: f64) -> String {
        if !self.folder.path().exists() {
            return "deleted".to_owned();
        }
        let ends = || self.ranks.iter().filter_map(|rank| rank.end.as_ref());
        let silent = |rank: &RankState| rank.end.is_none() && self.silence_s(rank, now) > SILENCE_S;
        if let Some(failed) = ends().find(|end| end.code.is_some_and(|code| code != 0)) {
            return match failed.code {
                Some(75) => format!("stopped and saved: {}", failed.message),
                code => format!("failed ({}): {}", code.unwrap_or(0), failed.message),
            };
        }
        if let Some(rank) = self.ranks.iter().find(|rank| silent(rank)) {
            return format!("rank {} has shown no sign of life for {}", rank.rank, age(self.silence_s(rank, now)));
        }
        match self.metrics.newest() {
            _ if self.ranks.iter().any(|rank| rank.end.is_none()) => "running".to_owned(),
            _ if !self.ranks.is_empty() && ends().all(|end| end.code == Some(0)) => "done".to_owned(),
            _ if !self.ranks.is_empty() => "ended".to_owned(),
            Some(time) => format!("its newest metrics are {} old", age(now - time)),
            None => "no metrics or ranks yet".to_owned(),
        }
    }
}

/// The current time in seconds since 1970.
pub(super) fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// Formats a duration in one unit.
pub(super) fn age(seconds: f64) -> String {
    match seconds.max(0.0) as u64 {
        seconds @ 0..=119 => format!("{seconds} s"),
        seconds @ 120..=7199 => format!("{} min", seconds / 60),
        seconds @ 7200..=172_799 => format!("{} h", seconds / 3600),
        seconds => format!("{} days", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::ranks::RankEnd;

    fn rank(rank: usize, time: f64, end: Option<RankEnd>) -> RankState {
        RankState {
            rank,
            world_size: 2,
            process: 1,
            time,
            step: 3,
            max_steps: 9,
            phases: vec!["generate".to_owned()],
            phase_s: 1.0,
            waits_in: None,
            resident_bytes: 1,
            gpu_memory: None,
            held: Vec::new(),
            warnings: Vec::new(),
            end,
        }
    }

    #[test]
    fn runs_are_found_below_a_folder_and_keep_their_numbers() {
        let folder = tempfile::tempdir().unwrap();
        let mut runs = WatchedRuns::new(vec![folder.path().to_owned()]);
        assert!(runs.search().is_empty() && runs.message().contains("no run in"));
        for name in ["b", "deep/er/c", ".hidden", "no run"] {
            fs::create_dir_all(folder.path().join(name)).unwrap();
        }
        for name in ["b", "deep/er/c", ".hidden"] {
            fs::write(folder.path().join(name).join("metrics.jsonl"), "").unwrap();
        }
        runs.searched = None;
        let names = |runs: &[WatchedRun]| runs.iter().map(|run| run.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(runs.search()), ["b", "deep/er/c"]);
        fs::create_dir_all(folder.path().join("a/ranks")).unwrap();
        fs::remove_dir_all(folder.path().join("b")).unwrap();
        runs.searched = None;
        assert_eq!(names(runs.search()), ["b", "deep/er/c", "a"]);
        assert!(runs.message().is_empty() && runs.look(9).is_none());
        assert_eq!(runs.look(0).unwrap().state(), "deleted");
        assert_eq!(WatchedRun::new(folder.path(), &folder.path().join("a")).name, "a");
        assert!(!WatchedRun::new(folder.path(), folder.path()).name.contains('/'), "the folder's own name");
    }

    #[test]
    fn a_rank_with_a_wrong_clock_is_alive_once_it_writes() {
        let folder = tempfile::tempdir().unwrap();
        let mut run = WatchedRun::new(folder.path(), folder.path());
        run.hear(vec![rank(0, 3700.0, None), rank(1, 100.0, None)]);
        assert_eq!(run.state_at(3700.0), "rank 1 has shown no sign of life for 60 min", "it may be a run of yesterday");
        run.hear(vec![rank(0, 3705.0, None), rank(1, 105.0, None)]);
        assert_eq!(run.state_at(3705.0), "running");
        assert!(run.silence_s(&run.ranks[1], 3705.0) < 20.0);
    }

    #[test]
    fn the_state_of_a_run_is_running_silent_done_or_failed() {
        let folder = tempfile::tempdir().unwrap();
        let mut run = WatchedRun::new(folder.path(), folder.path());
        assert_eq!(run.state_at(100.0), "no metrics or ranks yet");
        let end = |code, message: &str| Some(RankEnd { code, message: message.to_owned() });
        for (ranks, expected) in [
            (vec![rank(0, 95.0, None), rank(1, 99.0, None)], "running"),
            (vec![rank(0, 95.0, None), rank(1, 10.0, None)], "rank 1 has shown no sign of life for 90 s"),
            (vec![rank(0, 1.0, end(Some(0), "")), rank(1, 1.0, end(Some(0), ""))], "done"),
            (vec![rank(0, 1.0, end(Some(0), "")), rank(1, 1.0, end(None, ""))], "ended"),
            (vec![rank(0, 1.0, None), rank(1, 1.0, end(Some(11), "no memory"))], "failed (11): no memory"),
            (vec![rank(0, 1.0, end(Some(75), "saved"))], "stopped and saved: saved"),
        ] {
            run.ranks = ranks;
            assert_eq!(run.state_at(100.0), expected);
        }
    }
}
