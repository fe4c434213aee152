//! Checks numbers in JSON from users and models. A float is rounded once, as usual. An integer that does not fit in 64 bits is an error, because
//! Rust's JSON parser would round it to a float, which no longer equals the original number.

use serde_json::{Number, Value};

/// From this value on, a float may be a rounded integer.
const TWO_TO_63: f64 = 9_223_372_036_854_775_808.0;

/// Parses an integer of at most 64 bits; `None` if the text is not an integer.
///
/// # Errors
/// An integer that needs more than 64 bits.
pub(crate) fn integer(text: &str) -> Result<Option<Number>, String> {
    let digits = text.strip_prefix('-').unwrap_or(text);
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Ok(None);
    }
    let short = text.parse::<i64>().map(Number::from).or_else(|_| text.parse::<u64>().map(Number::from));
    short.map(Some).map_err(|_| too_long(text))
}

fn too_long(literal: &str) -> String {
    let shown: String = literal.chars().take(40).collect();
    let more = if shown.len() < literal.len() { ".." } else { "" };
    format!("the integer {shown}{more} has more than 64 bits: write it as text, in quotes")
}

/// Checks that `value`, parsed from `text`, has not lost digits of an integer.
///
/// # Errors
/// The integer and its path in the value.
pub(crate) fn check_numbers(value: &Value, text: &str) -> Result<(), String> {
    if place(value, &|_| true).is_none() {
        return Ok(());
    }
    let Some(literal) = integers(text).find(|literal| integer(literal).is_err()) else { return Ok(()) };
    let is_it = |number: f64| literal.parse() == Ok(number);
    let place = place(value, &is_it).filter(|place| !place.is_empty());
    Err(place.map_or_else(String::new, |place| format!("{}: ", place.trim_start_matches('.'))) + &too_long(literal))
}

/// The path (`.a[3].b`) of the first large float for which `is_it` is true.
fn place(value: &Value, is_it: &dyn Fn(f64) -> bool) -> Option<String> {
    match value {
        Value::Number(number) if number.is_f64() => {
            number.as_f64().filter(|number| number.abs() >= TWO_TO_63 && is_it(*number)).map(|_| String::new())
        }
        Value::Array(items) => {
            items.iter().enumerate().find_map(|(index, item)| place(item, is_it).map(|rest| format!("[{index}]{rest}")))
        }
        Value::Object(fields) => {
            fields.iter().find_map(|(name, item)| place(item, is_it).map(|rest| format!(".{name}{rest}")))
        }
        _ => None,
    }
}

/// The integers in a JSON text, outside of its strings.
fn integers(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        loop {
            let at = rest.find(|c: char| c == '"' || c == '-' || c.is_ascii_digit())?;
            let token = &rest[at..];
            if let Some(string) = token.strip_prefix('"') {
                let mut is_escaped = false;
                let ends = |c| {
                    let was_escaped = std::mem::replace(&mut is_escaped, false);
                    is_escaped = c == '\\' && !was_escaped;
                    c == '"' && !was_escaped
                };
                let end = string.find(ends)?;
                rest = &string[end + 1..];
                continue;
            }
            let end = token.find(|c: char| !c.is_ascii_alphanumeric() && !"+-.".contains(c)).unwrap_or(token.len());
            rest = &token[end..];
            let number = &token[..end];
            if number.bytes().all(|byte| byte.is_ascii_digit() || byte == b'-') {
                return Some(number);
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Value, String> {
        let value = serde_json::from_str(text).map_err(|error| error.to_string())?;
        check_numbers(&value, text).map(|()| value)
    }

    /// Numbers survive reading and writing, or the error names the number that would be lost.
    #[test]
    fn json_numbers_round_trip_or_are_refused_with_their_place() {
        for exact in [
            "449.49106478873813",
            "18446744073709551615",
            "-9223372036854775808",
            "-0.0",
            "1.0",
            "1",
            "0.1",
            "2.2250738585072014e-308",
            "5e-324",
            "1.7976931348623157e+308",
            "9007199254740993",
            "[\"12345678901234567890123\",1]",
            "[\"\\\\\",\"\\\"12345678901234567890123\"]",
        ] {
            assert_eq!(read(exact).unwrap().to_string(), exact);
        }
        for (text, number) in [("1E5", 1e5), ("1e22", 1e22), ("10000000000000000000000.0", 1e22), ("1e300", 1e300)] {
            assert_eq!(read(text).unwrap(), number, "{text}");
        }
        for (text, place) in [
            ("12345678901234567890123", "the integer 12345678901234567890123 has"),
            ("{\"a\": [1, {\"b\": 18446744073709551616}]}", "a[1].b: the integer 18446744073709551616 has"),
            ("{\"a\": 1e300, \"b\": -9223372036854775809}", "b: the integer -9223372036854775809 has"),
            ("[\"\\\"\", 1, 10000000000000000000000]", "[2]: the integer 10000000000000000000000 has"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.starts_with(place), "{error}");
        }
        assert!(read("1e400").unwrap_err().contains("out of range"));
    }

    /// Checked with a million floats of random bits.
    #[test]
    fn floats_round_trip_through_json_bit_for_bit() {
        let mut bits = 0x9E37_79B9_7F4A_7C15_u64;
        for _ in 0..1_000_000 {
            bits = bits.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let number = f64::from_bits(bits);
            if number.is_finite() {
                let text = serde_json::to_string(&number).unwrap();
                let again: f64 = serde_json::from_str(&text).unwrap();
                assert_eq!(again.to_bits(), number.to_bits(), "{text}");
            }
        }
    }
}
