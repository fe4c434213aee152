//! Keys for tools that a model may call between its turns; named as in TRL and verl where these have them.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use super::check::check;
use super::field::{Field, KeyDoc, keys};
use super::flat::join;
use super::range::{ANY, COUNT, NumberRange, SECONDS};
use super::raw::RawConfig;
use super::reward::is_python;
use super::{AutoOr, Config, Environment, EnvironmentArguments, EnvironmentHub, ToolCallParser};
use crate::error::{Error, Result};

/// Name of the tool that is a Python interpreter.
pub(crate) const INTERPRETER: &str = "python";

keys! {
    /// Keys for tools, at the top level.
    ///
    /// ```
    /// use colo_grpo::Config;
    /// use colo_grpo::config::{AutoOr, ToolCallParser, ToolsConfig};
    ///
    /// let words = [
    ///     "tools=[\"python\", \"tools.py:add\"]",
    ///     "tool_call_parser=hermes",
    ///     "max_tool_calling_iterations=4",
    /// ]
    /// .map(str::to_owned);
    /// let config = Config::load(Some("configs/tiny-cpu.toml".as_ref()), &words)?;
    /// let tools: &ToolsConfig = &config.tools;
    /// assert!(tools.has_turns() && tools.max_tool_calling_iterations == Some(4));
    /// assert_eq!(tools.tool_call_parser, AutoOr::Given(ToolCallParser::Hermes)); // `auto` asks the chat template
    /// # Ok::<(), colo_grpo::Error>(())
    /// ```
    #[derive(Debug, Clone, PartialEq, serde::Serialize)]
    pub struct ToolsConfig: flat {
        /// Functions that the model may call, as `file.py:function`, `module:function` or `module.function`, `async` or not; `python` is an
        /// interpreter in the sandbox, with the limits of `reward.code`. The chat template shows their type hints and Google-style docstrings to the
        /// model, as with TRL.
        pub tools: Vec<String> = Vec::new(),
        /// Classes (or functions that return an object) whose public methods are tools, as in TRL: `file.py:Class` for all rows, or a table of
        /// classes selected by the row's column `environment`. Each completion has its own object in its own process. `reset` receives the row; a
        /// method `get_reward` is one more reward with weight 1.
        pub environment_factory: EnvironmentFactories = EnvironmentFactories::default(),
        /// Format of the model's tool calls, with vLLM's names; `auto` detects it from the chat template.
        pub tool_call_parser: AutoOr<ToolCallParser> = AutoOr::Auto,
        /// Maximum number of turns of a completion whose tool calls are answered; `none` is limited only by `max_completion_length`, which counts all
        /// turns and tool results.
        pub max_tool_calling_iterations: Option<usize> = None => COUNT,
        /// Maximum length of a tool result in characters: the middle of a longer one is cut out, as in verl. `none` cuts nothing; a result that does
        /// not fit into `max_completion_length` is dropped and ends the completion, as in TRL.
        pub max_tool_response_length: Option<usize> = None => COUNT,
        /// Time limit in seconds for the calls of one turn. After it their process is killed, and the model gets an error.
        pub tool_timeout_s: f64 = 60.0 => SECONDS,
        /// Number of turns for which each rank runs tools at the same time, each in its own process.
        pub tool_workers: usize = 32 => COUNT,
        /// Function `file.py:function` that plays an episode for each completion, instead of tools: it receives the row and the `base_url` of an
        /// OpenAI-compatible server that samples from the policy (docs/agents.md). It may return a reward.
        pub agent: Option<String> = None,
        /// Time limit in seconds for an episode. After it its process is killed, and its completion is masked.
        pub agent_timeout_s: f64 = 600.0 => SECONDS,
        /// Maximum number of requests of an episode; further ones are refused.
        pub agent_max_requests: usize = 100 => COUNT,
        /// Number of episodes that each rank plays at the same time, each in a process that is reused later.
        pub agent_workers: usize = 32 => COUNT,
        /// Environment of an environment hub (docs/environments.md) that makes the rows and gives a reward with weight 1: `verifiers:NAME`, a taskset
        /// of the Python package verifiers, which plays whole episodes like `agent`; `openenv:URL`, an OpenEnv server whose actions are tools;
        /// `reasoning_gym:TASK`, a generator of the Python package reasoning-gym with its scorer. `reward.python` loads it.
        pub environment: Option<Environment> = None,
        /// Arguments of the environment by name: of the generator (`environment_args.min_terms = 2`), of the taskset and its environment
        /// (`environment_args.taskset.game = "Wordle-v0"`), or of the server's `reset`.
        pub environment_args: EnvironmentArguments = EnvironmentArguments::default(),
    }
}

