//! Tables of keys as dotted names.

use serde_json::Value;

/// `table.key`, or `key` at the top.
pub(crate) fn join(table: &str, key: &str) -> String {
    if table.is_empty() { key.to_owned() } else { format!("{table}.{key}") }
}

/// Tables become dotted keys; an empty table stays an entry, so that a mistyped one is seen.
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
