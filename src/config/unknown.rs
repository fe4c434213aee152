//! Keys that a configuration does not have, each with advice: the key that was probably meant, or what takes its place here.

use serde_json::Map;
use strsim::levenshtein;

use super::raw::{Entry, RawConfig};
use super::{Config, SftConfig};
use crate::error::{MAX_LISTED, OF_ANOTHER_TRAINER, UnknownKey};
use crate::migration;

/// Longest key for which a similar one is searched, in bytes.
const MAX_MISTYPED_BYTES: usize = 128;

impl RawConfig {
    /// The keys that are not in `known`; those that a message lists come with advice.
    pub fn unknown_keys(&self, known: &[String]) -> Vec<UnknownKey> {
        let unknown = self.entries.iter().filter(|entry| entry.is_unknown(known));
        let bare = |entry: &Entry| UnknownKey { origin: entry.origin.clone(), key: entry.key.clone(), advice: None };
        let told =
            |(index, entry): (usize, &Entry)| if index < MAX_LISTED { entry.unknown(known) } else { bare(entry) };
        unknown.enumerate().map(told).collect()
    }
}

impl Entry {
    /// Whether no key of `known` is meant.
    fn is_unknown(&self, known: &[String]) -> bool {
        let pattern = pattern(&self.key, known);
        let start = format!("{pattern}.");
        let is_table = || known.iter().any(|name| name.starts_with(&start));
        let is_empty_table = self.value.as_object().is_some_and(Map::is_empty) && is_table();
        !known.contains(&pattern) && !is_empty_table
    }

    /// Describes a key that is not in `known`, with advice.
    fn unknown(&self, known: &[String]) -> UnknownKey {
        let Self { key, origin, .. } = self;
        let pattern = pattern(key, known);
        let start = format!("{pattern}.");
        let inner: Vec<&str> = known.iter().filter_map(|name| name.strip_prefix(&start)).collect();
        let table = (!inner.is_empty()).then(|| format!("it is a table of {}", inner.join(", ")));
        let other = || migration::advice(key).map(|advice| format!("{OF_ANOTHER_TRAINER}{advice}"));
        let of_other_runs = || {
            let has = |keys: &[String]| keys.contains(&self::pattern(key, keys));
            match (has(Config::keys()), has(&SftConfig::keys())) {
                (true, false) => Some("GRPO runs have it, supervised ones (sft) do not".to_owned()),
                (false, true) => Some("supervised runs (sft) have it, GRPO runs do not".to_owned()),
                _ => None,
            }
        };
        let (outer, name) = pattern.rsplit_once('.').unwrap_or(("", &pattern));
        let start = format!("{outer}.");
        let beside: Vec<String> =
            known.iter().filter_map(|name| name.strip_prefix(&start)).map(str::to_owned).collect();
        let close = || {
            let in_table = nearest(name, &beside).map(|name| format!("{start}{name}"));
            let close = in_table.or_else(|| nearest(&pattern, known).map(str::to_owned));
            close.map(|name| format!("did you mean '{name}'?"))
        };
        let all = || (!beside.is_empty()).then(|| format!("{outer} has {}", beside.join(", ")));
        let advice = table.or_else(other).or_else(of_other_runs).or_else(close).or_else(all);
        UnknownKey { origin: origin.clone(), key: key.clone(), advice }
    }
}

/// `rewards.brevity.timeout_s` → `rewards.*.timeout_s`, where the tables of a table have names of the user's choice;
/// `environment_args.taskset.game` → `environment_args.**`, where everything below a table has.
pub(crate) fn pattern(key: &str, known: &[String]) -> String {
    let Some((table, rest)) = key.split_once('.') else { return key.to_owned() };
    let (any, any_depth) = (format!("{table}.*"), format!("{table}.**"));
    if known.contains(&any_depth) {
        return any_depth;
    }
    if !known.iter().any(|name| name.starts_with(&any)) {
        return key.to_owned();
    }
    rest.split_once('.').map_or_else(|| any.clone(), |(_, field)| format!("{any}.{field}"))
}

/// The known key that was probably meant: a few letters away, or one that contains the other.
fn nearest<'a>(key: &str, known: &'a [String]) -> Option<&'a str> {
    if key.len() > MAX_MISTYPED_BYTES {
        return None;
    }
    let closest = known.iter().min_by_key(|name| levenshtein(key, name))?;
    if levenshtein(key, closest) <= (key.len() / 4).max(2) {
        return Some(closest);
    }
    // One that holds less than half of the other has another meaning: `stop` is not `early_stopping_patience`.
    let related = |name: &&String| {
        let (short, long) = (name.len().min(key.len()), name.len().max(key.len()));
        short >= 4 && 2 * short >= long && (key.contains(name.as_str()) || name.contains(key))
    };
    known.iter().filter(related).max_by_key(|name| name.len()).map(String::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_finds_typos_prefixed_names_and_bare_table_keys() {
        let known: Vec<String> =
            ["learning_rate", "importance_sampling_mode", "zero.stage", "beta"].map(String::from).into();
        assert_eq!(nearest("learnign_rate", &known), Some("learning_rate"));
        assert_eq!(nearest("vllm_importance_sampling_mode", &known), Some("importance_sampling_mode"));
        assert_eq!(nearest("stage", &known), Some("zero.stage"));
        for far in ["completely_else", "early_beta_stopping", "load_best_zero.stage_at_end", "learning_something"] {
            assert_eq!(nearest(far, &known), None, "{far}");
        }
    }
}
