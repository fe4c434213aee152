//! Progress display of a run: its steps, the current phase and the newest metrics, as bars on a terminal and as timestamped lines elsewhere.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use chrono::DateTime;

use super::bars::{BarState, times};
use super::progress::{BarHandle, number};
use super::{is_shown, say};

/// Minimum interval between step lines outside of a terminal; the last step always gets a line.
const LINE_INTERVAL: Duration = Duration::from_secs(1);

/// Metrics that are shown, with their display names; a narrow terminal omits the last ones.
const SHOWN: [(&str, &str); 7] = [
    ("reward", "reward"),
    ("loss", "loss"),
    ("completions/mean_length", "length"),
    ("step_time", "s/step"),
    ("entropy", "entropy"),
    ("kl", "kl"),
    ("eval_reward", "eval reward"),
];

/// The progress display of a run. On ranks other than 0 it shows nothing, so callers need no check. Clones share one display.
#[derive(Debug, Clone)]
pub struct RunDisplay {
    is_first_rank: bool,
    state: Rc<RefCell<RunState>>,
    lines: Option<Rc<Lines>>,
}

#[derive(Debug)]
struct RunState {
    start: Instant,
    first_step: u64,
    step: u64,
    max_steps: u64,
    summary: Vec<String>,
    /// The line of the newest step, which remains when the bars are removed.
    last: Option<String>,
    /// The bar of the steps, and that of the current phase within a step.
    steps: BarHandle,
    phase: Option<RunningPhase>,
}

#[derive(Debug)]
struct RunningPhase {
    handle: BarHandle,
    name: String,
    done: usize,
    total: usize,
    start: Instant,
    num_tokens: usize,
}

#[derive(Debug)]
struct Lines {
    last: Cell<Option<Instant>>,
    /// The line of the newest step, if it was not printed yet.
    left_out: RefCell<Option<String>>,
}

impl RunDisplay {
    /// A display for a run that ends with step `max_steps` and has done `done` steps. It writes to standard error, if `is_first_rank`.
    pub fn new(max_steps: u64, done: u64, is_first_rank: bool) -> Self {
        let (start, summary, steps) = (Instant::now(), Vec::new(), BarHandle::new());
        let state =
            RunState { start, first_step: done, step: done, max_steps, summary, last: None, steps, phase: None };
        let lines = (is_first_rank && !is_shown())
            .then(|| Rc::new(Lines { last: Cell::new(None), left_out: RefCell::new(None) }));
        Self { is_first_rank, state: Rc::new(RefCell::new(state)), lines }
    }

    /// Starts a phase of `total` parts: completed groups, micro-batches or evaluation problems.
    pub fn begin_phase(&self, name: &str, total: usize) {
        let (handle, name) = (BarHandle::new(), name.to_owned());
        let phase = RunningPhase { handle, name, done: 0, total, start: Instant::now(), num_tokens: 0 };
        self.state.borrow_mut().phase = Some(phase);
        self.show_steps();
        self.show_phase(true);
    }

    /// Reports that one part of the phase is done.
    pub fn advance(&self) {
        self.change(|phase| phase.done += 1);
    }

    /// Tokens that a rank has sampled in the phase so far.
    pub fn sampled(&self, num_tokens: usize) {
        self.change(|phase| phase.num_tokens = num_tokens);
    }

    fn change(&self, change: impl FnOnce(&mut RunningPhase)) {
        let mut state = self.state.borrow_mut();
        let Some(phase) = state.phase.as_mut() else { return };
        change(phase);
        let is_over = phase.done == phase.total;
        drop(state);
        self.show_phase(is_over);
    }

    /// Reports a finished step with its metrics.
    pub fn finish_step(&self, step: u64, values: &BTreeMap<String, f64>) {
        let mut state = self.state.borrow_mut();
        (state.step, state.summary, state.phase) = (step, summary(values), None);
        let (text, total) = (state.summary.join("  "), state.max_steps);
        let times =
            times(state.start.elapsed(), step.saturating_sub(state.first_step), total.saturating_sub(state.first_step));
        let line = format!("step {step}/{total} | {text} | {times}");
        state.last = Some(line.clone());
        drop(state);
        self.show_steps();
        let Some(lines) = &self.lines else { return };
        if step == total || lines.last.get().is_none_or(|last| last.elapsed() >= LINE_INTERVAL) {
            lines.last.set(Some(Instant::now()));
            lines.left_out.take();
            self.say(&line);
        } else {
            lines.left_out.replace(Some(line));
        }
    }

