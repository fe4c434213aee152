//! A timeline of phases in Chrome's trace format, for ui.perfetto.dev or chrome://tracing. Each rank writes its own file while it runs, so that a
//! killed run leaves them; at the end these are merged into one.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use serde_json::json;

use super::Phase;
use crate::error::{Error, Result};

/// Starts the array of events; the format permits its end to be missing.
const BEGIN: &str = "[\n";

static TRACE: Mutex<Option<Trace>> = Mutex::new(None);

struct Trace {
    rank: usize,
    /// Microseconds by which this host's clock is ahead of rank 0's.
    ahead_us: i64,
    file: BufWriter<File>,
}

/// Starts to write every phase of this process to `rank_00000.json` (with its rank) in the existing `folder`. If the run is resumed (`goes_on`),
/// events already in the file are kept. `label` names the process in the timeline. Times are converted to rank 0's clock; this host's clock is
/// `ahead_us` ahead of it.
///
/// # Errors
/// [`Error::Io`] if the file cannot be created.
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

/// The complete lines of a trace; a killed run may have left part of a line.
fn whole_lines(path: &Path) -> Result<String> {
    let mut text = text_of(path)?;
    text.truncate(text.rfind('\n').map_or(0, |end| end + 1));
    Ok(if text.starts_with(BEGIN) { text } else { BEGIN.to_owned() })
}

/// Writes buffered events; ranks that share a disk must call it before [`merge_traces`].
pub fn flush_trace() {
    record(|trace| trace.file.flush());
}

/// Merges the events of all ranks whose files are in `folder` into `trace.json` there.
///
/// # Errors
/// [`Error::Io`] for a file that cannot be read or written.
pub fn merge_traces(folder: &Path, num_ranks: usize) -> Result<()> {
    let mut events = String::new();
    for rank in 0..num_ranks {
        let path = of_rank(folder, rank);
        if !path.exists() {
            continue; // it is on another node's disk
        }
        let text = text_of(&path)?;
        events.push_str(text.strip_prefix(BEGIN).unwrap_or(&text));
    }
    let path = folder.join("trace.json");
    let events = events.trim_end().trim_end_matches(',');
    let mut file = opened(File::options().write(true).create(true).truncate(true), &path)?;
    file.write_all(format!("{BEGIN}{events}\n]\n").as_bytes()).map_err(Error::io(path))
}

/// Opens a file, but not through a symbolic link, which could lead out of the folder.
fn opened(options: &mut OpenOptions, path: &Path) -> Result<File> {
    options.custom_flags(libc::O_NOFOLLOW).open(path).map_err(Error::io(path))
}

fn text_of(path: &Path) -> Result<String> {
    let (mut file, mut text) = (opened(File::options().read(true), path)?, String::new());
    file.read_to_string(&mut text).map_err(Error::io(path))?;
    Ok(text)
}

/// Records a phase that ends now.
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

/// Writes to the trace, if there is one. After an error it logs a warning and stops tracing.
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
