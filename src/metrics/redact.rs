//! Secrets are taken out of whatever is logged or written (names that end in TOKEN, KEY, SECRET or PASSWORD; credentials in
//! URLs and Authorization headers; Hugging Face tokens).

use std::sync::LazyLock;

use regex::{Captures, Regex};
use serde_json::Value;

const REDACTED: &str = "[redacted]";

/// `text` with its secrets replaced by `[redacted]`.
pub fn redact(text: &str) -> String {
    let text = ASSIGNMENT.replace_all(text, |found: &Captures| {
        let quote = if found[2].starts_with('"') { "\"" } else { "" };
        format!("{}{quote}{REDACTED}{quote}", &found[1])
    });
    let text = URL.replace_all(&text, format!("${{1}}{REDACTED}@"));
    let text = BEARER.replace_all(&text, format!("${{1}}{REDACTED}"));
    HUB_TOKEN.replace_all(&text, REDACTED).into_owned()
}

/// The same for every string of a JSON value, in place; what stands under a secret's name goes whole.
pub fn redact_json(value: &mut Value) {
    match value {
        Value::String(text) => *text = redact(text),
        Value::Array(values) => values.iter_mut().for_each(redact_json),
        Value::Object(members) => {
            for (name, value) in members {
                match SECRET_NAME.is_match(name) && !value.is_null() {
                    true => *value = REDACTED.into(),
                    false => redact_json(value),
                }
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

static SECRET_NAME: LazyLock<Regex> = LazyLock::new(|| pattern(r"(?i)(token|key|secret|password)$"));
static ASSIGNMENT: LazyLock<Regex> = LazyLock::new(|| {
    let name = r#"(?:[\w.-]+(?:token|key)|[\w.-]*(?:secret|password))"?"#; // `key = ..` alone is no secret
    pattern(&format!(r#"(?i)({name}\s*[=:]\s*)("(?:[^"\\]|\\.)*"|[^\s,;&"]+)"#))
});
static URL: LazyLock<Regex> = LazyLock::new(|| pattern(r"([A-Za-z][A-Za-z0-9+.-]*://)[^\s/@]+@"));
static BEARER: LazyLock<Regex> = LazyLock::new(|| pattern(r"(?i)(authorization:\s*(?:bearer|basic)\s+)\S+"));
static HUB_TOKEN: LazyLock<Regex> = LazyLock::new(|| pattern(r"\bhf_[A-Za-z0-9]{16,}"));

fn pattern(text: &str) -> Regex {
    Regex::new(text).expect("the patterns of this file compile")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_go_and_the_rest_stays() {
        for (text, expected) in [
            ("HF_TOKEN=abc WANDB_API_KEY: xyz", "HF_TOKEN=[redacted] WANDB_API_KEY: [redacted]"),
            (r#"{"db_password": "a \"b\" c", "steps": 3}"#, r#"{"db_password": "[redacted]", "steps": 3}"#),
            ("https://me:pw@host/path?x=1", "https://[redacted]@host/path?x=1"),
            ("http://host/?access_token=abc&page=2", "http://host/?access_token=[redacted]&page=2"),
            ("Authorization: Bearer abc.def", "Authorization: Bearer [redacted]"),
            ("got hf_abcdefghijklmnopqrst here", "got [redacted] here"),
            ("num_tokens=100, key = 3, learning_rate: 1e-6", "num_tokens=100, key = 3, learning_rate: 1e-6"),
        ] {
            assert_eq!(redact(text), expected);
        }
    }

    #[test]
    fn json_keeps_its_shape() {
        let mut value = serde_json::json!({
            "hub_token": "abc", "no_token": null, "list": ["ftp://u:p@h"], "n": 1, "db_password": 123, "api_key": ["a", {"b": "c"}],
        });
        redact_json(&mut value);
        let expected = serde_json::json!({
            "hub_token": "[redacted]", "no_token": null, "list": ["ftp://[redacted]@h"], "n": 1, "db_password": "[redacted]",
            "api_key": "[redacted]",
        });
        assert_eq!(value, expected);
    }
}
