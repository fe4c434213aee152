//! Finds the answer that a completion marks with `<answer>..</answer>`, `\boxed{..}`, `\fbox{..}` or GSM8K's `#### ..`.

use std::collections::HashMap;
use std::ops::Range;

use super::number::Rational;

/// The texts with which a mark begins.
const MARKS: [&str; 4] = ["<answer>", "\\boxed", "\\fbox", "####"];
const ANSWER_END: &str = "</answer>";

/// The text of the last marked answer; of nested marks, the inner one. `None` if nothing is marked, or if the last mark is not closed.
/// In the latter case an earlier answer does not count.
pub(super) fn last_marked(text: &str) -> Option<&str> {
    let (marks, mut range, mut is_marked) = (Marks::of(text), 0..text.len(), false);
    while let Some(last) = marks.last_within(range.clone()) {
        (range, is_marked) = (last?, true);
    }
    is_marked.then(|| &text[range])
}

/// Positions of all marks, line ends and braces in a text, found in one pass. Parsing thus takes linear time even with many or deeply nested marks.
struct Marks<'a> {
    text: &'a str,
    /// Byte offsets at which [`MARKS`] begin, in order. A longer command such as `\boxedsize` is not a mark.
    starts: Vec<(usize, &'static str)>,
    answer_ends: Vec<usize>,
    /// Byte offsets of line ends; `formulas` also includes those of `$`.
    lines: Vec<usize>,
    formulas: Vec<usize>,
    /// Byte offset of the closing brace for that of each opening brace. Escaped braces are ignored.
    closes: HashMap<usize, usize>,
}

impl<'a> Marks<'a> {
    fn of(text: &'a str) -> Self {
        let mut marks = Self {
            text,
            starts: Vec::new(),
            answer_ends: text.match_indices(ANSWER_END).map(|(at, _)| at).collect(),
            lines: text.match_indices('\n').map(|(at, _)| at).collect(),
            formulas: text.match_indices(['$', '\n']).map(|(at, _)| at).collect(),
            closes: HashMap::new(),
        };
        let (mut open, mut is_escaped) = (Vec::new(), false);
        for (at, byte) in text.bytes().enumerate() {
            if matches!(byte, b'<' | b'\\' | b'#') {
                let mark = MARKS.into_iter().find(|mark| text[at..].starts_with(mark));
                let is_longer = |mark: &&str| {
                    byte == b'\\' && text[at + mark.len()..].starts_with(|c: char| c.is_ascii_alphabetic())
                };
                marks.starts.extend(mark.filter(|mark| !is_longer(mark)).map(|mark| (at, mark)));
            }
            match byte {
                _ if is_escaped => is_escaped = false,
                b'\\' => is_escaped = true,
                b'{' => open.push(at),
                b'}' => marks.closes.extend(open.pop().map(|open| (open, at))),
                _ => {}
            }
        }
        marks
    }

    /// The answer of the last mark within `range`: `None` without a mark, `Some(None)` if the mark cannot be parsed.
    fn last_within(&self, range: Range<usize>) -> Option<Option<Range<usize>>> {
        let (mut from, mut last) = (range.start, None);
        while let Some((at, mark)) = self.next(from).filter(|(at, mark)| at + mark.len() <= range.end) {
            let after = at + mark.len()..range.end;
            from = after.start;
            let read = match mark {
                "<answer>" => self.answer(after),
                "####" => Some(self.line(after)),
                _ => self.boxed(after),
            };
            last = Some(read.map(|(answer, behind)| {
                from = behind;
                let trimmed = self.text[answer.clone()].trim_start();
                let start = answer.end - trimmed.len();
                start..start + trimmed.trim_end().len()
            }));
        }
        last
    }

    /// The first mark at or after an offset.
    fn next(&self, from: usize) -> Option<(usize, &'static str)> {
        self.starts.get(self.starts.partition_point(|(at, _)| *at < from)).copied()
    }

    /// The answer up to `</answer>`, and the offset after this tag.
    fn answer(&self, after: Range<usize>) -> Option<(Range<usize>, usize)> {
        let end = first_from(&self.answer_ends, after.start)?;
        let behind = end + ANSWER_END.len();
        (behind <= after.end).then_some((after.start..end, behind))
    }

    /// The answer after `####` and its end offset: the whole line if it is a number of several words (`1 1/2`), else its first word.
    fn line(&self, after: Range<usize>) -> (Range<usize>, usize) {
        let start = after.end - self.text[after.clone()].trim_start().len();
        let line_end = first_from(&self.lines, start).map_or(after.end, |end| end.min(after.end));
        let word = self.text[start..line_end].split_whitespace().next().unwrap_or_default();
        let mut end = start + word.len();
        let others = &self.starts[self.starts.partition_point(|(at, _)| *at < end)..];
        let is_last = others.iter().take_while(|(at, _)| *at < line_end).all(|(_, mark)| *mark != "####");
        if is_last {
            let line = self.text[start..line_end].trim_end_matches('\r');
            let whole = Rational::parse(line);
            if whole.is_some() && whole != Rational::parse(word) {
                end = start + line.len();
            }
        }
        (start..end, end)
    }

    /// The content of a box and the offset after it. The content is between matched braces, or, without braces, extends to the end of the
    /// formula or line, as verl reads `\boxed 5`. `None` if the braces are not closed.
    fn boxed(&self, after: Range<usize>) -> Option<(Range<usize>, usize)> {
        let rest = self.text[after.clone()].trim_start();
        let start = after.end - rest.len();
        if !rest.starts_with('{') {
            let end = first_from(&self.formulas, start).map_or(after.end, |end| end.min(after.end));
            return Some((start..end, end));
        }
        let close = *self.closes.get(&start)?;
        (close < after.end).then_some((start + 1..close, close + 1))
    }
}

/// The first of the sorted offsets `places` that is at least `from`.
fn first_from(places: &[usize], from: usize) -> Option<usize> {
    places.get(places.partition_point(|place| *place < from)).copied()
}

#[cfg(test)]
mod tests {
    use super::last_marked;

    #[test]
    fn the_last_answer_marker_decides() {
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
            ("<answer>\\boxed{7</answer>}", None),
            ("#### 1\r\n#### 1 1/2\r\nso", Some("1 1/2")),
            ("#### 3 #### 4 5/8", Some("4 5/8")),
            ("\\boxed{1} \\boxed{\\boxed{2} \\boxed{ 3 } }", Some("3")),
        ] {
            assert_eq!(last_marked(text), expected, "{text}");
        }
    }

    /// Nesting deeper than any recursive parser's stack would allow.
    #[test]
    fn nested_and_repeated_answer_markers_are_parsed() {
        let nested = ["\\boxed{".repeat(100_000), "5".to_owned(), "}".repeat(100_000)].concat();
        assert_eq!(last_marked(&nested), Some("5"));
        assert_eq!(last_marked(&format!("{nested}\\boxed{{")), None);
        for (mark, expected) in
            [("<answer>", None), ("\\boxed{", Some("7")), ("#### ", Some("7")), ("\\fbox ", Some("7"))]
        {
            let many = mark.repeat(100_000);
            assert_eq!(last_marked(&format!("{many}<answer> 7 </answer>")), expected, "{mark}");
        }
    }
}
