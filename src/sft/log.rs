//! What a supervised run writes and shows, on the first rank; the others only keep its lines.

use std::time::Instant;

use crate::checkpoint::Checkpoint;
use crate::config::SftConfig;
use crate::error::Result;
use crate::metrics::{LogHistory, MetricValues, Progress, RunLog, write_run_config};

#[derive(Debug)]
pub(super) struct Log {
    lines: RunLog,
    display: Progress,
    logging_steps: u64,
    max_steps: u64,
    last: Instant,
}

impl Log {
    /// Opens files on the first rank; a checkpoint continues those of an earlier run.
    pub fn new(config: &SftConfig, is_first: bool, max_steps: u64, checkpoint: Option<&Checkpoint>) -> Result<Self> {
        if is_first {
            write_run_config(&config.output_dir, config)?;
        }
        let earlier = checkpoint.map(|checkpoint| (checkpoint.state.global_step, checkpoint.state.log_history.clone()));
        let display = Progress::new(max_steps, earlier.as_ref().map_or(0, |(step, _)| *step), is_first);
        if let Some(checkpoint) = checkpoint {
            display.say(&format!("resumed from {}", checkpoint.folder.display()));
        }
        let lines = RunLog::open(&config.output_dir, is_first, earlier)?;
        Ok(Self { lines, display, logging_steps: config.logging_steps as u64, max_steps, last: Instant::now() })
    }

    /// Writes the configuration again into an output folder that was deleted while the run was on its way.
    pub fn begin_again(&self, config: &SftConfig) -> Result<()> {
        let folder = config.output_dir.display();
        self.say(&format!("warning: {folder} was deleted or moved: it is made again; what was saved there is gone"));
        write_run_config(&config.output_dir, config)
    }

    /// A line above the bar.
    pub fn say(&self, text: &str) {
        self.display.say(text);
    }

    /// Every line so far.
    pub fn history(&self) -> LogHistory {
        self.lines.history().clone()
    }

    /// The newest loss that was written, in nats; NaN before any.
    pub fn loss(&self) -> f64 {
        self.lines.first_and_last("loss").map_or(f64::NAN, |(_, last)| last)
    }

    /// A step is done; a line is written at the end of a logging interval and of the run.
    pub fn step(&mut self, step: u64, numbers: &[(&str, f64)]) {
        let mut values: MetricValues = numbers.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        values.insert("step_time".into(), self.last.elapsed().as_secs_f64());
        self.last = Instant::now();
        self.display.finish_step(step, &values);
        if step.is_multiple_of(self.logging_steps) || step == self.max_steps {
            self.lines.write(step, values);
        }
    }

    /// Takes the bar away and writes the report.
    pub fn finish(&mut self, eval_loss: Option<f64>) -> Result<()> {
        self.display.finish();
        if let Some(loss) = eval_loss {
            self.lines.write(self.max_steps, MetricValues::from([("eval_loss".to_owned(), loss)]));
        }
        self.lines.report().map(drop)
    }
}
