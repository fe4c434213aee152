//! The few parts of `strftime` that chat templates use, in UTC.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::error::{Error, Result};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// Seconds since 1970: `SOURCE_DATE_EPOCH` where it is set (a run that names the date can then be repeated), else now.
pub(super) fn now_s() -> Result<u64> {
    match std::env::var("SOURCE_DATE_EPOCH") {
        Ok(text) => text.parse().map_err(|_| Error::Environment {
            message: format!("SOURCE_DATE_EPOCH = '{text}': expected whole seconds since 1970"),
        }),
        Err(_) => Ok(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs())),
    }
}

/// `%d %b %Y` and the like. An unknown directive is an error.
pub(super) fn strftime(format: &str, seconds: u64) -> Result<String, String> {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    let mut text = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            text.push(character);
            continue;
        }
        let part = match characters.next() {
            Some('Y') => year.to_string(),
            Some('y') => format!("{:02}", year % 100),
            Some('m') => format!("{month:02}"),
            Some('B') => MONTHS[month - 1].to_owned(),
            Some('b') => MONTHS[month - 1][..3].to_owned(),
            Some('d') => format!("{day:02}"),
            Some('A') => DAYS[(days % 7) as usize].to_owned(),
            Some('a') => DAYS[(days % 7) as usize][..3].to_owned(),
            Some('H') => format!("{:02}", second / 3600),
            Some('M') => format!("{:02}", second / 60 % 60),
            Some('S') => format!("{:02}", second % 60),
            Some('%') => "%".to_owned(),
            other => return Err(format!("strftime_now: '%{}' is not supported", other.unwrap_or(' '))),
        };
        text.push_str(&part);
    }
    Ok(text)
}

/// Year, month from 1 and day from 1 of a day counted from 1970-01-01, in the Gregorian calendar.
fn civil(days: u64) -> (u64, usize, u64) {
    let is_leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let (mut year, mut day) = (1970, days);
    while day >= 365 + u64::from(is_leap(year)) {
        day -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let february = 28 + u64::from(is_leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if day < length {
            break;
        }
        day -= length;
        month += 1;
    }
    (year, month, day + 1)
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
        assert!(strftime("%Q", 0).unwrap_err().contains("'%Q' is not supported"));
    }
}
