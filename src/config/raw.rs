//! Keys and values as written, each with its place: those of a TOML or YAML file, overridden by those of the command line.
//!
//! A file may come from anybody, so its size, nesting and number of keys are limited before they cost time or memory.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Map, Number, Value};
use toml::de::{DeTable, DeValue};

use super::flat::{flatten, join};
use super::{unquoted, yaml};
use crate::error::{Error, Result};
use crate::migration;
use crate::untrusted::{self, MAX_RUN_CONFIG_BYTES, ThreadLimits};

/// Maximum number of keys in one configuration, several times the number of existing keys.
const MAX_KEYS: usize = 2048;
/// Maximum number of characters in a file that may open a level of nesting: brackets, dots in keys, YAML dashes.
const MAX_OPENINGS: usize = 8192;
/// Limits on time and memory for parsing a file.
const LIMITS: ThreadLimits = ThreadLimits { stack_bytes: 64 << 20, memory_bytes: 128 << 20, cpu_s: 10 };

/// Entries as the user wrote them, before validation.
#[derive(Debug, Default)]
pub(crate) struct RawConfig {
    pub(super) entries: Vec<Entry>,
    /// Keys of the file that were replaced by those of the command line.
    replaced: Vec<Entry>,
}

/// The place that errors give for an override.
const COMMAND_LINE: &str = "command line";

#[derive(Debug)]
pub(super) struct Entry {
    pub key: String,
    pub value: Value,
    /// The value as written, if it was converted to `value`.
    written: Option<Value>,
    /// Place of the key: `run.toml:12` or `command line`; empty if there is none.
    pub origin: String,
}

impl RawConfig {
    /// Reads the file (`.toml`, `.yaml`, `.yml`, or `.json` such as a run's run_config.json) and applies `key=value` overrides; the last override of
    /// a key wins.
    ///
    /// # Errors
    /// [`Error::ConfigSyntax`] with the line of a syntax error.
    pub fn read(file: Option<&Path>, overrides: &[String]) -> Result<Self> {
        let (owned, texts) = (file.map(Path::to_owned), overrides.to_vec());
        let read = untrusted::once("configuration", LIMITS, move || Self::read_all(owned.as_deref(), &texts));
        read.unwrap_or_else(|message| {
            let origin = file.map_or(COMMAND_LINE.to_owned(), |file| file.display().to_string());
            Err(Error::ConfigSyntax { origin, message })
        })
    }

    fn read_all(file: Option<&Path>, overrides: &[String]) -> Result<Self> {
        let mut raw = Self::default();
        if let Some(file) = file {
            raw.read_file(file)?;
        }
        for text in overrides {
            raw.read_override(text)?;
        }
        raw.replace_source();
        Ok(raw)
    }

    /// If the command line names training rows, removes those of the file, whatever key they are given by. Without evaluation rows the file's
    /// `eval_steps` is removed, too.
    fn replace_source(&mut self) {
        let sets = |key: &str, origin: Option<&str>| {
            let is_set = |entry: &&Entry| !entry.value.is_null() && entry.value != "none";
            let entry = self.entries.iter().find(|entry| entry.key == key).filter(is_set);
            entry.is_some_and(|entry| origin.is_none_or(|origin| entry.origin == origin))
        };
        let [by_file, by_name] = ["train_file", "dataset_name"].map(|key| sets(key, Some(COMMAND_LINE)));
        let without: &[&str] = match (by_file, by_name) {
            (true, false) if sets("dataset_name", None) => {
                let all = &["dataset_name", "dataset_config", "eval_steps"];
                if sets("eval_file", None) { &all[..2] } else { all }
            }
            (false, true) if sets("train_file", None) => &["train_file", "train_file_weights"],
            _ => return,
        };
        let is_replaced = |entry: &mut Entry| without.contains(&entry.key.as_str()) && entry.origin != COMMAND_LINE;
        self.replaced = self.entries.extract_if(.., is_replaced).collect();
    }

    /// Parses TOML text that is not a file of the user.
    pub fn read_text(text: &str, origin: &Path) -> Result<Self> {
        let mut raw = Self::default();
        raw.read_toml(text, origin)?;
        Ok(raw)
    }

    /// Takes keys with values, without places.
    pub fn of_entries(entries: impl IntoIterator<Item = (String, Value)>) -> Result<Self> {
        let mut raw = Self::default();
        entries.into_iter().try_for_each(|(key, value)| raw.add(key, value, String::new()))?;
        Ok(raw)
    }

    /// Every key with its value, and with the value as written if that was converted.
    pub(super) fn into_entries(self) -> impl Iterator<Item = (String, Value, Option<Value>)> {
        self.entries.into_iter().map(|Entry { key, value, written, .. }| (key, value, written))
    }

