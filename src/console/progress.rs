//! Progress of long work: a bar on a terminal, elsewhere a line every few seconds.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::bars::BarState;
use super::{is_shown, say, show};

/// Minimum interval between two redraws of the bars, except for new and finished bars.
const FRAME_INTERVAL: Duration = Duration::from_millis(100);
/// Work that ends sooner than this shows no bar if it repeats every step, as the bar would flicker.
const PATIENCE: Duration = Duration::from_millis(300);
/// Minimum interval between two progress lines about the same work.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

static IS_HIDDEN: AtomicBool = AtomicBool::new(false);
static NEXT_KEY: AtomicU64 = AtomicU64::new(0);
static LIVE: Mutex<Live> = Mutex::new(Live { bars: Vec::new(), shown: None });

/// The bars of this process, in the order in which they started.
#[derive(Debug)]
struct Live {
    bars: Vec<BarState>,
    shown: Option<Instant>,
}

/// Shows no progress of long work in this process; the first rank shows it.
pub fn hide_progress() {
    IS_HIDDEN.store(true, Ordering::Relaxed);
}

/// Removes all bars.
pub fn clear_progress() {
    let mut live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
    live.bars.clear();
    show(Vec::new());
}

/// A bar of this process, removed when the handle is dropped.
#[derive(Debug)]
pub(super) struct BarHandle(u64);

impl BarHandle {
    /// A handle that shows nothing before the first [`BarHandle::show`]. The process id distinguishes its bar from those of other processes.
    pub fn new() -> Self {
        let count = NEXT_KEY.fetch_add(1, Ordering::Relaxed);
        Self((u64::from(std::process::id()) << 32) + count)
    }

    /// A bar that belongs to this handle.
    pub fn bar(&self, name: &str, unit: &str) -> BarState {
        BarState::new(self.0, name, unit)
    }

    /// Updates the bar: at once, or when the next redraw is due.
    pub fn show(&self, bar: BarState, at_once: bool) {
        let mut live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
        let place = live.bars.iter_mut().find(|own| own.key == self.0);
        let is_new = place.is_none();
        match place {
            Some(own) => *own = bar,
            None => live.bars.push(bar),
        }
        if at_once || is_new || live.shown.is_none_or(|shown| shown.elapsed() >= FRAME_INTERVAL) {
            live.shown = Some(Instant::now());
            show(live.bars.clone());
        }
    }

    /// Removes the bar.
    pub fn take_away(&self) {
        let mut live = LIVE.lock().unwrap_or_else(PoisonError::into_inner);
        let before = live.bars.len();
        live.bars.retain(|bar| bar.key != self.0);
        if live.bars.len() < before {
            show(live.bars.clone());
        }
    }
}

impl Drop for BarHandle {
    fn drop(&mut self) {
        self.take_away();
    }
}

/// Progress of long work that any thread may report. Its bar is removed when the work is done or this is dropped.
#[derive(Debug)]
pub struct Progress {
    handle: BarHandle,
    name: &'static str,
    unit: &'static str,
    unit_size: u64,
    has_lines: bool,
    /// The bar is shown once the work has taken this long.
    patience: Duration,
    start: Instant,
    last_line: Mutex<Option<Instant>>,
}

impl Progress {
    /// Progress of work called `name`, counted in `unit`s.
    pub fn new(name: &'static str, unit: &'static str) -> Self {
        let (handle, start) = (BarHandle::new(), Instant::now());
        let (patience, last_line) = (Duration::ZERO, Mutex::new(None));
        Self { handle, name, unit, unit_size: 1, has_lines: true, patience, start, last_line }
    }

    /// Counts bytes and displays units of `unit_size` bytes.
    fn in_bytes(self, unit_size: u64) -> Self {
        Self { unit_size, ..self }
    }

    /// Shows a bar on a terminal, but no progress lines elsewhere.
    #[must_use]
    pub fn without_lines(self) -> Self {
        Self { has_lines: false, ..self }
    }

    /// Shows nothing if the work ends soon.
    #[must_use]
    pub fn when_slow(self) -> Self {
        Self { patience: PATIENCE, ..self }
    }

    /// Reports that `done` of `total` units are done.
    pub fn tell(&self, done: u64, total: u64) {
        self.update(done, Some(total), done >= total);
    }

    /// Reports that `done` units are done, with an unknown total.
    pub fn count(&self, done: u64, is_over: bool) {
        self.update(done, None, is_over);
    }

    fn update(&self, done: u64, total: Option<u64>, is_over: bool) {
        if IS_HIDDEN.load(Ordering::Relaxed) {
            return;
        }
        let bar = BarState { done, total, unit_size: self.unit_size, ..self.handle.bar(self.name, self.unit) };
        match is_shown() {
            true if is_over => self.handle.take_away(),
            true if self.start.elapsed() < self.patience => {}
            true => self.handle.show(BarState { items: self.rate(done).into_iter().collect(), ..bar }, false),
            false if !is_over && self.is_line_due() => say(format_args!("{}: {}", self.name, bar.count())),
            false => {}
        }
    }

