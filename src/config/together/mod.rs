//! Whether features go together. One table ([`TABLE`]) has the features that no run has both of, each with its reason: validation, the
//! comparison of engines, the loaders of models and the reference of all keys read it. A feature is a setting, a setting of several keys,
//! or a circumstance of the run that no key says.
//!
//! Not in the table: bounds that one number sets another, which are arithmetic and stay with the numbers, and what a chip lacks, which the
//! chip is asked for (`cuda/abilities.rs`).

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
    /// The files of the model have several projections of a gated delta net in one tensor.
    FusedDeltaNets,
    /// The files of the model have the matrices of all experts in one tensor.
    StackedExperts,
    /// The model has no draft head that is read.
    NoDraftHead,
    /// The world has several nodes.
    SeveralNodes,
    /// A program calls the parts of a step and samples by itself.
    OwnLoop,
    /// A program has a loss of its own.
    OwnLoss,
}

/// Why a row of the table is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConflictKind {
    /// Nothing would read the key, or the two say the opposite.
    Unread,
    /// The run would not be what the keys ask for.
    Wrong,
    /// The program cannot do it.
    Unserved,
}

/// Features that do not go together.
#[derive(Debug)]
pub(crate) struct Conflict {
    pub refused: ConflictKind,
    /// The feature whose key errors name.
    pub feature: Term,
    /// The other feature, all of whose parts a run has.
    pub with: &'static [Term],
    pub why: &'static str,
}

/// A part of a feature.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Term {
    /// A key, or a table of keys, with one of these values.
    Setting(&'static str, KeyValues),
    Circumstance(Circumstance),
}

/// Some values of a key.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum KeyValues {
    /// These words; of a list, one that has any of them.
    Is(&'static [&'static str]),
    /// All but these words.
    Not(&'static [&'static str]),
    Above(f64),
    AtMost(f64),
    /// Texts that begin with this.
    Begins(&'static str),
    /// All but the default.
    Given,
}

/// Settings and circumstances that are to go together.
#[derive(Debug, Clone)]
pub(crate) struct Combination {
    settings: BTreeMap<String, Value>,
    circumstances: Vec<Circumstance>,
}

impl Combination {
    /// All keys of a configuration.
    pub(super) fn of_keys(config: &impl Field) -> Self {
        let mut settings = Vec::new();
        config.write("", &mut settings);
        Self { settings: settings.into_iter().collect(), circumstances: Vec::new() }
    }

    /// Some keys.
    pub(crate) fn of<'a>(settings: impl IntoIterator<Item = (&'a str, Value)>) -> Self {
        Self { settings: BTreeMap::new(), circumstances: Vec::new() }.with(settings)
    }

    /// Sets keys, in the place of those that are set.
    pub(crate) fn with<'a>(mut self, settings: impl IntoIterator<Item = (&'a str, Value)>) -> Self {
        self.settings.extend(settings.into_iter().map(|(key, value)| (key.to_owned(), value)));
        self
    }

    /// Adds what is known beside keys.
    pub(crate) fn in_circumstances(mut self, circumstances: impl IntoIterator<Item = Circumstance>) -> Self {
        self.circumstances.extend(circumstances);
        self
    }

    /// An error for each row of the table that refuses the combination.
    pub(crate) fn refusals(&self) -> impl Iterator<Item = Error> + '_ {
        TABLE.iter().filter_map(|row| row.refusal(self))
    }

    /// Refuses features that do not go together.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] on the first key of a row of the table; [`Error::InvalidConfig`] with all rows.
    pub(crate) fn check(&self) -> Result<()> {
        Error::of_all(self.refusals().collect()).map_or(Ok(()), Err)
    }
}

impl Config {
    /// All keys, to be looked up in the table.
    pub(crate) fn combination(&self) -> Combination {
        Combination::of_keys(self)
    }
}

impl Conflict {
    /// The error for a combination that has both features.
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
    /// The key and the value, or the circumstance, by which a combination has this part.
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

    /// Whether this is `environment = none` and the combination lacks the key, as supervised runs do: they never have an environment, and
    /// cannot set one.
    fn is_lack_of_environment(&self, combination: &Combination) -> bool {
        let is_none = Self::Setting("environment", KeyValues::Is(&["none"]));
        *self == is_none && !combination.settings.contains_key("environment")
    }

    /// Whether a combination has this part.
    #[cfg(test)]
    pub(crate) fn is_in(&self, combination: &Combination) -> bool {
        self.found(combination).is_some()
    }

    /// The values that the key may have instead.
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

    /// A change by which a run does not have this part.
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

    /// The part as the reference of all keys shows it.
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
    /// The names of a circumstance and of its opposite.
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

/// The declarations of all keys.
fn docs() -> &'static HashMap<String, KeyDoc> {
    static DOCS: OnceLock<HashMap<String, KeyDoc>> = OnceLock::new();
    DOCS.get_or_init(|| described::<Config>().into_iter().map(|doc| (doc.key.clone(), doc)).collect())
}

/// The words that a key takes beside `words`.
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

/// A value as errors show it.
fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Number(number) => number.as_f64().map_or_else(|| number.to_string(), |number| number.to_string()),
        other => other.to_string(),
    }
}