    /// The value written for `key`.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.entries.iter().find(|entry| entry.key == key).map(|entry| &entry.value)
    }

    /// Place of a key, or of the first key of a table.
    pub fn origin(&self, key: &str) -> Option<&str> {
        let is_in =
            |entry: &&Entry| entry.key.strip_prefix(key).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
        self.entries.iter().find(is_in).map(|entry| &*entry.origin).filter(|origin| !origin.is_empty())
    }

    /// Sentences about values that were converted.
    pub fn notices(&self) -> impl Iterator<Item = String> + '_ {
        let read = self.entries.iter().filter_map(|Entry { key, value, written, origin }| {
            let written = written.as_ref()?;
            Some(format!("{origin}: {key} = {written} is read as {key} = {value}"))
        });
        let replaced = self.replaced.iter().map(|Entry { key, value, origin, .. }| {
            let why = match key.as_str() {
                "eval_steps" => {
                    "the training rows given on the command line have no evaluation rows; name some with eval_file=FILE"
                }
                _ => "the command line names other training rows",
            };
            format!("{origin}: {key} = {value} is ignored: {why}")
        });
        read.chain(replaced)
    }

    /// Names of the sub-tables of `table`, for tables whose entries have names of the user's choice.
    pub fn names_in(&self, table: &str) -> BTreeSet<&str> {
        let start = format!("{table}.");
        let rest = self.entries.iter().filter_map(|entry| entry.key.strip_prefix(&start));
        rest.filter_map(|rest| rest.split('.').next()).collect()
    }

    /// Adds the places of the keys to errors about values.
    pub fn locate(&self, error: Error) -> Error {
        match error {
            Error::InvalidValue { key, got, expected } => {
                let entry = self.entries.iter().find(|entry| entry.key == key && !entry.origin.is_empty());
                let place = entry.map(|entry| format!(" ({})", entry.origin)).unwrap_or_default();
                Error::InvalidValue { key, got, expected: expected + &place }
            }
            Error::InvalidConfig(all) => {
                Error::InvalidConfig(all.into_iter().map(|error| self.locate(error)).collect())
            }
            other => other,
        }
    }

    fn read_file(&mut self, file: &Path) -> Result<()> {
        let at = |line: usize| format!("{}:{line}", file.display());
        let failed = |message: String| Error::ConfigSyntax { origin: file.display().to_string(), message };
        let text = untrusted::read_text(file, MAX_RUN_CONFIG_BYTES).map_err(|error| failed(error.to_string()))?;
        check_openings(&text).map_err(failed)?;
        match file.extension().and_then(|extension| extension.to_str()) {
            Some("toml") => self.read_toml(&text, file),
            Some("yaml" | "yml") => {
                for (key, value, line) in
                    yaml::entries(&text).map_err(|(message, line)| Error::ConfigSyntax { origin: at(line), message })?
                {
                    self.add(key, value, at(line))?;
                }
                Ok(())
            }
            Some("json") => {
                let value = serde_json::from_str(&text).map_err(|error| failed(error.to_string()))?;
                let Value::Object(_) = value else { return Err(failed("expected an object of keys".into())) };
                let mut flat = Vec::new();
                flatten("", value, &mut flat);
                flat.into_iter().try_for_each(|(key, value)| self.add(key, value, file.display().to_string()))
            }
            _ => Err(failed("expected a .toml, .yaml, .yml or .json file".into())),
        }
    }

    fn read_toml(&mut self, text: &str, file: &Path) -> Result<()> {
        let ends: Vec<usize> = text.match_indices('\n').map(|(end, _)| end).collect(); // of lines
        let line = |offset: usize| 1 + ends.partition_point(|&end| end < offset);
        let at = |offset: usize| format!("{}:{}", file.display(), line(offset));
        let table = DeTable::parse(text).map_err(|error| {
            let start = error.span().map_or(0, |span| span.start);
            let message = bare_word(text, line(start)).map_or_else(|| error.message().to_owned(), needs_quotes);
            Error::ConfigSyntax { origin: at(start), message }
        })?;
        self.add_toml("", table.get_ref(), &at)
    }

    fn read_override(&mut self, text: &str) -> Result<()> {
        let origin = COMMAND_LINE.to_owned();
        let Some((key, value)) = text.split_once('=') else {
            let is_file = [".toml", ".yaml", ".yml"].iter().any(|kind| text.ends_with(kind));
            let hint = if is_file { "; give a configuration file as --config FILE" } else { "" };
            let message = format!("'{text}' is not key=value{hint}");
            return Err(Error::ConfigSyntax { origin, message });
        };
        let (key, value) = (key.trim(), value.trim());
        // A bare word, a path or a sentence is no TOML value: it is text, or a list of names.
        let value = match DeValue::parse(value) {
            Ok(parsed) => to_json(parsed.get_ref()).unwrap_or_else(|_| value.into()),
            Err(_) => unquoted::names(key, value).unwrap_or_else(|| value.into()),
        };
        let mut flat = Vec::new();
        flatten(key, value, &mut flat);
        for (key, value) in flat {
            self.entries.retain(|entry| entry.key != key);
            self.add(key, value, origin.clone())?;
        }
        Ok(())
    }

    fn add_toml(&mut self, table: &str, entries: &DeTable<'_>, at: &dyn Fn(usize) -> String) -> Result<()> {
        let mut ordered: Vec<_> = entries.iter().collect();
        ordered.sort_by_key(|(key, _)| key.span().start);
        for (name, value) in ordered {
            let key = join(table, name.get_ref());
            let origin = at(name.span().start);
            match value.get_ref() {
                DeValue::Table(inner) if !inner.is_empty() => self.add_toml(&key, inner, at)?,
                other => {
                    let value =
                        to_json(other).map_err(|message| Error::ConfigSyntax { origin: origin.clone(), message })?;
                    self.add(key, value, origin)?;
                }
            }
        }
        Ok(())
    }

    fn add(&mut self, key: String, value: Value, origin: String) -> Result<()> {
        if self.entries.len() == MAX_KEYS {
            return Err(Error::ConfigSyntax { origin, message: format!("more than {MAX_KEYS} keys") });
        }
        if let Some(first) = self.entries.iter().find(|entry| entry.key == key) {
            let message = format!("key '{key}' was already given at {}", first.origin);
            return Err(Error::ConfigSyntax { origin, message });
        }
        let ours = migration::value(&key, &value);
        let (value, written) = ours.map_or((value.clone(), None), |ours| (ours, Some(value)));
        self.entries.push(Entry { key, value, written, origin });
        Ok(())
    }
}

