//! How a configuration is read: a file, overrides over it, and all that is wrong with both reported together.

use std::path::{Path, PathBuf};

use super::field::Field;
use super::range::ANY;
use super::raw::RawConfig;
use super::{Config, DataConfig, SftConfig, Sources};
use crate::error::{Error, Result};

/// A key of a configuration that may be another program's, its value, and what was written where that stands for something else.
pub(crate) type ForeignEntry = (String, serde_json::Value, Option<serde_json::Value>);

/// Every key of a file and of overrides, whatever program's they are.
///
/// # Errors
/// [`Error::ConfigSyntax`](crate::Error::ConfigSyntax) with the line for what does not parse.
pub(crate) fn foreign_entries(file: Option<&Path>, overrides: &[String]) -> Result<Vec<ForeignEntry>> {
    Ok(RawConfig::read(file, overrides)?.into_entries().collect())
}

/// The raw entries, and a sentence in `notices` for every value that is read as another.
fn read_noting(file: Option<&Path>, overrides: &[String], notices: &mut Vec<String>) -> Result<RawConfig> {
    let raw = RawConfig::read(file, overrides)?;
    notices.extend(raw.notices());
    Ok(raw)
}

impl Config {
    /// Reads a TOML or YAML file and lays `key=value` (or `table.key=value`) overrides over it; an override's value is
    /// a TOML value, or text where it is none. What depends on the world is left to [`Config::validate_world`].
    ///
    /// # Errors
    /// [`Error::UnknownKeys`](crate::Error::UnknownKeys) with file, line and nearest key;
    /// [`Error::InvalidValue`](crate::Error::InvalidValue) and [`Error::ConfigSyntax`](crate::Error::ConfigSyntax)
    /// with file and line; [`Error::InvalidConfig`](crate::Error::InvalidConfig) where several keys or values are wrong.
    pub fn load(file: Option<&Path>, overrides: &[String]) -> Result<Self> {
        Self::load_noting(file, overrides, &mut Vec::new())
    }

    /// [`Config::load`], which adds a sentence to `notices` for every value that is read as another, such as TRL's
    /// `top_k = -1`, and for keys that nothing reads, such as those of tools where there are none.
    ///
    /// # Errors
    /// Returns the errors of [`Config::load`].
    pub fn load_noting(file: Option<&Path>, overrides: &[String], notices: &mut Vec<String>) -> Result<Self> {
        let raw = read_noting(file, overrides, notices)?;
        let config = Self::validate(&raw)?;
        notices.extend(config.unread(&raw));
        Ok(config)
    }

    /// Reads back what [`Config::to_toml`] wrote.
    ///
    /// # Errors
    /// Returns the errors of [`Config::load`].
    pub fn from_toml(text: &str) -> Result<Self> {
        Self::validate(&RawConfig::read_text(text, Path::new("saved configuration"))?)
    }

    /// Reads keys that no file has: its errors name no line.
    ///
    /// # Errors
    /// Returns the errors of [`Config::load`].
    pub(crate) fn from_imported(entries: impl IntoIterator<Item = (String, serde_json::Value)>) -> Result<Self> {
        Self::validate(&RawConfig::of_entries(entries)?)
    }

    /// Adds to an error about values where the keys were written, which whoever checks a configuration later does not know.
    pub(crate) fn located(file: Option<&Path>, overrides: &[String], error: Error) -> Error {
        match RawConfig::read(file, overrides) {
            Ok(raw) => raw.locate(error),
            Err(_) => error,
        }
    }

    /// Where a run's model and rows are, of a configuration that may be wrong otherwise: what is missing is then reported with
    /// all that is wrong.
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
    /// Reads a file and overrides as [`Config::load`] does, with the same errors.
    pub fn load(file: Option<&Path>, overrides: &[String]) -> Result<Self> {
        Self::load_noting(file, overrides, &mut Vec::new())
    }

    /// [`SftConfig::load`], which adds a sentence to `notices` for every value that is read as another.
    pub fn load_noting(file: Option<&Path>, overrides: &[String], notices: &mut Vec<String>) -> Result<Self> {
        Self::validate(&read_noting(file, overrides, notices)?)
    }
}
