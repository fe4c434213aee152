//! Where a completion marks its answer: `<answer>..</answer>`, `\boxed{..}`, `\fbox{..}`, GSM8K's `#### ..`.

use super::number::Rational;

/// The starts of marks.
const MARKS: [&str; 4] = ["<answer>", "\\boxed", "\\fbox", "####"];

/// The text of the last answer that is marked, and of a mark within a mark that of the inner one. `None` where nothing is marked, and
/// where the last mark cannot be read because it is not closed: an earlier answer does not count then.
pub(super) fn last_marked(text: &str) -> Option<&str> {
    let (mut rest, mut last) = (text, None);
    while let Some((mark, after)) = next_mark(rest) {
        let read = match mark {
            "<answer>" => after.split_once("</answer>"),
            "####" => Some(line(after)),
            _ => boxed(after),
        };
        (last, rest) = match read {
            Some((answer, others)) => (Some(answer.trim()), others),
            None => (None, after),
        };
    }
    let answer = last?;
    match next_mark(answer) {
        Some(_) => last_marked(answer),
        None => Some(answer),
    }
}

/// The first mark of a text, and what follows it. A longer command (`\boxedsize`) is no mark.
fn next_mark(text: &str) -> Option<(&'static str, &str)> {
    let found = |mark: &'static str| {
        let is_mark = |at: &usize| {
            let is_command = mark.starts_with('\\');
            !(is_command && text[at + mark.len()..].starts_with(|c: char| c.is_ascii_alphabetic()))
        };
        let at = text.match_indices(mark).map(|(at, _)| at).find(is_mark)?;
        Some((at, mark))
    };
    let (at, mark) = MARKS.into_iter().filter_map(found).min()?;
    Some((mark, &text[at + mark.len()..]))
}

/// The answer behind `####`, and what follows it: the line if it is a number of several words (`1 1/2`), else its first word.
fn line(after: &str) -> (&str, &str) {
    let after = after.trim_start();
    let line = after.lines().next().unwrap_or_default();
    let word = line.split_whitespace().next().unwrap_or_default();
    let whole = Rational::parse(line);
    let answer = if whole.is_some() && whole != Rational::parse(word) { line } else { word };
    (answer, &after[answer.len()..])
}

/// What stands in the box that begins here, and what follows it: between braces, which are matched, or up to the end of the formula or
/// of the line, as verl reads `\boxed 5`. `None` for braces that are not closed.
fn boxed(after: &str) -> Option<(&str, &str)> {
    let after = after.trim_start();
    let Some(inner) = after.strip_prefix('{') else {
        let end = after.find(['$', '\n']).unwrap_or(after.len());
        return Some(after.split_at(end));
    };
    let (mut depth, mut is_escaped) = (1, false);
    for (at, byte) in inner.bytes().enumerate() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = true,
            b'{' => depth += 1,
            b'}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some((&inner[..at], &inner[at + 1..]));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::last_marked;

    #[test]
    fn the_last_mark_decides_whatever_it_holds() {
        for (text, expected) in [
            ("\\boxed{3} then \\boxed{\\frac{\\frac{1}{2}}{3}}", Some("\\frac{\\frac{1}{2}}{3}")),
            ("\\boxed{3} then \\boxed{\\frac{1}{2}", None),
            ("\\boxed{3} then \\boxed{a{b{c{d}}}} so", Some("a{b{c{d}}}")),
            ("<answer>1</answer> no, <answer>2", None),
            ("<answer> so \\boxed{7}. </answer>", Some("7")),
            ("<answer>\\boxed{7}", Some("7")),
            ("\\boxed{1}\n#### 2", Some("2")),
            ("#### 18 dollars", Some("18")),
            ("#### 1 1/2", Some("1 1/2")),
            ("####", Some("")),
            ("\\fbox{5} and \\boxed {6}", Some("6")),
            ("$\\boxed 5$ it is", Some("5")),
            ("\\boxed\n{\\{1, 2\\}}", Some("\\{1, 2\\}")),
            ("\\boxed{\\text{so }\\boxed{4}}", Some("4")),
            ("\\boxedsize{5}", None),
            ("5", None),
        ] {
            assert_eq!(last_marked(text), expected, "{text}");
        }
    }
}
