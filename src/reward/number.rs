//! Parses numbers as people and models write them, for exact comparison.

use std::sync::LazyLock;

use regex::Regex;

/// A fraction in lowest terms with a positive denominator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rational {
    numerator: i128,
    denominator: i128,
}

impl Rational {
    /// Parses an integer, a decimal (`1,234.50`, `.5`, `1e3`), a fraction (`3/4`, `\frac34`, `\frac{-1}{\frac{2}{3}}`) or a mixed number
    /// (`1\frac{1}{2}`, `1 1/2`) with an optional sign, which may be a dash. Ignores what is around it: currency signs, a
    /// percent sign (50% is 50), degrees, units, a variable (`x = 5`), `\boxed{..}`, braces, parentheses, math delimiters and a
    /// final full stop. Commas must separate groups of three digits. `None` if the text is anything else, or the fraction needs more than 128
    /// bits.
    pub fn parse(text: &str) -> Option<Self> {
        value(&plain_signs(text), MAX_DEPTH)
    }

    /// Parses a number in an unambiguous notation, without any other text: `-1,234.5`, `50\%` (0.5), `3/4`,
    /// `\frac{3}{4}`, each with at most 15 digits before the point and 9 after it.
    pub fn plain(text: &str) -> Option<Self> {
        static FORMS: LazyLock<Regex> = LazyLock::new(|| {
            let whole = r"(?:0|[1-9][0-9]{0,14})";
            let decimal = r"(?:0|[1-9][0-9]{0,14}|[1-9][0-9]{0,2}(?:,[0-9]{3}){1,4})(?:\.[0-9]{1,9})?(?:\\%)?";
            let forms = format!(r"\A-?(?:\\[dt]?frac\{{{whole}\}}\{{{whole}\}}|{whole}/{whole}|{decimal})\z");
            Regex::new(&forms).expect("a pattern of this program")
        });
        let hundred = Self { numerator: 100, denominator: 1 };
        match (FORMS.is_match(text), text.strip_suffix("\\%")) {
            (true, Some(percent)) => Self::parse(percent)?.divided_by(hundred),
            (true, None) => Self::parse(text),
            (false, _) => None,
        }
    }

    fn new(numerator: i128, denominator: i128) -> Option<Self> {
        if denominator == 0 {
            return None;
        }
        let divisor = gcd(numerator, denominator);
        let divisor = if denominator < 0 { -divisor } else { divisor };
        Some(Self { numerator: numerator / divisor, denominator: denominator / divisor })
    }

    fn divided_by(self, other: Self) -> Option<Self> {
        let numerator = self.numerator.checked_mul(other.denominator)?;
        Self::new(numerator, self.denominator.checked_mul(other.numerator)?)
    }
}

impl std::fmt::Display for Rational {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.numerator, self.denominator)
    }
}

/// Deepest nesting of fractions.
const MAX_DEPTH: usize = 8;
/// Alternative spellings, and what each is replaced by.
const SPELLINGS: [(&str, &str); 16] = [
    ("{,}", ","),
    ("\\,", ""),
    ("\\!", ""),
    ("\\;", " "),
    ("\\:", " "),
    ("\\ ", " "),
    ("~", " "),
    ("\\left", ""),
    ("\\right", ""),
    ("\\dfrac", "\\frac"),
    ("\\tfrac", "\\frac"),
    ("\\cfrac", "\\frac"),
    ("^{\\circ}", "°"),
    ("^\\circ", "°"),
    ("\\degree", "°"),
    ("\\displaystyle", ""),
];
/// LaTeX commands whose argument is text.
const TEXTS: [&str; 8] = ["\\text", "\\textbf", "\\textrm", "\\textit", "\\mathrm", "\\mathbf", "\\mbox", "\\mathit"];
/// Units that may follow a number, without a plural s: those of verl's `math_dapo` and of math-verify that cannot mean anything else after
/// a number.
const UNITS: &str = " degree deg mph kmph kmh cm mm km kg gm lb mile foot feet ft inch inche yard meter metre liter litre gallon pound \
    ounce gram acre hectare hour hr minute min second sec day week month year cent dollar euro rupee way integer unit digit point \
    square student edge meal multiple ticket apple coin toy percent pct sq cubic ";

/// Replaces all dashes by `-` and alternative spellings by one of them.
fn plain_signs(text: &str) -> String {
    let is_dash = |c: char| matches!(c, '\u{2010}'..='\u{2015}' | '\u{2212}' | '\u{fe63}' | '\u{ff0d}');
    let text: String = text.chars().map(|c| if is_dash(c) { '-' } else { c }).collect();
    SPELLINGS.iter().fold(text, |text, (from, to)| if text.contains(from) { text.replace(from, to) } else { text })
}

