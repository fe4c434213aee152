//! The process that loads tools. It forks another for each turn whose tools run, so that a call that hangs or crashes costs its own
//! turn alone.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::config::{Config, is_python};
use crate::data::ToolSchemas;
use crate::error::{Error, Result};
use crate::phase;
use crate::reward::{Origin, Program, RewardFailure, RewardWorker, frame};

/// The server, a Python program.
const SERVER: &str = include_str!("server.py");
/// Longest time until all tools are loaded: a file may import much.
const START: Duration = Duration::from_secs(120);
/// Longest time between two heartbeats.
const BEAT: Duration = Duration::from_millis(200);
/// Longest result of one call in characters.
const MAX_RESULT_CHARS: usize = 1 << 20;
/// Longest reply in bytes: of the results of all calls of a turn.
const MAX_REPLY_BYTES: usize = 64 << 20;

/// The server's first reply: what it loaded, or why it could not.
#[derive(Debug, Deserialize)]
struct Loaded {
    #[serde(default)]
    tools: Value,
    #[serde(default)]
    environments: BTreeMap<String, LoadedEnvironment>,
    error: Option<String>,
}

/// What is known of a class of environments.
#[derive(Debug, Deserialize)]
struct LoadedEnvironment {
    tools: Value,
    has_reward: bool,
    class: String,
}

/// The reply to a request: a fresh environment's, the results of calls, or the end of an environment.
#[derive(Debug, Deserialize)]
pub(super) struct ToolReply {
    /// The request's number.
    pub id: u64,
    /// One for each call, in their order.
    #[serde(default)]
    pub results: Vec<CallResult>,
    /// Text that a fresh environment adds to the prompt.
    pub observation: Option<String>,
    /// The environment's own reward: a number, or the name of what is none.
    #[serde(default)]
    reward: Value,
    /// Why it has given none.
    failure: Option<String>,
    /// The environment's state.
    pub state: Option<String>,
    /// Why the request failed.
    pub error: Option<String>,
    /// `timeout` where that was the time.
    kind: Option<String>,
    /// Seconds from the beginning of the first call.
    #[serde(default)]
    pub seconds: f64,
}

/// The result of one call as text.
#[derive(Debug, Deserialize)]
pub(super) struct CallResult {
    pub content: String,
    pub failed: bool,
}

impl ToolReply {
    /// Whether the time was over.
    pub fn is_late(&self) -> bool {
        self.kind.as_deref() == Some("timeout")
    }

    /// The environment's own reward, if it has one.
    pub fn reward(&mut self) -> Option<Result<f32, String>> {
        match (self.failure.take(), std::mem::take(&mut self.reward)) {
            (Some(failure), _) => Some(Err(failure)),
            (None, Value::Null) => None,
            (None, Value::Number(number)) => Some(Ok(number.as_f64().unwrap_or(f64::NAN) as f32)),
            (None, other) => Some(Err(format!("get_reward returned {other}"))),
        }
    }
}

/// A class of environments.
#[derive(Debug)]
pub(super) struct EnvironmentClass {
    pub name: String,
    /// Folder of its file; empty for a module.
    pub folder: String,
    has_reward: bool,
}

/// The process of this rank's tools. Dropping it ends all that it started.
pub struct ToolProcess {
    worker: RewardWorker,
    schemas: ToolSchemas,
    environments: BTreeMap<String, EnvironmentClass>,
    /// Whether states of environments are asked for.
    wants_states: bool,
    next_id: u64,
    _parent: Sender<()>, // of the thread that started the worker, with which the worker would die
}

impl fmt::Debug for ToolProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ToolProcess").field("schemas", &self.schemas).finish_non_exhaustive()
    }
}

impl ToolProcess {
    /// Loads the tools that `config` names; `None` if it names none. Best called before there is a GPU context in this process.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for a tool that cannot be loaded, or whose signature or docstring says too little.
    pub fn start(config: &Config) -> Result<Option<Self>> {
        if !config.tools.has_turns() {
            return Ok(None);
        }
        let tools = &config.tools;
        let factories = &tools.environment_factory.0;
        let key = if tools.tools.is_empty() { "environment_factory" } else { "tools" };
        let named: Vec<&str> = tools.tools.iter().chain(factories.values()).map(String::as_str).collect();
        let named = named.join(", ");
        let refuse = |cause: &str| {
            let python = &config.reward.python;
            let expected = format!("what {python} can load and whose signatures it can describe; {cause}");
            Error::invalid_value(key, &named, expected)
        };
        let settings = json!({
            "tools": tools.tools,
            "environments": factories,
            "timeout_s": tools.tool_timeout_s,
            "workers": tools.tool_workers,
            "max_chars": MAX_RESULT_CHARS,
            "max_bytes": MAX_REPLY_BYTES,
        });
        let command = [&config.reward.python, "-c", SERVER, &settings.to_string()].map(str::to_owned).to_vec();
        let origin = Origin::Key(key.to_owned(), named.clone());
        let program = Program { command, is_ours: false, origin, max_reply_bytes: MAX_REPLY_BYTES };
        let (mut worker, parent) = started(program).map_err(|failure| refuse(&failure.cause))?;
        worker.send(&frame(&json!({"id": 0})));
        let loaded = first_reply(&mut worker).map_err(|failure| refuse(&failure.cause))?;
        let loaded: Loaded = serde_json::from_slice(&loaded).map_err(|error| refuse(&error.to_string()))?;
        match loaded.error {
            Some(cause) => Err(refuse(&cause)),
            None => Ok(Some(Self::new(config, worker, parent, loaded))),
        }
    }

