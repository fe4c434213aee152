//! What a person sees while a run goes on: bars on a terminal, timestamped lines elsewhere.

use std::cell::Cell;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

use super::step::MetricValues;
use crate::phase::terminal;

/// Lines outside a terminal come no closer than this; the last step always gets one.
const LINE_INTERVAL: Duration = Duration::from_secs(1);

/// The same for lines on pinned memory, at about a second a GiB.
const PINNING_INTERVAL: Duration = Duration::from_secs(5);

/// The least between two lines on a download.
const DOWNLOAD_INTERVAL: Duration = Duration::from_secs(5);

/// Metrics worth a glance, with the names used for them; a narrow terminal cuts the last ones.
const SHOWN: [(&str, &str); 7] = [
    ("reward", "reward"),
    ("loss", "loss"),
    ("completions/mean_length", "length"),
    ("step_time", "s/step"),
    ("entropy", "entropy"),
    ("kl", "kl"),
    ("eval_reward", "eval reward"),
];

/// The display of one run. Ranks other than the first hold a hidden one, so that no caller asks.
#[derive(Debug)]
pub struct Progress {
    is_first_rank: bool,
    steps: ProgressBar,
    phase: ProgressBar,
    lines: Option<Lines>,
}

#[derive(Debug)]
struct Lines {
    start: Instant,
    last: Cell<Option<Instant>>,
}

/// Tells whoever waits for host memory to be pinned, `(done, total)` in bytes at a time: a bar on a terminal, elsewhere a line
/// every few seconds; nothing where not `is_first_rank`.
pub fn pinning_progress(is_first_rank: bool) -> impl FnMut(usize, usize) {
    let on_terminal = terminal::is_shown();
    let style = style("host memory, GiB {bar:16.green/dim} {pos}/{len} {elapsed} < {eta}");
    let bar = terminal::bars(is_first_rank).add(ProgressBar::no_length().with_style(style));
    let mut last_line = Instant::now();
    move |done, total| {
        bar.set_length((total >> 30) as u64);
        bar.set_position((done >> 30) as u64);
        if done == total {
            bar.finish_and_clear();
        } else if is_first_rank && !on_terminal && last_line.elapsed() >= PINNING_INTERVAL {
            last_line = Instant::now();
            terminal::say(format_args!("host memory: {} of {} GiB pinned", done >> 30, total >> 30));
        }
    }
}

/// Shows how far a download is, told `(done, total)` in bytes by any thread: a bar on a terminal, elsewhere a line every few
/// seconds.
pub fn download_progress() -> impl Fn(u64, u64) + Send + Sync {
    let on_terminal = terminal::is_shown();
    let style = style("download {bar:16.green/dim} {bytes}/{total_bytes} {bytes_per_sec} {elapsed} < {eta}");
    let bar = terminal::bars(true).add(ProgressBar::no_length().with_style(style));
    let last_line = Mutex::new(Instant::now());
    move |done, total| {
        bar.set_length(total);
        bar.set_position(done);
        let mut last = last_line.lock().unwrap_or_else(|poison| poison.into_inner());
        if done == total {
            bar.finish_and_clear();
        } else if !on_terminal && last.elapsed() >= DOWNLOAD_INTERVAL {
            *last = Instant::now();
            terminal::say(format_args!("download: {} of {} MB", done / 1_000_000, total / 1_000_000));
        }
    }
}

/// Shows how far work is that is no run, `(done, total)` in parts at a time: a bar on a terminal, nothing elsewhere.
pub fn parts_progress(name: &'static str) -> impl FnMut(usize, usize) {
    let style = style("{prefix} {bar:16.green/dim} {pos}/{len} {elapsed} < {eta}");
    let bar = terminal::bars(true).add(ProgressBar::no_length().with_style(style).with_prefix(name));
    move |done, total| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
        if done == total {
            bar.finish_and_clear();
        }
    }
}