/// Environment classes by name; a single class has an empty name.
///
/// ```
/// use colo_grpo::Config;
/// use colo_grpo::config::EnvironmentFactories;
///
/// let words = [
///     "environment_factory={ games = \"games.py:Wordle\", sums = \"sums.py:Calculator\" }",
/// ]
/// .map(str::to_owned);
/// let config = Config::load(Some("configs/tiny-cpu.toml".as_ref()), &words)?;
/// let EnvironmentFactories(classes) = &config.tools.environment_factory;
/// assert_eq!(classes["games"], "games.py:Wordle"); // for rows whose column `environment` is `games`
/// # Ok::<(), colo_grpo::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct EnvironmentFactories(pub BTreeMap<String, String>);

impl EnvironmentFactories {
    /// Whether the row's column `environment` selects the class.
    pub fn are_named(&self) -> bool {
        !self.0.is_empty() && !self.0.contains_key("")
    }
}

impl serde::Serialize for EnvironmentFactories {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        match self.0.get("") {
            Some(single) => single.serialize(serializer),
            None if self.0.is_empty() => "none".serialize(serializer),
            None => self.0.serialize(serializer),
        }
    }
}

impl Field for EnvironmentFactories {
    fn describe(key: &str, _: Option<Self>, _: &NumberRange, text: &str, out: &mut Vec<KeyDoc>) {
        let (entries, expected) = (vec![key.to_owned(), join(key, "*")], "text, or a table of them".to_owned());
        let (key, default, text) = (key.to_owned(), Some("none".into()), text.to_owned());
        out.push(KeyDoc { section: None, key, entries, expected, default, text });
    }

    fn read(raw: &RawConfig, key: &str, _: Option<Self>, _: &NumberRange, wrong: &mut Vec<Error>) -> Option<Self> {
        let named = raw.names_in(key).into_iter().map(|name| (name.to_owned(), raw.get(&join(key, name))));
        let single = raw.get(key).filter(|value| *value != "none").map(|value| (String::new(), Some(value)));
        let mut factories = BTreeMap::new();
        for (name, value) in named.chain(single) {
            match value.and_then(Value::as_str).filter(|spec| is_python(spec)) {
                Some(spec) => drop(factories.insert(name, spec.to_owned())),
                None => {
                    let full = if name.is_empty() { key.to_owned() } else { join(key, &name) };
                    let got = value.map_or_else(|| "nothing".to_owned(), Value::to_string);
                    let expected = "a class as file.py:Class, module:Class or module.Class";
                    wrong.push(raw.locate(Error::invalid_value(&full, got, expected)));
                    return None;
                }
            }
        }
        Some(Self(factories))
    }

    fn write(&self, key: &str, out: &mut Vec<(String, Value)>) {
        let full = |name: &str| if name.is_empty() { key.to_owned() } else { join(key, name) };
        out.extend(self.0.iter().map(|(name, spec)| (full(name), spec.as_str().into())));
    }
}

impl Default for ToolsConfig {
    fn default() -> Self {
        Self::read(&RawConfig::default(), "", None, &ANY, &mut Vec::new()).expect("every key has a default")
    }
}

impl ToolsConfig {
    /// Whether completions may have several turns.
    pub fn has_turns(&self) -> bool {
        !self.tools.is_empty() || self.has_environments()
    }

