//! Trajectories of several turns: the calls of a turn are read and answered, and the answers become the context of the next one.

mod answers;
mod suspended;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::process::ToolProcess;
use super::stats::{SessionCosts, ToolStats};
use crate::config::{AutoOr, Config, ToolCallParser};
use crate::data::{DatasetOptions, Reply, Tokenizer, ToolCall, TurnContext, TurnModel, open_thought};
use crate::error::{Error, Result};
use crate::types::{EnvironmentEnd, FinishReason, Prompt, Trajectory};

/// A group: no two that are under way have both in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupKey {
    /// Identity of its prompt.
    pub prompt_id: u64,
    /// Generation step at which it was begun.
    pub first_step: u64,
}

/// A trajectory: its group and its sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TrajectoryKey {
    /// The group.
    pub group: GroupKey,
    /// Sample index in the group.
    pub sample: usize,
}

/// Longest trajectories, in tokens.
#[derive(Debug, Clone, Copy)]
struct TurnLimits {
    /// All turns of a trajectory and the context between them.
    max_completion_length: usize,
    /// Prompt and trajectory together.
    max_model_length: usize,
}

/// The outcome of a turn, or of opening the environments of a group.
#[derive(Debug, Clone, PartialEq)]
pub enum TurnOutcome {
    /// All environments of the group are open. The prompt, if they added to it.
    Opened(Option<Prompt>),
    /// Context to append, after which the next turn is sampled.
    Continues(Vec<u32>),
    /// It was the last turn.
    Ended(EpisodeEnd),
}

/// The end of a trajectory, as rewards get it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct EpisodeEnd {
    /// Messages after the prompt.
    pub messages: Vec<Value>,
    /// The environment, if it has one that is not lost.
    pub environment: Option<Arc<EnvironmentEnd>>,
    /// Why the environment was lost.
    pub failure: Option<String>,
}

/// A request to the process.
#[derive(Debug, Clone, Copy)]
enum Asked {
    Open(TrajectoryKey),
    Calls(TrajectoryKey),
    Close(TrajectoryKey),
}

impl Asked {
    fn key(self) -> TrajectoryKey {
        match self {
            Self::Open(key) | Self::Calls(key) | Self::Close(key) => key,
        }
    }
}

/// A group whose environments are being opened.
#[derive(Debug)]
struct Opening {
    prompt: Prompt,
    num_left: usize,
    observations: Vec<Option<String>>,
}

/// A trajectory that is not at its end.
#[derive(Debug, Default)]
struct OpenTrajectory {
    /// The trajectory's number in the tools' process.
    number: u64,
    /// The name of the trajectory's environment.
    environment: Option<String>,
    /// Why the environment was lost.
    failure: Option<String>,
    prompt_len: usize,
    messages: Vec<Value>,
    num_answered: usize,
    /// The trajectory and the names of the calls that are under way.
    waiting: Option<(Trajectory, Vec<String>)>,
}

/// The trajectories of this rank that have several turns.
#[derive(Debug)]
pub struct Conversations {
    pub(super) process: ToolProcess,
    turns: TurnContext,
    tokenizer: Arc<Tokenizer>,
    parser: ToolCallParser,
    /// Whether the parser needs to see special tokens.
    shows_special: bool,
    eos_token_ids: Vec<u32>,
    max_iterations: usize,
    max_response_length: usize,
    limits: TurnLimits,
    open: HashMap<TrajectoryKey, OpenTrajectory>,
    opening: HashMap<GroupKey, Opening>,
    /// Ends of trajectories, and prompts with what environments added, of groups that wait for a later rollout.
    ended: HashMap<TrajectoryKey, EpisodeEnd>,
    observed: HashMap<GroupKey, Prompt>,
    asked: HashMap<u64, Asked>,
    prompts: DatasetOptions,
    num_trajectories: u64, // so far
    done: Vec<(TrajectoryKey, TurnOutcome)>,
    stats: ToolStats,
    /// Whether the first failed call, and the first lost environment, were told.
    has_warned: bool,
    has_failed: bool,
    /// Why the first environment since the last [`Conversations::take_loss`] was lost.
    loss: Option<String>,
}

