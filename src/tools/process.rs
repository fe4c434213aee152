//! The process that loads tools. It forks a process for each turn whose tools run, so that a call that hangs or crashes affects only its
//! own turn. For the tool `python`, there is a second process that manages the interpreters.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::interpreters::{self, InterpreterSettings};
use super::reply::{CallResult, ToolReply};
use super::worker::ToolWorker;
use crate::config::{Config, Environment, EnvironmentHub, INTERPRETER, is_python, reward_name};
use crate::data::ToolSchemas;
use crate::error::{Error, Result};
use crate::process::PROGRAM;
use crate::reward::{Origin, Program};

/// The Python program of the tools' process.
const SERVER: &str = include_str!("server.py");
/// Python module for environments from hubs, which several processes load.
pub(super) const ENVIRONMENTS: &str = include_str!("environments.py");
/// Longest result of one call in characters.
const MAX_RESULT_CHARS: usize = 1 << 20;
/// Largest size of a reply in bytes; it contains the results of all calls of a turn.
const MAX_REPLY_BYTES: usize = 64 << 20;
/// Bytes that the tools' process adds to the reply of a forked process.
const SPARE_BYTES: usize = 1 << 10;

/// The first reply of the tools' process: what it loaded, or why loading failed.
#[derive(Debug, Deserialize)]
struct LoadReply {
    #[serde(default)]
    tools: Value,
    #[serde(default)]
    environments: BTreeMap<String, LoadedEnvironment>,
    error: Option<String>,
}

/// A class of environments, as the tools' process describes it.
#[derive(Debug, Deserialize)]
struct LoadedEnvironment {
    tools: Value,
    has_reward: bool,
    class: String,
}

/// A class of environments.
#[derive(Debug)]
pub(super) struct EnvironmentClass {
    pub name: String,
    /// Folder of the file with the class; empty for an installed module.
    pub folder: String,
    has_reward: bool,
}

/// Adds the source of the Python module to the settings of an environment from a hub.
fn with_source(mut settings: Value) -> Value {
    settings["source"] = ENVIRONMENTS.into();
    settings
}

/// The processes of this rank's tools. Dropping this ends them and all processes that they started.
pub struct ToolProcess {
    /// The process of Python functions and environments.
    pub(super) functions: ToolWorker,
    /// The process of interpreters, if the tool `python` is configured.
    interpreters: Option<ToolWorker>,
    /// Turns with calls in both processes, by request number.
    shared: HashMap<u64, SharedTurn>,
    schemas: ToolSchemas,
    environments: BTreeMap<String, EnvironmentClass>,
    /// Name of the agent that plays episodes, if there is one.
    pub(super) agent: Option<String>,
    /// Whether the states of environments are requested when they end.
    wants_states: bool,
    next_id: u64,
}

/// A turn with calls of `python` and of other tools.
#[derive(Debug)]
struct SharedTurn {
    /// For each call, whether it is one of `python`.
    is_python: Vec<bool>,
    /// Whether the trajectory has an environment, which is lost if the functions' process fails.
    has_environment: bool,
    /// The first of the two replies, and whether it is from the interpreters' process.
    first: Option<(bool, ToolReply)>,
}

impl fmt::Debug for ToolProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ToolProcess").field("schemas", &self.schemas).finish_non_exhaustive()
    }
}

