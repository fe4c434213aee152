//! Progress bars at the bottom of a terminal, drawn by indicatif, and the records in which workers send them to their launcher.
//!
//! A bar is data ([`BarState`]). The process that owns the terminal (the launcher of a run) passes bars to indicatif; a worker writes all its bars as
//! one line of JSON to standard error instead. Text of a bar may come from a model, so control characters are made visible first.

use std::fmt::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

use super::neutral;
use super::screen::{NEXT_ITEM, Screen};

/// Character that begins a record of bars.
const RECORD: char = '\u{1e}';
/// Maximum number of bars in a record, and of characters in a bar's text.
const MAX_BARS: usize = 16;
const MAX_CHARACTERS: usize = 1000;
/// Interval at which the clocks of bars are redrawn while nothing else changes.
const TICK: Duration = Duration::from_secs(1);

/// The state of one progress bar.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct BarState {
    /// Identifies the bar among those of all processes.
    pub key: u64,
    pub name: String,
    /// Name of the counted things. If it is empty, the count is shown before the bar.
    pub unit: String,
    /// Number of counted units in one displayed unit.
    pub unit_size: u64,
    /// Units that were done before the clock started.
    pub first: u64,
    pub done: u64,
    pub total: Option<u64>,
    /// Further items of text, most important first.
    pub items: Vec<String>,
}

impl BarState {
    /// A bar with nothing done and an unknown total.
    pub fn new(key: u64, name: &str, unit: &str) -> Self {
        let (name, unit) = (name.to_owned(), unit.to_owned());
        Self { key, name, unit, unit_size: 1, first: 0, done: 0, total: None, items: Vec::new() }
    }

    /// The count as text, such as `3/10 GiB`.
    pub fn count(&self) -> String {
        let size = self.unit_size.max(1);
        let done = self.done / size;
        let number = self.total.map_or(done.to_string(), |total| format!("{done}/{}", total / size));
        format!("{number} {}", self.unit).trim_end().to_owned()
    }

    /// The message of the bar, as passed to indicatif.
    fn message(&self) -> String {
        visible(&self.items.join(&NEXT_ITEM.to_string()))
    }

    fn style(&self) -> ProgressStyle {
        let (counted, first) = (self.clone(), self.first);
        let count = move |state: &ProgressState, out: &mut dyn Write| {
            let now = BarState { done: state.pos(), total: state.len(), ..counted.clone() };
            let _ = out.write_str(&visible(&now.count()));
        };
        let clock = move |state: &ProgressState, out: &mut dyn Write| {
            let (done, total) = (state.pos().saturating_sub(first), state.len().unwrap_or(0).saturating_sub(first));
            let _ = out.write_str(&times(state.elapsed(), done, total));
        };
        let order = match (self.total, self.unit.is_empty()) {
            (None, _) => "{prefix} {count}",
            (_, true) => "{prefix} {count} {bar:10}",
            (_, false) => "{prefix} {bar:10} {count}",
        };
        let style = ProgressStyle::with_template(&format!("{order}{NEXT_ITEM}{{clock}}{NEXT_ITEM}{{msg}}"));
        style.expect("a template of this file").progress_chars("━╌").with_key("count", count).with_key("clock", clock)
    }

    fn begin(&self) -> ProgressBar {
        let bar = ProgressBar::with_draw_target(self.total, ProgressDrawTarget::hidden());
        bar.with_style(self.style()).with_prefix(visible(&self.name))
    }
}

/// The bars on a terminal.
#[derive(Debug)]
pub(super) struct Bars {
    multi: MultiProgress,
    screen: Screen,
    shown: Mutex<Shown>,
}

#[derive(Debug, Default)]
struct Shown {
    bars: Vec<(BarState, ProgressBar)>,
    /// The newest warning, shown below the bars while there are any.
    warning: Option<ProgressBar>,
    last_warning: Option<String>,
}

impl Bars {
    /// An empty list of bars for this screen.
    pub fn new(screen: Screen) -> Self {
        let target = ProgressDrawTarget::term_like(Box::new(screen.clone()));
        Self { multi: MultiProgress::with_draw_target(target), screen, shown: Mutex::default() }
    }

    /// Replaces all shown bars by these.
    pub fn show(&self, bars: Vec<BarState>) {
        let mut shown = self.shown();
        self.screen.at_once(|| {
            shown.replace(&self.multi, bars);
            self.multi.suspend(|| ()); // draws, where a bar is gone, too
        });
    }