impl Conversations {
    /// The conversations of `model` with the tools of `process`, in a run whose rows become prompts as `prompts` says.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] for a template that does not show tools' answers, or rewrites earlier turns;
    /// [`Error::InvalidValue`] where no format of calls is known.
    pub fn new(config: &Config, process: ToolProcess, model: &TurnModel, prompts: DatasetOptions) -> Result<Self> {
        let TurnModel { tokenizer, eos_token_ids, max_model_length } = model;
        let source = tokenizer.template_source().unwrap_or_default();
        let parser = match config.tools.tool_call_parser {
            AutoOr::Given(parser) => Some(parser),
            AutoOr::Auto => ToolCallParser::of_template(source),
        };
        let parser = parser.ok_or_else(|| {
            let expected = format!(
                "one of {}, as the format cannot be recognized from the chat template",
                ToolCallParser::NAMES.join(", ")
            );
            Error::invalid_value("tool_call_parser", "auto", expected)
        })?;
        let kwargs: &Map<String, Value> = &config.data.chat_template_kwargs.0;
        let turns =
            TurnContext::probe(Arc::clone(tokenizer), eos_token_ids, process.schemas().of_any(), kwargs, Reply::Tool)?;
        Ok(Self {
            process,
            turns,
            tokenizer: Arc::clone(tokenizer),
            parser,
            shows_special: parser.marks().any(|mark| tokenizer.is_special(mark)),
            eos_token_ids: eos_token_ids.clone(),
            max_iterations: config.tools.max_tool_calling_iterations.unwrap_or(usize::MAX),
            max_response_length: config.tools.max_tool_response_length.unwrap_or(usize::MAX),
            limits: TurnLimits {
                max_completion_length: config.max_completion_length,
                max_model_length: *max_model_length,
            },
            open: HashMap::new(),
            opening: HashMap::new(),
            ended: HashMap::new(),
            observed: HashMap::new(),
            asked: HashMap::new(),
            prompts,
            num_trajectories: 0,
            done: Vec::new(),
            stats: ToolStats::default(),
            has_warned: false,
            has_failed: false,
            loss: None,
        })
    }

    /// Whether trajectories have environments, which [`Conversations::open`] opens.
    pub fn has_environments(&self) -> bool {
        self.process.schemas().has_environments()
    }

    /// Opens an environment for each of `num_samples` trajectories of a group. [`Conversations::poll`] says when all are open.
    ///
    /// # Errors
    /// [`Error::Environment`] for a row that does not say which one it has.
    pub fn open(&mut self, group: GroupKey, prompt: &Prompt, num_samples: usize) -> Result<()> {
        let schemas = self.process.schemas().clone();
        let name = schemas.environment(&prompt.columns).map_err(|message| Error::Environment { message })?;
        let row = schemas.reset_columns(&prompt.columns);
        for sample in 0..num_samples {
            let key = TrajectoryKey { group, sample };
            let conversation = OpenTrajectory { environment: Some(name.to_owned()), ..self.fresh() };
            self.asked.insert(self.process.open(conversation.number, name, &row), Asked::Open(key));
            self.open.insert(key, conversation);
        }
        let opening = Opening { prompt: prompt.clone(), num_left: num_samples, observations: Vec::new() };
        self.opening.insert(group, opening);
        Ok(())
    }

