//! The file metrics.jsonl: one JSON object per line, first `step` and `time` (Unix seconds), then metrics by name.

use std::io;
use std::path::Path;

use super::lasting::LastingFile;
use super::step::MetricValues;
use crate::error::{Error, Result};
use crate::untrusted::{self, Folder, MAX_LOG_BYTES};

/// Name of the file in a run's output folder.
pub(super) const FILE: &str = "metrics.jsonl";
/// New name of an earlier run's file.
const EARLIER: &str = "metrics.jsonl.old";

/// One line: metrics of a step, or of an evaluation after it (names with `eval_`).
#[derive(Debug, Clone, PartialEq)]
pub struct MetricLine {
    /// Optimizer updates done.
    pub step: u64,
    /// Time of writing, in seconds since 1970.
    pub time: f64,
    /// Metrics by name, without those that are not numbers.
    pub values: MetricValues,
}

/// Reads a metrics.jsonl. Lines that cannot be parsed, after a crash while writing, are skipped.
///
/// # Errors
/// [`Error::Io`] if the file cannot be read.
pub fn read_metrics(path: &Path) -> Result<Vec<MetricLine>> {
    let bytes = untrusted::read(path, MAX_LOG_BYTES).map_err(Error::io(path))?;
    Ok(lines(&bytes))
}

/// Like [`read_metrics`], for the file in a run's output folder.
pub(crate) fn read_metrics_in(folder: &Folder) -> Result<Vec<MetricLine>> {
    Ok(lines(&read_bytes(folder)?))
}

fn read_bytes(folder: &Folder) -> Result<Vec<u8>> {
    folder.read(FILE, MAX_LOG_BYTES).map_err(Error::io(folder.path().join(FILE)))
}

/// The lines that can be parsed. A line torn by a crash may contain any bytes and does not affect others.
fn lines(bytes: &[u8]) -> Vec<MetricLine> {
    String::from_utf8_lossy(bytes).lines().filter_map(MetricLine::parse).collect()
}

impl MetricLine {
    /// Parses a line; `None` for a torn one.
    pub fn parse(line: &str) -> Option<Self> {
        let object: serde_json::Map<String, serde_json::Value> = serde_json::from_str(line).ok()?;
        let step = object.get("step")?.as_u64()?;
        let time = object.get("time")?.as_f64()?;
        let metrics = object.into_iter().filter(|(name, _)| name != "step" && name != "time");
        let values = metrics.filter_map(|(name, value)| Some((name, value.as_f64()?))).collect();
        Some(Self { step, time, values })
    }

    /// The line as JSON with a newline. Non-finite values become null.
    pub(super) fn to_json(&self) -> String {
        let mut object = serde_json::Map::new();
        object.insert("step".into(), self.step.into());
        object.insert("time".into(), self.time.into());
        object.extend(self.values.iter().map(|(name, value)| (name.clone(), (*value).into())));
        serde_json::Value::Object(object).to_string() + "\n"
    }
}

/// The file, open for appending.
#[derive(Debug)]
pub(super) struct JsonLines {
    file: LastingFile,
    torn: bool,
}

impl JsonLines {
    /// Starts a new file, renaming the old one, or on resume keeps the lines up to that step.
    pub fn open(folder: Folder, resume_step: Option<u64>) -> Result<Self> {
        let path = folder.path().join(FILE);
        if folder.has(FILE) {
            match resume_step {
                Some(step) => truncate_after(&folder, step)?,
                None => {
                    tracing::info!("{} belongs to another run: moved to {EARLIER}", path.display());
                    folder.rename(FILE, EARLIER).map_err(Error::io(&path))?;
                }
            }
        }
        let file = LastingFile::open(folder, FILE).map_err(Error::io(path))?;
        Ok(Self { file, torn: false })
    }

    /// Creates the file again if it was deleted or moved.
    pub fn restore(&mut self) -> io::Result<()> {
        self.file.restore()
    }

