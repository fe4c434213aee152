//! `strftime` as in Python with glibc, in UTC and the C locale.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use chrono::DateTime;

use crate::error::{Error, Result};

/// Directives that chrono formats like glibc.
const DIRECTIVES: &str = "YCymBbhdejAawuUWGgVHkIlpPMSsnt%FDxTXRrc";
/// Directives for a single number. Only these are padded; for others glibc ignores a `-` and leaves the text unchanged.
const NUMBERS: &str = "YCymdejwuUWGgVHkIlMSs";

/// The current time in seconds since 1970, or `SOURCE_DATE_EPOCH` if that is set (so that a run whose template prints the date is reproducible).
pub(super) fn now_s() -> Result<u64> {
    match std::env::var("SOURCE_DATE_EPOCH") {
        Ok(text) => text.parse().map_err(|_| Error::Environment {
            message: format!("SOURCE_DATE_EPOCH = '{text}': expected whole seconds since 1970"),
        }),
        Err(_) => Ok(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs())),
    }
}

/// Formats a time, for example by `%d %b %Y`; `%-d` is without padding. An unknown directive is an error.
pub(super) fn strftime(format: &str, seconds: u64) -> Result<String, String> {
    let unsupported = |directive: &str| format!("strftime_now: '%{directive}' is not supported");
    let date = i64::try_from(seconds).ok().and_then(|seconds| DateTime::from_timestamp(seconds, 0));
    let date = date.ok_or_else(|| format!("strftime_now: {seconds} seconds since 1970 is not a valid date"))?;
    let mut text = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            text.push(character);
            continue;
        }
        let (padding, directive) = match characters.next() {
            Some('-') => ("-", characters.next()),
            directive => ("", directive),
        };
        match directive {
            Some('f') => text.push_str("000000"),
            Some('z' | 'Z') => {} // Python's `now()` knows no time zone
            Some(name) if DIRECTIVES.contains(name) => {
                let padding = if NUMBERS.contains(name) { padding } else { "" };
                let directive = format!("{padding}{name}");
                let written = write!(text, "{}", date.format(&format!("%{directive}")));
                written.map_err(|_| unsupported(&directive))?;
            }
            other => return Err(unsupported(&other.unwrap_or(' ').to_string())),
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_agree_with_the_calendar() {
        assert_eq!(strftime("%Y-%m-%d %H:%M:%S %a", 0).unwrap(), "1970-01-01 00:00:00 Thu");
        assert_eq!(strftime("%d %b %Y", 951_782_400).unwrap(), "29 Feb 2000");
        assert_eq!(strftime("%A, %B %d, %y 100%%", 1_721_952_000).unwrap(), "Friday, July 26, 24 100%");
        assert_eq!(strftime("%Y-%m-%d", 1_735_689_599).unwrap(), "2024-12-31");
        // 2026-01-01 is a Thursday, so 2025-12-29 is in its week; 2027-01-01 is in the last week of 2026.
        assert_eq!(strftime("%j %U %W %V %G %u", 1_767_225_600).unwrap(), "001 00 00 01 2026 4");
        assert_eq!(strftime("%j %V %G", 1_766_966_400).unwrap(), "363 01 2026");
        assert_eq!(strftime("%-d %-j %V %G", 1_798_761_600).unwrap(), "1 1 53 2026");
        for unknown in ["%Q", "%q", "%+", "%3f", "%:z", "%"] {
            assert!(strftime(unknown, 0).unwrap_err().contains("is not supported"), "{unknown}");
        }
        assert!(strftime("%Y", u64::MAX).is_err());
    }

    /// The expected words are from glibc 2.36 (`date -u -d @1709215509 +FORMAT` in the C locale), those of %f, %z and %Z from Python.
    #[test]
    fn strftime_directives_match_python() {
        let expected = [
            ("%C %g %h %e %w", "20 24 Feb 29 4"),
            ("%k|%l|%I|%-I|%p|%P", "14| 2|02|2|PM|pm"),
            ("%s %f [%z%Z]", "1709215509 000000 []"),
            ("%F %T|%D|%x|%X|%R|%r", "2024-02-29 14:05:09|02/29/24|02/29/24|14:05:09|14:05|02:05:09 PM"),
            ("%-d %-B %-A %-p %-F", "29 February Thursday PM 2024-02-29"),
            ("%c%n%t%-M", "Thu Feb 29 14:05:09 2024\n\t5"),
        ];
        for (format, text) in expected {
            assert_eq!(strftime(format, 1_709_215_509).as_deref(), Ok(text), "{format}");
        }
    }
}
