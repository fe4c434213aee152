//! The key that names an environment of an environment hub, and its arguments.

use std::fmt;

use serde_json::{Map, Value};

use super::Config;
use super::check::check;
use super::field::{Field, FromValue, KeyDoc};
use super::flat::join;
use super::range::NumberRange;
use super::raw::RawConfig;
use crate::error::{Error, Result};

/// The kind of environment, given by the word before the colon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EnvironmentHub {
    /// The Python package verifiers: whole episodes against an OpenAI-compatible server.
    Verifiers,
    /// An OpenEnv server, which provides tools.
    OpenEnv,
    /// The Python package reasoning-gym, which provides rows and scores.
    ReasoningGym,
}

impl EnvironmentHub {
    const ALL: [Self; 3] = [Self::Verifiers, Self::OpenEnv, Self::ReasoningGym];

    /// Whether the environment acts between the model's turns or plays whole episodes; else it only makes rows and scores completions.
    pub(crate) const fn acts(self) -> bool {
        !matches!(self, Self::ReasoningGym)
    }

    const fn word(self) -> &'static str {
        match self {
            Self::Verifiers => "verifiers",
            Self::OpenEnv => "openenv",
            Self::ReasoningGym => "reasoning_gym",
        }
    }
}

/// An environment, written `hub:name`.
///
/// ```
/// use colo_grpo::Config;
/// use colo_grpo::config::{Environment, EnvironmentArguments, EnvironmentHub};
///
/// let words = [
///     "model_name_or_path=Qwen/Qwen2.5-1.5B-Instruct",
///     "environment=reasoning_gym:chain_sum",
///     "environment_args.min_terms=2",
///     "reward_funcs=[]",
/// ]
/// .map(str::to_owned);
/// let config = Config::load(None, &words)?;
/// let environment: &Environment = config.tools.environment.as_ref().expect("it is given");
/// assert_eq!((environment.hub, environment.name()), (EnvironmentHub::ReasoningGym, "chain_sum"));
/// let EnvironmentArguments(arguments) = &config.tools.environment_args;
/// assert_eq!(arguments["min_terms"], 2);
/// # Ok::<(), colo_grpo::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Environment {
    /// The environment's kind.
    pub hub: EnvironmentHub,
    text: String,
}

impl fmt::Display for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Environment {
    /// Parses `hub:name`; `None` for any other text.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (word, name) = text.split_once(':')?;
        let hub = EnvironmentHub::ALL.into_iter().find(|hub| hub.word() == word)?;
        (!name.is_empty()).then(|| Self { hub, text: text.to_owned() })
    }

    /// The environment as written, `hub:name`.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The last part of the name without owner and version, which names the environment's reward.
    pub(crate) fn short_name(&self) -> &str {
        let name = self.name().rsplit('/').next().unwrap_or_default();
        name.split('@').next().unwrap_or_default()
    }

    /// The name of the environment at its hub, or the address of an OpenEnv server.
    pub fn name(&self) -> &str {
        &self.text[self.hub.word().len() + 1..]
    }
}

impl serde::Serialize for Environment {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl FromValue for Environment {
    fn expected(_: &NumberRange) -> String {
        "verifiers:NAME, openenv:URL or reasoning_gym:TASK".into()
    }

    fn from_value(value: &Value, _: &NumberRange) -> Option<Self> {
        Self::parse(value.as_str()?)
    }

    fn to_value(&self) -> Value {
        self.to_string().into()
    }
}

/// `environment_args.*`: arguments of an environment by name; values may be tables.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct EnvironmentArguments(pub Map<String, Value>);

impl Field for EnvironmentArguments {
    fn describe(key: &str, _: Option<Self>, _: &NumberRange, text: &str, out: &mut Vec<KeyDoc>) {
        let entries = vec![join(key, "**")];
        let (key, expected) = (join(key, "*"), "what the environment's package takes".to_owned());
        out.push(KeyDoc { section: None, key, entries, expected, default: Some("none".into()), text: text.to_owned() });
    }

    fn read(raw: &RawConfig, key: &str, _: Option<Self>, _: &NumberRange, _: &mut Vec<Error>) -> Option<Self> {
        Some(Self(table(raw, key)))
    }

