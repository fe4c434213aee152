//! The configuration being built by `import`, and notes on every key of the other trainer.

use std::path::Path;

use serde_json::Value;

use super::{expand, is_ours};
use crate::config::{Config, ForeignEntry, toml_value};
use crate::console;
use crate::error::{Error, Result};
use crate::migration::{self, NONE};

/// Keys of the other trainer that are not translated yet.
pub(super) struct ForeignKeys {
    entries: Vec<ForeignEntry>,
}

impl ForeignKeys {
    pub fn new(entries: Vec<ForeignEntry>) -> Self {
        Self { entries }
    }

    /// Whether a key has one of these prefixes.
    pub fn has_table(&self, starts: &[&str]) -> bool {
        self.entries.iter().any(|(key, ..)| starts.iter().any(|start| key.trim_start_matches('+').starts_with(start)))
    }

    /// Removes and returns the value of a key that is set. verl's names are given without `actor_rollout_ref`. The caller must note what becomes of
    /// the key.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        self.take_if(name, |_| true)
    }

    /// Like [`ForeignKeys::take`], but only if the value `fits`.
    pub fn take_if(&mut self, name: &str, fits: impl Fn(&Value) -> bool) -> Option<Value> {
        let at = self.position(name).filter(|at| fits(&self.entries[*at].1))?;
        let (_, value, written) = self.entries.remove(at);
        Some(written.unwrap_or(value))
    }

    /// Adds the keys of a table that was given as text.
    pub fn extend(&mut self, table: &str, keys: serde_json::Map<String, Value>) {
        self.entries.extend(keys.into_iter().map(|(key, value)| (format!("{table}.{key}"), value, None)));
    }

    /// Removes the keys whose values still contain shell variables or references (`${..}`).
    pub fn take_unfilled(&mut self, is_script: bool) -> Vec<(String, Value)> {
        let is_unfilled = |(key, value, _): &mut ForeignEntry| {
            let text = value.to_string();
            let has_more = if is_script { expand::has_variable(&text) } else { text.contains("${") };
            has_more && !migration::is_harmless_at(key, value)
        };
        self.entries.extract_if(.., is_unfilled).map(|(key, value, _)| (key, value)).collect()
    }

    /// Removes and returns a numeric value.
    pub fn take_number(&mut self, name: &str) -> Option<f64> {
        self.take_if(name, Value::is_number)?.as_f64()
    }

    /// Returns a numeric value and keeps the key for translation.
    pub fn number(&self, name: &str) -> Option<f64> {
        self.position(name).and_then(|at| self.entries[at].1.as_f64())
    }

    /// Whether a key is set.
    pub fn has(&self, name: &str) -> bool {
        self.position(name).is_some()
    }

    /// Whether a key is true.
    pub fn is_true(&self, name: &str) -> bool {
        self.position(name).is_some_and(|at| self.entries[at].1 == true)
    }

    /// Whether a key has this text as value.
    pub fn is_word(&self, name: &str, word: &str) -> bool {
        self.position(name).is_some_and(|at| self.entries[at].1 == word)
    }

    /// Whether a key is false.
    pub fn is_false(&self, name: &str) -> bool {
        self.position(name).is_some_and(|at| self.entries[at].1 == false)
    }

    /// Whether a key of ours is set, under its own or another trainer's name.
    pub fn sets(&self, ours: &str) -> bool {
        let is_meant = |key: &str| migration::bare(key) == ours || migration::renamed(key).as_deref() == Some(ours);
        self.entries.iter().any(|(key, value, _)| is_meant(key) && !is_nothing(value))
    }

    /// Whether the model named by a key has experts, judging by a name such as `Qwen3-30B-A3B`.
    pub fn has_experts(&self, name: &str) -> bool {
        let model =
            self.position(name).map(|at| migration::word(&self.entries[at].1).to_lowercase()).unwrap_or_default();
        let is_active = |part: &str| {
            let number = part.strip_prefix('a').and_then(|rest| rest.strip_suffix('b'));
            number.is_some_and(|number| number.parse::<f64>().is_ok())
        };
        model.contains("moe") || model.split(['-', '/', '_']).any(is_active)
    }

    fn position(&self, name: &str) -> Option<usize> {
        self.entries.iter().position(|(key, value, _)| migration::bare(key) == name && !is_nothing(value))
    }
}

