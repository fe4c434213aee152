//! A run's metrics. Rank 0 writes and shows the lines, and keeps them for checkpoints.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::history::LogHistory;
use super::jsonl;
use super::over_steps::over_steps;
use super::report::write_report;
use super::sidecar::Services;
use super::step::MetricValues;
use super::writer::{MetricsWriter, write_run_config};
use crate::console::RunDisplay;
use crate::error::Result;
use crate::untrusted::Folder;

/// Prefix of the names of evaluation metrics.
const EVALUATION: &str = "eval_";
/// Minimum time between two writes of the report. The report also takes at most a share of 1 / `REPORT_COST` of the run's time.
const REPORT_INTERVAL: Duration = Duration::from_secs(20);
const REPORT_COST: u32 = 200;

/// A run's metrics so far.
#[derive(Debug)]
pub struct RunLog {
    output_dir: PathBuf,
    writer: Option<MetricsWriter>,
    /// All lines; empty on ranks that write nothing.
    history: LogHistory,
    /// The lines of evaluations, on every rank.
    evaluations: LogHistory,
    /// First and newest value of each metric.
    ends: BTreeMap<String, FirstAndNewest>,
    next_report: Instant,
    report_has_failed: bool,
    display: RunDisplay,
    logging_steps: u64,
    max_steps: u64,
    interval: Vec<MetricValues>, // steps since the newest line
    last_logged_step: u64,
}

/// The metrics of a run from a checkpoint.
#[derive(Debug, Clone, Default)]
pub struct EarlierLog {
    /// The checkpoint's folder.
    pub folder: PathBuf,
    /// Step of the checkpoint.
    pub step: u64,
    /// All metric lines written before the checkpoint.
    pub history: LogHistory,
    /// Metrics of the steps since the newest line, as bit patterns.
    pub unlogged: Vec<BTreeMap<String, u64>>,
}

/// The logging interval and the length of a run.
#[derive(Debug, Clone, Copy)]
pub struct LogOptions {
    /// Steps between lines.
    pub logging_steps: usize,
    /// Total steps.
    pub max_steps: u64,
}

impl RunLog {
    /// Opens the files in `output_dir` and shows the run's progress, if this rank `writes`. A resumed run continues from `earlier`.
    ///
    /// # Errors
    /// The errors of [`MetricsWriter::new`]; [`Error::Io`](crate::Error::Io) if the configuration cannot be written.
    pub fn open(
        output_dir: &Path,
        config: &impl Serialize,
        options: LogOptions,
        writes: bool,
        earlier: Option<EarlierLog>,
        services: &Services,
    ) -> Result<Self> {
        if writes {
            write_run_config(output_dir, config)?;
        }
        let first_step = earlier.as_ref().map(|earlier| earlier.step);
        let display = RunDisplay::new(options.max_steps, first_step.unwrap_or(0), writes);
        if let Some(earlier) = &earlier {
            display.say(&format!("resumed from {}", earlier.folder.display()));
        }
        let EarlierLog { history, unlogged, .. } = earlier.unwrap_or_default();
        let mut ends = BTreeMap::new();
        history.numbers().for_each(|(name, value)| extend(&mut ends, name, value));
        let from_bits = |(name, bits): (String, u64)| (name, f64::from_bits(bits));
        Ok(Self {
            output_dir: output_dir.to_owned(),
            writer: if writes { Some(MetricsWriter::new(output_dir, first_step, services)?) } else { None },
            evaluations: history.with(EVALUATION),
            history: if writes { history } else { LogHistory::default() },
            ends,
            next_report: Instant::now(),
            report_has_failed: false,
            display,
            logging_steps: options.logging_steps as u64,
            max_steps: options.max_steps,
            interval: unlogged.into_iter().map(|values| values.into_iter().map(from_bits).collect()).collect(),
            last_logged_step: first_step.unwrap_or(0),
        })
    }

    /// The progress bars, and lines above them.
    pub fn display(&self) -> &RunDisplay {
        &self.display
    }

    /// Records a finished step. At the end of a logging interval and of the run, it writes a line that combines the interval's steps.
    pub fn step(&mut self, step: u64, values: MetricValues) {
        self.display.finish_step(step, &values);
        self.interval.push(values);
        let is_due = step / self.logging_steps > self.last_logged_step / self.logging_steps;
        if is_due || step >= self.max_steps {
            let line = over_steps(&std::mem::take(&mut self.interval));
            self.write(step, line);
            self.last_logged_step = step;
        }
    }

    /// Writes one line of metrics, which must already be reduced. The report is written with the first line, and again from time to time.
    pub fn write(&mut self, step: u64, values: MetricValues) {
        if let Some(writer) = &mut self.writer {
            writer.write(step, &values);
            self.history.push(step, &values);
            self.report_now_and_then();
        }
        if values.keys().any(|name| name.starts_with(EVALUATION)) {
            self.evaluations.push(step, &values);
        }
        values.iter().for_each(|(name, value)| extend(&mut self.ends, name, *value));
    }

