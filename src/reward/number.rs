//! Numbers as people and models write them, compared exactly.

use std::sync::LazyLock;

use regex::Regex;

/// A fraction in lowest terms, the denominator positive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rational {
    numerator: i128,
    denominator: i128,
}

impl Rational {
    /// Reads an integer, a decimal (`1,234.50`, `.5`, `1e3`), a fraction (`3/4`, `\frac{3}{4}`) with an optional sign.
    /// Dollar, euro and pound signs, a percent sign (50% is 50), `\boxed{..}`, mathematics delimiters and a full stop at
    /// the end are looked through. Commas must stand before groups of three digits. `None` if it is anything else or
    /// does not fit 128 bits.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.replace('\u{2212}', "-").replace("{,}", ",").replace("\\,", "").replace("\\!", "");
        let (negative, text) = unwrapped(&text);
        let (numerator, denominator) = match fraction_parts(text) {
            Some((numerator, denominator)) => (decimal(numerator)?, decimal(denominator)?),
            None => (decimal(text)?, Self { numerator: 1, denominator: 1 }),
        };
        let sign = if negative { -1 } else { 1 };
        let value = numerator.divided_by(denominator)?;
        Some(Self { numerator: sign * value.numerator, ..value })
    }

    /// Reads a number that is written in one of the ways that leave no doubt, and alone: `-1,234.5`, `50\%` (0.5), `3/4`,
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

/// The sign, and what is left inside of wrappings, currency signs and closing punctuation.
fn unwrapped(text: &str) -> (bool, &str) {
    let (mut text, mut negative) = (text, false);
    loop {
        let start = text;
        text = text.trim().trim_end_matches(['.', ',', ';']).trim_matches('$');
        for (open, close) in [("\\boxed{", "}"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**")] {
            text = text.strip_prefix(open).and_then(|inner| inner.strip_suffix(close)).unwrap_or(text);
        }
        text = text.strip_suffix("\\%").or_else(|| text.strip_suffix('%')).unwrap_or(text);
        text = text.strip_prefix("\\$").unwrap_or(text).trim_start_matches(['€', '£']);
        if text == start {
            break;
        }
    }
    match text.strip_prefix(['-', '+']) {
        Some(rest) => {
            negative = text.starts_with('-');
            (negative, rest.trim_start_matches(['$', '€', '£', ' ']))
        }
        None => (negative, text),
    }
}

/// Numerator and denominator of `a/b`, `\frac{a}{b}`, `\dfrac{a}{b}` and `\tfrac{a}{b}`.
fn fraction_parts(text: &str) -> Option<(&str, &str)> {
    for name in ["\\frac{", "\\dfrac{", "\\tfrac{"] {
        if let Some(parts) = text.strip_prefix(name) {
            return parts.strip_suffix('}')?.split_once("}{");
        }
    }
    let (numerator, denominator) = text.split_once('/')?;
    Some((numerator.trim(), denominator.trim()))
}

/// An unsigned decimal with optional thousands separators and exponent.
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

/// `1,234,567` → `1234567`; `None` if a comma stands elsewhere.
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
    fn numbers_in_many_spellings_are_read_exactly() {
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
    fn what_is_no_number_is_none() {
        for text in [
            "",
            "-",
            ".",
            "abc",
            "1,23",
            "1,2345",
            "12 apples",
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