fn is_nothing(value: &Value) -> bool {
    value.is_null() || value.as_array().is_some_and(Vec::is_empty)
}

/// A note `key: why`. A key that looks like the name of a secret is quoted, because redaction would hide the text after `hub_token: `.
fn noted(key: &str, why: &str) -> String {
    let plain = format!("{key}: {why}");
    if console::redact(&plain) == plain { plain } else { format!("`{key}`: {why}") }
}

/// A key of the configuration being built.
struct DraftKey {
    key: String,
    value: Value,
    /// The original key, and why the value differs; `None` if both are unchanged.
    note: Option<String>,
}

impl DraftKey {
    /// The key with its value and reasons, as a line of the file.
    fn line(&self, reason: &str) -> String {
        let reasons: Vec<&str> = self.note.as_deref().into_iter().chain([reason]).filter(|it| !it.is_empty()).collect();
        noted(&format!("{} = {}", self.key, toml_value(&self.value)), &reasons.join("; "))
    }
}

/// The configuration being built, each key once, and notes on the original keys.
#[derive(Default)]
pub(super) struct Draft {
    keys: Vec<DraftKey>,
    dropped: Vec<String>,
    /// Notes on keys without an equivalent, which change the result.
    lost: Vec<String>,
    /// Required keys that the original does not contain, such as the rewards of a Python script.
    missing: Vec<String>,
    /// Number of processes per node.
    pub nproc: Option<u64>,
    /// Number of nodes, if there are several.
    pub nnodes: Option<u64>,
}

impl Draft {
    /// Sets a key; the note names the original key and says why the value differs.
    pub fn set(&mut self, key: &str, value: impl Into<Value>, note: impl Into<String>) {
        self.put(DraftKey { key: key.to_owned(), value: value.into(), note: Some(note.into()) });
    }

    /// Keeps a key whose name and meaning are the same here.
    pub fn keep(&mut self, key: &str, value: Value) {
        self.put(DraftKey { key: key.to_owned(), value, note: None });
    }

    /// Adds a key. If two original keys map to the same key, the later one is used and the other is noted.
    fn put(&mut self, new: DraftKey) {
        if let Some(at) = self.position(&new.key) {
            let old = self.keys.remove(at);
            match old.value == new.value {
                true => self.dropped.push(old.line("the key is set twice")),
                false => self.lost.push(old.line(&format!("{} = {} is used instead", new.key, toml_value(&new.value)))),
            }
        }
        self.keys.push(new);
    }

    fn position(&self, key: &str) -> Option<usize> {
        self.keys.iter().position(|known| known.key == key)
    }

    /// Notes a key that is left out without an effect on the result.
    pub fn drop(&mut self, key: &str, why: &str) {
        self.dropped.push(noted(key, why));
    }

    /// Notes a key that is left out and changes the result.
    pub fn lose(&mut self, key: &str, value: &Value, why: &str) {
        self.lost.push(noted(&format!("{key} = {}", toml_value(value)), why));
    }

    /// Adds a reward with this weight to rewards of weight 1; returns whether that was possible.
    pub fn adds_reward(&mut self, name: &str, weight: f64) -> bool {
        let Some(at) = self.position("reward_funcs") else { return false };
        let Value::Array(names) = &mut self.keys[at].value else { return false };
        let weights: Vec<_> = names.iter().map(|_| 1.0).chain([weight]).collect();
        names.push(name.into());
        self.set("reward_weights", weights, format!("{name} beside the reward"));
        true
    }

    /// Notes a word of a script from which no key was read.
    pub fn lose_word(&mut self, word: String) {
        self.lost.push(word);
    }

    /// Writes out the original trainer's default of a key that was not set.
    pub fn fill(&mut self, key: &str, value: impl Into<Value>, whose: &str) {
        if !self.has(key) {
            self.set(key, value, whose);
        }
    }

    pub fn has(&self, key: &str) -> bool {
        self.position(key).is_some()
    }

