//! Time limits for a rank without progress, by phase.

use std::time::Duration;

use serde_json::{Map, Value};

use super::field::{Field, FromValue, KeyDoc};
use super::flat::join;
use super::range::{NumberRange, SECONDS};
use super::raw::RawConfig;
use crate::error::Error;
use crate::phase::{HeartbeatLimits, Phase};

const TIMEOUT_S: f64 = 300.0;
/// Limit for phases such as reading a large model or writing a checkpoint, which make no visible progress for long.
const LONG_S: f64 = 1800.0;

/// `heartbeat`: seconds without a heartbeat after which a rank counts as hung. `timeout_s` applies to every phase without its own `{phase}_s`.
#[derive(Debug, Clone, PartialEq)]
pub struct HeartbeatConfig {
    /// Limit in seconds for phases without their own.
    pub timeout_s: f64,
    by_phase: Vec<Option<f64>>, // in the order of Phase::ALL
}

impl HeartbeatConfig {
    /// The limits of all phases.
    pub fn limits(&self) -> HeartbeatLimits {
        HeartbeatLimits::new(|phase| Duration::from_secs_f64(self.by_phase[phase as usize].unwrap_or(self.timeout_s)))
    }

    /// All keys of the table with their values.
    fn entries(&self) -> impl Iterator<Item = (String, Option<f64>)> + '_ {
        let own = Phase::ALL.iter().map(|&phase| (key_of(phase), self.by_phase[phase as usize]));
        std::iter::once(("timeout_s".to_owned(), Some(self.timeout_s))).chain(own)
    }
}

impl Default for HeartbeatConfig {
    fn default() -> Self {
        let by_phase = Phase::ALL.iter().map(|&phase| long_by_default(phase)).collect();
        Self { timeout_s: TIMEOUT_S, by_phase }
    }
}

impl Field for HeartbeatConfig {
    fn describe(key: &str, _: Option<Self>, _: &NumberRange, text: &str, out: &mut Vec<KeyDoc>) {
        let default = Self::default();
        let entries = default.entries().map(|(name, _)| join(key, &name)).collect();
        let own = default.entries().filter_map(|(name, seconds)| Some((name, seconds?.into())));
        let default = Some(Value::Object(own.collect()));
        let expected = format!(
            "a table with `timeout_s`, {}, and one `PHASE_s` per phase, \"none\" or a number in the same range",
            f64::expected(&SECONDS)
        );
        let phases: Vec<&str> = Phase::ALL.iter().map(|phase| phase.name()).collect();
        let text = format!("{text} Phases: {}.", phases.join(", "));
        out.push(KeyDoc { section: None, key: key.to_owned(), entries, expected, default, text });
    }

    fn read(raw: &RawConfig, key: &str, _: Option<Self>, _: &NumberRange, wrong: &mut Vec<Error>) -> Option<Self> {
        let timeout_s = Field::read(raw, &join(key, "timeout_s"), Some(TIMEOUT_S), &SECONDS, wrong);
        let own = |&phase: &Phase| {
            Field::read(raw, &join(key, &key_of(phase)), Some(long_by_default(phase)), &SECONDS, wrong)
        };
        let by_phase: Vec<Option<Option<f64>>> = Phase::ALL.iter().map(own).collect();
        Some(Self { timeout_s: timeout_s?, by_phase: by_phase.into_iter().collect::<Option<_>>()? })
    }

    fn write(&self, key: &str, out: &mut Vec<(String, Value)>) {
        for (name, seconds) in self.entries() {
            seconds.write(&join(key, &name), out);
        }
    }
}

impl serde::Serialize for HeartbeatConfig {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let map: Map<String, Value> = self.entries().map(|(name, seconds)| (name, seconds.into())).collect();
        map.serialize(serializer)
    }
}

fn key_of(phase: Phase) -> String {
    format!("{}_s", phase.name())
}

fn long_by_default(phase: Phase) -> Option<f64> {
    matches!(phase, Phase::Load | Phase::Checkpoint | Phase::Write).then_some(LONG_S)
}

#[cfg(test)]
mod tests {
    use super::super::tests::config;
    use super::*;

    #[test]
    fn the_heartbeat_limit_of_a_phase_overrides_the_general_one() {
        let limits = config(&["heartbeat.timeout_s=5", "heartbeat.wake_s=2.5"]).supervision.heartbeat.limits();
        let seconds = [Phase::Wake, Phase::Sleep, Phase::Load].map(|phase| limits.of(phase).as_secs_f64());
        assert_eq!(seconds, [2.5, 5.0, LONG_S]);
    }
}