/// The number that a text contains, after removing what is around it.
fn value(text: &str, depth: usize) -> Option<Rational> {
    let depth = depth.checked_sub(1)?;
    let text = unwrapped(text);
    if let Some(rest) = text.strip_prefix(['-', '+']) {
        let rest = rest.trim_start();
        let number = if rest.starts_with(['-', '+']) { None } else { value(rest, depth) }?;
        let sign = if text.starts_with('-') { -1 } else { 1 };
        return Some(Rational { numerator: sign * number.numerator, ..number });
    }
    if let Some((numerator, denominator, "")) = fraction(text) {
        return value(numerator, depth)?.divided_by(value(denominator, depth)?);
    }
    if let Some(mixed) = mixed(text, depth) {
        return Some(mixed);
    }
    match text.split_once('/') {
        Some((numerator, denominator)) => quotient(numerator, denominator),
        None => decimal(text),
    }
}

/// Parses a quotient `a/b` of decimals.
fn quotient(numerator: &str, denominator: &str) -> Option<Rational> {
    let bare = |text: &str| -> Option<Rational> { decimal(inside(text.trim(), "{", "}").unwrap_or(text.trim())) };
    bare(numerator)?.divided_by(bare(denominator)?)
}

/// Parses an integer followed by a fraction below 1.
fn mixed(text: &str, depth: usize) -> Option<Rational> {
    let end = text.find(|c: char| !c.is_ascii_digit())?;
    let (whole, rest) = text.split_at(end);
    let part = match fraction(rest.trim_start()) {
        Some((numerator, denominator, "")) => value(numerator, depth)?.divided_by(value(denominator, depth)?)?,
        Some(_) => return None,
        None => {
            let (numerator, denominator) = rest.strip_prefix(' ')?.trim().split_once('/')?;
            quotient(numerator, denominator)?
        }
    };
    let is_part = part.numerator > 0 && part.numerator < part.denominator;
    let whole = whole.parse::<i128>().ok().filter(|_| is_part)?;
    Rational::new(whole.checked_mul(part.denominator)?.checked_add(part.numerator)?, part.denominator)
}

/// Splits text that begins with `\frac{a}{b}`, `\frac ab` or a mixture into numerator, denominator and the rest.
fn fraction(text: &str) -> Option<(&str, &str, &str)> {
    let (numerator, rest) = argument(text.strip_prefix("\\frac")?)?;
    let (denominator, rest) = argument(rest)?;
    Some((numerator, denominator, rest.trim()))
}

/// Splits off a LaTeX command's next argument, in braces or of one character. Returns the argument and the rest.
fn argument(text: &str) -> Option<(&str, &str)> {
    let text = text.trim_start();
    let Some(inner) = text.strip_prefix('{') else {
        return text.starts_with(|c: char| c.is_ascii_digit()).then(|| text.split_at(1));
    };
    let mut depth = 1;
    let end = inner.bytes().position(|byte| {
        depth += i32::from(byte == b'{') - i32::from(byte == b'}');
        depth == 0
    })?;
    Some((&inner[..end], &inner[end + 1..]))
}

/// The text between `open` and `close`, if the text begins and ends with them and they match each other.
fn inside<'a>(text: &'a str, open: &str, close: &str) -> Option<&'a str> {
    let inner = text.strip_prefix(open)?.strip_suffix(close)?;
    let (mut depth, mut least) = (0, 0);
    for c in inner.chars() {
        depth += i32::from(c == '{' || c == '(') - i32::from(c == '}' || c == ')');
        least = least.min(depth);
    }
    (least == 0).then_some(inner)
}

/// The text without surrounding delimiters, currency signs, units and closing punctuation.
fn unwrapped(text: &str) -> &str {
    let mut text = text;
    loop {
        let start = text;
        text = text.trim().trim_end_matches(['.', ',', ';']);
        text = text.strip_suffix("\\$").unwrap_or(text).trim_matches('$');
        for (open, close) in [("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("(", ")"), ("{", "}")] {
            text = inside(text, open, close).unwrap_or(text);
        }
        for command in ["\\boxed", "\\fbox"].into_iter().chain(TEXTS) {
            let braced = text.strip_prefix(command).map(str::trim_start);
            text = braced.and_then(|braced| inside(braced, "{", "}")).unwrap_or(text);
        }
        text = text
            .strip_suffix("\\%")
            .or_else(|| text.strip_suffix('%'))
            .or_else(|| text.strip_suffix('°'))
            .unwrap_or(text);
        text = text.strip_prefix("\\text{ }").unwrap_or(text);
        text = text.strip_prefix("\\$").unwrap_or(text).trim_start_matches(['$', '€', '£']);
        text = without_unit(without_name(text));
        if text == start {
            return text;
        }
    }
}

/// The text after `x =`, where the name has at most three letters or is a LaTeX command.
fn without_name(text: &str) -> &str {
    let Some((name, number)) = text.split_once('=') else { return text };
    let name = name.trim();
    let is_word = |word: &str| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_alphabetic());
    let head = name.split(['_', '(']).next().unwrap_or_default();
    let is_name = match head.strip_prefix('\\') {
        Some(command) => command.split(' ').all(is_word), // `\angle A`
        None => is_word(head) && head.len() <= 3,
    };
    if is_name { number.trim_start() } else { text }
}

