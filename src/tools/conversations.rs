//! Multi-turn trajectories: the tool calls of a turn are parsed and executed, and their results become the context of the next turn.

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

/// Identifies a group. No two open groups have the same prompt and first step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupKey {
    /// Id of the group's prompt.
    pub prompt_id: u64,
    /// Generation step at which the group began.
    pub first_step: u64,
}

/// Identifies a trajectory by its group and sample index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TrajectoryKey {
    /// The trajectory's group.
    pub group: GroupKey,
    /// Index of the trajectory in its group.
    pub sample: usize,
}

/// Limits on the lengths of trajectories, in tokens.
#[derive(Debug, Clone, Copy)]
struct TurnLimits {
    /// All turns of a trajectory, including the context between them.
    max_completion_length: usize,
    /// Prompt and trajectory together.
    max_model_length: usize,
}

/// What follows a turn, or the opening of a group's environments.
#[derive(Debug, Clone, PartialEq)]
pub enum TurnOutcome {
    /// All environments of the group are open. Contains the new prompt if they added text to it.
    Opened(Option<Prompt>),
    /// Context to append before the next turn is sampled.
    Continues(Vec<u32>),
    /// The trajectory has ended.
    Ended(EpisodeEnd),
}

/// The end of a trajectory, as rewards receive it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct EpisodeEnd {
    /// Messages after the prompt.
    pub messages: Vec<Value>,
    /// The result of the environment; `None` without an environment, or if it failed.
    pub environment: Option<Arc<EnvironmentEnd>>,
    /// Why the environment failed.
    pub failure: Option<String>,
}

/// A request to the tools' process.
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

/// A trajectory that has not ended.
#[derive(Debug, Default)]
struct OpenTrajectory {
    /// Number of the trajectory in the tools' process.
    number: u64,
    /// Name of the trajectory's environment.
    environment: Option<String>,
    /// Why the environment failed.
    failure: Option<String>,
    prompt_len: usize,
    messages: Vec<Value>,
    num_answered: usize,
    /// The trajectory and the calls that are running.
    waiting: Option<(Trajectory, Vec<ToolCall>)>,
}

/// The multi-turn trajectories of this rank.
#[derive(Debug)]
pub struct Conversations {
    pub(super) process: ToolProcess,
    turns: TurnContext,
    tokenizer: Arc<Tokenizer>,
    parser: ToolCallParser,
    /// Whether the parser needs special tokens in the text.
    shows_special: bool,
    eos_token_ids: Vec<u32>,
    max_iterations: usize,
    max_response_length: usize,
    limits: TurnLimits,
    open: HashMap<TrajectoryKey, OpenTrajectory>,
    opening: HashMap<GroupKey, Opening>,
    /// Ends of trajectories whose groups wait for a later rollout. `observed` has the prompts to which environments added text.
    ended: HashMap<TrajectoryKey, EpisodeEnd>,
    observed: HashMap<GroupKey, Prompt>,
    asked: HashMap<u64, Asked>,
    prompts: DatasetOptions,
    num_trajectories: u64, // so far
    done: Vec<(TrajectoryKey, TurnOutcome)>,
    stats: ToolStats,
    /// Whether the first failed call was logged; likewise for the first failed environment.
    has_warned: bool,
    has_failed: bool,
    /// Why an environment failed: the first failure since the last [`Conversations::take_loss`].
    loss: Option<String>,
}

impl Conversations {
    /// Creates the conversations of `model` with the tools of `process`; `prompts` says how the run's rows become prompts.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] for a template that does not show tool results, or rewrites earlier turns;
    /// [`Error::InvalidValue`] if the format of tool calls is unknown.
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

    /// Whether trajectories have environments, which must be opened with [`Conversations::open`].
    pub fn has_environments(&self) -> bool {
        self.process.schemas().has_environments()
    }

    /// Opens an environment for each of `num_samples` trajectories of a group. [`Conversations::poll`] reports when all are open.
    ///
    /// # Errors
    /// [`Error::Environment`] for a row that does not name its environment.
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

    /// Parses and executes the tool calls in the newest turn of a trajectory after `prompt`. [`Conversations::poll`] returns the outcome.
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
                return self.answer(
                    key,
                    conversation,
                    trajectory.clone(),
                    &[(&ToolCall::new("unknown", Value::Null), error)],
                );
            }
            None if calls.is_empty() => self.end(key, conversation, trajectory),
            None => {
                let asked = self.process.call(conversation.number, conversation.environment.is_some(), &calls);
                self.asked.insert(asked, Asked::Calls(key));
                conversation.waiting = Some((trajectory.clone(), parsed.tool_calls));
                self.open.insert(key, conversation);
            }
        }
        Ok(())
    }

    /// Outcomes of the wanted trajectories whose next turn can be sampled or that have ended. If there are none, waits up to `wait` for tools.
    ///
    /// # Errors
    /// [`Error::ToolService`] if the tools' process has ended repeatedly; [`Error::ChatTemplate`] if a tool result cannot be rendered.
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

    /// Whether tools are running for wanted trajectories.
    pub fn is_waiting(&self, is_wanted: impl Fn(&TrajectoryKey) -> bool) -> bool {
        self.asked.values().any(|asked| is_wanted(&asked.key()))
    }

    /// Adds the costs of a session to the statistics.
    pub fn book(&mut self, costs: SessionCosts) {
        self.stats.sessions += costs;
    }

    /// The model's tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Why an environment failed: the first failure since the last call.
    pub fn take_loss(&mut self) -> Option<String> {
        self.loss.take()
    }

    /// The statistics since the last call.
    pub fn take_stats(&mut self) -> ToolStats {
        std::mem::take(&mut self.stats)
    }

    /// State of a new trajectory.
    fn fresh(&mut self) -> OpenTrajectory {
        self.num_trajectories += 1;
        OpenTrajectory { number: self.num_trajectories, ..OpenTrajectory::default() }
    }

    /// Text of a turn, with special tokens if the parser needs them.
    fn text(&self, ids: &[u32]) -> Result<String> {
        if !self.shows_special {
            return self.tokenizer.decode(ids);
        }
        let ids: Vec<u32> = ids.iter().copied().filter(|id| !self.eos_token_ids.contains(id)).collect();
        self.tokenizer.decode_all(&ids)
    }
}
