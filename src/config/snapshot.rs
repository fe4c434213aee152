//! Saved forms of a run's configuration: every key with its value, as TOML text and as checkpoints store it.

use std::fmt::Write;
use std::path::Path;

use serde_json::Value;

use super::field::Field;
use super::raw::RawConfig;
use super::{Config, SftConfig};
use crate::error::Result;

/// Keys that may differ between the nodes of a run: rank 0 decides where the run resumes.
const MAY_DIFFER: [&str; 3] = ["resume_from_checkpoint", "force_resume", "fault"];

impl Config {
    /// Keys and values that must be equal on all nodes of a run.
    pub(crate) fn compared(&self) -> Vec<(String, String)> {
        compared(self.entries())
    }

    /// Every key with its value, one per line; [`Config::load`] reads it back to an equal configuration.
    pub fn to_toml(&self) -> String {
        text(self.entries())
    }

    /// Every key with its value, in declaration order.
    pub(crate) fn entries(&self) -> Vec<(String, Value)> {
        entries(self)
    }

    /// The inverse of [`Config::entries`].
    ///
    /// # Errors
    /// The errors of [`Config::load`].
    pub(crate) fn from_entries(entries: impl IntoIterator<Item = (String, Value)>) -> Result<Self> {
        Self::from_toml(&text(entries))
    }
}

/// Saved forms of a supervised run's configuration.
impl SftConfig {
    /// Keys and values that must be equal on all nodes of a run.
    pub(crate) fn compared(&self) -> Vec<(String, String)> {
        compared(self.entries())
    }

    pub(crate) fn entries(&self) -> Vec<(String, Value)> {
        entries(self)
    }

    pub(crate) fn from_entries(entries: impl IntoIterator<Item = (String, Value)>) -> Result<Self> {
        Self::validate(&RawConfig::read_text(&text(entries), Path::new("saved configuration"))?)
    }
}

fn compared(entries: Vec<(String, Value)>) -> Vec<(String, String)> {
    let alike = entries.into_iter().filter(|(key, _)| !MAY_DIFFER.contains(&key.as_str()));
    alike.map(|(key, value)| (key, toml_value(&value))).collect()
}

fn entries(config: &impl Field) -> Vec<(String, Value)> {
    let mut entries = Vec::new();
    config.write("", &mut entries);
    entries
}

fn text(entries: impl IntoIterator<Item = (String, Value)>) -> String {
    entries.into_iter().fold(String::new(), |mut text, (key, value)| {
        let _ = writeln!(text, "{key} = {}", toml_value(&value));
        text
    })
}

/// A JSON value as TOML on one line. JSON numbers, strings and lists are valid TOML, except for DEL, which TOML requires to be escaped.
pub(crate) fn toml_value(value: &Value) -> String {
    if let Value::Object(table) = value {
        let entries = table.iter().map(|(key, value)| format!("{key} = {}", toml_value(value)));
        return format!("{{ {} }}", entries.collect::<Vec<_>>().join(", "));
    }
    value.to_string().replace('\u{7f}', "\\u007f")
}

#[cfg(test)]
mod tests {
    use super::super::tests::config;
    use super::*;

    #[test]
    fn a_snapshot_reloads_to_an_equal_configuration() {
        let overrides = [
            "save_steps=none",
            "min_p=0.05",
            "temperature=0.9",
            "system_prompt=say \"it\"\tin \u{7f} tabs\nand lines \\",
            "stop=[\"a\", \"\\n\"]",
            "reward_weights=[0.5]",
            "zero.shard_group_size=2",
            "fault=0:1:wake:kill",
        ];
        let original = config(&overrides);
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config.toml");
        std::fs::write(&file, original.to_toml()).unwrap();
        assert_eq!(Config::load(Some(&file), &[]).unwrap(), original);
        assert!(original.to_toml().contains("temperature = 0.9\n"));
    }
}
