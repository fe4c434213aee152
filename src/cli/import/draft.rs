//! A configuration in the making, and what became of every key of the other one.

use std::path::Path;

use serde_json::Value;

use super::is_ours;
use crate::config::{Config, ForeignEntry, toml_value};
use crate::error::{Error, Result};
use crate::migration::{self, NONE};

/// Keys of the other program that are not translated yet.
pub(super) struct ForeignKeys {
    entries: Vec<ForeignEntry>,
}

impl ForeignKeys {
    pub fn new(entries: Vec<ForeignEntry>) -> Self {
        Self { entries }
    }

    /// Whether a key begins so.
    pub fn has_table(&self, starts: &[&str]) -> bool {
        self.entries.iter().any(|(key, ..)| starts.iter().any(|start| key.trim_start_matches('+').starts_with(start)))
    }

    /// Takes a key out: its value as it was written. verl's names are without `actor_rollout_ref`.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        let at = self.entries.iter().position(|(key, ..)| migration::bare(key) == name)?;
        let (_, value, written) = self.entries.remove(at);
        Some(written.unwrap_or(value))
    }

    /// [`ForeignKeys::take`] of a number.
    pub fn take_number(&mut self, name: &str) -> Option<f64> {
        self.take(name)?.as_f64()
    }

    /// Reads a key and leaves it to be translated.
    pub fn number(&self, name: &str) -> Option<f64> {
        self.entries.iter().find(|(key, ..)| migration::bare(key) == name).and_then(|(_, value, _)| value.as_f64())
    }
}

/// Keys of ours, and notes.
#[derive(Default)]
pub(super) struct Draft {
    keys: Vec<(String, Value)>,
    changed: Vec<String>,
    dropped: Vec<String>,
    /// Without an equivalent: the result is another one.
    lost: Vec<String>,
    /// Processes to start.
    pub nproc: Option<u64>,
}

impl Draft {
    /// Sets a key of ours; a note says which one of theirs it was and why the value is another.
    pub fn set(&mut self, key: &str, value: impl Into<Value>, note: impl Into<String>) {
        let value = value.into();
        self.changed.retain(|note| !note.starts_with(&format!("{key} = ")));
        self.changed.push(format!("{key} = {}: {}", toml_value(&value), note.into()));
        self.keys.retain(|(known, _)| known != key);
        self.keys.push((key.to_owned(), value));
    }

    /// Keeps a key that is ours by name and meaning.
    pub fn keep(&mut self, key: &str, value: Value) {
        self.keys.push((key.to_owned(), value));
    }

    /// Leaves out what changes nothing.
    pub fn drop(&mut self, key: &str, why: &str) {
        self.dropped.push(format!("{key}: {why}"));
    }

    /// Leaves out what changes the result.
    pub fn lose(&mut self, key: &str, value: &Value, why: &str) {
        self.lost.push(format!("{key} = {}: {why}", toml_value(value)));
    }

    pub fn has(&self, key: &str) -> bool {
        self.keys.iter().any(|(known, _)| known == key)
    }

    /// Translates by the dictionary what no rule has taken.
    pub fn translate_rest(&mut self, theirs: ForeignKeys) {
        for (key, value, written) in theirs.entries {
            let advice = migration::advice(&key).unwrap_or(NONE);
            let is_nothing = value.is_null() || value.as_array().is_some_and(Vec::is_empty);
            match migration::renamed(&key) {
                _ if is_nothing => self.drop(&key, "nothing is set"),
                _ if is_ours(&key) => match written {
                    Some(written) => self.set(&key, value, format!("it was {}", toml_value(&written))),
                    None => self.keep(&key, value),
                },
                Some(ours) => {
                    let value = migration::value(&ours, &value).unwrap_or(value);
                    self.set(&ours, value, format!("it was {key}"));
                }
                None if migration::is_harmless(&key) => self.drop(&key, advice),
                None => self.lose(&key, &value, advice),
            }
        }
    }

    /// Reads the configuration; a key whose value is refused is left out, as without an equivalent.
    ///
    /// # Errors
    /// What is still missing or wrong.
    pub fn check(&mut self) -> Result<()> {
        loop {
            let error = match Config::from_toml(&self.lines()) {
                Ok(_) => return Ok(()),
                Err(error) => error,
            };
            let first = match error {
                Error::InvalidConfig(all) => all.into_iter().next().expect("there are several"),
                other => other,
            };
            let Error::InvalidValue { key, expected, .. } = &first else { return Err(first) };
            let Some(at) = self.keys.iter().position(|(known, _)| known == key) else { return Err(first) };
            let (key, value) = self.keys.remove(at);
            self.changed.retain(|note| !note.starts_with(&format!("{key} = ")));
            let expected = expected.split(" (saved configuration").next().unwrap_or_default();
            self.lose(&key, &value, &format!("expected {expected}"));
        }
    }

    fn lines(&self) -> String {
        let known = Config::keys();
        let place = |key: &str| known.iter().position(|name| name == key).unwrap_or(known.len());
        let mut sorted: Vec<_> = self.keys.iter().collect();
        sorted.sort_by_key(|(key, _)| place(key));
        sorted.iter().map(|(key, value)| format!("{key} = {}\n", toml_value(value))).collect()
    }

    /// The file, which begins with what became of the other one.
    pub fn text(&self, file: &Path, program: &str) -> String {
        let nproc = self.nproc.map(|count| format!(" --nproc {count}")).unwrap_or_default();
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let mut text = format!("# From {name} of {program}; start it with: colo-grpo{nproc} --config THIS_FILE\n");
        for note in self.notes() {
            note.lines().for_each(|line| text += &format!("# {line}\n"));
        }
        text + "\n" + &self.lines()
    }

    /// One paragraph for each kind of note.
    pub fn notes(&self) -> Vec<String> {
        let kinds = [
            ("changed", &self.changed),
            ("left out, without a change of the result", &self.dropped),
            ("WITHOUT AN EQUIVALENT, look at each", &self.lost),
        ];
        let note = |(title, notes): (&str, &Vec<String>)| format!("{title}:\n  {}", notes.join("\n  "));
        kinds.into_iter().filter(|(_, notes)| !notes.is_empty()).map(note).collect()
    }
}
