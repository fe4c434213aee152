//! The only writer to standard output and standard error: messages, log lines, the status of a run and results.
//!
//! Writing a message never fails: if the reader is gone or the disk is full, the message is lost and the run continues. Results that exist nowhere
//! else return an error instead. Text may come from a model, a template or a reward, so control characters are written as `\u001b`; only the frames
//! of bars and the colours of this file control the terminal. Messages are redacted, and one message cannot look like two: warnings and log lines are
//! one line each, with `\n` for a newline, and further lines of other messages are indented. Results are written unchanged.
//!
//! | file | what it is |
//! |---|---|
//! | `redact` | removes secrets from text and from JSON values |
//! | `bars`, `screen` | the lines at the bottom of a terminal, drawn by indicatif; what a worker sends of them to its launcher |
//! | `progress`, `run` | progress of long work; of a run, with its metrics |

mod bars;
mod progress;
mod redact;
mod run;
mod screen;

use std::borrow::Cow;
use std::collections::VecDeque;
use std::fmt::Display;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::SystemTime;

use tracing_subscriber::fmt::MakeWriter;

use bars::{BarState, Bars};
pub use progress::{
    Progress, checkpoint_progress, clear_progress, download_progress, hide_progress, number, parts_progress,
    pinning_progress, rows_progress, units_progress,
};
pub use redact::{redact, redact_json};
pub use run::RunDisplay;
use screen::{Screen, Size};

use crate::error::{Error, Result};

/// Terminal size if it cannot be determined, columns and rows.
const DEFAULT_SIZE: (u16, u16) = (80, 24);
/// Name of standard output in errors.
const STANDARD_OUTPUT: &str = "standard output";
/// Maximum number of words before `warning:` that say where it arose, as in `step 3: warning: ..`.
const MAX_PLACE_WORDS: usize = 5;
/// Number of warnings kept, and the characters kept of each.
const MAX_WARNINGS: usize = 20;
const MAX_WARNING_CHARACTERS: usize = 500;
/// Environment variable that the launcher sets for a worker whose standard error it shows on a terminal: [`RELAY_ALL`] if also standard output.
pub const RELAY_VARIABLE: &str = "COLO_GRPO_RELAY";
pub const RELAY_ALL: &str = "all";

/// The newest warnings with their times, oldest first.
static WARNINGS: Mutex<VecDeque<KeptWarning>> = Mutex::new(VecDeque::new());
/// The bars of the process that owns the terminal.
static BARS: LazyLock<Bars> = LazyLock::new(|| Bars::new(Screen::new(size, put)));
static STDERR_TARGET: LazyLock<StderrTarget> = LazyLock::new(|| match () {
    () if std::env::var_os(RELAY_VARIABLE).is_some() => StderrTarget::Launcher,
    () if io::stderr().is_terminal() => StderrTarget::Terminal,
    () => StderrTarget::File,
});

/// Where this process's standard error goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StderrTarget {
    Terminal,
    /// To a launcher that owns the terminal.
    Launcher,
    File,
}

/// Writes a line to standard error, above the bars if there are any.
pub fn say(text: impl Display) {
    let text = redact(&text.to_string());
    let is_warning = text.split(' ').take(MAX_PLACE_WORDS).any(|word| word == "warning:" || word == "WARN");
    let line = message(&text, is_warning);
    if is_warning {
        keep_warning(&line);
    }
    write_line(&line, Some(&*line).filter(|_| is_warning));
}

/// Handles a line that a worker wrote to standard error: shows its bars, or prints the message with `prefix`.
pub fn pass_on(prefix: &str, line: &str) {
    match bars::decode(line) {
        Some(bars) => show(bars),
        None => say(format_args!("{prefix}{line}")),
    }
}

/// Replaces the bars at the bottom of the terminal, if there is a terminal.
fn show(bars: Vec<BarState>) {
    match *STDERR_TARGET {
        StderrTarget::Terminal => BARS.show(bars),
        StderrTarget::Launcher => put(&bars::encode(&bars)),
        StderrTarget::File => {}
    }
}

/// Writes text to standard output without adding a newline.
///
/// # Errors
/// [`Error::Io`] if it cannot be written.
pub fn print(text: impl Display) -> Result<()> {
    let text = text.to_string();
    let write = || {
        let mut output = io::stdout().lock();
        output.write_all(neutral(&text).as_bytes()).and_then(|()| output.flush()).map_err(Error::io(STANDARD_OUTPUT))
    };
    if shows_output() { BARS.beside(write) } else { write() }
}

/// Whether an error is that the reader of standard output is gone.
pub fn is_closed_output(error: &Error) -> bool {
    matches!(error, Error::Io { path, source } if path == Path::new(STANDARD_OUTPUT) && source.kind() == io::ErrorKind::BrokenPipe)
}

/// Writes a line to standard output about something that is also saved elsewhere; a failure is only a warning.
pub fn print_saved(text: impl Display) {
    if let Err(error) = print(format_args!("{text}\n")) {
        say(format_args!("warning: {error}; this line could not be written: {text}"));
    }
}

/// Like [`print_saved`], for the final results of a run: if standard output is not the terminal, the line is shown on the terminal, too.
pub fn print_outcome(text: impl Display) {
    print_saved(&text);
    if is_shown() && !shows_output() && !relays_output() {
        say(text);
    }
}

/// Whether a launcher reads this process's standard output and shows it on a terminal.
fn relays_output() -> bool {
    std::env::var_os(RELAY_VARIABLE).is_some_and(|relayed| relayed == RELAY_ALL)
}

/// Flushes standard output.
pub fn flush() {
    let _ = io::stdout().flush();
}

