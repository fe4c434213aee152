//! The only writer to standard output and standard error: messages, log lines, progress bars and results.
//!
//! Messages never fail: where the reader is gone or the disk is full they are lost, and the run goes on. Results that exist
//! nowhere else return an error instead. All text may come from a model, a template or a reward, so control characters are
//! written as `\u001b`; only this file's own bars and colours control the terminal.

use std::borrow::Cow;
use std::fmt::Display;
use std::io::{self, IsTerminal, Write};
use std::sync::LazyLock;

use indicatif::{MultiProgress, ProgressDrawTarget, TermLike};
use tracing_subscriber::fmt::MakeWriter;

use crate::error::{Error, Result};

/// Redraws of the bars in a second, at most.
const FRAMES_PER_SECOND: u8 = 20;
/// Columns of a terminal that does not tell.
const DEFAULT_WIDTH: u16 = 80;
/// The name by which errors call standard output.
const STANDARD_OUTPUT: &str = "standard output";

static BARS: LazyLock<MultiProgress> = LazyLock::new(|| {
    let screen = ProgressDrawTarget::term_like_with_hz(Box::new(Screen), FRAMES_PER_SECOND);
    MultiProgress::with_draw_target(if is_shown() { screen } else { ProgressDrawTarget::hidden() })
});

/// Writes a line to standard error, above the progress bars if there are any.
pub fn say(text: impl Display) {
    write_error(&format!("{}\n", neutral(&text.to_string())));
}

/// Writes text to standard output; its newlines are the caller's.
///
/// # Errors
/// [`Error::Io`] if it cannot be written.
pub fn print(text: impl Display) -> Result<()> {
    let text = text.to_string();
    let mut output = io::stdout().lock();
    output.write_all(neutral(&text).as_bytes()).and_then(|()| output.flush()).map_err(Error::io(STANDARD_OUTPUT))
}

/// Writes a line to standard output about something that is saved elsewhere: where that fails, a warning says so.
pub fn print_saved(text: impl Display) {
    if let Err(error) = print(format_args!("{text}\n")) {
        say(format_args!("warning: {error}; this was to be written there: {text}"));
    }
}

/// Pushes out what standard output still holds.
pub fn flush() {
    let _ = io::stdout().flush();
}

/// Whether a person may look at standard error.
pub fn is_shown() -> bool {
    io::stderr().is_terminal()
}

/// The progress bars of this process, on standard error; hidden where that is no terminal, or not `wanted`.
pub fn bars(wanted: bool) -> MultiProgress {
    if wanted { BARS.clone() } else { MultiProgress::with_draw_target(ProgressDrawTarget::hidden()) }
}

fn write_error(text: &str) {
    let write = || drop(io::stderr().lock().write_all(text.as_bytes())); // nobody is left to be told of a failure
    if is_shown() { BARS.suspend(write) } else { write() }
}

/// The text with its control characters made visible, and those that change the direction of writing. JSON means the same
/// afterwards.
fn neutral(text: &str) -> Cow<'_, str> {
    if !text.contains(is_control) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.replace("\r\n", "\n").chars() {
        match is_control(c) {
            true => out.push_str(&format!("\\u{:04x}", u32::from(c))),
            false => out.push(c),
        }
    }
    Cow::Owned(out)
}

fn is_control(c: char) -> bool {
    let changes_direction = matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    (c.is_control() && c != '\n' && c != '\t') || changes_direction
}

/// Where progress bars are drawn: standard error, whose failures end nothing.
#[derive(Debug)]
struct Screen;

impl Screen {
    fn draw(text: &str) -> io::Result<()> {
        let _ = io::stderr().lock().write_all(text.as_bytes());
        Ok(())
    }

    fn move_cursor(num: usize, direction: char) -> io::Result<()> {
        if num == 0 { Ok(()) } else { Self::draw(&format!("\x1b[{num}{direction}")) }
    }
}

impl TermLike for Screen {
    fn width(&self) -> u16 {
        let size = rustix::termios::tcgetwinsize(io::stderr());
        size.map(|size| size.ws_col).ok().filter(|columns| *columns > 0).unwrap_or(DEFAULT_WIDTH)
    }

    fn move_cursor_up(&self, num: usize) -> io::Result<()> {
        Self::move_cursor(num, 'A')
    }

    fn move_cursor_down(&self, num: usize) -> io::Result<()> {
        Self::move_cursor(num, 'B')
    }

    fn move_cursor_right(&self, num: usize) -> io::Result<()> {
        Self::move_cursor(num, 'C')
    }

    fn move_cursor_left(&self, num: usize) -> io::Result<()> {
        Self::move_cursor(num, 'D')
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        Self::draw(&format!("{text}\n"))
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        Self::draw(text)
    }

    fn clear_line(&self) -> io::Result<()> {
        Self::draw("\r\x1b[2K")
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}

/// Standard error as the target of log lines. Colours are given here, since lines come with escape codes removed.
#[derive(Debug, Clone, Copy)]
pub struct Log {
    /// Removes secrets from a line.
    pub redact: fn(&str) -> String,
}

/// A log line of a level.
#[derive(Debug)]
pub struct LogLine {
    level: Option<tracing::Level>,
    redact: fn(&str) -> String,
}

impl MakeWriter<'_> for Log {
    type Writer = LogLine;

    fn make_writer(&self) -> LogLine {
        LogLine { level: None, redact: self.redact }
    }

    fn make_writer_for(&self, meta: &tracing::Metadata<'_>) -> LogLine {
        LogLine { level: Some(*meta.level()), redact: self.redact }
    }
}

impl Write for LogLine {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(line);
        let text = (self.redact)(&text);
        let text = neutral(&text);
        match self.level.filter(|_| is_shown()) {
            Some(level) => write_error(&text.replacen(level.as_str(), &coloured(level), 1)),
            None => write_error(&text),
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn coloured(level: tracing::Level) -> String {
    let colour = match level {
        tracing::Level::ERROR => 31,
        tracing::Level::WARN => 33,
        tracing::Level::INFO => 32,
        tracing::Level::DEBUG => 34,
        tracing::Level::TRACE => 35,
    };
    format!("\x1b[{colour}m{level}\x1b[0m")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_controls_a_terminal_is_made_visible_and_all_else_stays() {
        assert_eq!(neutral("\x1b]0;title\x07 \u{9b}31m \u{202e}x\r\n\ty é\r"), {
            "\\u001b]0;title\\u0007 \\u009b31m \\u202ex\n\ty é\\u000d"
        });
        assert!(matches!(neutral("plain\n\ttext, ü 漢"), Cow::Borrowed(_)));
        let json = serde_json::json!({"completion": "\u{7f}\u{9b}\u{202e}\x1b"}).to_string();
        let read: serde_json::Value = serde_json::from_str(&neutral(&json)).unwrap();
        assert_eq!(read["completion"], "\u{7f}\u{9b}\u{202e}\x1b");
    }

    #[test]
    fn a_level_keeps_its_colour() {
        assert_eq!(coloured(tracing::Level::WARN), "\x1b[33mWARN\x1b[0m");
    }
}
