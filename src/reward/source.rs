//! Determines how the reward named by an entry of `reward_funcs` or by a command line option is computed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Duration;

use serde_json::Value;

use super::code::{self, SANDBOX_COMMAND};
use super::endpoint::ServiceEndpoint;
use super::grading::Grading;
use super::protocol::{MAX_REPLY_BYTES, VERDICT_COLUMN};
use super::service::RewardService;
use super::verdict::Verdict;
use super::worker::{Origin, Program};
use super::{RewardFunction, builtin};
use crate::config::{ProcessReward, ProcessRewards, RewardBatch, RewardConfig, is_python, reward_name};
use crate::error::Result;
use crate::process::PROGRAM;

/// Python program of a worker that serves a Python function.
const PYTHON_WORKER: &str = include_str!("worker.py");

/// Python code for environments from hubs.
const ENVIRONMENTS: &str = include_str!("../tools/environments.py");

/// Additional time for running all tests of a program, beyond the configured timeout.
const SANDBOX_OVERHEAD: Duration = Duration::from_secs(10);

pub(super) enum RewardSource {
    /// The reward is computed by a function of this process.
    Function(RewardFunction),
    /// The reward is computed by worker processes.
    Service(RewardService),
    /// The reward is computed by an HTTP service.
    Endpoint(Box<ServiceEndpoint>),
}

/// The rewards that entries of a configuration key may name.
pub(super) struct RewardSources<'a> {
    /// The configuration key or command line option that names the rewards.
    pub key: &'a str,
    pub settings: &'a RewardConfig,
    pub processes: &'a ProcessRewards,
    /// The column with the prompt; `None` means the first of the default names.
    pub prompt_column: Option<&'a str>,
    /// Settings of the environment, whose own score may be named as a reward.
    pub environment: Option<Value>,
    /// Functions from the caller. They take precedence over other rewards of the same name.
    pub functions: &'a [(&'a str, RewardFunction)],
}