/// The text before a unit. A unit is a word of the list, or any text without digits in a LaTeX text command, optionally with an exponent.
fn without_unit(text: &str) -> &str {
    let without_exponent = |text: &'_ str| -> usize {
        let ends = ["^2", "^3", "^{2}", "^{3}", "²", "³"];
        ends.iter().find_map(|end| text.strip_suffix(end)).map_or(text.len(), str::len)
    };
    let body = &text[..without_exponent(text)];
    if let Some(inner) = body.strip_suffix('}') {
        let Some((before, unit)) = inner.rsplit_once('{') else { return text };
        let command = TEXTS.iter().find_map(|command| before.strip_suffix(command));
        let is_unit = !unit.contains(|c: char| c.is_ascii_digit() || "{}\\".contains(c));
        return command.filter(|before| is_unit && !before.trim().is_empty()).unwrap_or(text);
    }
    let number = body.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let word = &body[number.len()..];
    let singular = word.strip_suffix('s').unwrap_or(word);
    let is_unit = |word: &str| !word.is_empty() && UNITS.contains(&format!(" {} ", word.to_ascii_lowercase()));
    let follows = number.trim_end();
    if (is_unit(singular) || is_unit(word)) && !follows.is_empty() { follows } else { text }
}

/// Parses an unsigned decimal with optional thousands separators and exponent.
fn decimal(text: &str) -> Option<Rational> {
    let (mantissa, exponent) = match text.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => (mantissa, exponent.parse::<i32>().ok()?),
        None => (text, 0),
    };
    let (whole, part) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let whole = without_separators(whole)?;
    let digits = whole + part;
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let scale = exponent.checked_sub(i32::try_from(part.len()).ok()?)?;
    let power = 10_i128.checked_pow(scale.unsigned_abs())?;
    let number: i128 = digits.parse().ok()?;
    if scale >= 0 { Rational::new(number.checked_mul(power)?, 1) } else { Rational::new(number, power) }
}

/// Removes thousands separators (`1,234,567` → `1234567`); `None` if a comma is at a wrong place.
fn without_separators(text: &str) -> Option<String> {
    let mut groups = text.split(',');
    let first = groups.next().unwrap_or_default();
    let rest: Vec<&str> = groups.collect();
    let well_placed = rest.is_empty() || ((1..=3).contains(&first.len()) && rest.iter().all(|group| group.len() == 3));
    well_placed.then(|| first.to_owned() + &rest.concat())
}

fn gcd(a: i128, b: i128) -> i128 {
    if b == 0 { a.abs() } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Option<(i128, i128)> {
        Rational::parse(text).map(|number| (number.numerator, number.denominator))
    }

    #[test]
    fn numbers_in_many_notations_are_parsed_exactly() {
        for (text, expected) in [
            ("42", (42, 1)),
            (" -7. ", (-7, 1)),
            ("+3", (3, 1)),
            ("\u{2212}3", (-3, 1)),
            ("1,234,567.50", (2_469_135, 2)),
            ("0.1", (1, 10)),
            (".5", (1, 2)),
            ("5.", (5, 1)),
            ("6/8", (3, 4)),
            ("-6 / 8", (-3, 4)),
            ("\\frac{6}{8}", (3, 4)),
            ("-\\dfrac{1}{3}", (-1, 3)),
            ("\\boxed{\\frac{1}{2}}", (1, 2)),
            ("$\\boxed{12}$.", (12, 1)),
            ("$1,200", (1_200, 1)),
            ("-$5", (-5, 1)),
            ("\\$18", (18, 1)),
            ("50%", (50, 1)),
            ("50\\%", (50, 1)),
            ("1.5e3", (1_500, 1)),
            ("25E-1", (5, 2)),
            ("10{,}000", (10_000, 1)),
            ("**8**", (8, 1)),
            ("0", (0, 1)),
            ("-0.0", (0, 1)),
        ] {
            assert_eq!(parse(text), Some(expected), "{text}");
        }
    }

    #[test]
    fn text_without_a_number_gives_none() {
        for text in [
            "",
            "-",
            ".",
            "abc",
            "1,23",
            "1,2345",
            "12 bananas",
            "1/0",
            "1/2/3",
            "--3",
            "0x10",
            "1e99",
            "inf",
            "NaN",
            "1.2.3",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
        assert_eq!(parse(&"9".repeat(60)), None);
    }
}
