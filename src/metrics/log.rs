//! The lines of a run: the first rank writes them and keeps them for checkpoints.

use std::collections::BTreeMap;
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
    /// Empty on ranks that write nothing.
    history: LogHistory,
    /// A metric's first and newest number.
    ends: BTreeMap<String, (f64, f64)>,
}

impl RunLog {
    /// Opens the files of `output_dir`, if this rank `writes` them. A resumed run goes on after the step and the lines of
    /// `earlier`.
    ///
    /// # Errors
    /// Those of [`MetricsWriter::new`].
    pub fn open(output_dir: &Path, writes: bool, earlier: Option<(u64, LogHistory)>) -> Result<Self> {
        let (step, history) = earlier.map_or((None, LogHistory::default()), |(step, history)| (Some(step), history));
        let mut ends = BTreeMap::new();
        history.numbers().for_each(|(name, value)| extend(&mut ends, name, value));
        let writer = if writes { Some(MetricsWriter::new(output_dir, step)?) } else { None };
        let history = if writes { history } else { LogHistory::default() };
        Ok(Self { output_dir: output_dir.to_owned(), writer, history, ends })
    }

    /// One line of metrics, already reduced.
    pub fn write(&mut self, step: u64, values: MetricValues) {
        if let Some(writer) = &mut self.writer {
            writer.write(step, &values);
            self.history.push(step, &values);
        }
        values.iter().for_each(|(name, value)| extend(&mut self.ends, name, *value));
    }

    /// Every line, those before a resume included, on the first rank; none on the others.
    pub fn history(&self) -> &LogHistory {
        &self.history
    }

    /// A metric's first and newest number, those before a resume included, on every rank.
    pub fn first_and_last(&self, name: &str) -> Option<(f64, f64)> {
        self.ends.get(name).copied()
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

fn extend(ends: &mut BTreeMap<String, (f64, f64)>, name: &str, value: f64) {
    match ends.get_mut(name) {
        _ if !value.is_finite() => {}
        Some((_, last)) => *last = value,
        None => drop(ends.insert(name.to_owned(), (value, value))),
    }
}
