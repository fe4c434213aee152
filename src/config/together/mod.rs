//! Which features exclude each other. One table ([`TABLE`]) lists pairs of features that no run may combine, each with a reason; validation, the
//! comparison of engines, model loading and the reference page use it. A feature is a setting, a combination of settings, or a fact about the run
//! that no key states.
//!
//! Not in the table: numeric bounds between keys, which are checked with the numbers, and missing features of a GPU (`cuda/abilities.rs`).

mod table;

use std::collections::{BTreeMap, HashMap};
use std::sync::OnceLock;

use serde_json::Value;

use super::Config;
use super::field::{Field, KeyDoc, described};
use crate::error::{Error, Result};
pub(crate) use table::TABLE;

/// A fact about a run that no key states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Circumstance {
    /// The model has experts in some layers or in all.
    Experts,
    /// No layer has experts.
    NoExperts,
    /// Some layers have experts and others do not.
    SomeExperts,
    /// The model has gated delta nets.
    DeltaNets,
    /// No layer has a gated delta net.
    NoDeltaNets,
    /// The model's files store several projections of a gated delta net in one tensor.
    FusedDeltaNets,
    /// The model's files store the matrices of all experts in one tensor.
    StackedExperts,
    /// The model has no supported draft head.
    NoDraftHead,
    /// The run has several nodes.
    SeveralNodes,
    /// A program that uses the library calls the parts of a step itself and samples itself.
    OwnLoop,
    /// A program that uses the library passes its own loss.
    OwnLoss,
}

/// The kind of reason for an exclusion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConflictKind {
    /// The key would have no effect, or contradicts the other.
    Unread,
    /// The run would not do what the keys promise.
    Wrong,
    /// The combination is not implemented.
    Unserved,
}

/// Two features that exclude each other.
#[derive(Debug)]
pub(crate) struct Conflict {
    pub refused: ConflictKind,
    /// The feature whose key error messages name.
    pub feature: Term,
    /// The other feature: all of these parts together.
    pub with: &'static [Term],
    pub why: &'static str,
}

/// One part of a feature.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Term {
    /// A key, or a table of keys, with one of these values.
    Setting(&'static str, KeyValues),
    Circumstance(Circumstance),
}

/// A set of values of a key.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum KeyValues {
    /// One of these words; for a list, a list that contains one of them.
    Is(&'static [&'static str]),
    /// Any value except these words.
    Not(&'static [&'static str]),
    Above(f64),
    AtMost(f64),
    /// Text that begins with this.
    Begins(&'static str),
    /// Any value except the default.
    Given,
}

/// Settings and facts of a run that are checked against the table.
#[derive(Debug, Clone)]
pub(crate) struct Combination {
    settings: BTreeMap<String, Value>,
    circumstances: Vec<Circumstance>,
}

impl Combination {
    /// Takes all keys of a configuration.
    pub(super) fn of_keys(config: &impl Field) -> Self {
        let mut settings = Vec::new();
        config.write("", &mut settings);
        Self { settings: settings.into_iter().collect(), circumstances: Vec::new() }
    }

    /// A configuration of which only some keys are known.
    pub(crate) fn of<'a>(settings: impl IntoIterator<Item = (&'a str, Value)>) -> Self {
        Self { settings: BTreeMap::new(), circumstances: Vec::new() }.with(settings)
    }

    /// Sets keys, replacing earlier values.
    pub(crate) fn with<'a>(mut self, settings: impl IntoIterator<Item = (&'a str, Value)>) -> Self {
        self.settings.extend(settings.into_iter().map(|(key, value)| (key.to_owned(), value)));
        self
    }

    /// Adds facts that no key states.
    pub(crate) fn in_circumstances(mut self, circumstances: impl IntoIterator<Item = Circumstance>) -> Self {
        self.circumstances.extend(circumstances);
        self
    }

    /// One error for each row of the table that the combination violates.
    pub(crate) fn refusals(&self) -> impl Iterator<Item = Error> + '_ {
        TABLE.iter().filter_map(|row| row.refusal(self))
    }

    /// Refuses combinations that the table excludes.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] on the first key of a row of the table; [`Error::InvalidConfig`] with all rows.
    pub(crate) fn check(&self) -> Result<()> {
        Error::of_all(self.refusals().collect()).map_or(Ok(()), Err)
    }
}