    /// Takes in a trajectory behind `prompt` whose newest turn has ended. [`Conversations::poll`] has what follows.
    ///
    /// # Errors
    /// The errors of the tokenizer and of the chat template.
    pub fn turn_ended(&mut self, key: TrajectoryKey, prompt: &[u32], trajectory: &Trajectory) -> Result<()> {
        let mut conversation = self.open.remove(&key).unwrap_or_else(|| self.fresh());
        conversation.prompt_len = prompt.len();
        let environment = conversation.environment.as_deref().unwrap_or_default();
        let tools = self.process.schemas().of_environment(environment);
        let turn = trajectory.turns().pop().unwrap_or_default();
        let before = if turn.start == 0 { prompt } else { &trajectory.token_ids[..turn.start] };
        let thought = open_thought(&self.tokenizer, before)?;
        let parsed = self.parser.parse(&self.text(&trajectory.token_ids[turn])?, tools, thought);
        let mut message = json!({"role": "assistant", "content": parsed.content});
        let named = |call: &ToolCall| json!({"name": call.name, "arguments": call.arguments});
        let calls: Vec<Value> = parsed.tool_calls.iter().map(named).collect();
        if !calls.is_empty() {
            let listed = calls.iter().map(|call| json!({"type": "function", "function": call}));
            message["tool_calls"] = listed.collect();
        }
        conversation.messages.push(message);
        let may_go_on = conversation.failure.is_none()
            && trajectory.finish_reason != Some(FinishReason::Length)
            && conversation.num_answered < self.max_iterations;
        match parsed.error {
            _ if !may_go_on => self.end(key, conversation, trajectory),
            Some(error) => {
                self.stats.num_calls += 1;
                self.stats.num_failures += 1;
                self.stats.num_unreadable += 1;
                let error = format!("{{'error': 'The tool call cannot be read: {error}'}}");
                return self.answer(key, conversation, trajectory.clone(), &[("unknown", error)]);
            }
            None if calls.is_empty() => self.end(key, conversation, trajectory),
            None => {
                let names = parsed.tool_calls.into_iter().map(|call| call.name).collect();
                let asked = self.process.call(conversation.number, conversation.environment.is_some(), &calls);
                self.asked.insert(asked, Asked::Calls(key));
                conversation.waiting = Some((trajectory.clone(), names));
                self.open.insert(key, conversation);
            }
        }
        Ok(())
    }

    /// The wanted trajectories whose next turn can be sampled, or which have ended. If there are none, waits up to `wait` for a tool.
    ///
    /// # Errors
    /// [`Error::ToolService`] if the tools' process has ended again and again; [`Error::ChatTemplate`] if the template refuses an answer.
    pub fn poll(
        &mut self,
        wait: Duration,
        is_wanted: impl Fn(&TrajectoryKey) -> bool,
    ) -> Result<Vec<(TrajectoryKey, TurnOutcome)>> {
        if !self.asked.is_empty() {
            let is_there = self.done.iter().any(|(key, _)| is_wanted(key));
            for reply in self.process.replies(if is_there { Duration::ZERO } else { wait })? {
                self.take(reply)?;
            }
        }
        let (wanted, others) = std::mem::take(&mut self.done).into_iter().partition(|(key, _)| is_wanted(key));
        self.done = others;
        Ok(wanted)
    }

    /// Whether tools run for wanted trajectories.
    pub fn is_waiting(&self, is_wanted: impl Fn(&TrajectoryKey) -> bool) -> bool {
        self.asked.values().any(|asked| is_wanted(&asked.key()))
    }

    /// Counts what a session cost.
    pub fn book(&mut self, costs: SessionCosts) {
        self.stats.sessions += costs;
    }

    /// The model's tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Why an environment was lost since the last call: the first of them.
    pub fn take_loss(&mut self) -> Option<String> {
        self.loss.take()
    }

    /// The counts since the last call.
    pub fn take_stats(&mut self) -> ToolStats {
        std::mem::take(&mut self.stats)
    }

    /// A conversation that begins.
    fn fresh(&mut self) -> OpenTrajectory {
        self.num_trajectories += 1;
        OpenTrajectory { number: self.num_trajectories, ..OpenTrajectory::default() }
    }

    /// Text of a turn, with special tokens where the parser needs them.
    fn text(&self, ids: &[u32]) -> Result<String> {
        if !self.shows_special {
            return self.tokenizer.decode(ids);
        }
        let ids: Vec<u32> = ids.iter().copied().filter(|id| !self.eos_token_ids.contains(id)).collect();
        self.tokenizer.decode_all(&ids)
    }
}
