//! Checks of numbers that must divide one another, and the nearest valid numbers.

use crate::error::{Error, Result};

pub(super) fn check_divides(key: &str, size: usize, num_ranks: usize, what_they_do: &str) -> Result<()> {
    if num_ranks.is_multiple_of(size) {
        return Ok(());
    }
    let valid = listed(&divisors(num_ranks));
    let expected = match num_ranks {
        1 => format!("1, as there is only one rank to {what_they_do}; --nproc {size} starts more ranks"),
        _ => format!("a divisor of the {num_ranks} ranks that {what_they_do}: {valid}"),
    };
    Err(Error::invalid_value(key, size, expected))
}

/// The nearest multiples of `unit` as text, such as `8 or 16`.
pub(super) fn nearest_multiples(number: usize, unit: usize) -> String {
    let below = number / unit * unit;
    if below == 0 { unit.to_string() } else { format!("{below} or {}", below + unit) }
}

pub(crate) fn divisors(number: usize) -> Vec<usize> {
    (1..=number).filter(|divisor| number.is_multiple_of(*divisor)).collect()
}

pub(super) fn listed(numbers: &[usize]) -> String {
    numbers.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
}

pub(super) fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