impl ToolProcess {
    /// Starts the processes and loads the tools in `config`; `None` if there are none. Best called before this process has a GPU context.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for a tool that cannot be loaded, or whose signature or docstring is incomplete;
    /// [`Error::Environment`] if the sandbox of `python` cannot be set up.
    pub fn start(config: &Config) -> Result<Option<Self>> {
        let tools = &config.tools;
        if !tools.takes_turns() {
            return Ok(None);
        }
        let factories = &tools.environment_factory.0;
        let environment = tools.environment.as_ref().filter(|environment| environment.hub.acts());
        let key = match (&tools.agent, environment) {
            (Some(_), _) => "agent",
            (None, Some(_)) => "environment",
            (None, None) if tools.tools.is_empty() => "environment_factory",
            (None, None) => "tools",
        };
        let named = tools.tools.iter().chain(factories.values()).chain(&tools.agent).map(String::as_str);
        let named = named.chain(environment.map(Environment::text)).collect::<Vec<&str>>().join(", ");
        let refuse = |cause: &str| {
            let python = &config.reward.python;
            let expected = format!(
                "functions or classes that {python} can load and whose signatures it can describe; loading failed: \
                 {cause}"
            );
            Error::invalid_value(key, &named, expected)
        };
        let functions: Vec<&String> = tools.tools.iter().filter(|tool| *tool != INTERPRETER).collect();
        let (name, timeout_key, timeout_s, workers) = match tools.agent() {
            Some(_) => ("the process of the agent", "agent_timeout_s", tools.agent_timeout_s, tools.agent_workers),
            None => ("the process of the tools", "tool_timeout_s", tools.tool_timeout_s, tools.tool_workers),
        };
        let settings = json!({
            "agent": tools.agent,
            "tools": functions,
            "environments": factories,
            "hub": environment.and(config.environment_settings()).map(with_source),
            "timeout_s": timeout_s,
            "workers": workers,
            "max_chars": MAX_RESULT_CHARS,
            "max_bytes": MAX_REPLY_BYTES - SPARE_BYTES,
        });
        let command = [&config.reward.python, "-c", SERVER, &settings.to_string()].map(str::to_owned).to_vec();
        let origin = Origin::Key(key.to_owned(), named.clone());
        let program = Program { command, is_ours: false, origin, max_reply_bytes: MAX_REPLY_BYTES };
        let worker = ToolWorker::start(program, name, timeout_key, timeout_s, &refuse)?;
        let mut loaded: LoadReply =
            serde_json::from_slice(worker.loaded()).map_err(|error| refuse(&error.to_string()))?;
        if let Some(cause) = &loaded.error {
            return Err(refuse(cause));
        }
        let mut own = None;
        if let Some(place) = tools.tools.iter().position(|tool| tool == INTERPRETER) {
            loaded.add(place, &interpreters::schema()).map_err(|cause| refuse(&cause))?;
            own = Some(start_interpreters(config)?);
        }
        Ok(Some(Self::new(config, (worker, own), loaded)))
    }

    fn new(config: &Config, (functions, interpreters): (ToolWorker, Option<ToolWorker>), loaded: LoadReply) -> Self {
        let factories = &config.tools.environment_factory.0;
        let class = |(name, loaded): (&String, &LoadedEnvironment)| {
            let spec = factories.get(name).map_or("", String::as_str); // a hub's has no file
            let place = spec.rsplit_once(':').map_or("", |(place, _)| place);
            let folder = Path::new(place).parent().filter(|_| place.ends_with(".py"));
            let folder = folder.and_then(|folder| std::path::absolute(folder.join(".")).ok()).unwrap_or_default();
            let folder = folder.to_string_lossy().into_owned();
            (name.clone(), EnvironmentClass { name: loaded.class.clone(), folder, has_reward: loaded.has_reward })
        };
        let environments = loaded.environments.iter().map(class).collect();
        let schemas = loaded.environments.into_iter().map(|(name, loaded)| (name, loaded.tools)).collect();
        let is_process = |entry: &String| is_python(entry) || config.rewards.get(entry).is_some();
        let of_hub = config.environment_of(EnvironmentHub::Verifiers).map(Environment::short_name);
        let agent = config.tools.agent.as_deref().map(reward_name).or(of_hub).map(str::to_owned);
        let schemas = match &agent {
            Some(_) => ToolSchemas::default(), // each request has its own
            None => ToolSchemas::new(loaded.tools, schemas),
        };
        Self {
            functions,
            interpreters,
            shared: HashMap::new(),
            schemas,
            environments,
            agent,
            wants_states: config.reward_funcs.iter().any(is_process),
            next_id: 1,
        }
    }

    /// JSON schemas of the tools.
    pub fn schemas(&self) -> &ToolSchemas {
        &self.schemas
    }

    /// Names of the environment classes that return a reward themselves, or of the agent.
    pub fn rewarding_classes(&self) -> Vec<String> {
        let mut classes: Vec<String> = self.agent.iter().cloned().collect();
        for class in self.environments.values().filter(|class| class.has_reward) {
            if !classes.contains(&class.name) {
                classes.push(class.name.clone());
            }
        }
        classes
    }

    /// The class of an environment.
    pub(super) fn class(&self, environment: &str) -> &EnvironmentClass {
        &self.environments[environment]
    }

    /// Begins an episode of an environment for a trajectory. Returns the request's number.
    pub(super) fn open(&mut self, trajectory: u64, environment: &str, row: &Map<String, Value>) -> u64 {
        self.ask_of(Some(trajectory), json!({"environment": environment, "row": row}))
    }

    /// Ends a trajectory's environment and requests its reward and state. Returns the request's number.
    pub(super) fn close(&mut self, trajectory: u64, environment: &str) -> u64 {
        let wants_state = self.wants_states;
        self.ask_of(Some(trajectory), json!({"environment": environment, "wants_state": wants_state}))
    }

