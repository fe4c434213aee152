//! The lines that stay at the bottom of a terminal while a run goes on. Pure text: `console` writes it.

/// Begins a status that a worker sends to its launcher, which has the terminal.
pub(super) const RECORD: char = '\u{1e}';
/// Between the lines of a record, and between the items of a line.
const NEXT_LINE: char = '\u{1f}';
const NEXT_ITEM: char = '\u{1d}';
/// Between the items of a line on the terminal.
const GAP: &str = "  ";
/// Parts of a bar.
const BAR_WIDTH: usize = 10;

/// One line, its most important item first. A narrow terminal shows as many whole items as it has room for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StatusLine(Vec<String>);

impl StatusLine {
    /// A line of `items`; empty ones are left out.
    pub fn new(items: impl IntoIterator<Item = String>) -> Self {
        Self(items.into_iter().filter(|item| !item.is_empty()).collect())
    }

    /// The line on a terminal with this many columns: whole items, or a part of the first.
    fn fit(&self, columns: usize) -> String {
        let mut line = String::new();
        for item in &self.0 {
            let gap = if line.is_empty() { "" } else { GAP };
            if width(&line) + gap.len() + width(item) > columns {
                break;
            }
            line = line + gap + item;
        }
        match self.0.first().filter(|_| line.is_empty()) {
            Some(first) => cut(first, columns),
            None => line,
        }
    }
}

/// `━━━╌╌╌╌╌╌╌` for three of ten.
pub fn bar(done: u64, total: u64) -> String {
    let filled = (done.min(total) as usize * BAR_WIDTH).checked_div(total as usize).unwrap_or(0);
    "━".repeat(filled) + &"╌".repeat(BAR_WIDTH - filled)
}

/// The status lines at the bottom of the terminal now.
#[derive(Debug, Default)]
pub(super) struct Status {
    lines: Vec<StatusLine>,
    last_warning: Option<StatusLine>,
    num_drawn: usize,
}

impl Status {
    pub const fn new() -> Self {
        Self { lines: Vec::new(), last_warning: None, num_drawn: 0 }
    }

    /// Replaces the lines; none takes the status away.
    pub fn set(&mut self, lines: Vec<StatusLine>) {
        self.lines = lines;
    }

    /// Remembers a warning, which stays in sight when the line that it was has scrolled away.
    pub fn warn(&mut self, text: &str) {
        self.last_warning = Some(StatusLine(vec![format!("last warning: {}", warning_of(text))]));
    }

    /// The text that takes the drawn lines away; the cursor is then where they began.
    pub fn erase(&mut self) -> String {
        match std::mem::take(&mut self.num_drawn) {
            0 => String::new(),
            num => format!("\r\x1b[{num}A\x1b[J"),
        }
    }

    /// The text that draws the lines on a terminal with this many columns.
    pub fn draw(&mut self, columns: usize) -> String {
        let warning = self.last_warning.iter().filter(|_| !self.lines.is_empty());
        let lines: Vec<String> = self.lines.iter().chain(warning).map(|line| line.fit(columns) + "\n").collect();
        self.num_drawn = lines.len();
        lines.concat()
    }
}

/// The warning in a line, without the words before it.
pub(super) fn warning_of(text: &str) -> &str {
    let behind = |word: &&str| text.find(*word).map(|at| at + word.len());
    text[["warning: ", "WARN "].iter().filter_map(behind).min().unwrap_or(0)..].trim()
}

/// The lines as one line of text, for a launcher.
pub(super) fn encode(lines: &[StatusLine]) -> String {
    let lines: Vec<String> = lines.iter().map(|line| line.0.join(&NEXT_ITEM.to_string())).collect();
    format!("{RECORD}{}\n", lines.join(&NEXT_LINE.to_string()))
}

/// The lines of a record; `None` for any other text.
pub(super) fn decode(line: &str) -> Option<Vec<StatusLine>> {
    let lines = line.strip_prefix(RECORD)?.trim_end_matches('\n');
    let line = |line: &str| StatusLine::new(line.split(NEXT_ITEM).map(str::to_owned));
    Some(lines.split(NEXT_LINE).filter(|line| !line.is_empty()).map(line).collect())
}

/// Columns that text takes: letters of East Asia and emoji take two.
fn width(text: &str) -> usize {
    text.chars().map(char_width).sum()
}

fn char_width(c: char) -> usize {
    1 + usize::from(matches!(c, '\u{1100}'..='\u{115f}' | '\u{2e80}'..='\u{ffdc}' | '\u{1f300}'..))
}

fn cut(text: &str, columns: usize) -> String {
    let mut left = columns;
    let fits = |c: &char| {
        left = left.saturating_sub(char_width(*c));
        left > 0
    };
    text.chars().take_while(fits).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warning_begins_behind_the_first_word_that_says_so() {
        assert_eq!(warning_of(" WARN a reward failed: warning: forged\n"), "a reward failed: warning: forged");
        assert_eq!(warning_of("step 3: warning: WARN is in it"), "WARN is in it");
        assert_eq!(warning_of("plain\n"), "plain");
    }

    fn line(items: &[&str]) -> StatusLine {
        StatusLine::new(items.iter().map(|item| (*item).to_owned()))
    }

    #[test]
    fn a_narrow_terminal_shows_whole_items() {
        let step = line(&["step 3/20", "reward 0.5", "", "s/step 1.2"]);
        assert_eq!(step.fit(80), "step 3/20  reward 0.5  s/step 1.2");
        assert_eq!(step.fit(32), "step 3/20  reward 0.5");
        assert_eq!(step.fit(5), "step");
        assert_eq!(line(&["漢字漢字"]).fit(6), "漢字");
        assert_eq!(
            (bar(0, 7), bar(3, 10), bar(9, 0)),
            ("╌".repeat(10), "━".repeat(3) + &"╌".repeat(7), "╌".repeat(10))
        );
    }

    #[test]
    fn what_was_drawn_is_taken_away_and_no_more() {
        let mut status = Status::new();
        assert_eq!((status.erase(), status.draw(80)), (String::new(), String::new()));
        status.warn("step 3: warning: slow\n");
        assert_eq!(status.draw(80), "", "a warning alone is no status");
        status.set(vec![line(&["one"]), line(&["two"])]);
        assert_eq!(status.draw(80), "one\ntwo\nlast warning: slow\n");
        assert_eq!(status.erase(), "\r\x1b[3A\x1b[J");
        assert_eq!(status.erase(), "");
    }

    #[test]
    fn a_record_comes_back_as_it_was_sent() {
        let lines = vec![line(&["step 1/2", "reward 1"]), line(&["generate"])];
        assert_eq!(decode(&encode(&lines)), Some(lines));
        assert_eq!(decode(&encode(&[])), Some(Vec::new()));
        assert_eq!(decode("step 1/2"), None);
    }
}