    /// Prints a line above the bars, or with a timestamp if there are no bars.
    pub fn say(&self, text: &str) {
        if self.lines.is_some() {
            say(format_args!("{} {text}", timestamp()));
        } else if self.is_first_rank {
            say(text);
        }
    }

    /// Removes the bars and prints the line of the last step, if a run that ended early has not printed it.
    pub fn finish(&self) {
        if let Some(line) = self.lines.as_ref().and_then(|lines| lines.left_out.take()) {
            self.say(&line);
        }
        if self.has_bars() {
            let mut state = self.state.borrow_mut();
            state.phase = None;
            state.steps.take_away();
            state.last.take().iter().for_each(say);
        }
    }

    fn has_bars(&self) -> bool {
        self.is_first_rank && is_shown()
    }

    fn show_steps(&self) {
        if self.has_bars() {
            let state = self.state.borrow();
            state.steps.show(state.bar(), true);
        }
    }

    fn show_phase(&self, at_once: bool) {
        if self.has_bars()
            && let Some(phase) = &self.state.borrow().phase
        {
            phase.handle.show(phase.bar(), at_once);
        }
    }
}

impl RunState {
    fn bar(&self) -> BarState {
        let total = Some(self.max_steps);
        BarState {
            first: self.first_step,
            done: self.step,
            total,
            items: self.summary.clone(),
            ..self.steps.bar("step", "")
        }
    }
}

impl RunningPhase {
    fn bar(&self) -> BarState {
        let unit = match self.name.as_str() {
            "generate" => "groups",
            "evaluate" => "problems",
            _ => "micro-batches",
        };
        let rate = self.num_tokens as f64 / self.start.elapsed().as_secs_f64().max(1e-3);
        let rate = (self.num_tokens > 0).then(|| format!("{} tokens/s a rank", number(rate)));
        let (done, total) = (self.done as u64, Some(self.total as u64));
        BarState { done, total, items: rate.into_iter().collect(), ..self.handle.bar(&self.name, unit) }
    }
}

fn summary(values: &BTreeMap<String, f64>) -> Vec<String> {
    let shown = SHOWN.iter().filter_map(|(name, label)| {
        let value = *values.get(*name)?;
        Some(format!("{label} {}", number(value)))
    });
    shown.collect()
}

/// Current time in UTC, to the second.
fn timestamp() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = DateTime::from_timestamp(since.as_secs() as i64, 0).unwrap_or_default();
    now.format("%Y-%m-%dT%H:%M:%SZ").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_line_shows_the_main_metrics_that_exist() {
        let values = [("loss", 0.01234), ("reward", 0.5), ("num_tokens", 9.0)];
        let values = values.map(|(name, value)| (name.to_owned(), value)).into();
        assert_eq!(summary(&values), ["reward 0.5", "loss 0.0123"]);
        assert_eq!(timestamp().len(), "2026-01-01T00:00:00Z".len());
    }

    #[test]
    fn step_progress_shows_position_and_rate() {
        let display = RunDisplay::new(20, 2, false);
        display.finish_step(7, &[("reward".to_owned(), 0.5)].into());
        display.begin_phase("generate", 4);
        display.advance();
        display.sampled(1000);
        let mut state = display.state.borrow_mut();
        state.phase.as_mut().unwrap().start = Instant::now() - Duration::from_secs(2);
        let (steps, phase) = (state.bar(), state.phase.as_ref().unwrap().bar());
        assert_eq!((steps.first, steps.count(), steps.items), (2, "7/20".to_owned(), vec!["reward 0.5".to_owned()]));
        assert_eq!((phase.name.as_str(), phase.count().as_str()), ("generate", "1/4 groups"));
        let rate: f64 = phase.items[0].strip_suffix(" tokens/s a rank").unwrap().replace(',', "").parse().unwrap();
        assert!(rate > 0.0 && rate <= 500.0, "{rate}: 1,000 tokens in at least two seconds");
    }

    #[test]
    fn step_lines_are_throttled_except_for_the_last() {
        let display = RunDisplay::new(3, 0, true);
        let Some(lines) = &display.lines else { return }; // tests may run on a terminal
        display.finish_step(1, &BTreeMap::new());
        let first = lines.last.get();
        display.finish_step(2, &BTreeMap::new());
        assert_eq!(lines.last.get(), first);
        assert!(lines.left_out.borrow().as_ref().is_some_and(|line| line.starts_with("step 2/3")));
        display.finish();
        assert!(lines.left_out.borrow().is_none(), "the end of a run prints it");
        display.finish_step(3, &BTreeMap::new());
        assert_ne!(lines.last.get(), first);
    }
}