    /// Discards a trajectory that is not continued: ends its environment and its interpreter.
    pub(super) fn forget(&mut self, trajectory: u64) {
        let functions = std::iter::once(&mut self.functions).filter(|_| self.schemas.has_environments());
        for worker in functions.chain(&mut self.interpreters) {
            worker.forget(trajectory);
            worker.tell(&json!({"drop": trajectory}));
        }
    }

    /// Begins the calls of a turn, given as objects with `name` and `arguments`. Returns the request's number. `has_environment` says whether the
    /// trajectory has an environment.
    pub(super) fn call(&mut self, trajectory: u64, has_environment: bool, calls: &[Value]) -> u64 {
        let is_python = |call: &&Value| call["name"] == INTERPRETER;
        let (ours, others): (Vec<&Value>, Vec<&Value>) = match &self.interpreters {
            Some(_) => calls.iter().partition(is_python),
            None => (Vec::new(), calls.iter().collect()),
        };
        let Some(worker) = self.interpreters.as_mut().filter(|_| !ours.is_empty()) else {
            return self.ask_of(has_environment.then_some(trajectory), json!({"calls": calls}));
        };
        let arguments: Vec<&Value> = ours.iter().map(|call| &call["arguments"]).collect();
        let request = json!({"id": self.next_id, "trajectory": trajectory, "arguments": arguments});
        worker.ask(self.next_id, Some(trajectory), &request);
        if others.is_empty() {
            self.next_id += 1;
            return self.next_id - 1;
        }
        let is_python = calls.iter().map(|call| is_python(&call)).collect();
        self.shared.insert(self.next_id, SharedTurn { is_python, has_environment, first: None });
        self.ask_of(has_environment.then_some(trajectory), json!({"calls": others}))
    }

    /// Begins an episode of the agent with the columns of a row, against the server at `base_url`. Returns the request's number.
    pub(super) fn play(&mut self, row: &Map<String, Value>, base_url: &str) -> u64 {
        let wants_state = self.wants_states;
        self.ask_of(None, json!({"row": row, "base_url": base_url, "wants_state": wants_state}))
    }

    /// Cancels an episode of the agent, whether it is running or queued. It gets no reply.
    pub(super) fn give_up(&mut self, id: u64) {
        self.functions.give_up(id);
        self.functions.tell(&json!({"give_up": id}));
    }

    /// Sends a request to the functions' process. `trajectory` is the one with an environment in that process to which the request belongs.
    fn ask_of(&mut self, trajectory: Option<u64>, mut request: Value) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        (request["id"], request["trajectory"]) = (id.into(), trajectory.into());
        self.functions.ask(id, trajectory, &request);
        id
    }

    /// The replies that have arrived. If there are none, waits up to `wait` for the next ones.
    ///
    /// # Errors
    /// The errors of [`ToolWorker::received`].
    pub(super) fn replies(&mut self, wait: Duration) -> Result<Vec<ToolReply>> {
        let end = Instant::now() + wait;
        loop {
            let functions = self.functions.received()?;
            let interpreters = self.interpreters.as_mut().map(ToolWorker::received).transpose()?.unwrap_or_default();
            let both = functions.into_iter().map(|reply| (false, reply));
            let both = both.chain(interpreters.into_iter().map(|reply| (true, reply)));
            let replies: Vec<_> = both.filter_map(|(is_python, reply)| self.whole(is_python, reply)).collect();
            let left = end.saturating_duration_since(Instant::now());
            if !replies.is_empty() || left.is_zero() {
                return Ok(replies);
            }
            let workers: Vec<_> = std::iter::once(&self.functions).chain(&self.interpreters).collect();
            ToolWorker::wait_any(&workers, left);
        }
    }

    /// Returns the reply for a complete turn, once both processes have replied if the turn has calls in both.
    fn whole(&mut self, is_python: bool, reply: ToolReply) -> Option<ToolReply> {
        let Some(turn) = self.shared.get_mut(&reply.id) else { return Some(reply) };
        let Some((first_is_python, first)) = turn.first.take() else {
            turn.first = Some((is_python, reply));
            return None;
        };
        let turn = self.shared.remove(&reply.id)?;
        let (python, others) = if first_is_python { (first, reply) } else { (reply, first) };
        Some(turn.merged(python, others))
    }
}