    /// Keeps a warning below the bars, where it stays visible after its own line has scrolled away.
    pub fn warn(&self, text: &str) {
        let mut shown = self.shown();
        shown.last_warning = Some(visible(&format!("last warning: {text}")));
        self.screen.at_once(|| shown.place_warning(&self.multi));
    }

    /// Removes the bars, runs `write` and draws the bars again below the text written.
    pub fn beside<T>(&self, write: impl FnOnce() -> T) -> T {
        let _others = self.shown(); // whose drawing would hold back that the bars are taken away
        self.multi.suspend(write)
    }

    fn shown(&self) -> MutexGuard<'_, Shown> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shown {
    fn replace(&mut self, multi: &MultiProgress, bars: Vec<BarState>) {
        let mut before = std::mem::take(&mut self.bars);
        for (index, bar) in bars.into_iter().take(MAX_BARS).enumerate() {
            let is_same = |(old, _): &(BarState, ProgressBar)| {
                (old.key, &old.name, old.total.is_some()) == (bar.key, &bar.name, bar.total.is_some())
            };
            let drawn = match before.iter().position(is_same) {
                Some(at) => before.swap_remove(at).1,
                None => {
                    let drawn = multi.insert(index, bar.begin());
                    drawn.enable_steady_tick(TICK);
                    drawn
                }
            };
            bar.total.iter().for_each(|total| drawn.set_length(*total));
            drawn.set_position(bar.done);
            drawn.set_message(bar.message());
            self.bars.push((bar, drawn));
        }
        before.iter().for_each(|(_, drawn)| multi.remove(drawn));
        self.place_warning(multi);
    }

    fn place_warning(&mut self, multi: &MultiProgress) {
        if let Some(gone) = self.warning.take_if(|_| self.bars.is_empty()) {
            multi.remove(&gone);
        }
        if let Some(text) = self.last_warning.clone().filter(|_| !self.bars.is_empty()) {
            let new = || {
                let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
                multi.add(bar.with_style(ProgressStyle::with_template("{msg}").expect("a template of this file")))
            };
            self.warning.get_or_insert_with(new).set_message(text);
        }
    }
}

/// Encodes the bars as one line of text for the launcher.
pub(super) fn encode(bars: &[BarState]) -> String {
    let json = serde_json::to_string(bars).unwrap_or_default(); // of text and numbers alone
    format!("{RECORD}{json}\n")
}

/// Decodes a record of bars; `None` for any other text.
pub(super) fn decode(line: &str) -> Option<Vec<BarState>> {
    serde_json::from_str(line.strip_prefix(RECORD)?).ok()
}

/// Makes control characters visible, except the separator of items.
fn visible(text: &str) -> String {
    let text: String = text.chars().take(MAX_CHARACTERS).collect();
    let items = text.split(NEXT_ITEM).map(|item| neutral(item).replace(['\n', '\t'], " "));
    items.collect::<Vec<_>>().join(&NEXT_ITEM.to_string())
}

/// Elapsed time, and the remaining time at the average rate if the total is known: `1:05 < 10:20`. indicatif's own estimate follows only the last
/// seconds, but steps take minutes.
pub(super) fn times(elapsed: Duration, done: u64, total: u64) -> String {
    let left = total.saturating_sub(done);
    match (done, left) {
        (0, _) | (_, 0) => clock(elapsed),
        // A record from elsewhere may claim any counts.
        _ => match Duration::try_from_secs_f64(elapsed.as_secs_f64() * left as f64 / done as f64) {
            Ok(rest) => format!("{} < {}", clock(elapsed), clock(rest)),
            Err(_) => clock(elapsed),
        },
    }
}

/// A duration as `9:05`, or with hours `1:09:05`.
fn clock(time: Duration) -> String {
    let seconds = time.as_secs();
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    if hours > 0 { format!("{hours}:{minutes:02}:{seconds:02}") } else { format!("{minutes}:{seconds:02}") }
}

#[cfg(test)]
mod tests {
    use super::super::screen::Size;
    use super::*;

    fn bar(key: u64, name: &str, done: u64, total: u64, items: &[&str]) -> BarState {
        let items = items.iter().map(|item| (*item).to_owned()).collect();
        let unit = if name == "step" { "" } else { "groups" };
        BarState { done, total: Some(total), items, ..BarState::new(key, name, unit) }
    }

    const NARROW: fn() -> Size = || Size { columns: 40, rows: 24 };
    const WIDE: fn() -> Size = || Size { columns: 200, rows: 24 };

    fn on_terminal(size: fn() -> Size) -> (Bars, Screen) {
        let screen = Screen::new(size, |_| ());
        (Bars::new(screen.clone()), screen)
    }

