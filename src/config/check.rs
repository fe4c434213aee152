//! One key's check.

use regex::Regex;

use crate::error::{Error, Result};

/// Compiles a key's regular expression.
pub(super) fn compiles(key: &str, pattern: &str) -> Result<Regex> {
    Regex::new(pattern).map_err(|error| Error::invalid_value(key, pattern, format!("a regular expression: {error}")))
}

/// Refuses the value `got` of a key, unless it holds what is `expected`.
pub(super) fn check(key: &str, got: impl ToString, holds: bool, expected: impl Into<String>) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::invalid_value(key, got, expected)) }
}
