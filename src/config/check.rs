//! Helpers to check the value of one key.

use regex::Regex;

use crate::error::{Error, Result};

/// Compiles the regular expression given as a key's value.
pub(super) fn compiles(key: &str, pattern: &str) -> Result<Regex> {
    Regex::new(pattern).map_err(|error| Error::invalid_value(key, pattern, format!("a regular expression: {error}")))
}

/// Returns an error for the key's value `got` unless `holds`; the error says what is `expected`.
pub(super) fn check(key: &str, got: impl ToString, holds: bool, expected: impl Into<String>) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::invalid_value(key, got, expected)) }
}