    /// The lines on the terminal without times.
    fn lines(screen: &Screen) -> Vec<String> {
        let time = regex::Regex::new(r"\d+:\d\d( < \d+:\d\d)?").unwrap();
        screen.lines().iter().map(|line| time.replace_all(line, "TIME").into_owned()).collect()
    }

    #[test]
    fn progress_bars_show_the_position_within_a_step() {
        let (bars, screen) = on_terminal(WIDE);
        bars.show(vec![bar(1, "step", 7, 20, &["reward 0.5", "loss 0.1"])]);
        assert_eq!(lines(&screen), ["step 7/20 ━━━╌╌╌╌╌╌╌  TIME  reward 0.5  loss 0.1"]);
        bars.warn("slow");
        bars.show(vec![bar(1, "step", 7, 20, &["reward 0.5"]), bar(2, "generate", 1, 4, &["500 tokens/s a rank"])]);
        let below = ["generate ━━╌╌╌╌╌╌╌╌ 1/4 groups  TIME  500 tokens/s a rank", "last warning: slow"];
        assert_eq!(lines(&screen), [&["step 7/20 ━━━╌╌╌╌╌╌╌  TIME  reward 0.5"][..], &below].concat());
        let (mut written, before) = (9, lines(&screen));
        bars.beside(|| written = lines(&screen).len());
        assert_eq!((written, lines(&screen)), (0, before), "they are away while a message is written, and return");
        bars.show(vec![bar(2, "generate", 4, 4, &[])]);
        assert_eq!(lines(&screen), ["generate ━━━━━━━━━━ 4/4 groups  TIME", "last warning: slow"]);
        bars.show(vec![bar(3, "step", 9, 20, &[]), bar(2, "generate", 4, 4, &[])]);
        assert!(lines(&screen)[0].starts_with("step 9/20 "), "bars have the order in which they were given");
        bars.show(Vec::new());
        assert!(lines(&screen).is_empty(), "a warning alone is no bar");
    }

    #[test]
    fn narrow_terminals_drop_items_and_unbounded_work_has_no_bar() {
        let (bars, screen) = on_terminal(NARROW);
        let rows = BarState { done: 1234, ..BarState::new(2, "load", "rows read") };
        bars.show(vec![bar(1, "step", 7, 20, &["reward 0.5", "loss 0.1"]), rows]);
        assert_eq!(lines(&screen), ["step 7/20 ━━━╌╌╌╌╌╌╌  TIME", "load 1234 rows read  TIME"]);
        let pinned = BarState { unit_size: 1 << 30, ..bar(3, "pinned", 3 << 30, 10 << 30, &[]) };
        assert_eq!(pinned.count(), "3/10 groups");
    }

    #[test]
    fn control_characters_in_bar_text_are_escaped() {
        let (bars, screen) = on_terminal(WIDE);
        let mut hostile = bar(1, "\x1b]0;title\x07", 1, 4, &["\x1b[2J\nforged", "{bar:9}"]);
        hostile.unit = "\x1b[1m".to_owned();
        bars.show(vec![hostile]);
        bars.warn("\x1b[5A");
        let text = lines(&screen).join("\n");
        assert!(!text.contains(|c: char| c.is_control() && c != '\n') && text.lines().count() == 2, "{text:?}");
        assert!(text.contains("\\u001b]0;title\\u0007 ━━") && text.contains("{bar:9}"), "{text:?}");
        let many = (0..1000).map(|key| bar(key, "x", 0, 1, &[])).collect();
        bars.show(many);
        assert!(lines(&screen).len() <= MAX_BARS + 1);
    }

    #[test]
    fn status_records_of_ranks_round_trip() {
        let bars = vec![bar(1, "step", 1, 2, &["reward 1"]), bar(2, "generate", 0, 1, &[])];
        assert_eq!(decode(encode(&bars).trim_end()), Some(bars));
        assert_eq!(decode(encode(&[]).trim_end()), Some(Vec::new()));
        assert_eq!((decode("step 1/2"), decode("\u{1e}step")), (None, None));
    }

    #[test]
    fn remaining_time_is_extrapolated_from_the_rate_so_far() {
        let seconds = Duration::from_secs;
        assert_eq!(times(seconds(100), 5, 18), "1:40 < 4:20");
        assert_eq!((times(seconds(5), 0, 3), times(seconds(5), 3, 3)), ("0:05".to_owned(), "0:05".to_owned()));
        assert_eq!(clock(seconds(3 * 3600 + 65)), "3:01:05");
    }
}