impl Progress {
    /// For a run that is to end with step `max_steps` and has done `done` of them. Shows itself where `is_first_rank`, on
    /// standard error.
    pub fn new(max_steps: u64, done: u64, is_first_rank: bool) -> Self {
        let all = terminal::bars(is_first_rank);
        let steps = all.add(
            ProgressBar::new(max_steps)
                .with_style(style("{prefix} {bar:10.cyan/dim} {pos}/{len} {elapsed} < {eta}  {wide_msg}")),
        );
        steps.set_prefix("step");
        steps.set_position(done);
        steps.reset_eta();
        let phase = all.add(ProgressBar::no_length().with_style(style("{prefix} {bar:10.green/dim} {pos}/{len}")));
        let lines = Lines { start: Instant::now(), last: Cell::new(None) };
        let lines = (is_first_rank && !terminal::is_shown()).then_some(lines);
        Self { is_first_rank, steps, phase, lines }
    }

    /// Starts a phase of `total` parts: completed groups, micro-batches, held-out problems.
    pub fn begin_phase(&self, name: &str, total: usize) {
        self.phase.set_prefix(name.to_owned());
        self.phase.set_length(total as u64);
        self.phase.set_position(0);
    }

    /// One part of the phase is done.
    pub fn advance(&self) {
        self.phase.inc(1);
    }

    /// A step is done: its number and metrics.
    pub fn finish_step(&self, step: u64, values: &MetricValues) {
        self.steps.set_position(step);
        self.steps.set_message(summary(values));
        let Some(lines) = &self.lines else { return };
        let is_last = Some(step) == self.steps.length();
        if is_last || lines.last.get().is_none_or(|last| last.elapsed() >= LINE_INTERVAL) {
            lines.last.set(Some(Instant::now()));
            let elapsed_s = lines.start.elapsed().as_secs_f64();
            let total = self.steps.length().unwrap_or(step);
            self.say(&format!("step {step}/{total} | {} | {elapsed_s:.0} s", summary(values)));
        }
    }

    /// Prints a line above the bars, or with a timestamp where there are none.
    pub fn say(&self, text: &str) {
        if self.lines.is_some() {
            terminal::say(format_args!("{} {text}", timestamp()));
        } else if self.is_first_rank {
            terminal::say(text);
        }
    }

    /// Takes the bars away.
    pub fn finish(&self) {
        self.phase.finish_and_clear();
        self.steps.finish();
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("the templates of this file parse").progress_chars("━━╌")
}

fn summary(values: &MetricValues) -> String {
    let shown = SHOWN.iter().filter_map(|(name, label)| {
        let value = *values.get(*name)?;
        Some(format!("{label} {}", super::report::number(value)))
    });
    shown.collect::<Vec<_>>().join("  ")
}

/// UTC to the second, as the log's own.
fn timestamp() -> String {
    let mut text = String::new();
    let written = SystemTime.format_time(&mut Writer::new(&mut text));
    written.map(|()| text.get(..19).map(|seconds| format!("{seconds}Z")).unwrap_or(text)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_names_what_matters_and_leaves_out_what_is_absent() {
        let values = [("loss", 0.01234), ("reward", 0.5), ("num_tokens", 9.0)];
        let values = values.map(|(name, value)| (name.to_owned(), value)).into();
        assert_eq!(summary(&values), "reward 0.5  loss 0.0123");
        assert_eq!(timestamp().len(), "2026-01-01T00:00:00Z".len());
    }

    #[test]
    fn lines_are_throttled_but_the_last_step_is_said() {
        let progress = Progress::new(3, 0, true);
        let Some(lines) = &progress.lines else { return }; // tests may run on a terminal
        progress.finish_step(1, &MetricValues::new());
        let first = lines.last.get();
        progress.finish_step(2, &MetricValues::new());
        assert_eq!(lines.last.get(), first);
        progress.finish_step(3, &MetricValues::new());
        assert_ne!(lines.last.get(), first);
    }
}