    /// Appends a line in one write and flushes it.
    pub fn append(&mut self, line: &MetricLine) -> io::Result<()> {
        // After a failed write, part of a line may be in the file: end that line, so that it does not damage the next.
        let separator = if std::mem::replace(&mut self.torn, true) { "\n" } else { "" };
        self.file.append(format!("{separator}{}", line.to_json()).as_bytes())?;
        self.torn = false;
        Ok(())
    }
}

fn truncate_after(folder: &Folder, step: u64) -> Result<()> {
    let bytes = read_bytes(folder)?;
    let text = String::from_utf8_lossy(&bytes);
    let kept = text.lines().filter(|line| MetricLine::parse(line).is_some_and(|line| line.step <= step));
    let kept: String = kept.flat_map(|line| [line, "\n"]).collect();
    folder.write(FILE, kept).map_err(Error::io(folder.path().join(FILE)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(step: u64, values: &[(&str, f64)]) -> MetricLine {
        let values = values.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        MetricLine { step, time: 1.5, values }
    }

    #[test]
    fn metric_lines_start_with_the_step_and_write_nan_as_null() {
        let text = line(3, &[("loss", 0.25), ("kl", f64::NAN)]).to_json();
        assert_eq!(text, "{\"step\":3,\"time\":1.5,\"kl\":null,\"loss\":0.25}\n");
        assert_eq!(MetricLine::parse(&text), Some(line(3, &[("loss", 0.25)])));
    }

    #[test]
    fn resume_drops_later_and_incomplete_metric_lines() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut lines = JsonLines::open(Folder::new(folder.path()), None).unwrap();
        (1..=4).for_each(|step| lines.append(&line(step, &[("loss", 1.0)])).unwrap());
        lines.file.append(b"{\"step\":5,\"ti").unwrap();
        let mut lines = JsonLines::open(Folder::new(folder.path()), Some(2)).unwrap();
        lines.append(&line(3, &[("loss", 2.0)])).unwrap();
        let steps: Vec<_> = read_metrics(&path).unwrap().iter().map(|line| (line.step, line.values["loss"])).collect();
        assert_eq!(steps, [(1, 1.0), (2, 1.0), (3, 2.0)]);
        assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 3);
    }

    #[test]
    fn an_incomplete_metric_line_does_not_damage_others() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut lines = JsonLines::open(Folder::new(folder.path()), None).unwrap();
        lines.append(&line(1, &[])).unwrap();
        lines.file.append(b"\xff\xfe\0\n").unwrap();
        lines.append(&line(2, &[])).unwrap();
        JsonLines::open(Folder::new(folder.path()), Some(2)).unwrap();
        let steps: Vec<_> = read_metrics(&path).unwrap().iter().map(|line| line.step).collect();
        assert_eq!(steps, [1, 2]);
    }

    #[test]
    fn metrics_are_not_written_through_a_symbolic_link() {
        let (folder, outside) = (tempfile::tempdir().unwrap(), tempfile::NamedTempFile::new().unwrap());
        let run = || Folder::new(folder.path());
        std::os::unix::fs::symlink(outside.path(), folder.path().join(FILE)).unwrap();
        let refused = JsonLines::open(run(), Some(1)).unwrap_err().to_string();
        assert!(refused.contains("metrics.jsonl is a symbolic link"), "{refused}");
        let mut lines = JsonLines::open(run(), None).unwrap();
        lines.append(&line(1, &[])).unwrap();
        assert_eq!(read_metrics_in(&run()).unwrap().len(), 1);
        std::fs::remove_file(folder.path().join(FILE)).unwrap();
        std::os::unix::fs::symlink(outside.path(), folder.path().join(FILE)).unwrap();
        assert!(lines.append(&line(2, &[])).unwrap_err().to_string().contains("is a symbolic link"));
        assert_eq!(std::fs::read(outside.path()).unwrap(), b"");
    }

    #[test]
    fn a_new_run_moves_the_old_metrics_aside() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        JsonLines::open(Folder::new(folder.path()), None).unwrap().append(&line(1, &[])).unwrap();
        JsonLines::open(Folder::new(folder.path()), None).unwrap();
        assert!(read_metrics(&path).unwrap().is_empty());
        assert_eq!(read_metrics(&folder.path().join("metrics.jsonl.old")).unwrap().len(), 1);
    }
}