    fn write(&self, key: &str, out: &mut Vec<(String, Value)>) {
        let mut inner = |(name, value): (&String, &Value)| match value {
            Value::Object(table) => Self(table.clone()).write(&join(key, name), out),
            value => out.push((join(key, name), value.clone())),
        };
        self.0.iter().for_each(&mut inner);
    }
}

/// The values below `key`, as a table.
fn table(raw: &RawConfig, key: &str) -> Map<String, Value> {
    let value = |name: &str| {
        let key = join(key, name);
        raw.get(&key).cloned().unwrap_or_else(|| Value::Object(table(raw, &key)))
    };
    raw.names_in(key).into_iter().map(|name| (name.to_owned(), value(name))).collect()
}

impl Config {
    /// The run's environment if it is of kind `hub`.
    pub(crate) fn environment_of(&self, hub: EnvironmentHub) -> Option<&Environment> {
        self.tools.environment.as_ref().filter(|environment| environment.hub == hub)
    }

    /// The settings as JSON from which the environment's processes open it.
    pub(crate) fn environment_settings(&self) -> Option<Value> {
        let environment = self.tools.environment.as_ref()?;
        Some(serde_json::json!({
            "environment": environment.to_string(),
            "args": self.tools.environment_args.0,
            "seed": self.seed,
            "num_train": self.data.max_train_samples,
            "num_held_out": self.data.max_eval_samples,
        }))
    }

    /// Whether the environment makes the rows of the run.
    pub(crate) fn makes_rows(&self) -> bool {
        let is_named = !self.data.train_file.0.is_empty() || self.data.dataset_name.is_some();
        self.tools.environment.is_some() && !is_named
    }

    /// Whether the run is evaluated on held-out rows.
    pub(crate) fn has_held_out(&self) -> bool {
        self.data.has_held_out(self.eval_steps) || (self.makes_rows() && self.eval_steps.is_some())
    }

    pub(super) fn check_environment(&self) -> Result<()> {
        let Some(environment) = self.environment_of(EnvironmentHub::OpenEnv) else { return Ok(()) };
        let is_address = ["http://", "https://"].iter().any(|start| environment.name().starts_with(start));
        let expected = "openenv:http://HOST:PORT, the address of a server: environments of OpenEnv run in containers; start \
                        one (docker run -p 8000:8000 IMAGE, or openenv serve) and name its address";
        check("environment", environment, is_address, expected)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::super::tests::{config, message};
    use super::*;

    const NO_ROWS: &str = "train_file=none";

    #[test]
    fn an_environment_is_given_as_hub_name_and_a_table_of_arguments() {
        let named = config(&[
            NO_ROWS,
            "reward_funcs=[]",
            "environment=verifiers:textarena",
            "environment_args.taskset.game=Wordle-v0",
            "environment_args={max_concurrent_agents = 2}",
        ]);
        assert_eq!(named.environment_of(EnvironmentHub::Verifiers).map(Environment::name), Some("textarena"));
        let settings = named.environment_settings().unwrap();
        let args = serde_json::json!({"taskset": {"game": "Wordle-v0"}, "max_concurrent_agents": 2});
        assert_eq!((&settings["environment"], &settings["args"]), (&"verifiers:textarena".into(), &args));
        assert!(named.makes_rows() && named.tools.agent() == Some("verifiers:textarena") && !named.tools.has_turns());
        assert_eq!(Config::from_toml(&named.to_toml()).unwrap(), named);
        let server = config(&["reward_funcs=[]", "environment=openenv:http://localhost:8000"]);
        assert!(server.tools.has_turns() && !server.makes_rows() && server.tools.agent().is_none());
        let scored = config(&[NO_ROWS, "reward_funcs=[]", "environment=reasoning_gym:chain_sum"]);
        assert!(!scored.tools.has_turns() && scored.tools.agent().is_none());
        let scored = scored.with_environment_rewards(&[]).unwrap();
        assert_eq!(
            (&scored.reward_names()[..], &scored.reward_funcs[..]),
            (&["chain_sum".to_owned()][..], &["reasoning_gym:chain_sum".to_owned()][..])
        );
    }

    #[test]
    fn invalid_environments_are_refused() {
        for (keys, part) in [
            (&["environment=gym:a"][..], "expected \"none\" or verifiers:NAME, openenv:URL or reasoning_gym:TASK"),
            (&["environment=openenv:coding_env"], "run in containers; start one (docker run"),
            (&[NO_ROWS], "train_file = none: expected a value, or a value for dataset_name"),
            (
                &["environment=verifiers:a"],
                "train_file = train.jsonl: expected no train_file, or no environment: such an environment",
            ),
            (&[NO_ROWS, "environment=verifiers:a", "agent=a.py:play"], "no environment: both run episodes"),
            (&[NO_ROWS, "environment=verifiers:a", "full_determinism=true"], "when the agent's requests arrive"),
            (
                &["environment_args.seed=3"],
                "environment_args.seed = 3: expected no environment_args, or a value for environment: these",
            ),
        ] {
            assert!(message(keys).contains(part), "{keys:?}: {}", message(keys));
        }
    }
}
