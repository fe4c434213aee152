//! The display of a run under way: a status at the bottom of a terminal, timestamped lines elsewhere.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

use super::step::MetricValues;
use crate::console::{self, StatusLine};

/// Lines outside a terminal come no closer than this, so that quick steps are left out; the run's last step always gets one.
const LINE_INTERVAL: Duration = Duration::from_secs(1);
/// The status is drawn anew no more often than this, but for a new phase or step.
const FRAME_INTERVAL: Duration = Duration::from_millis(100);
/// The least between two lines on host memory that is pinned, or on a download.
const WAIT_INTERVAL: Duration = Duration::from_secs(5);

/// Metrics worth a glance, with the names used for them; a narrow terminal leaves out the last ones.
const SHOWN: [(&str, &str); 7] = [
    ("reward", "reward"),
    ("loss", "loss"),
    ("completions/mean_length", "length"),
    ("step_time", "s/step"),
    ("entropy", "entropy"),
    ("kl", "kl"),
    ("eval_reward", "eval reward"),
];

/// The display of one run. Ranks other than the first hold a hidden one, so that no caller asks. Clones show the same.
#[derive(Debug, Clone)]
pub struct ProgressBar {
    is_first_rank: bool,
    state: Rc<RefCell<BarState>>,
    lines: Option<Rc<Lines>>,
}

#[derive(Debug)]
struct BarState {
    start: Instant,
    first_step: u64,
    step: u64,
    max_steps: u64,
    summary: Vec<String>,
    /// The line of the newest step, which stays when the status goes.
    last: Option<String>,
    part: Option<RunningPhase>,
    shown: Option<Instant>,
}

/// A phase of a step that is under way.
#[derive(Debug)]
struct RunningPhase {
    name: String,
    done: usize,
    total: usize,
    start: Instant,
    num_tokens: usize,
}

#[derive(Debug)]
struct Lines {
    last: Cell<Option<Instant>>,
    /// The line of the newest step, if it was left out.
    left_out: RefCell<Option<String>>,
}

/// Shows how much host memory is pinned, told `(done, total)` in bytes; nothing where not `is_first_rank`.
pub fn pinning_progress(is_first_rank: bool) -> impl FnMut(usize, usize) {
    let wait = Wait::new("host memory pinned", "GiB", 1 << 30, is_first_rank, true);
    move |done, total| wait.tell(done as u64, total as u64)
}

/// Shows how far a download is, told `(done, total)` in bytes by any thread.
pub fn download_progress() -> impl Fn(u64, u64) + Send + Sync {
    let wait = Wait::new("download", "MB", 1_000_000, true, true);
    move |done, total| wait.tell(done, total)
}

/// Shows how far work is that is no run, told `(done, total)` in parts; nothing where there is no terminal.
pub fn parts_progress(name: &'static str) -> impl FnMut(usize, usize) {
    let wait = Wait::new(name, "parts", 1, true, false);
    move |done, total| wait.tell(done as u64, total as u64)
}

/// Shows how many problems of an evaluation are sampled, told `(done, total)`; nothing where not `is_first_rank`.
pub fn problems_progress(is_first_rank: bool) -> impl FnMut(usize, usize) {
    let wait = Wait::new("eval", "problems", 1, is_first_rank, true);
    move |done, total| wait.tell(done as u64, total as u64)
}

/// Shows how many rows are read for `what`, told `(done, is_over)`; nothing where not `is_first_rank`.
pub fn rows_progress(what: &'static str, is_first_rank: bool) -> impl FnMut(usize, bool) {
    let wait = Wait::new(what, "rows read", 1, is_first_rank, true);
    move |done, is_over| wait.count(done as u64, is_over)
}

/// Something that is waited for: a bar on a terminal, elsewhere a line every few seconds.
struct Wait {
    name: &'static str,
    unit: &'static str,
    unit_size: u64,
    is_wanted: bool,
    has_lines: bool,
    start: Instant,
    last: Mutex<Option<Instant>>,
}

impl Wait {
    fn new(name: &'static str, unit: &'static str, unit_size: u64, is_wanted: bool, has_lines: bool) -> Self {
        Self { name, unit, unit_size, is_wanted, has_lines, start: Instant::now(), last: Mutex::new(None) }
    }

    fn tell(&self, done: u64, total: u64) {
        let Self { name, unit, unit_size, .. } = self;
        let (is_over, is_new) = (done >= total, done == 0 && console::is_shown());
        if self.is_due(is_over || is_new) {
            let count = format!("{}/{} {unit}", done / unit_size, total / unit_size);
            let times = times(self.start.elapsed(), done, total);
            self.show(&count, [format!("{name} {} {count}", console::bar(done, total)), times], is_over);
        }
    }