    /// Whether each completion has an environment object whose methods are tools.
    pub fn has_environments(&self) -> bool {
        !self.environment_factory.0.is_empty() || self.of_hub(EnvironmentHub::OpenEnv).is_some()
    }

    /// The agent function, or the environment, that plays whole episodes.
    pub fn agent(&self) -> Option<&str> {
        self.agent.as_deref().or(self.of_hub(EnvironmentHub::Verifiers))
    }

    /// The environment as written, if it is of kind `hub`.
    fn of_hub(&self, hub: EnvironmentHub) -> Option<&str> {
        self.environment.as_ref().filter(|environment| environment.hub == hub).map(Environment::text)
    }

    /// Whether tools, environments or an agent act between the model's turns.
    pub fn takes_turns(&self) -> bool {
        self.has_turns() || self.agent().is_some()
    }
}

impl Config {
    pub(super) fn check_tools(&self) -> Result<()> {
        let named = format!("{:?}", self.tools.tools);
        let expected = "functions as file.py:function, module:function or module.function, and python once";
        let interpreters = self.tools.tools.iter().filter(|tool| *tool == INTERPRETER).count();
        let is_known = |tool: &String| is_python(tool) || tool == INTERPRETER;
        check("tools", &named, self.tools.tools.iter().all(is_known) && interpreters < 2, expected)?;
        if interpreters > 0 {
            let command = &self.reward.code.command.0;
            let name = command.first().and_then(|program| Path::new(program).file_name()?.to_str());
            let is_python = name.is_some_and(|name| name.starts_with("python"));
            check(
                "reward.code.command",
                format!("{command:?}"),
                is_python,
                "a Python interpreter, as tools has python",
            )?;
        }
        let factories = &self.tools.environment_factory;
        let single = factories.0.get("").filter(|_| factories.0.len() > 1);
        let only = "either one class or a table of classes, not both";
        check("environment_factory", single.map_or("", String::as_str), single.is_none(), only)?;
        let agent = self.tools.agent.as_deref();
        let expected = "a function as file.py:function, module:function or module.function";
        check("agent", agent.unwrap_or_default(), agent.is_none_or(is_python), expected)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::super::tests::{config, message};

    #[test]
    fn tools_environments_and_agents_are_read_or_refused() {
        let tools = config(&["tools=[\"t.py:add\", \"m.sub\"]", "tool_call_parser=hermes"]).tools;
        assert!(tools.has_turns() && config(&["tools=python"]).tools.has_turns() && !config(&[]).tools.has_turns());
        let one = config(&["environment_factory=e.py:Env", "reward_funcs=[]"]);
        assert!(one.tools.has_turns() && !one.tools.environment_factory.are_named());
        let table = config(&["environment_factory.a=e.py:A", "environment_factory={b = \"e:B\"}"]);
        assert!(table.tools.environment_factory.are_named() && table.tools.environment_factory.0.len() == 2);
        for config in [one, table] {
            assert_eq!(Config::from_toml(&config.to_toml()).unwrap(), config);
        }
        for (keys, part) in [
            (&["tools=add"][..], "expected functions as file.py:function"),
            (&["tools=[\"python\", \"python\"]"], "and python once"),
            (
                &["tools=python", "reward.code.command=[\"node\"]"],
                "reward.code.command = [\"node\"]: expected a Python",
            ),
            (&["agent=play"], "agent = play: expected a function as file.py:function"),
            (&["environment_factory=Env"], "environment_factory = \"Env\": expected a class as file.py:Class"),
            (&["environment_factory=e.py:Env", "environment_factory.b=e.py:B"], "either one class or a table"),
            (&["reward_funcs=[]"], "at least one reward"),
            (&["tool_call_parser=hermit"], "auto or one of hermes, qwen3_xml"),
        ] {
            assert!(message(keys).contains(part), "{keys:?}: {}", message(keys));
        }
    }
}
