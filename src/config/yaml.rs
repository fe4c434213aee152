//! YAML with line numbers: the parser gives the values, and a scan of the indentation gives the line of each block key.

use std::collections::HashMap;

use serde_json::Value;

use super::flat::flatten;

/// A dotted key, its value and its line number, from 1.
type YamlEntry = (String, Value, usize);

/// Parses YAML to dotted keys with values and lines. An error has a message and a line. Keys of a flow mapping (`zero: {stage: 2}`) get the line of
/// the block key that contains it.
pub(super) fn entries(text: &str) -> Result<Vec<YamlEntry>, (String, usize)> {
    let failed = |error: serde_yaml_ng::Error| {
        let line = error.location().map_or(1, |location| location.line());
        (error.to_string(), line)
    };
    // `serde_yaml_ng::Value` refuses duplicate keys, which JSON's map would swallow.
    let document: serde_yaml_ng::Value = serde_yaml_ng::from_str(text).map_err(failed)?;
    let document = match document {
        serde_yaml_ng::Value::Null => return Ok(Vec::new()),
        serde_yaml_ng::Value::Mapping(_) => serde_json::to_value(document).map_err(|error| (error.to_string(), 1))?,
        _ => return Err(("expected a mapping (key: value) at the top level".into(), 1)),
    };
    let mut flat = Vec::new();
    flatten("", document, &mut flat);
    let lines = lines(text);
    Ok(flat
        .into_iter()
        .map(|(key, value)| {
            let line = ancestors(&key).find_map(|name| lines.get(name)).copied().unwrap_or(1);
            (key, value, line)
        })
        .collect())
}

/// Line number of each block key, by dotted name.
fn lines(text: &str) -> HashMap<String, usize> {
    let mut lines = HashMap::new();
    let mut open: Vec<(usize, String)> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let indent = line.len() - line.trim_start().len();
        let Some((name, _)) = line.trim_start().split_once(':') else { continue };
        let name = name.trim().trim_matches(['"', '\'']);
        if name.is_empty() || name.starts_with(['#', '-']) {
            continue;
        }
        open.retain(|(outer, _)| *outer < indent);
        let key = open.last().map_or_else(|| name.to_owned(), |(_, table)| format!("{table}.{name}"));
        open.push((indent, key.clone()));
        lines.entry(key).or_insert(number + 1);
    }
    lines
}

/// A dotted key and the tables that contain it: `a.b.c`, `a.b`, `a`.
fn ancestors(key: &str) -> impl Iterator<Item = &str> {
    std::iter::successors(Some(key), |key| key.rsplit_once('.').map(|(table, _)| table))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_flow_and_quoted_keys_have_lines() {
        let text = "# run\nbeta: 0.1\nzero:\n  stage: 3\n\"seed\": 7\nreward: {num_threads: 2}\nlearning_rate: 1e-6\n";
        let found = entries(text).unwrap();
        let expected: Vec<YamlEntry> = vec![
            ("beta".into(), 0.1.into(), 2),
            ("zero.stage".into(), 3.into(), 4),
            ("seed".into(), 7.into(), 5),
            ("reward.num_threads".into(), 2.into(), 6),
            ("learning_rate".into(), 1e-6.into(), 7),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn duplicates_and_lists_are_refused() {
        assert!(entries("beta: 1\nbeta: 2\n").unwrap_err().0.contains("duplicate"));
        assert_eq!(entries("- a\n").unwrap_err().0, "expected a mapping (key: value) at the top level");
        assert_eq!(entries("# nothing\n").unwrap(), Vec::new());
    }
}