    /// Bytes per second as text, if bytes are counted.
    fn rate(&self, done: u64) -> Option<String> {
        let units = done as f64 / self.unit_size as f64 / self.start.elapsed().as_secs_f64().max(1e-3);
        (self.unit_size > 1 && done > 0).then(|| format!("{} {}/s", number(units), self.unit))
    }

    fn is_line_due(&self) -> bool {
        let mut last = self.last_line.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = self.has_lines && last.unwrap_or(self.start).elapsed() >= LINE_INTERVAL;
        if is_due {
            *last = Some(Instant::now());
        }
        is_due
    }
}

/// Returns a callback that shows how much host memory is pinned, from `(done, total)` in bytes.
pub fn pinning_progress() -> impl FnMut(usize, usize) {
    let progress = Progress::new("host memory pinned", "GiB").in_bytes(1 << 30);
    move |done, total| progress.tell(done as u64, total as u64)
}

/// Returns a callback that shows the progress of a download, from `(done, total)` in bytes; any thread may call it.
pub fn download_progress() -> impl Fn(u64, u64) + Send + Sync {
    let progress = Progress::new("download", "MB").in_bytes(1_000_000);
    move |done, total| progress.tell(done, total)
}

/// Returns a callback that shows the progress over the parts of a model, from `(done, total)`, on a terminal only.
pub fn parts_progress(name: &'static str) -> impl FnMut(usize, usize) {
    let progress = Progress::new(name, "parts").without_lines();
    move |done, total| progress.tell(done as u64, total as u64)
}

/// Returns a callback to be called after each of a model's `total` units is read, sent or gathered; shows a bar if this takes long.
pub fn units_progress(name: &'static str, total: usize) -> impl FnMut() {
    let (progress, mut num_done) = (Progress::new(name, "parts").when_slow(), 0);
    move || {
        num_done += 1;
        progress.tell(num_done, total as u64);
    }
}

/// Returns a callback that is given the number of further bytes of a checkpoint of `total` bytes written or read; shows a bar if this takes long.
pub fn checkpoint_progress(name: &'static str, total: u64) -> impl FnMut(u64) {
    let (progress, mut done) = (Progress::new(name, "MB").in_bytes(1_000_000).when_slow(), 0);
    move |more| {
        done = (done + more).min(total);
        progress.tell(done, total);
    }
}

/// Returns a callback that shows how many rows of `what` are read, from `(done, is_over)`.
pub fn rows_progress(what: &'static str) -> impl FnMut(usize, bool) {
    let progress = Progress::new(what, "rows read");
    move |done, is_over| progress.count(done as u64, is_over)
}

/// A number with three significant digits: 0.0123, 4.5, 12.3k, 1e-6.
pub fn number(value: f64) -> String {
    let trim = |text: String| match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    };
    let digits = |value: f64| {
        let decimals = (2.0 - value.abs().log10().floor()).clamp(0.0, 6.0) as usize;
        trim(format!("{value:.decimals$}"))
    };
    match value.abs() {
        _ if !value.is_finite() => "–".to_owned(),
        0.0 => "0".to_owned(),
        size if size < 1e-3 => {
            let text = format!("{value:.2e}");
            let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
            format!("{}e{exponent}", trim(mantissa.to_owned()))
        }
        size if size >= 1e9 => digits(value / 1e9) + "G",
        size if size >= 1e6 => digits(value / 1e6) + "M",
        size if size >= 1e4 => digits(value / 1e3) + "k",
        _ => digits(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_shortened_with_units() {
        let shown = [0.0, 0.012345, 4.5, 123.456, 12_345.0, 7.5e9, 1e-6, -2.5e-5, f64::NAN, 1999.0].map(number);
        assert_eq!(shown, ["0", "0.0123", "4.5", "123", "12.3k", "7.5G", "1e-6", "-2.5e-5", "–", "1999"]);
    }

    #[test]
    fn progress_lines_are_throttled_and_can_be_switched_off() {
        let progress = Progress::new("load", "rows read");
        assert!(!progress.is_line_due(), "it has begun just now");
        let long_ago = || Mutex::new(Some(Instant::now() - 2 * LINE_INTERVAL));
        let waiting = Progress { last_line: long_ago(), ..Progress::new("load", "rows read") };
        assert!(waiting.is_line_due() && !waiting.is_line_due());
        let silent = Progress { last_line: long_ago(), ..Progress::new("init", "parts").without_lines() };
        assert!(!silent.is_line_due());
    }

    #[test]
    fn progress_in_bytes_shows_a_rate() {
        let download = Progress::new("download", "MB").in_bytes(1_000_000);
        assert!(download.rate(5_000_000).unwrap().ends_with(" MB/s"));
        assert_eq!((download.rate(0), Progress::new("init", "parts").rate(5)), (None, None));
    }
}
