//! Reads a configuration from a file and overrides, and reports all errors of both together.

use std::path::{Path, PathBuf};

use super::field::Field;
use super::range::ANY;
use super::raw::RawConfig;
use super::{Config, DataConfig, SftConfig, Sources};
use crate::error::{Error, Result};

/// A key of a configuration that may belong to another trainer: the key, its value, and the value as written if it was converted.
pub(crate) type ForeignEntry = (String, serde_json::Value, Option<serde_json::Value>);

/// All keys of a file and of overrides, whichever trainer they belong to.
///
/// # Errors
/// [`Error::ConfigSyntax`](crate::Error::ConfigSyntax) with the line of a syntax error.
pub(crate) fn foreign_entries(file: Option<&Path>, overrides: &[String]) -> Result<Vec<ForeignEntry>> {
    Ok(RawConfig::read(file, overrides)?.into_entries().collect())
}

/// Reads the raw entries; adds a sentence to `notices` for every value that is converted.
fn read_noting(file: Option<&Path>, overrides: &[String], notices: &mut Vec<String>) -> Result<RawConfig> {
    let raw = RawConfig::read(file, overrides)?;
    notices.extend(raw.notices());
    Ok(raw)
}

impl Config {
    /// Reads a TOML or YAML file and applies `key=value` (or `table.key=value`) overrides. The value of an override is a TOML value, or text if it is
    /// none. Checks that depend on the number of ranks are left to [`Config::validate_world`].
    ///
    /// # Errors
    /// [`Error::UnknownKeys`](crate::Error::UnknownKeys) with file, line and nearest key;
    /// [`Error::InvalidValue`](crate::Error::InvalidValue) and [`Error::ConfigSyntax`](crate::Error::ConfigSyntax)
    /// with file and line; [`Error::InvalidConfig`](crate::Error::InvalidConfig) where several keys or values are wrong.
    pub fn load(file: Option<&Path>, overrides: &[String]) -> Result<Self> {
        Self::load_noting(file, overrides, &mut Vec::new())
    }

    /// Like [`Config::load`], and adds a sentence to `notices` for every value that is converted, such as TRL's `top_k = -1`, and for every key
    /// without effect, such as those for tools in a run without tools.
    ///
    /// # Errors
    /// Returns the errors of [`Config::load`].
    pub fn load_noting(file: Option<&Path>, overrides: &[String], notices: &mut Vec<String>) -> Result<Self> {
        let raw = read_noting(file, overrides, notices)?;
        let config = Self::validate(&raw)?;
        notices.extend(config.unread(&raw));
        Ok(config)
    }

    /// Reads the TOML text that [`Config::to_toml`] wrote.
    ///
    /// # Errors
    /// Returns the errors of [`Config::load`].
    pub fn from_toml(text: &str) -> Result<Self> {
        Self::validate(&RawConfig::read_text(text, Path::new("saved configuration"))?)
    }

    /// Builds a configuration from imported keys; errors name no line, as there is no file.
    ///
    /// # Errors
    /// Returns the errors of [`Config::load`].
    pub(crate) fn from_imported(entries: impl IntoIterator<Item = (String, serde_json::Value)>) -> Result<Self> {
        Self::validate(&RawConfig::of_entries(entries)?)
    }

    /// Adds to an error about values the places where these keys were written.
    pub(crate) fn located(file: Option<&Path>, overrides: &[String], error: Error) -> Error {
        match RawConfig::read(file, overrides) {
            Ok(raw) => raw.locate(error),
            Err(_) => error,
        }
    }

    /// Model and rows of a run, even if the configuration has other errors, so that missing files can be reported together with those.
    pub fn sources(file: Option<&Path>, overrides: &[String]) -> Option<Sources> {
        let (raw, mut wrong) = (RawConfig::read(file, overrides).ok()?, Vec::new());
        let model = PathBuf::read(&raw, "model_name_or_path", None, &ANY, &mut wrong)?;
        let revision = Option::<String>::read(&raw, "model_revision", Some(None), &ANY, &mut wrong)?;
        let data = DataConfig::read(&raw, "", None, &ANY, &mut wrong).filter(|data| data.check_source(&raw).is_ok())?;
        let eval_steps = Option::<usize>::read(&raw, "eval_steps", Some(None), &ANY, &mut wrong).flatten();
        let teacher = Option::<PathBuf>::read(&raw, "teacher_model_name_or_path", Some(None), &ANY, &mut wrong)?;
        let of_teacher = Option::<String>::read(&raw, "teacher_model_revision", Some(None), &ANY, &mut wrong)?;
        Some(Sources { model, revision, teacher: teacher.map(|teacher| (teacher, of_teacher)), data, eval_steps })
    }
}

impl SftConfig {
    /// Reads a file and overrides like [`Config::load`], with the same errors.
    pub fn load(file: Option<&Path>, overrides: &[String]) -> Result<Self> {
        Self::load_noting(file, overrides, &mut Vec::new())
    }

    /// Like [`SftConfig::load`], and adds a sentence to `notices` for every value that is converted.
    pub fn load_noting(file: Option<&Path>, overrides: &[String], notices: &mut Vec<String>) -> Result<Self> {
        Self::validate(&read_noting(file, overrides, notices)?)
    }
}