/// Whether this process's standard output is a terminal.
pub fn shows_output() -> bool {
    *STDERR_TARGET == StderrTarget::Terminal && io::stdout().is_terminal()
}

/// Whether standard error is shown on a terminal, by this process or by its launcher.
pub fn is_shown() -> bool {
    *STDERR_TARGET != StderrTarget::File
}

/// A warning that this process has given.
#[derive(Debug, Clone)]
pub struct KeptWarning {
    /// Time at which the warning was given.
    pub at: SystemTime,
    /// The message, cut to the length that is kept.
    pub text: String,
}

/// The newest warnings of this process, oldest first.
pub fn recent_warnings() -> Vec<KeptWarning> {
    WARNINGS.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
}

fn keep_warning(text: &str) {
    let mut warnings = WARNINGS.lock().unwrap_or_else(PoisonError::into_inner);
    if warnings.len() >= MAX_WARNINGS {
        warnings.pop_front();
    }
    let text = warning_of(text).chars().take(MAX_WARNING_CHARACTERS).collect();
    warnings.push_back(KeptWarning { at: SystemTime::now(), text });
}

/// Writes a line to standard error; a `warning` stays visible below the bars.
fn write_line(line: &str, warning: Option<&str>) {
    if *STDERR_TARGET != StderrTarget::Terminal {
        return put(line);
    }
    BARS.beside(|| put(line));
    if let Some(warning) = warning {
        BARS.warn(warning_of(warning));
    }
}

fn put(text: &str) {
    if !text.is_empty() {
        drop(io::stderr().lock().write_all(text.as_bytes())); // nobody is left to be told of a failure
    }
}

/// The terminal's size.
fn size() -> Size {
    let size = rustix::termios::tcgetwinsize(io::stderr()).map(|size| (size.ws_col, size.ws_row));
    let (columns, rows) = size.ok().filter(|(columns, rows)| *columns > 0 && *rows > 0).unwrap_or(DEFAULT_SIZE);
    Size { columns: usize::from(columns), rows: usize::from(rows) }
}

/// The text of a warning in a line, without its prefix.
fn warning_of(text: &str) -> &str {
    let behind = |word: &&str| text.find(*word).map(|at| at + word.len());
    text[["warning: ", "WARN "].iter().filter_map(behind).min().unwrap_or(0)..].trim()
}

/// A message as written, with a final newline: on one line, or with further lines indented.
fn message(text: &str, is_one_line: bool) -> String {
    let text = neutral(text.trim_end_matches(['\n', '\r']));
    format!("{}\n", text.replace('\n', if is_one_line { "\\n" } else { "\n  " }))
}

/// Makes control characters visible, and characters that end a line or change the writing direction. JSON keeps its meaning.
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
    let is_separator = matches!(c, '\u{2028}' | '\u{2029}');
    let changes_direction =
        matches!(c, '\u{061c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    (c.is_control() && c != '\n' && c != '\t') || is_separator || changes_direction
}

/// Writer of log lines to standard error. Colours are added here, as escape codes in lines are removed.
#[derive(Debug, Clone, Copy)]
pub struct Log;

/// One log line with its level.
#[derive(Debug)]
pub struct LogLine(Option<tracing::Level>);

impl MakeWriter<'_> for Log {
    type Writer = LogLine;

    fn make_writer(&self) -> LogLine {
        LogLine(None)
    }

    fn make_writer_for(&self, meta: &tracing::Metadata<'_>) -> LogLine {
        LogLine(Some(*meta.level()))
    }
}

impl Write for LogLine {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let text = message(&redact(&String::from_utf8_lossy(line)), true);
        let is_warning = self.0.is_some_and(|level| level <= tracing::Level::WARN);
        if is_warning {
            keep_warning(&text);
        }
        let (text, warning) = match self.0.filter(|_| *STDERR_TARGET == StderrTarget::Terminal) {
            Some(level) => (text.replacen(level.as_str(), &coloured(level), 1), Some(text).filter(|_| is_warning)),
            None => (text, None),
        };
        write_line(&text, warning.as_deref());
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
    fn terminal_control_characters_are_made_visible() {
        assert_eq!(neutral("\x1b]0;title\x07 \u{9b}31m \u{202e}x\r\n\ty é\r"), {
            "\\u001b]0;title\\u0007 \\u009b31m \\u202ex\n\ty é\\u000d"
        });
        assert!(matches!(neutral("plain\n\ttext, ü 漢"), Cow::Borrowed(_)));
        let json = serde_json::json!({"completion": "\u{7f}\u{9b}\u{202e}\x1b"}).to_string();
        let read: serde_json::Value = serde_json::from_str(&neutral(&json)).unwrap();
        assert_eq!(read["completion"], "\u{7f}\u{9b}\u{202e}\x1b");
    }

    #[test]
    fn line_breaks_in_a_message_cannot_fake_another_message() {
        let forged = "step 3: warning: x\r\nstep 4: y\u{2028}step 5: z\u{85}\n";
        assert_eq!(message(forged, true), "step 3: warning: x\\nstep 4: y\\u2028step 5: z\\u0085\n");
        assert_eq!(message("error: x\nerror: y", false), "error: x\n  error: y\n");
    }

    #[test]
    fn the_text_of_a_warning_starts_after_its_first_prefix() {
        assert_eq!(warning_of(" WARN a reward failed: warning: forged\n"), "a reward failed: warning: forged");
        assert_eq!(warning_of("step 3: warning: WARN is in it"), "WARN is in it");
        assert_eq!(warning_of("plain\n"), "plain");
    }

    #[test]
    fn every_log_level_has_a_fixed_colour() {
        assert_eq!(coloured(tracing::Level::WARN), "\x1b[33mWARN\x1b[0m");
    }
}
