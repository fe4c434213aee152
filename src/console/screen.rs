//! The status lines at the bottom of the terminal. indicatif composes them on a very wide virtual screen; this file fits them to the real terminal.
//!
//! indicatif erases lines by the terminal width at the time of writing, so after the window was made narrower, parts of wrapped lines would remain.
//! This file erases by the current width. A line is a list of items, most important first; a narrow terminal shows as many whole items as fit.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use indicatif::TermLike;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Separator of items within a line.
pub(super) const NEXT_ITEM: char = '\u{1d}';
/// Space between the items of a line on the terminal.
const GAP: &str = "  ";
/// Width of the virtual screen in columns; no line is longer.
const WIDTH: u16 = 4096;

/// Size of a terminal in columns and rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Size {
    pub columns: usize,
    pub rows: usize,
}

/// The screen that indicatif draws on. Clones share one screen.
#[derive(Debug, Clone)]
pub(super) struct Screen {
    frame: Arc<Mutex<ScreenFrame>>,
    size: fn() -> Size,
    put: fn(&str),
}

impl Screen {
    /// A screen on a terminal of `size`; `put` writes to it.
    pub fn new(size: fn() -> Size, put: fn(&str)) -> Self {
        Self { frame: Arc::default(), size, put }
    }

    /// Runs `draw` and writes all its changes to the terminal at once.
    pub fn at_once(&self, draw: impl FnOnce()) {
        self.frame().num_holders += 1;
        draw();
        let mut frame = self.frame();
        frame.num_holders -= 1;
        self.show(&mut frame);
    }

    fn show(&self, frame: &mut ScreenFrame) {
        if frame.num_holders == 0 {
            (self.put)(&frame.update((self.size)().columns));
        }
    }

    fn frame(&self) -> MutexGuard<'_, ScreenFrame> {
        self.frame.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lines currently on the terminal.
    #[cfg(test)]
    pub fn lines(&self) -> Vec<String> {
        self.frame().drawn.clone()
    }
}

/// Cursor movements are ignored: indicatif writes all lines and flushes with every drawing.
impl TermLike for Screen {
    fn width(&self) -> u16 {
        WIDTH
    }

    /// Rows of the terminal, except the one where the next message begins.
    fn height(&self) -> u16 {
        (self.size)().rows.saturating_sub(1).try_into().unwrap_or(u16::MAX)
    }

