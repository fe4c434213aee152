//! The lines of a run: the first rank writes them, every rank keeps them for checkpoints.

use std::path::{Path, PathBuf};

use super::history::LogHistory;
use super::report::write_report;
use super::step::MetricValues;
use super::writer::MetricsWriter;
use crate::error::Result;

/// A run's metrics so far.
#[derive(Debug)]
pub struct RunLog {
    output_dir: PathBuf,
    writer: Option<MetricsWriter>,
    history: LogHistory,
}

impl RunLog {
    /// Opens the files of `output_dir`, if this rank `writes` them. A resumed run goes on after the step and the lines of
    /// `earlier`.
    ///
    /// # Errors
    /// Those of [`MetricsWriter::new`].
    pub fn open(output_dir: &Path, writes: bool, earlier: Option<(u64, LogHistory)>) -> Result<Self> {
        let (step, history) = earlier.map_or((None, LogHistory::default()), |(step, history)| (Some(step), history));
        let writer = if writes { Some(MetricsWriter::new(output_dir, step)?) } else { None };
        Ok(Self { output_dir: output_dir.to_owned(), writer, history })
    }

    /// One line of metrics, already reduced.
    pub fn write(&mut self, step: u64, values: MetricValues) {
        if let Some(writer) = &mut self.writer {
            writer.write(step, &values);
        }
        self.history.push(step, &values);
    }

    /// Every line, those before a resume included.
    pub fn history(&self) -> &LogHistory {
        &self.history
    }

    /// A metric's values in the order of its lines.
    pub fn values(&self, name: &str) -> impl DoubleEndedIterator<Item = f64> {
        self.history.values(name)
    }

    /// Writes the report where files are written. A run that was resumed after its last step, in another folder, has nothing to
    /// report.
    ///
    /// # Errors
    /// Those of [`write_report`].
    pub fn report(&mut self) -> Result<Option<PathBuf>> {
        if let Some(writer) = &mut self.writer {
            writer.restore();
        }
        let has_lines = std::fs::metadata(self.output_dir.join("metrics.jsonl")).is_ok_and(|file| file.len() > 0);
        if self.writer.is_some() && has_lines { write_report(&self.output_dir).map(Some) } else { Ok(None) }
    }
}