impl Config {
    /// All keys, to be checked against the table.
    pub(crate) fn combination(&self) -> Combination {
        Combination::of_keys(self)
    }
}

impl Conflict {
    /// The error of a row if the combination has both features, else `None`.
    pub(crate) fn refusal(&self, combination: &Combination) -> Option<Error> {
        let has_all = self.with.iter().all(|term| term.found(combination).is_some());
        let (key, got) = self.feature.found(combination).filter(|_| has_all)?;
        let others =
            self.with.iter().filter(|term| !term.is_lack_of_environment(combination)).map(|term| term.remedy());
        let remedies: Vec<_> = [self.feature.otherwise()].into_iter().chain(others).collect();
        Some(Error::invalid_value(&key, got, format!("{}: {}", remedies.join(", or "), self.why)))
    }
}

impl Term {
    /// The key and value, or the fact, through which a combination has this part.
    fn found(&self, combination: &Combination) -> Option<(String, String)> {
        match *self {
            Self::Circumstance(one) => {
                combination.circumstances.contains(&one).then(|| (one.words()[0].to_owned(), String::new()))
            }
            Self::Setting(key, _) if self.is_lack_of_environment(combination) => {
                Some((key.to_owned(), "none".to_owned()))
            }
            Self::Setting(key, values) => {
                let is_of =
                    |set: &str| set.strip_prefix(key).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
                let mut settings =
                    combination.settings.range(key.to_owned()..).take_while(|(set, _)| set.starts_with(key));
                let (key, value) = settings.find(|(set, value)| is_of(set) && values.contain(set, value))?;
                Some((key.clone(), shown(value)))
            }
        }
    }

    /// Whether this part is `environment = none` and the combination lacks that key, as in supervised runs, which never have an environment.
    fn is_lack_of_environment(&self, combination: &Combination) -> bool {
        let is_none = Self::Setting("environment", KeyValues::Is(&["none"]));
        *self == is_none && !combination.settings.contains_key("environment")
    }

    /// Whether a combination has this part.
    #[cfg(test)]
    pub(crate) fn is_in(&self, combination: &Combination) -> bool {
        self.found(combination).is_some()
    }

    /// Other values of the key, for the error message.
    fn otherwise(&self) -> String {
        let Self::Setting(key, values) = *self else { return self.remedy() };
        match values {
            KeyValues::Is(words) => match other_words(key, words) {
                others if !others.is_empty() => others.join(" or "),
                _ if words == ["none"] => "a value".to_owned(),
                _ => format!("any value other than {}", words.join(", ")),
            },
            KeyValues::Not(words) => words.join(" or "),
            KeyValues::Above(number) => number.to_string(),
            KeyValues::AtMost(number) => format!("a number above {number}"),
            KeyValues::Begins(start) => format!("one that does not begin with {start}"),
            KeyValues::Given => format!("no {key}"),
        }
    }

    /// A change that removes this part from a run, for the error message.
    fn remedy(&self) -> String {
        match *self {
            Self::Circumstance(one) => one.words()[1].to_owned(),
            Self::Setting(key, KeyValues::Given | KeyValues::Begins(_)) => format!("no {key}"),
            Self::Setting(key, KeyValues::Is(words @ ["none"])) if other_words(key, words).is_empty() => {
                format!("a value for {key}")
            }
            Self::Setting(key, KeyValues::AtMost(number)) => format!("{key} above {number}"),
            Self::Setting(key, _) => format!("{key} = {}", self.otherwise()),
        }
    }