    fn move_cursor_up(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_down(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_right(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_left(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn clear_line(&self) -> io::Result<()> {
        Ok(())
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        let mut frame = self.frame();
        frame.composed.push_str(text);
        let filler = usize::from(WIDTH).saturating_sub(text.width());
        frame.composed.extend(std::iter::repeat_n(' ', filler));
        Ok(())
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        self.frame().composed.push_str(text);
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        let mut frame = self.frame();
        frame.lines = lines(&std::mem::take(&mut frame.composed));
        self.show(&mut frame);
        Ok(())
    }
}

#[derive(Debug, Default)]
struct ScreenFrame {
    /// Text of the current drawing: every line is padded with spaces to [`WIDTH`] columns.
    composed: String,
    /// Lines that should be on the terminal.
    lines: Vec<String>,
    /// Lines that are on the terminal.
    drawn: Vec<String>,
    /// Number of open [`Screen::at_once`] calls; the last one writes the changes.
    num_holders: usize,
}

impl ScreenFrame {
    /// The text that erases the drawn lines and draws the new ones on a terminal with `columns` columns. The last column stays free, as some
    /// terminals begin a new line after it.
    fn update(&mut self, columns: usize) -> String {
        let lines: Vec<String> = self.lines.iter().map(|line| fit(line, columns.saturating_sub(1))).collect();
        if lines == self.drawn {
            return String::new();
        }
        let rows = |line: &String| line.width().div_ceil(columns.max(1)).max(1); // narrower now: the terminal has wrapped it
        let erased = match self.drawn.iter().map(rows).sum() {
            0 => String::new(),
            // Deleted before the rest is erased: tmux takes lines that are erased from the top left corner into its history.
            num_rows => format!("\r\x1b[{num_rows}A\x1b[{num_rows}M\x1b[J"),
        };
        self.drawn = lines;
        self.drawn.iter().fold(erased, |text, line| text + line + "\n")
    }
}

/// Splits a text of lines padded to [`WIDTH`] columns.
fn lines(text: &str) -> Vec<String> {
    let (mut lines, mut column): (Vec<String>, usize) = (Vec::new(), 0);
    for c in text.chars().filter(|c| *c != '\r') {
        let width = c.width().unwrap_or(0);
        if lines.is_empty() || column + width > usize::from(WIDTH) {
            lines.push(String::new());
            column = 0;
        }
        column += width;
        lines.last_mut().expect("the first one is begun").push(c);
    }
    lines.iter().map(|line| line.trim_end().to_owned()).filter(|line| !line.is_empty()).collect()
}

/// Fits a line to a terminal with `columns` columns: whole items, or a part of the first.
fn fit(line: &str, columns: usize) -> String {
    let mut items = line.split(NEXT_ITEM).map(str::trim).filter(|item| !item.is_empty());
    let Some(first) = items.next() else { return String::new() };
    let mut fitted = cut(first, columns);
    for item in items {
        if fitted.width() + GAP.len() + item.width() > columns {
            break;
        }
        fitted = fitted + GAP + item;
    }
    fitted
}

/// The text on at most so many columns: whole, or its beginning and an ellipsis.
fn cut(text: &str, columns: usize) -> String {
    if text.width() <= columns {
        return text.to_owned();
    }
    let mut left = columns.saturating_sub(1);
    let fits = |c: &char| {
        let rest = left.checked_sub(c.width().unwrap_or(0));
        left = rest.unwrap_or(left);
        rest.is_some()
    };
    text.chars().take_while(fits).chain(['…'].into_iter().take(columns)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_narrow_terminal_drops_whole_items() {
        let step = "step 3/20\u{1d}reward 0.5\u{1d}\u{1d}s/step 1.2";
        assert_eq!(fit(step, 80), "step 3/20  reward 0.5  s/step 1.2");
        assert_eq!(fit(step, 32), "step 3/20  reward 0.5");
        assert_eq!(
            (fit(step, 9), fit(step, 5), fit(step, 0)),
            ("step 3/20".to_owned(), "step…".to_owned(), String::new())
        );
        assert_eq!((fit("漢字漢字", 6), fit("", 5)), ("漢字…".to_owned(), String::new()));
    }

    #[test]
    fn drawn_text_is_split_at_the_virtual_screen_width() {
        let filled = |text: &str| format!("{text:4096}");
        assert_eq!(lines(&(filled("one") + "\r" + &filled("two"))), ["one", "two"]);
        let wide = format!("漢{}", " ".repeat(4094)); // takes two columns
        assert_eq!(lines(&(wide + &filled("two"))), ["漢", "two"]);
        assert!(lines("").is_empty());
    }

    fn frame(lines: &[&str]) -> Vec<String> {
        lines.iter().map(|line| (*line).to_owned()).collect()
    }

    #[test]
    fn erasing_the_status_removes_exactly_its_lines() {
        let mut screen = ScreenFrame::default();
        assert_eq!(screen.update(80), "");
        screen.lines = frame(&["one", "two"]);
        assert_eq!(screen.update(80), "one\ntwo\n");
        assert_eq!(screen.update(80), "", "nothing has changed");
        screen.lines.clear();
        assert_eq!(screen.update(80), "\r\x1b[2A\x1b[2M\x1b[J");
        assert_eq!(screen.update(80), "");
    }

    #[test]
    fn erasing_counts_lines_wrapped_by_a_narrower_window() {
        let mut screen = ScreenFrame { lines: frame(&["a line of 20 columns", "short"]), ..ScreenFrame::default() };
        screen.update(80);
        assert_eq!(screen.update(10), "\r\x1b[3A\x1b[3M\x1b[Ja line o…\nshort\n", "two rows and one");
        assert_eq!(screen.update(80), "\r\x1b[2A\x1b[2M\x1b[Ja line of 20 columns\nshort\n");
    }
}