    /// Translates by the dictionary the keys that no rule has taken.
    pub fn translate_rest(&mut self, theirs: ForeignKeys) {
        for (key, value, written) in theirs.entries {
            let advice = migration::advice(&key).unwrap_or(NONE);
            match migration::renamed(&key) {
                _ if is_nothing(&value) => self.drop(&key, "the value is empty"),
                _ if is_ours(&key) => match written {
                    Some(written) => self.set(&key, value, format!("it was {}", toml_value(&written))),
                    None => self.keep(&key, value),
                },
                Some(ours) => {
                    let value = migration::value(&ours, &value).unwrap_or(value);
                    self.set(&ours, value, format!("it was {key}"));
                }
                None if migration::is_harmless_at(&key, &value) => self.drop(&key, advice),
                None => self.lose(&key, &value, advice),
            }
        }
    }

    /// Validates the configuration. A key with an invalid value is removed and noted as having no equivalent, and a missing key is noted.
    ///
    /// # Errors
    /// The remaining errors.
    pub fn check(&mut self) -> Result<()> {
        loop {
            let entries = self.keys.iter().map(|known| (known.key.clone(), known.value.clone()));
            let Err(error) = Config::from_imported(entries) else { return Ok(()) };
            let errors = match error {
                Error::InvalidConfig(all) => all,
                other => vec![other],
            };
            let refused = errors.iter().find_map(|error| match error {
                Error::InvalidValue { key, expected, .. } => Some((self.position(key)?, expected)),
                _ => None,
            });
            let Some((at, expected)) = refused else { return self.take_missing(errors) };
            let line = self.keys.remove(at).line(&format!("expected {expected}"));
            self.lost.push(line);
        }
    }

    /// Notes missing keys; returns the other errors.
    fn take_missing(&mut self, errors: Vec<Error>) -> Result<()> {
        let mut wrong = Vec::new();
        for error in errors {
            match error {
                Error::InvalidValue { key, expected, .. } if !self.has(&key) => {
                    let expected = expected.strip_suffix(" (this key is required)").unwrap_or(&expected);
                    self.missing.push(noted(&key, &format!("expected {expected}")));
                }
                other => wrong.push(other),
            }
        }
        Error::of_all(wrong).map_or(Ok(()), Err)
    }

    fn lines(&self) -> String {
        let known = Config::keys();
        let place = |key: &str| known.iter().position(|name| name == key).unwrap_or(known.len());
        let mut sorted: Vec<_> = self.keys.iter().collect();
        sorted.sort_by_key(|known| place(&known.key));
        sorted.iter().map(|known| format!("{} = {}\n", known.key, toml_value(&known.value))).collect()
    }

    /// The text of the file, which begins with the notes.
    pub fn text(&self, file: &Path, program: &str) -> String {
        let nproc = self.nproc.map(|count| format!(" --nproc {count}")).unwrap_or_default();
        let nnodes = self.nnodes.map(|count| format!(" --nnodes {count} --node_rank RANK --master_addr NODE_0"));
        let nproc = nproc + &nnodes.unwrap_or_default();
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let mut text = format!("# From {name} of {program}; start it with: colo-grpo{nproc} --config THIS_FILE\n");
        for note in self.notes() {
            note.lines().for_each(|line| text += &format!("# {line}\n"));
        }
        text + "\n" + &self.lines()
    }

    /// Whether an original key is kept unchanged.
    #[cfg(test)]
    pub fn keeps(&self, key: &str) -> bool {
        self.keys.iter().any(|known| known.key == key && known.note.is_none())
    }

    /// One paragraph for each kind of note.
    pub fn notes(&self) -> Vec<String> {
        let changed = self.keys.iter().filter(|known| known.note.is_some()).map(|known| known.line(""));
        let kinds = [
            ("changed", changed.collect()),
            ("LEFT OUT, without an effect on the result", self.dropped.clone()),
            ("MISSING, add each before the run", self.missing.clone()),
            ("WITHOUT AN EQUIVALENT, look at each", self.lost.clone()),
        ];
        let note = |(title, notes): (&str, Vec<String>)| format!("{title}:\n  {}", notes.join("\n  "));
        kinds.into_iter().filter(|(_, notes)| !notes.is_empty()).map(note).collect()
    }
}