    fn new(config: &Config, worker: RewardWorker, parent: Sender<()>, loaded: Loaded) -> Self {
        let factories = &config.tools.environment_factory.0;
        let class = |(name, loaded): (&String, &LoadedEnvironment)| {
            let place = factories[name].rsplit_once(':').map_or("", |(place, _)| place);
            let folder = Path::new(place).parent().filter(|_| place.ends_with(".py"));
            let folder = folder.and_then(|folder| std::path::absolute(folder.join(".")).ok()).unwrap_or_default();
            let folder = folder.to_string_lossy().into_owned();
            (name.clone(), EnvironmentClass { name: loaded.class.clone(), folder, has_reward: loaded.has_reward })
        };
        let environments = loaded.environments.iter().map(class).collect();
        let schemas = loaded.environments.into_iter().map(|(name, loaded)| (name, loaded.tools)).collect();
        let is_process = |entry: &String| is_python(entry) || config.rewards.get(entry).is_some();
        Self {
            worker,
            schemas: ToolSchemas::new(loaded.tools, schemas),
            environments,
            wants_states: config.reward_funcs.iter().any(is_process),
            next_id: 1,
            _parent: parent,
        }
    }

    /// JSON schemas of the tools.
    pub fn schemas(&self) -> &ToolSchemas {
        &self.schemas
    }

    /// Names of the classes of environments that give a reward by themselves.
    pub fn rewarding_classes(&self) -> Vec<String> {
        let mut classes: Vec<String> = Vec::new();
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

    /// Begins an episode of an environment for a trajectory and returns the request's number.
    pub(super) fn open(&mut self, trajectory: u64, environment: &str, row: &Map<String, Value>) -> u64 {
        self.ask(json!({"trajectory": trajectory, "environment": environment, "row": row}))
    }

    /// Asks for the reward and the state of a trajectory's environment, which ends, and returns the request's number.
    pub(super) fn close(&mut self, trajectory: u64, environment: &str) -> u64 {
        let wants_state = self.wants_states;
        self.ask(json!({"trajectory": trajectory, "environment": environment, "wants_state": wants_state}))
    }

    /// Ends the environment of a trajectory that nobody goes on with.
    pub(super) fn forget(&mut self, trajectory: u64) {
        self.worker.send(&frame(&json!({"drop": trajectory})));
    }

    /// Begins the calls of a turn, of a trajectory if it has an environment, objects with a `name` and `arguments`, and returns the request's number.
    pub(super) fn call(&mut self, trajectory: Option<u64>, calls: &[Value]) -> u64 {
        self.ask(json!({"trajectory": trajectory, "calls": calls}))
    }

    fn ask(&mut self, mut request: Value) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        request["id"] = id.into();
        self.worker.send(&frame(&request));
        id
    }

    /// The replies that have come; if there are none, the next ones that come within `wait`.
    ///
    /// # Errors
    /// [`Error::Environment`] if the process has ended or writes what is no reply.
    pub(super) fn replies(&mut self, wait: Duration) -> Result<Vec<ToolReply>> {
        let mut replies = Vec::new();
        let mut next = match wait.is_zero() {
            true => self.worker.poll(),
            false => self.worker.receive(Instant::now() + wait),
        };
        while let Some(reply) = next.map_err(|failure| gone(&failure.cause))? {
            replies.push(serde_json::from_slice(&reply).map_err(|error| gone(&error.to_string()))?);
            next = self.worker.reply_at_hand();
        }
        Ok(replies)
    }
}

fn gone(cause: &str) -> Error {
    Error::Environment { message: format!("the process of the tools cannot go on: {cause}") }
}

/// A worker whose parent is a thread that lives as long as the sender.
fn started(program: Program) -> Result<(RewardWorker, Sender<()>), RewardFailure> {
    let (parent, end) = channel::<()>();
    let (started, worker) = channel();
    let work = move || {
        let _ = started.send(RewardWorker::start(&program));
        let _ = end.recv();
    };
    let thread = std::thread::Builder::new().name("tools".into()).spawn(work);
    let failed = |what: String| RewardFailure::new(crate::reward::FailureKind::Died, what);
    thread.map_err(|error| failed(format!("no thread for it: {error}")))?;
    let worker = worker.recv().map_err(|_| failed("its thread ended".to_owned()))??;
    Ok((worker, parent))
}

fn first_reply(worker: &mut RewardWorker) -> Result<Vec<u8>, RewardFailure> {
    let end = Instant::now() + START;
    loop {
        phase::beat();
        match worker.receive(end.min(Instant::now() + BEAT))? {
            Some(reply) => return Ok(reply),
            None if Instant::now() >= end => return Err(worker.overdue()),
            None => {}
        }
    }
}
