//! Writes the metrics of a run on rank 0.

use std::io;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use super::jsonl::{JsonLines, MetricLine};
use super::sidecar::{Services, Sidecar};
use super::step::MetricValues;
use super::tensorboard::EventFile;
use crate::console::redact_json;
use crate::error::{Error, Result};
use crate::untrusted::Folder;

/// The configuration's file in the output folder of a run.
pub(super) const RUN_CONFIG: &str = "run_config.json";

/// Writes metrics.jsonl and TensorBoard events. If a destination fails, it is reported once and retried at the next line; training continues.
#[derive(Debug)]
pub struct MetricsWriter {
    lines: Destination<JsonLines>,
    events: Destination<EventFile>,
    sidecar: Sidecar,
}

impl MetricsWriter {
    /// Opens `metrics.jsonl` and the outputs in `services`: `tensorboard/` in the output folder, a process for the others. On resume, lines after
    /// `resume_step` are dropped and TensorBoard is told to discard them; otherwise an old metrics.jsonl is renamed.
    ///
    /// # Errors
    /// [`Error::Io`] if metrics.jsonl cannot be opened.
    pub fn new(output_dir: &Path, resume_step: Option<u64>, services: &Services) -> Result<Self> {
        let folder = Folder::new(output_dir);
        folder.make().map_err(Error::io(output_dir))?;
        let lines = JsonLines::open(folder.clone(), resume_step)?;
        let first_step = resume_step.map_or(0, |step| step + 1);
        let mut events = Destination { name: "tensorboard", open: None, has_failed: false };
        if services.tensorboard {
            events.open = events.attempt(|_| EventFile::create(folder.folder("tensorboard"), now(), first_step));
        }
        let sidecar = Sidecar::start(output_dir, services, resume_step);
        Ok(Self { lines: Destination { name: "metrics.jsonl", open: Some(lines), has_failed: false }, events, sidecar })
    }

    /// Writes one line for `step`: training metrics, or evaluation metrics whose names start with `eval_`.
    pub fn write(&mut self, step: u64, values: &MetricValues) {
        let line = MetricLine { step, time: now(), values: values.clone() };
        self.lines.attempt(|open| open.as_mut().map_or(Ok(()), |lines| lines.append(&line)));
        self.events.attempt(|open| open.as_mut().map_or(Ok(()), |events| events.scalars(line.time, step, values)));
        self.sidecar.look();
    }

    /// Waits, for a limited time, until W&B and trackio have received everything.
    pub(super) fn finish(&mut self) {
        self.sidecar.finish();
    }

    /// Creates metrics.jsonl again if it was deleted or moved.
    pub(super) fn restore(&mut self) {
        self.lines.attempt(|open| open.as_mut().map_or(Ok(()), JsonLines::restore));
    }
}

/// Writes the configuration to `run_config.json` in the output folder, with secrets redacted.
///
/// # Errors
/// [`Error::Io`] if it cannot be written.
pub fn write_run_config(output_dir: &Path, config: &impl serde::Serialize) -> Result<()> {
    let write = || {
        let mut value = serde_json::to_value(config)?;
        redact_json(&mut value);
        Folder::new(output_dir).write(RUN_CONFIG, serde_json::to_string_pretty(&value)? + "\n")
    };
    write().map_err(Error::io(output_dir.join(RUN_CONFIG)))
}

/// An output that may fail.
#[derive(Debug)]
struct Destination<T> {
    name: &'static str,
    open: Option<T>,
    has_failed: bool,
}

impl<T> Destination<T> {
    fn attempt<R>(&mut self, work: impl FnOnce(&mut Option<T>) -> io::Result<R>) -> Option<R> {
        let result = work(&mut self.open);
        if let Err(error) = &result
            && !std::mem::replace(&mut self.has_failed, true)
        {
            tracing::warn!("cannot write {}: {error}; training continues without it (reported once)", self.name);
        }
        result.ok()
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::read_metrics;

    fn tensorboard() -> Services {
        Services { tensorboard: true, ..Services::default() }
    }

    #[test]
    fn metrics_reach_jsonl_and_tensorboard_files() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = MetricsWriter::new(folder.path(), None, &tensorboard()).unwrap();
        writer.write(1, &[("loss".to_owned(), 0.5)].into());
        let lines = read_metrics(&folder.path().join("metrics.jsonl")).unwrap();
        assert_eq!((lines[0].step, lines[0].values["loss"]), (1, 0.5));
        assert_eq!(std::fs::read_dir(folder.path().join("tensorboard")).unwrap().count(), 1);
    }

    #[test]
    fn a_failing_logger_does_not_end_training() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tensorboard"), "a file where a folder should be").unwrap();
        let mut writer = MetricsWriter::new(folder.path(), None, &tensorboard()).unwrap();
        assert!(writer.events.has_failed);
        writer.write(1, &[("loss".to_owned(), 0.5)].into());
        assert_eq!(read_metrics(&folder.path().join("metrics.jsonl")).unwrap().len(), 1);

        let full: Destination<()> = Destination { name: "full", open: Some(()), has_failed: false };
        let mut full = full;
        assert!(full.attempt(|_| Err::<(), _>(io::ErrorKind::StorageFull.into())).is_none());
        assert!(full.attempt(|_| Ok(())).is_some(), "it is tried again");
    }

    #[test]
    fn the_configuration_is_written_without_secrets() {
        let folder = tempfile::tempdir().unwrap();
        let config =
            serde_json::json!({"learning_rate": 1e-6, "reward": {"api_key": "abc", "url": "http://me:pw@host/"}});
        write_run_config(folder.path(), &config).unwrap();
        let text = std::fs::read_to_string(folder.path().join("run_config.json")).unwrap();
        assert!(text.contains("learning_rate") && !text.contains("abc") && !text.contains("pw"), "{text}");
    }
}
