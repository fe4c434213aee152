//! `strftime` as Python has it with glibc, in UTC and in the C locale.

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
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

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
    let date = Date::of(seconds);
    let mut text = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        match character {
            '%' => match characters.next() {
                // Without padding: `%-d`.
                Some('-') => text.push_str(unpadded(&date.directive(characters.next())?)),
                directive => text.push_str(&date.directive(directive)?),
            },
            _ => text.push(character),
        }
    }
    Ok(text)
}

fn unpadded(number: &str) -> &str {
    let digits = number.trim_start_matches(['0', ' ']);
    if digits.is_empty() { "0" } else { digits }
}

/// A second of the Gregorian calendar, and what is counted from it.
struct Date {
    seconds: u64,
    year: u64,
    month: usize,
    day: u64,
    /// Day of the year, from 1.
    day_of_year: u64,
    /// Sunday is 0.
    weekday: u64,
    hour: u64,
    minute: u64,
    second: u64,
}

impl Date {
    fn of(seconds: u64) -> Self {
        let (days, second) = (seconds / 86_400, seconds % 86_400);
        let (year, month, day, day_of_year) = civil(days);
        Self {
            seconds,
            year,
            month,
            day,
            day_of_year,
            weekday: (days + 4) % 7,
            hour: second / 3600,
            minute: second / 60 % 60,
            second: second % 60,
        }
    }

    fn directive(&self, name: Option<char>) -> Result<String, String> {
        let Self { year, day, hour, minute, second, .. } = *self;
        let again = |format: &str| strftime(format, self.seconds);
        Ok(match name {
            Some('Y') => year.to_string(),
            Some('C') => format!("{:02}", year / 100),
            Some('y') => format!("{:02}", year % 100),
            Some('m') => format!("{:02}", self.month),
            Some('B') => MONTHS[self.month - 1].to_owned(),
            Some('b' | 'h') => MONTHS[self.month - 1][..3].to_owned(),
            Some('d') => format!("{day:02}"),
            Some('e') => format!("{day:2}"),
            Some('j') => format!("{:03}", self.day_of_year),
            Some('A') => DAYS[self.weekday as usize].to_owned(),
            Some('a') => DAYS[self.weekday as usize][..3].to_owned(),
            Some('w') => self.weekday.to_string(),
            Some('u') => self.monday_is_1().to_string(),
            Some('U') => format!("{:02}", (self.day_of_year + 6 - self.weekday) / 7),
            Some('W') => format!("{:02}", (self.day_of_year + 7 - self.monday_is_1()) / 7),
            Some('G') => self.iso_week().0.to_string(),
            Some('g') => format!("{:02}", self.iso_week().0 % 100),
            Some('V') => format!("{:02}", self.iso_week().1),
            Some('H') => format!("{hour:02}"),
            Some('k') => format!("{hour:2}"),
            Some('I') => format!("{:02}", (hour + 11) % 12 + 1),
            Some('l') => format!("{:2}", (hour + 11) % 12 + 1),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('P') => if hour < 12 { "am" } else { "pm" }.to_owned(),
            Some('M') => format!("{minute:02}"),
            Some('S') => format!("{second:02}"),
            Some('f') => "000000".to_owned(),
            Some('s') => self.seconds.to_string(),
            Some('z' | 'Z') => String::new(), // Python's `now()` knows no time zone
            Some('n') => "\n".to_owned(),
            Some('t') => "\t".to_owned(),
            Some('%') => "%".to_owned(),
            Some('F') => again("%Y-%m-%d")?,
            Some('D' | 'x') => again("%m/%d/%y")?,
            Some('T' | 'X') => again("%H:%M:%S")?,
            Some('R') => again("%H:%M")?,
            Some('r') => again("%I:%M:%S %p")?,
            Some('c') => again("%a %b %e %H:%M:%S %Y")?,
            other => return Err(format!("strftime_now: '%{}' is not supported", other.unwrap_or(' '))),
        })
    }

    fn monday_is_1(&self) -> u64 {
        if self.weekday == 0 { 7 } else { self.weekday }
    }

    /// Year and week of ISO 8601: those of the week's Thursday.
    fn iso_week(&self) -> (u64, u64) {
        let days = self.seconds / 86_400 + 4 - self.monday_is_1();
        let thursday = if days == self.seconds / 86_400 { None } else { Some(Self::of(days * 86_400)) };
        let thursday = thursday.as_ref().unwrap_or(self);
        (thursday.year, thursday.day_of_year.div_ceil(7))
    }
}

/// Year, month, day and day of the year, the last three from 1, of a day counted from 1970-01-01 in the Gregorian calendar.
fn civil(days: u64) -> (u64, usize, u64, u64) {
    let is_leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let (mut year, mut day) = (1970, days);
    while day >= 365 + u64::from(is_leap(year)) {
        day -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let day_of_year = day + 1;
    let february = 28 + u64::from(is_leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if day < length {
            break;
        }
        day -= length;
        month += 1;
    }
    (year, month, day + 1, day_of_year)
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
        assert!(strftime("%Q", 0).unwrap_err().contains("'%Q' is not supported"));
    }
}
