//! Valid ranges of numeric keys, declared with the key and used for validation and for the reference page.

/// Largest number of completions, tokens or steps that a key accepts.
pub(super) const MAX_COUNT: usize = 1 << 31;

/// A range of numbers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NumberRange {
    low: f64,
    high: f64,
    /// Whether the lower bound itself is valid.
    low_is_in: bool,
    high_is_in: bool,
    why: &'static str,
}

/// Largest absolute value that any key accepts; float32 arithmetic overflows at 3.4e38.
pub(crate) const LARGEST: f64 = 1e30;
/// All numbers.
pub(crate) const ANY: NumberRange = above(f64::NEG_INFINITY);
/// Counts of at least 1. The upper bound keeps products of two counts within 64 bits.
pub(crate) const COUNT: NumberRange = from_to(1.0, MAX_COUNT as f64);
/// Fractions in [0, 1).
pub(crate) const BELOW_ONE: NumberRange = NumberRange { high_is_in: false, ..from_to(0.0, 1.0) };
/// Fractions in (0, 1].
pub(crate) const ABOVE_ZERO: NumberRange = NumberRange { low_is_in: false, ..from_to(0.0, 1.0) };
/// Penalties of at most 0.
pub(crate) const NOT_POSITIVE: NumberRange = from_to(-1e6, 0.0);
/// Random seeds.
pub(crate) const SEED: NumberRange =
    at_least(0.0).because("at most 9223372036854775807 (2^63 - 1), where TOML's integers end");
/// Durations in seconds, less than a year.
pub(crate) const SECONDS: NumberRange =
    NumberRange { low_is_in: false, high_is_in: false, ..from_to(0.0, 365.0 * 86_400.0) };

/// Numbers of at least `low`.
pub(crate) const fn at_least(low: f64) -> NumberRange {
    from_to(low, f64::INFINITY)
}

/// Numbers above `low`.
pub(crate) const fn above(low: f64) -> NumberRange {
    NumberRange { low_is_in: false, ..at_least(low) }
}

/// Numbers from `low` to `high`, both inclusive.
pub(crate) const fn from_to(low: f64, high: f64) -> NumberRange {
    NumberRange { low, high, low_is_in: true, high_is_in: true, why: "" }
}

impl NumberRange {
    /// Adds the reason for the bounds, which error messages include.
    pub const fn because(self, why: &'static str) -> Self {
        Self { why, ..self }
    }

    /// Returns this range without its lower bound.
    pub const fn without_low(self) -> Self {
        Self { low_is_in: false, ..self }
    }

    /// Returns this range without negative numbers.
    pub fn not_negative(self) -> Self {
        if self.low < 0.0 { Self { low: 0.0, low_is_in: true, ..self } } else { self }
    }

    /// Whether `number` is in the range.
    pub fn contains(&self, number: f64) -> bool {
        let is_in = |bound: f64, is_in: bool| is_in && number == bound;
        (number > self.low || is_in(self.low, self.low_is_in))
            && (number < self.high || is_in(self.high, self.high_is_in))
    }

    /// Describes the range for messages: `kind` ("a number") with the bounds and their reason.
    pub fn of(&self, kind: &str) -> String {
        let Self { low, high, low_is_in, high_is_in, why } = *self;
        let bounds = match (low.is_finite(), high.is_finite()) {
            (false, false) => String::new(),
            (_, false) if low_is_in => format!(" of at least {low}"),
            (_, false) => format!(" above {low}"),
            _ if low_is_in && high_is_in => format!(" from {low} to {high}"),
            _ => {
                format!(" in {}{low}, {high}{}", if low_is_in { '[' } else { '(' }, if high_is_in { ']' } else { ')' })
            }
        };
        let why = if why.is_empty() { String::new() } else { format!(": {why}") };
        format!("{kind}{bounds}{why}")
    }
}