impl RewardSources<'_> {
    /// Determines the source of the reward that `entry` names; `index` is its index among all rewards.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for an unknown name.
    pub fn find(&self, entry: &str, index: usize) -> Result<RewardSource> {
        if let Some((_, function)) = self.functions.iter().find(|(known, _)| *known == entry) {
            return Ok(RewardSource::Function(Arc::clone(function)));
        }
        if let Some(reward) = self.processes.get(entry).filter(|reward| reward.url.is_some()) {
            return ServiceEndpoint::new(entry, index, reward, self.settings, self.prompt_column)
                .map(|endpoint| RewardSource::Endpoint(Box::new(endpoint)));
        }
        if let Some(reward) = self.processes.get(entry) {
            return Ok(RewardSource::Service(self.process(entry, index, reward, &format!("rewards.{entry}"))));
        }
        if [code::NAME, code::BINARY_NAME].contains(&entry) {
            return Ok(RewardSource::Service(self.sandbox(entry, index)));
        }
        if let Some(verdict) = Verdict::of(entry, self.settings) {
            return Ok(RewardSource::Service(self.verdict(entry, index, verdict)));
        }
        if let Some(settings) = self.environment.as_ref().filter(|settings| settings["environment"] == entry) {
            return Ok(RewardSource::Service(self.scorer(entry, index, settings)));
        }
        if is_python(entry) {
            let reward = ProcessReward::python(entry);
            return Ok(RewardSource::Service(self.process(reward_name(entry), index, &reward, self.key)));
        }
        builtin::function(self.key, entry, self.settings).map(RewardSource::Function)
    }

    fn process(&self, name: &str, index: usize, reward: &ProcessReward, key: &str) -> RewardService {
        let timeout_s = reward.timeout_s.unwrap_or(self.settings.timeout_s);
        let (command, key, value) = match &reward.function {
            Some(function) => {
                let key = if key == self.key { key.to_owned() } else { format!("{key}.function") };
                (
                    python(&self.settings.python, function, &self.settings.answer_column, timeout_s),
                    key,
                    function.clone(),
                )
            }
            None => (reward.command.0.clone(), format!("{key}.command"), format!("{:?}", reward.command.0)),
        };
        let program = Program {
            command,
            is_ours: reward.function.is_some(),
            origin: Origin::Key(key, value),
            max_reply_bytes: MAX_REPLY_BYTES,
        };
        let timeout = Duration::from_secs_f64(timeout_s);
        let service = self.service(name, index, program, timeout, reward.workers);
        RewardService { batch: reward.batch, concurrency: reward.concurrency, ..service }
    }

    /// A service for the score of an environment from a hub.
    fn scorer(&self, entry: &str, index: usize, settings: &Value) -> RewardService {
        let text = Value::from(settings.to_string()).to_string(); // a text of JSON is one of Python
        let function = format!("{ENVIRONMENTS}\nSETTINGS = json.loads({text})\n:score");
        let command = python(&self.settings.python, &function, &self.settings.answer_column, self.settings.timeout_s);
        let origin = Origin::Key("environment".to_owned(), entry.to_owned());
        let program = Program { command, is_ours: true, origin, max_reply_bytes: MAX_REPLY_BYTES };
        let timeout = Duration::from_secs_f64(self.settings.timeout_s);
        self.service(reward_name(entry), index, program, timeout, 1)
    }

    /// A service that compares answers with math-verify in a worker process.
    fn verdict(&self, name: &str, index: usize, verdict: Verdict) -> RewardService {
        let RewardConfig { timeout_s, math_workers, .. } = *self.settings;
        let timeout = Duration::from_secs_f64(timeout_s);
        let program = math_verify(name, &verdict.function(), self.settings);
        let service = self.service(name, index, program, timeout, math_workers);
        RewardService { grading: Grading::Verdict(Box::new(verdict)), ..service }
    }

    /// A service that runs model-written code. The worker process is this program itself.
    fn sandbox(&self, name: &str, index: usize) -> RewardService {
        let settings = &self.settings.code;
        let text = serde_json::to_string(settings).expect("settings are plain data");
        let command = vec![PROGRAM.to_owned(), SANDBOX_COMMAND.to_owned(), text];
        let program = Program { command, is_ours: true, origin: Origin::Sandbox, max_reply_bytes: MAX_REPLY_BYTES };
        let timeout = Duration::from_secs_f64(settings.timeout_s) + SANDBOX_OVERHEAD;
        let grading = if name == code::BINARY_NAME { Grading::Passed } else { Grading::Scores };
        RewardService { grading, ..self.service(name, index, program, timeout, settings.workers) }
    }

    fn service(
        &self,
        name: &str,
        index: usize,
        program: Program,
        timeout: Duration,
        num_workers: usize,
    ) -> RewardService {
        RewardService {
            index,
            name: name.to_owned(),
            program,
            grading: Grading::Scores,
            batch: RewardBatch::Completion,
            timeout,
            num_workers,
            concurrency: 1,
            max_failures: self.settings.max_worker_failures,
            num_failures: AtomicUsize::new(0),
            has_no_ids: AtomicBool::new(false),
        }
    }
}

/// The command that serves a Python function.
fn python(interpreter: &str, function: &str, answer_column: &str, timeout_s: f64) -> Vec<String> {
    let timeout_s = timeout_s.to_string();
    [interpreter, "-c", PYTHON_WORKER, function, answer_column, &timeout_s].map(str::to_owned).to_vec()
}

/// The worker program that runs `function` of `verdict.py` for the reward named `reward`.
pub(super) fn math_verify(reward: &str, function: &str, settings: &RewardConfig) -> Program {
    let command = python(&settings.python, function, VERDICT_COLUMN, settings.timeout_s);
    let origin = Origin::MathVerify { reward: reward.to_owned(), python: settings.python.clone() };
    Program { command, is_ours: true, origin, max_reply_bytes: MAX_REPLY_BYTES }
}