    /// [`Wait::tell`] of something whose total is not known.
    fn count(&self, done: u64, is_over: bool) {
        if self.is_due(is_over) {
            let count = format!("{done} {}", self.unit);
            let time = clock(self.start.elapsed());
            self.show(&count, [format!("{} {count}", self.name), time], is_over);
        }
    }

    /// Whether so much time has passed that something is shown again, or `always`.
    fn is_due(&self, always: bool) -> bool {
        let mut last = self.last.lock().unwrap_or_else(|poison| poison.into_inner());
        let interval = if console::is_shown() { FRAME_INTERVAL } else { WAIT_INTERVAL };
        let is_due = self.is_wanted && (always || last.unwrap_or(self.start).elapsed() >= interval);
        if is_due {
            *last = Some(Instant::now());
        }
        is_due
    }

    fn show(&self, count: &str, status: [String; 2], is_over: bool) {
        if console::is_shown() {
            console::show(if is_over { Vec::new() } else { vec![StatusLine::new(status)] });
        } else if self.has_lines && !is_over {
            console::say(format_args!("{}: {count}", self.name));
        }
    }
}

impl ProgressBar {
    /// For a run that is to end with step `max_steps` and has done `done` of them. Shows itself where `is_first_rank`, on
    /// standard error.
    pub fn new(max_steps: u64, done: u64, is_first_rank: bool) -> Self {
        let (start, summary) = (Instant::now(), Vec::new());
        let state =
            BarState { start, first_step: done, step: done, max_steps, summary, last: None, part: None, shown: None };
        let lines = (is_first_rank && !console::is_shown())
            .then(|| Rc::new(Lines { last: Cell::new(None), left_out: RefCell::new(None) }));
        Self { is_first_rank, state: Rc::new(RefCell::new(state)), lines }
    }

    /// Starts a phase of `total` parts: completed groups, micro-batches, held-out problems.
    pub fn begin_phase(&self, name: &str, total: usize) {
        let part = RunningPhase { name: name.to_owned(), done: 0, total, start: Instant::now(), num_tokens: 0 };
        self.state.borrow_mut().part = Some(part);
        self.show(true);
    }

    /// One part of the phase is done.
    pub fn advance(&self) {
        self.change(|part| part.done += 1);
    }

    /// Tokens that a GPU has sampled in the phase so far.
    pub fn sampled(&self, num_tokens: usize) {
        self.change(|part| part.num_tokens = num_tokens);
    }

    fn change(&self, change: impl FnOnce(&mut RunningPhase)) {
        let mut state = self.state.borrow_mut();
        if let Some(part) = state.part.as_mut() {
            change(part);
        }
        let is_over = state.part.as_ref().is_some_and(|part| part.done == part.total);
        drop(state);
        self.show(is_over);
    }

    /// A step is done: its number and metrics.
    pub fn finish_step(&self, step: u64, values: &MetricValues) {
        let mut state = self.state.borrow_mut();
        (state.step, state.summary, state.part) = (step, summary(values), None);
        let (text, total) = (state.summary.join("  "), state.max_steps);
        let times =
            times(state.start.elapsed(), step.saturating_sub(state.first_step), total.saturating_sub(state.first_step));
        let line = format!("step {step}/{total} | {text} | {times}");
        state.last = Some(line.clone());
        drop(state);
        self.show(true);
        let Some(lines) = &self.lines else { return };
        if step == total || lines.last.get().is_none_or(|last| last.elapsed() >= LINE_INTERVAL) {
            lines.last.set(Some(Instant::now()));
            lines.left_out.take();
            self.say(&line);
        } else {
            lines.left_out.replace(Some(line));
        }
    }

    /// Prints a line above the status, or with a timestamp where there is none.
    pub fn say(&self, text: &str) {
        if self.lines.is_some() {
            console::say(format_args!("{} {text}", timestamp()));
        } else if self.is_first_rank {
            console::say(text);
        }
    }

    /// Takes the status away and leaves the line of the last step, which is printed where lines are, too, if a run ends before its
    /// time.
    pub fn finish(&self) {
        if let Some(line) = self.lines.as_ref().and_then(|lines| lines.left_out.take()) {
            self.say(&line);
        }
        if self.is_first_rank && console::is_shown() {
            console::show(Vec::new());
            self.state.borrow_mut().last.take().iter().for_each(console::say);
        }
    }

