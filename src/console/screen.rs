//! The lines at the bottom of the terminal, which indicatif composes on a very wide screen and this file fits to the real one.
//!
//! indicatif counts the rows that it has to erase by the width that the terminal had when they were written, so a window that was made
//! narrower keeps the remains of lines that wrapped. Here a frame is erased by the width that the terminal has now. A line is a list of
//! items, the most important one first; a narrow terminal shows as many whole items as it has room for.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use indicatif::TermLike;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Stands between the items of a line.
pub(super) const NEXT_ITEM: char = '\u{1d}';
/// Columns between the items of a line on the terminal.
const GAP: &str = "  ";
/// Columns that indicatif composes lines for; none is as long.
const WIDTH: u16 = 4096;

/// Columns and rows of a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Size {
    pub columns: usize,
    pub rows: usize,
}

/// The screen that indicatif draws on. Clones are the same screen.
#[derive(Debug, Clone)]
pub(super) struct Screen {
    frame: Arc<Mutex<ScreenFrame>>,
    size: fn() -> Size,
    put: fn(&str),
}

impl Screen {
    /// A screen on a terminal of `size` that `put` writes to.
    pub fn new(size: fn() -> Size, put: fn(&str)) -> Self {
        Self { frame: Arc::default(), size, put }
    }

    /// Writes all that `draw` changes at once.
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

    /// The lines on the terminal.
    #[cfg(test)]
    pub fn lines(&self) -> Vec<String> {
        self.frame().drawn.clone()
    }
}

/// Every drawing of indicatif writes all lines and flushes, so its movements of the cursor say nothing new.
impl TermLike for Screen {
    fn width(&self) -> u16 {
        WIDTH
    }

    /// Rows but the one where the next message begins.
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
    /// Text of the drawing under way: each line filled up with spaces to [`WIDTH`] columns.
    composed: String,
    /// Lines that are wanted.
    lines: Vec<String>,
    /// Lines that are on the terminal.
    drawn: Vec<String>,
    /// Drawings under way whose end writes them.
    num_holders: usize,
}

impl ScreenFrame {
    /// The text that takes the drawn lines away and draws the wanted ones on a terminal of so many columns. The last column stays free: some
    /// terminals begin a new line behind it.
    fn update(&mut self, columns: usize) -> String {
        let lines: Vec<String> = self.lines.iter().map(|line| fit(line, columns.saturating_sub(1))).collect();
        if lines == self.drawn {
            return String::new();
        }
        let rows = |line: &String| line.width().div_ceil(columns.max(1)).max(1); // narrower now: the terminal has wrapped it
        let erased = match self.drawn.iter().map(rows).sum() {
            0 => String::new(),
            num_rows => format!("\r\x1b[{num_rows}A\x1b[J"),
        };
        self.drawn = lines;
        self.drawn.iter().fold(erased, |text, line| text + line + "\n")
    }
}

/// The lines of a text that fills each one up to [`WIDTH`] columns.
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

/// The line on a terminal with so many columns: whole items, or a part of the first.
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

/// The beginning of a text that takes at most so many columns.
fn cut(text: &str, columns: usize) -> String {
    let mut left = columns;
    let fits = |c: &char| {
        let rest = left.checked_sub(c.width().unwrap_or(0));
        left = rest.unwrap_or(left);
        rest.is_some()
    };
    text.chars().take_while(fits).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_narrow_terminal_drops_whole_items() {
        let step = "step 3/20\u{1d}reward 0.5\u{1d}\u{1d}s/step 1.2";
        assert_eq!(fit(step, 80), "step 3/20  reward 0.5  s/step 1.2");
        assert_eq!(fit(step, 32), "step 3/20  reward 0.5");
        assert_eq!(fit(step, 4), "step");
        assert_eq!((fit("漢字漢字", 5), fit("", 5)), ("漢字".to_owned(), String::new()));
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
        assert_eq!(screen.update(80), "\r\x1b[2A\x1b[J");
        assert_eq!(screen.update(80), "");
    }

    #[test]
    fn erasing_counts_lines_wrapped_by_a_narrower_window() {
        let mut screen = ScreenFrame { lines: frame(&["a line of 20 columns", "short"]), ..ScreenFrame::default() };
        screen.update(80);
        assert_eq!(screen.update(10), "\r\x1b[3A\x1b[Ja line of\nshort\n", "two rows and one");
        assert_eq!(screen.update(80), "\r\x1b[2A\x1b[Ja line of 20 columns\nshort\n");
    }
}
