//! Tables of the keys in a model's JSON files, one table per file. A key that changes results and is not supported is an error.

use std::path::Path;

use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// The keys of one file.
#[derive(Debug)]
pub(crate) struct KeyTable {
    /// Name of the file or of the object within it.
    pub name: &'static str,
    /// Supported keys with the same meaning as in transformers, separated by blanks.
    pub served: &'static str,
    /// Keys that affect neither what is computed nor how text is tokenized.
    pub harmless: &'static str,
    /// Unsupported keys that would change results. They are accepted if absent, null, or equal to one of the listed values.
    pub refused: &'static [(&'static str, &'static [&'static str], &'static str)],
    /// Whether unknown keys are ignored, as transformers does for this file.
    pub ignores_unknown: bool,
}

impl KeyTable {
    /// Checks the values of `map`, the file's object or the part of it at `within`.
    ///
    /// # Errors
    /// [`Error::BadFile`] with the first unsupported key, its value and the expected values.
    pub(crate) fn check(&self, path: &Path, within: &str, map: &Map<String, Value>) -> Result<()> {
        map.iter().filter(|(_, value)| !value.is_null()).try_for_each(|(key, value)| {
            let refuse =
                |expected: String| Err(Error::bad_file(path, format!("{within}{key} is {value}: expected {expected}")));
            if let Some((_, values, effect)) = self.refused.iter().find(|(refused, ..)| refused == key) {
                let is_allowed =
                    |text: &&str| serde_json::from_str(text).is_ok_and(|allowed: Value| same(&allowed, value));
                return match values.iter().any(is_allowed) {
                    true => Ok(()),
                    false => refuse(format!("{}; {effect}", expected(values))),
                };
            }
            match self.ignores_unknown || self.knows(key) || is_off(value) {
                true => Ok(()),
                false => refuse(format!("no such key: it is not known in {}", self.name)),
            }
        })
    }

    /// Whether the table contains a key.
    pub(crate) fn knows(&self, key: &str) -> bool {
        let mut named = self.served.split_whitespace().chain(self.harmless.split_whitespace());
        named.any(|name| name == key) || self.refused.iter().any(|(name, ..)| *name == key)
    }

    /// Keys that docs/files.md does not mention.
    #[cfg(test)]
    pub(crate) fn undocumented(&self) -> Vec<&'static str> {
        let refused = self.refused.iter().map(|(name, ..)| *name);
        let all = self.served.split_whitespace().chain(self.harmless.split_whitespace()).chain(refused);
        all.filter(|name| !include_str!("../../docs/files.md").contains(&format!("`{name}`"))).collect()
    }
}

fn expected(values: &[&str]) -> String {
    if values.is_empty() { "no such key, or null".to_owned() } else { values.join(" or ") }
}

/// Whether two JSON values are equal; 0 equals 0.0.
fn same(allowed: &Value, value: &Value) -> bool {
    allowed == value || allowed.as_f64().is_some_and(|number| value.as_f64() == Some(number))
}

/// Whether a value disables the feature of any key: null, false, or an empty object or list.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Object(map) => map.is_empty(),
        Value::Array(items) => items.is_empty(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_supported_harmless_refused_or_unknown() {
        let table = KeyTable {
            name: "file.json",
            served: "a",
            harmless: "b",
            refused: &[("c", &["0", "\"none\""], "it would do harm"), ("d", &[], "it would, too")],
            ignores_unknown: false,
        };
        let check = |text: &str| {
            let map: Map<String, Value> = serde_json::from_str(text).unwrap();
            table.check(Path::new("file.json"), "", &map).map_err(|error| error.to_string())
        };
        for accepted in [r#"{"a": 1, "b": 2, "c": 0.0, "d": null}"#, r#"{"c": "none", "e": null, "f": [], "g": false}"#]
        {
            check(accepted).unwrap();
        }
        for (refused, message) in [
            (r#"{"c": 1}"#, "file.json: c is 1: expected 0 or \"none\"; it would do harm"),
            (r#"{"d": []}"#, "file.json: d is []: expected no such key, or null; it would, too"),
            (r#"{"e": true}"#, "file.json: e is true: expected no such key: it is not known in file.json"),
        ] {
            assert_eq!(check(refused).unwrap_err(), message);
        }
        KeyTable { ignores_unknown: true, ..table }
            .check(Path::new("f"), "", &Map::from_iter([("e".into(), 1.into())]))
            .unwrap();
    }
}
