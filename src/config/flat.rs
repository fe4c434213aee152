//! Converts nested tables to dotted keys.

use serde_json::Value;

/// Joins `table` and `key` to `table.key`; without a table just `key`.
pub(crate) fn join(table: &str, key: &str) -> String {
    if table.is_empty() { key.to_owned() } else { format!("{table}.{key}") }
}

/// Flattens tables to dotted keys. An empty table stays an entry, so that a mistyped one is reported.
pub(super) fn flatten(key: &str, value: Value, out: &mut Vec<(String, Value)>) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            for (name, value) in map {
                flatten(&join(key, &name), value, out);
            }
        }
        other => out.push((key.to_owned(), other)),
    }
}