fn to_json(value: &DeValue<'_>) -> std::result::Result<Value, String> {
    Ok(match value {
        DeValue::String(text) => text.as_ref().into(),
        DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
            .map_err(|_| format!("{} is outside of the range of TOML integers (64 bits, signed)", number.as_str()))?
            .into(),
        DeValue::Float(number) => {
            let parsed = number.as_str().parse().ok().and_then(Number::from_f64);
            parsed.ok_or_else(|| format!("{} is not a finite number", number.as_str()))?.into()
        }
        DeValue::Boolean(flag) => (*flag).into(),
        DeValue::Datetime(date) => return Err(format!("{date} is a date; put text in quotes")),
        DeValue::Array(items) => {
            items.iter().map(|item| to_json(item.get_ref())).collect::<std::result::Result<_, _>>()?
        }
        DeValue::Table(table) => table
            .iter()
            .map(|(key, value)| Ok((key.get_ref().to_string(), to_json(value.get_ref())?)))
            .collect::<std::result::Result<Map<_, _>, String>>()?
            .into(),
    })
}

/// Refuses text that could be nested so deeply that parsing, comparing or dropping it would exhaust the stack or take too long. Each level opens with
/// one of these characters, so their number bounds the depth, whatever quotes and comments hide.
pub(crate) fn check_openings(text: &str) -> std::result::Result<(), String> {
    let num_openings = text.bytes().filter(|byte| b"[{.".contains(byte)).count()
        + ["- ", "-\n", "-\t", "? ", "?\n", "?\t"].iter().map(|dash| text.matches(dash).count()).sum::<usize>();
    match num_openings {
        0..=MAX_OPENINGS => Ok(()),
        _ => Err(format!(
            "it has {num_openings} brackets, dots and list dashes: expected at most {MAX_OPENINGS}, as each of them may \
             open a nested value"
        )),
    }
}

/// The value in a line (counted from 1) if it is text without quotes.
fn bare_word(text: &str, line: usize) -> Option<&str> {
    let line = text.lines().nth(line - 1)?;
    let value = line.split_once('=')?.1.split('#').next()?.trim();
    let is_word = value.starts_with(|c: char| c.is_alphabetic() || "./~".contains(c)) && !value.contains(['"', '\'']);
    (is_word && !["true", "false", "inf", "nan"].contains(&value)).then_some(value)
}

fn needs_quotes(word: &str) -> String {
    format!("{word} is not a TOML value: put text in quotes (\"{word}\"); numbers, true and false need none")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_overrides_are_toml_values_or_bare_words() {
        let overrides =
            ["a=1", "b=1e-6", "c=[\"x\", \"y\"]", "d=some/path.jsonl", "e=true", "f=x = 1", "g.h=2026-01-01", "a=2"];
        let raw = RawConfig::read(None, &overrides.map(String::from)).unwrap();
        assert_eq!(raw.get("a"), Some(&2.into()));
        assert_eq!(raw.get("b"), Some(&1e-6.into()));
        assert_eq!(raw.get("c"), Some(&serde_json::json!(["x", "y"])));
        assert_eq!(raw.get("d"), Some(&"some/path.jsonl".into()));
        assert_eq!(raw.get("e"), Some(&true.into()));
        assert_eq!(raw.get("f"), Some(&"x = 1".into()));
        assert_eq!(raw.get("g.h"), Some(&"2026-01-01".into()));
        let error = RawConfig::read(None, &["beta".into()]).unwrap_err();
        assert_eq!(error.to_string(), "command line: 'beta' is not key=value");
        let error = RawConfig::read(None, &["run.toml".into()]).unwrap_err();
        assert!(error.to_string().ends_with("'run.toml' is not key=value; give a configuration file as --config FILE"));
    }
}