    /// Draws the status, if it is time to.
    fn show(&self, is_new: bool) {
        let mut state = self.state.borrow_mut();
        let is_due = is_new || state.shown.is_none_or(|shown| shown.elapsed() >= FRAME_INTERVAL);
        if self.is_first_rank && console::is_shown() && is_due {
            state.shown = Some(Instant::now());
            console::show(state.status());
        }
    }
}

impl BarState {
    fn status(&self) -> Vec<StatusLine> {
        let Self { step, max_steps, first_step, .. } = self;
        let bar = console::bar(*step, *max_steps);
        let times =
            times(self.start.elapsed(), step.saturating_sub(*first_step), max_steps.saturating_sub(*first_step));
        let steps = [format!("step {step}/{max_steps} {bar}"), times].into_iter().chain(self.summary.clone());
        std::iter::once(StatusLine::new(steps)).chain(self.part.as_ref().map(RunningPhase::status)).collect()
    }
}

impl RunningPhase {
    fn status(&self) -> StatusLine {
        let Self { name, done, total, .. } = self;
        let unit = match name.as_str() {
            "generate" => "groups",
            "evaluate" => "problems",
            _ => "micro-batches",
        };
        let bar = console::bar(*done as u64, *total as u64);
        let rate = match self.num_tokens {
            0 => String::new(),
            num => {
                let rate = num as f64 / self.start.elapsed().as_secs_f64().max(1e-3);
                format!("{} tokens/s a GPU", super::report::number(rate))
            }
        };
        StatusLine::new([format!("{name} {bar} {done}/{total} {unit}"), rate])
    }
}

/// `1:05 < 10:20`: the time that was taken, and what is left at that rate where there is one.
fn times(elapsed: Duration, done: u64, total: u64) -> String {
    let left = total.saturating_sub(done);
    match (done, left) {
        (0, _) | (_, 0) => clock(elapsed),
        _ => format!("{} < {}", clock(elapsed), clock(elapsed.mul_f64(left as f64 / done as f64))),
    }
}

/// `9:05`, or with hours `1:09:05`.
fn clock(time: Duration) -> String {
    let seconds = time.as_secs();
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    if hours > 0 { format!("{hours}:{minutes:02}:{seconds:02}") } else { format!("{minutes}:{seconds:02}") }
}

fn summary(values: &MetricValues) -> Vec<String> {
    let shown = SHOWN.iter().filter_map(|(name, label)| {
        let value = *values.get(*name)?;
        Some(format!("{label} {}", super::report::number(value)))
    });
    shown.collect()
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
        assert_eq!(summary(&values), ["reward 0.5", "loss 0.0123"]);
        assert_eq!(timestamp().len(), "2026-01-01T00:00:00Z".len());
    }

    #[test]
    fn the_status_says_how_far_a_step_is_and_when_the_run_ends() {
        let progress = ProgressBar::new(20, 2, false);
        progress.finish_step(7, &[("reward".to_owned(), 0.5)].into());
        progress.begin_phase("generate", 4);
        progress.advance();
        progress.sampled(1000);
        let mut state = progress.state.borrow_mut();
        state.start = Instant::now() - Duration::from_secs(100);
        state.part.as_mut().unwrap().start = Instant::now() - Duration::from_secs(2);
        let status = format!("{:?}", state.status());
        for part in [
            "step 7/20 ━━━╌╌╌╌╌╌╌",
            "1:40 < 4:20",
            "reward 0.5",
            "generate ━━╌╌╌╌╌╌╌╌ 1/4 groups",
            "500 tokens/s a GPU",
        ] {
            assert!(status.contains(part), "{part}: {status}");
        }
        assert_eq!(clock(Duration::from_secs(3 * 3600 + 65)), "3:01:05");
    }

    #[test]
    fn lines_are_throttled_but_the_last_step_is_said() {
        let progress = ProgressBar::new(3, 0, true);
        let Some(lines) = &progress.lines else { return }; // tests may run on a terminal
        progress.finish_step(1, &MetricValues::new());
        let first = lines.last.get();
        progress.finish_step(2, &MetricValues::new());
        assert_eq!(lines.last.get(), first);
        assert!(lines.left_out.borrow().as_ref().is_some_and(|line| line.starts_with("step 2/3")));
        progress.finish();
        assert!(lines.left_out.borrow().is_none(), "the end of a run prints it");
        progress.finish_step(3, &MetricValues::new());
        assert_ne!(lines.last.get(), first);
    }
}