    fn report_now_and_then(&mut self) {
        let start = Instant::now();
        if start < self.next_report {
            return;
        }
        if let Err(error) = write_report(&self.output_dir)
            && !std::mem::replace(&mut self.report_has_failed, true)
        {
            tracing::warn!("cannot write the report: {error}; training continues without it (reported once)");
        }
        self.next_report = Instant::now() + REPORT_INTERVAL.max(start.elapsed() * REPORT_COST);
    }

    /// Writes the configuration again if the output folder was deleted during the run.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io).
    pub fn begin_again(&self, config: &impl Serialize) -> Result<()> {
        let folder = self.output_dir.display();
        self.display.say(&format!(
            "warning: {folder} was deleted or moved: creating it again; checkpoints saved there are lost"
        ));
        write_run_config(&self.output_dir, config)
    }

    /// All lines, including those before a resume, on rank 0; empty on other ranks.
    pub fn history(&self) -> &LogHistory {
        &self.history
    }

    /// Metrics of the steps that no line contains yet, as bit patterns.
    pub fn unlogged(&self) -> Vec<BTreeMap<String, u64>> {
        let bits = |values: &MetricValues| values.iter().map(|(name, value)| (name.clone(), value.to_bits())).collect();
        self.interval.iter().map(bits).collect()
    }

    /// A metric's first and newest value, including those before a resume, on every rank.
    pub fn first_and_newest(&self, name: &str) -> Option<FirstAndNewest> {
        self.ends.get(name).copied()
    }

    /// The lines of evaluations, including those before a resume, on every rank.
    pub fn evaluations(&self) -> &LogHistory {
        &self.evaluations
    }

    /// Names of the evaluation metrics so far, on every rank.
    pub fn names_of_evaluations(&self) -> Vec<String> {
        self.ends.keys().filter(|name| name.starts_with(EVALUATION)).cloned().collect()
    }

    /// Removes the progress bars and, if this rank writes files, writes the report. Writes no report if there are no metrics, as after resuming a
    /// finished run in another folder.
    ///
    /// # Errors
    /// The errors of [`write_report`].
    pub fn finish(&mut self) -> Result<Option<PathBuf>> {
        self.display.finish();
        if let Some(writer) = &mut self.writer {
            writer.restore();
            writer.finish();
        }
        let lines = Folder::new(&self.output_dir).open(jsonl::FILE).and_then(|file| file.metadata());
        let has_lines = lines.is_ok_and(|file| file.len() > 0);
        if self.writer.is_some() && has_lines { write_report(&self.output_dir).map(Some) } else { Ok(None) }
    }
}

/// The first and newest value of a metric.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FirstAndNewest {
    /// The oldest value.
    pub first: f64,
    /// The newest value.
    pub newest: f64,
}

fn extend(ends: &mut BTreeMap<String, FirstAndNewest>, name: &str, value: f64) {
    match ends.get_mut(name) {
        _ if !value.is_finite() => {}
        Some(numbers) => numbers.newest = value,
        None => drop(ends.insert(name.to_owned(), FirstAndNewest { first: value, newest: value })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_is_written_from_the_first_step_and_may_fail() {
        let folder = tempfile::tempdir().unwrap();
        let report = folder.path().join("report.html");
        let line = || MetricValues::from([("reward".to_owned(), 0.5)]);
        let open = |folder: &Path, writes, earlier| {
            let options = LogOptions { logging_steps: 1, max_steps: 9 };
            RunLog::open(folder, &serde_json::json!({}), options, writes, earlier, &Services::default()).unwrap()
        };
        let mut log = open(folder.path(), true, None);
        log.write(1, line());
        assert!(std::fs::read_to_string(&report).unwrap().contains("<svg"));
        std::fs::remove_file(&report).unwrap();
        std::fs::create_dir_all(report.join("in the way")).unwrap();
        log.next_report = Instant::now();
        log.write(2, line());
        assert!(log.report_has_failed && log.history().lines().count() == 2);
        let mut silent = open(&folder.path().join("other"), false, None);
        silent.write(1, line());
        silent.write(1, [("eval_reward".to_owned(), 0.5), ("eval_kl".to_owned(), f64::NAN)].into());
        assert!(!folder.path().join("other").exists(), "another rank writes nothing");
        assert_eq!(silent.evaluations().points("eval_reward").collect::<Vec<_>>(), [(1, 0.5)]);
        assert_eq!(
            (silent.history().lines().count(), silent.names_of_evaluations()),
            (0, vec!["eval_reward".to_owned()])
        );
        let earlier = EarlierLog { step: 2, history: silent.evaluations().clone(), ..EarlierLog::default() };
        let resumed = open(folder.path(), false, Some(earlier));
        assert_eq!(resumed.evaluations().points("eval_reward").count(), 1);
    }
}