impl SharedTurn {
    /// Merges two replies: the results of all calls in order. If the functions' process has failed, each of its calls has, or the whole trajectory.
    fn merged(self, python: ToolReply, others: ToolReply) -> ToolReply {
        if python.is_lost() {
            return python;
        }
        if others.is_lost() {
            return others;
        }
        let failed = |error: &String| {
            let num_others = self.is_python.iter().filter(|is_python| !**is_python).count();
            vec![CallResult::error(error); num_others]
        };
        let kind = if python.is_late() { python.kind } else { others.kind };
        let results_of_others = others.error.as_ref().map(failed).unwrap_or(others.results);
        let (mut ours, mut theirs) = (python.results.into_iter(), results_of_others.into_iter());
        let results =
            self.is_python.iter().filter_map(|&is_python| if is_python { ours.next() } else { theirs.next() });
        let error = others.error.filter(|_| self.has_environment);
        ToolReply { results: results.collect(), seconds: python.seconds.max(others.seconds), kind, error, ..others }
    }
}

impl LoadReply {
    /// Adds a tool at index `place` to the schemas of all rows.
    fn add(&mut self, place: usize, schema: &Value) -> Result<(), String> {
        let of_environments = self.environments.values_mut().map(|environment| &mut environment.tools);
        for tools in std::iter::once(&mut self.tools).chain(of_environments) {
            let tools = tools.as_array_mut().ok_or("its process did not return a list of tools")?;
            if tools.iter().any(|tool| tool["function"]["name"] == schema["function"]["name"]) {
                return Err("more than one tool is named python".to_owned());
            }
            tools.insert(place, schema.clone());
        }
        Ok(())
    }
}

/// Starts the process of the tool `python` and checks that its sandbox can be set up.
fn start_interpreters(config: &Config) -> Result<ToolWorker> {
    let refuse = |cause: &str| Error::Environment { message: format!("tool 'python': {cause}") };
    let settings = InterpreterSettings {
        code: config.reward.code.clone(),
        turn_timeout_s: config.tools.tool_timeout_s,
        max_chars: MAX_RESULT_CHARS,
        workers: config.tools.tool_workers,
    };
    let settings = serde_json::to_string(&settings).expect("settings are plain data");
    let command = [PROGRAM, interpreters::COMMAND, &settings].map(str::to_owned).to_vec();
    let program = Program { command, is_ours: false, origin: Origin::Sandbox, max_reply_bytes: MAX_REPLY_BYTES };
    let (name, timeout_s) = ("the process of the tool 'python'", config.tools.tool_timeout_s);
    let worker = ToolWorker::start(program, name, "tool_timeout_s", timeout_s, &refuse)?;
    let ready: ToolReply = serde_json::from_slice(worker.loaded()).map_err(|error| refuse(&error.to_string()))?;
    ready.error.map_or(Ok(worker), |cause| Err(refuse(&cause)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(results: &[&str], error: Option<&str>, kind: Option<&str>) -> ToolReply {
        let results: Vec<_> = results.iter().map(|content| json!({"content": content, "failed": false})).collect();
        let reply = json!({"id": 1, "results": results, "error": error, "kind": kind, "seconds": results.len()});
        serde_json::from_value(reply).unwrap()
    }

    #[test]
    fn tool_results_of_two_processes_keep_the_call_order() {
        let merged = |python: ToolReply, others: ToolReply, has_environment: bool| {
            let is_python = vec![false, true, false, true];
            let reply = SharedTurn { is_python, has_environment, first: None }.merged(python, others);
            let contents: Vec<String> = reply.results.iter().map(|result| result.content.clone()).collect();
            (contents.join(" "), reply.is_late(), reply.error.is_some())
        };
        let [python, late, lost] = [None, Some("timeout"), None].map(|kind| reply(&["p1", "p2"], None, kind));
        assert_eq!(merged(python, reply(&["f1", "f2"], None, None), true), ("f1 p1 f2 p2".to_owned(), false, false));
        let expected = "{'error': 'gone'} p1 {'error': 'gone'} p2".to_owned();
        assert_eq!(merged(late, reply(&[], Some("gone"), Some("died")), false), (expected, true, false));
        assert!(merged(lost, reply(&[], Some("gone"), Some("died")), true).2, "the environment is lost");
        for (python, others) in [
            (ToolReply::lost(1, "x".into()), reply(&["f1"], None, None)),
            (reply(&["p1"], None, None), ToolReply::lost(1, "x".into())),
        ] {
            let turn = SharedTurn { is_python: vec![true, false], has_environment: false, first: None };
            assert!(turn.merged(python, others).is_lost(), "whichever of both processes is gone");
        }
    }
}
