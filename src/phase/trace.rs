//! A time-line of phases in Chrome's trace format, for ui.perfetto.dev or chrome://tracing: one file a rank while it runs, so
//! that a run that is killed leaves its own, and one of all ranks at the end.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use serde_json::json;

use super::Phase;
use crate::error::{Error, Result};

/// Begins the array of events, whose end the format allows to be missing.
const BEGIN: &str = "[\n";

static TRACE: Mutex<Option<Trace>> = Mutex::new(None);

struct Trace {
    rank: usize,
    /// Microseconds by which this host's clock is ahead of rank 0's.
    ahead_us: i64,
    file: BufWriter<File>,
}

/// Writes every phase of this process from now on to `rank_00000.json` in `folder`, which is there, after those that are there if the run `goes_on`;
/// `label` names it in the picture. Times are those of rank 0's clock, of which this host's is `ahead_us` ahead.
///
/// # Errors
/// [`Error::Io`] if the file cannot be made.
pub fn trace_to(folder: &Path, rank: usize, label: &str, ahead_us: i64, goes_on: bool) -> Result<()> {
    let path = of_rank(folder, rank);
    let earlier = if goes_on && path.exists() { whole_lines(&path)? } else { BEGIN.to_owned() };
    let file = opened(File::options().write(true).create(true).truncate(true), &path)?;
    let mut trace = Trace { rank, ahead_us, file: BufWriter::new(file) };
    let name = json!({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": label}});
    writeln!(trace.file, "{earlier}{name},").map_err(Error::io(path))?;
    *TRACE.lock().unwrap_or_else(PoisonError::into_inner) = Some(trace);
    Ok(())
}

/// The whole lines of a trace; a run that was killed may have left part of one.
fn whole_lines(path: &Path) -> Result<String> {
    let mut text = text_of(path)?;
    text.truncate(text.rfind('\n').map_or(0, |end| end + 1));
    Ok(if text.starts_with(BEGIN) { text } else { BEGIN.to_owned() })
}

/// Writes what is still held; ranks that share a disk call it before [`merge_traces`].
pub fn flush_trace() {
    record(|trace| trace.file.flush());
}

/// The events of all ranks whose files are in `folder`, as `trace.json` beside them.
///
/// # Errors
/// [`Error::Io`] for a file that cannot be read or written.
pub fn merge_traces(folder: &Path, num_ranks: usize) -> Result<()> {
    let mut events = String::new();
    for rank in 0..num_ranks {
        let path = of_rank(folder, rank);
        if !path.exists() {
            continue; // another node's disk
        }
        let text = text_of(&path)?;
        events.push_str(text.strip_prefix(BEGIN).unwrap_or(&text));
    }
    let path = folder.join("trace.json");
    let events = events.trim_end().trim_end_matches(',');
    let mut file = opened(File::options().write(true).create(true).truncate(true), &path)?;
    file.write_all(format!("{BEGIN}{events}\n]\n").as_bytes()).map_err(Error::io(path))
}

/// Opens a file that is no link, which could lead out of the folder.
fn opened(options: &mut OpenOptions, path: &Path) -> Result<File> {
    options.custom_flags(libc::O_NOFOLLOW).open(path).map_err(Error::io(path))
}

fn text_of(path: &Path) -> Result<String> {
    let (mut file, mut text) = (opened(File::options().read(true), path)?, String::new());
    file.read_to_string(&mut text).map_err(Error::io(path))?;
    Ok(text)
}

/// A phase that ends now.
pub(super) fn span(phase: Phase, duration: Duration) {
    record(|trace| {
        let end = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let (start_us, duration_us) = (end.saturating_sub(duration).as_micros() as i64, duration.as_micros() as u64);
        let start_us = start_us - trace.ahead_us;
        let event = json!({"name": phase.name(), "ph": "X", "ts": start_us, "dur": duration_us, "pid": trace.rank, "tid": 0,
            "args": {"step": super::step()}});
        writeln!(trace.file, "{event},")
    });
}

/// Does nothing without a trace; one that cannot be written is given up, and that is said.
fn record(write: impl FnOnce(&mut Trace) -> std::io::Result<()>) {
    let Ok(mut trace) = TRACE.lock() else { return };
    if let Some(Err(error)) = trace.as_mut().map(write) {
        tracing::warn!("cannot write the trace of phases: {error}; training continues without it");
        *trace = None;
    }
}

fn of_rank(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("rank_{rank:05}.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resumed_trace_keeps_all_complete_lines() {
        let folder = tempfile::tempdir().unwrap();
        let path = of_rank(folder.path(), 0);
        let earlier = format!("{BEGIN}{{\"ts\":1}},\n");
        std::fs::write(&path, format!("{earlier}{{\"ts\":2")).unwrap();
        assert_eq!(whole_lines(&path).unwrap(), earlier);
        std::fs::write(&path, "").unwrap();
        assert_eq!(whole_lines(&path).unwrap(), BEGIN);
    }
}