    /// This part as shown on the reference page.
    pub(crate) fn described(&self) -> String {
        match *self {
            Self::Circumstance(one) => one.words()[0].to_owned(),
            Self::Setting(key, KeyValues::Is(words)) => format!("`{key} = {}`", words.join("`, `")),
            Self::Setting(key, KeyValues::Not(words)) => format!("`{key}` other than `{}`", words.join("`, `")),
            Self::Setting(key, KeyValues::Above(number)) => format!("`{key}` above {number}"),
            Self::Setting(key, KeyValues::Begins(start)) => format!("`{key} = {start}..`"),
            Self::Setting(key, KeyValues::AtMost(0.0)) => format!("`{key} = 0`"),
            Self::Setting(key, KeyValues::AtMost(number)) => format!("`{key}` up to {number}"),
            Self::Setting(key, KeyValues::Given) if docs().contains_key(key) => format!("`{key}`"),
            Self::Setting(key, KeyValues::Given) => format!("`{key}.*`"),
        }
    }
}

impl KeyValues {
    fn contain(&self, key: &str, value: &Value) -> bool {
        let is_any = |words: &[&str]| match value {
            Value::Array(entries) => entries.iter().any(|entry| words.contains(&&*shown(entry))),
            value => words.contains(&&*shown(value)),
        };
        match *self {
            Self::Is(words) => is_any(words),
            Self::Not(words) => !is_any(words),
            Self::Above(number) => value.as_f64().is_some_and(|value| value > number),
            Self::AtMost(number) => value.as_f64().is_some_and(|value| value <= number),
            Self::Begins(start) => value.as_str().is_some_and(|text| text.starts_with(start)),
            Self::Given => docs().get(key).and_then(|doc| doc.default.as_ref()) != Some(value),
        }
    }
}

impl Circumstance {
    /// The text for a fact and for its opposite.
    fn words(self) -> [&'static str; 2] {
        match self {
            Self::Experts => ["a model with experts", "a model without experts"],
            Self::NoExperts => ["a model without experts", "a model with experts"],
            Self::SomeExperts => {
                ["a model with experts in only some layers", "a model with experts in all layers or in none"]
            }
            Self::DeltaNets => ["a model with gated delta nets", "a model without gated delta nets"],
            Self::NoDeltaNets => ["a model without gated delta nets", "a model with gated delta nets"],
            Self::FusedDeltaNets => {
                ["a model with in_proj_qkvz and in_proj_ba", "a model without in_proj_qkvz and in_proj_ba"]
            }
            Self::StackedExperts => ["a model with stacked experts", "a model without stacked experts"],
            Self::NoDraftHead => ["a model without a draft head", "a model with a draft head"],
            Self::SeveralNodes => ["several nodes", "one node"],
            Self::OwnLoop => ["a program with its own sampling loop", "Trainer::rollout"],
            Self::OwnLoss => ["a program with its own loss", "the configured loss"],
        }
    }
}

/// Documentation of all keys, by name.
fn docs() -> &'static HashMap<String, KeyDoc> {
    static DOCS: OnceLock<HashMap<String, KeyDoc>> = OnceLock::new();
    DOCS.get_or_init(|| described::<Config>().into_iter().map(|doc| (doc.key.clone(), doc)).collect())
}

/// The words that a key accepts besides `words`.
fn other_words<'a>(key: &str, words: &[&str]) -> Vec<&'a str> {
    let expected = docs().get(key).map_or("", |doc| &doc.expected);
    let all: Vec<&str> = match expected.split_once("one of ") {
        Some((before, listed)) => {
            before.split(' ').take_while(|word| *word == "auto").chain(listed.split(", ")).collect()
        }
        None if expected == "true or false" => vec!["true", "false"],
        None => Vec::new(),
    };
    all.into_iter().filter(|word| !words.contains(word)).collect()
}

/// A value as shown in error messages.
fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Number(number) => number.as_f64().map_or_else(|| number.to_string(), |number| number.to_string()),
        other => other.to_string(),
    }
}
