//! Trajectories of several turns: the calls of a turn are read and answered, and the answers become the context of the next one.

mod suspended;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::process::{CallResult, ToolProcess, ToolReply};
use super::stats::ToolStats;
use crate::config::{AutoOr, Config, ToolCallParser};
use crate::data::{DatasetOptions, Reply, Tokenizer, ToolCall, Turns};
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
struct Conversation {
    /// Its number in the process.
    number: u64,
    /// The name of its environment.
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
    turns: Turns,
    tokenizer: Arc<Tokenizer>,
    parser: ToolCallParser,
    /// Whether the parser needs to see special tokens.
    shows_special: bool,
    eos_token_ids: Vec<u32>,
    max_iterations: usize,
    max_response_length: usize,
    limits: TurnLimits,
    open: HashMap<TrajectoryKey, Conversation>,
    opening: HashMap<GroupKey, Opening>,
    /// Ends of trajectories, and prompts with what environments added, of groups that wait for a later rollout.
    ended: HashMap<TrajectoryKey, EpisodeEnd>,
    observed: HashMap<GroupKey, Prompt>,
    asked: HashMap<u64, Asked>,
    prompts: DatasetOptions,
    num_trajectories: u64, // so far
    done: Vec<(TrajectoryKey, TurnOutcome)>,
    stats: ToolStats,
    has_failed: bool,
}

impl Conversations {
    /// The conversations of a run with the tools of `process`, whose rows become prompts as `prompts` says.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] for a template that does not show tools' answers, or rewrites earlier turns;
    /// [`Error::InvalidValue`] where no format of calls is known.
    pub fn new(
        config: &Config,
        process: ToolProcess,
        tokenizer: &Arc<Tokenizer>,
        eos_token_ids: &[u32],
        (prompts, max_model_length): (DatasetOptions, usize),
    ) -> Result<Self> {
        let source = tokenizer.template_source().unwrap_or_default();
        let parser = match config.tools.tool_call_parser {
            AutoOr::Given(parser) => Some(parser),
            AutoOr::Auto => ToolCallParser::of_template(source),
        };
        let parser = parser.ok_or_else(|| {
            let expected = format!("one of {}: the chat template shows no format", ToolCallParser::NAMES.join(", "));
            Error::invalid_value("tool_call_parser", "auto", expected)
        })?;
        let kwargs: &Map<String, Value> = &config.data.chat_template_kwargs.0;
        let turns =
            Turns::probe(Arc::clone(tokenizer), eos_token_ids, process.schemas().of_any(), kwargs, Reply::Tool)?;
        Ok(Self {
            process,
            turns,
            tokenizer: Arc::clone(tokenizer),
            parser,
            shows_special: parser.markers().iter().any(|marker| tokenizer.is_special(marker)),
            eos_token_ids: eos_token_ids.to_vec(),
            max_iterations: config.tools.max_tool_calling_iterations.unwrap_or(usize::MAX),
            max_response_length: config.tools.max_tool_response_length.unwrap_or(usize::MAX),
            limits: TurnLimits { max_completion_length: config.max_completion_length, max_model_length },
            open: HashMap::new(),
            opening: HashMap::new(),
            ended: HashMap::new(),
            observed: HashMap::new(),
            asked: HashMap::new(),
            prompts,
            num_trajectories: 0,
            done: Vec::new(),
            stats: ToolStats::default(),
            has_failed: false,
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
            let conversation = Conversation { environment: Some(name.to_owned()), ..self.fresh() };
            self.asked.insert(self.process.open(conversation.number, name, &row), Asked::Open(key));
            self.open.insert(key, conversation);
        }
        let opening = Opening { prompt: prompt.clone(), num_left: num_samples, observations: Vec::new() };
        self.opening.insert(group, opening);
        Ok(())
    }

    /// Takes in a trajectory whose newest turn has ended. [`Conversations::poll`] has what follows.
    ///
    /// # Errors
    /// The errors of the tokenizer and of the chat template.
    pub fn turn_ended(&mut self, key: TrajectoryKey, prompt_len: usize, trajectory: &Trajectory) -> Result<()> {
        let mut conversation = self.open.remove(&key).unwrap_or_else(|| self.fresh());
        conversation.prompt_len = prompt_len;
        let environment = conversation.environment.as_deref().unwrap_or_default();
        let tools = self.process.schemas().of_environment(environment);
        let parsed = self.parser.parse(&self.newest_turn(trajectory)?, tools);
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
                let trajectory_of = (conversation.number, conversation.environment.is_some());
                self.asked.insert(self.process.call(trajectory_of, &calls), Asked::Calls(key));
                conversation.waiting = Some((trajectory.clone(), names));
                self.open.insert(key, conversation);
            }
        }
        Ok(())
    }

    /// The wanted trajectories whose next turn can be sampled, or which have ended. If there are none, waits up to `wait` for a tool.
    ///
    /// # Errors
    /// [`Error::Environment`] if the tools' process has ended; [`Error::ChatTemplate`] if the template refuses an answer.
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

    /// Books the time of a rollout, in which nothing was decoded for `idle`.
    pub fn book_time(&mut self, idle: Duration, total: Duration) {
        self.stats.idle += idle;
        self.stats.total += total;
    }

    /// The model's tokenizer.
    #[cfg(test)]
    pub(crate) fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Books tokens of earlier turns that an engine still had, and those that it computed again.
    pub fn book_tokens(&mut self, num_kept: usize, num_recomputed: usize) {
        self.stats.num_kept_tokens += num_kept;
        self.stats.num_recomputed_tokens += num_recomputed;
    }

    /// The counts since the last call.
    pub fn take_stats(&mut self) -> ToolStats {
        std::mem::take(&mut self.stats)
    }

    /// A conversation that begins.
    fn fresh(&mut self) -> Conversation {
        self.num_trajectories += 1;
        Conversation { number: self.num_trajectories, ..Conversation::default() }
    }

    /// Text of a trajectory's newest turn.
    fn newest_turn(&self, trajectory: &Trajectory) -> Result<String> {
        let range = trajectory.turns().pop().unwrap_or_default();
        let ids = &trajectory.token_ids[range];
        if !self.shows_special {
            return self.tokenizer.decode(ids);
        }
        let ids: Vec<u32> = ids.iter().copied().filter(|id| !self.eos_token_ids.contains(id)).collect();
        self.tokenizer.decode_all(&ids)
    }

    fn take(&mut self, reply: ToolReply) -> Result<()> {
        match self.asked.remove(&reply.id) {
            Some(Asked::Open(key)) => self.take_opened(key, reply),
            Some(Asked::Calls(key)) => self.take_results(key, reply),
            Some(Asked::Close(key)) => {
                self.take_closed(key, reply);
                Ok(())
            }
            None => Ok(()), // of a rollout that failed
        }
    }

    /// Books that an environment is open, or lost; once all of the group are, whether they add to the prompt.
    fn take_opened(&mut self, key: TrajectoryKey, reply: ToolReply) -> Result<()> {
        let (Some(conversation), Some(opening)) = (self.open.get_mut(&key), self.opening.get_mut(&key.group)) else {
            return Ok(());
        };
        opening.num_left -= 1;
        match reply.error {
            Some(error) => conversation.failure = Some(format!("reset: {error}")),
            None => opening.observations.push(reply.observation),
        }
        let Some(opening) = (opening.num_left == 0).then(|| self.opening.remove(&key.group)).flatten() else {
            return Ok(());
        };
        let Opening { prompt, observations, .. } = opening;
        let first = observations.first().cloned().flatten();
        if let Some(other) = observations.iter().find(|observation| **observation != first) {
            let message = format!(
                "environment_factory: reset gave one completion of a prompt {first:?} and another {other:?}; completions \
                 of a group have one prompt: let reset depend on the row alone"
            );
            return Err(Error::Environment { message });
        }
        let observed = |observation: String| -> Result<Prompt> {
            let (text, token_ids) = self.prompts.observed(&prompt.columns, &observation, &self.tokenizer)?;
            self.check_room(token_ids.len())?;
            Ok(Prompt { text, token_ids, ..prompt.clone() })
        };
        let prompt = first.map(observed).transpose()?;
        let key = TrajectoryKey { sample: 0, ..key };
        self.done.push((key, TurnOutcome::Opened(prompt)));
        Ok(())
    }

    /// Refuses a prompt after which no completion of `max_completion_length` tokens fits the sequences that the run plans for.
    fn check_room(&self, num_tokens: usize) -> Result<()> {
        let TurnLimits { max_completion_length, max_model_length } = self.limits;
        let longest = max_model_length.saturating_sub(max_completion_length);
        if num_tokens <= longest {
            return Ok(());
        }
        let message = format!(
            "environment_factory: reset made a prompt of {num_tokens} tokens, and the run plans for {longest} at most; set \
             max_prompt_length to the longest that there can be"
        );
        Err(Error::Environment { message })
    }

    /// Ends a trajectory whose environment has given its reward and state.
    fn take_closed(&mut self, key: TrajectoryKey, mut reply: ToolReply) {
        let Some(Conversation { number, messages, environment: Some(name), .. }) = self.open.remove(&key) else {
            return;
        };
        self.process.forget(number);
        let class = self.process.class(&name);
        let failure = reply.error.take().map(|error| format!("get_reward: {error}"));
        let end = EnvironmentEnd {
            class: class.name.clone(),
            folder: class.folder.clone(),
            reward: reply.reward(),
            state: reply.state.take(),
        };
        let environment = failure.is_none().then(|| Arc::new(end));
        self.finish(key, EpisodeEnd { messages, environment, failure });
    }

    fn take_results(&mut self, key: TrajectoryKey, reply: ToolReply) -> Result<()> {
        let Some(mut conversation) = self.open.remove(&key) else { return Ok(()) };
        let Some((trajectory, names)) = conversation.waiting.take() else { return Ok(()) };
        self.stats.num_timeouts += usize::from(reply.is_late());
        self.stats.num_answers += 1;
        self.stats.seconds += reply.seconds;
        self.stats.max_seconds = self.stats.max_seconds.max(reply.seconds);
        let results = match reply.error {
            None => reply.results,
            Some(error) if conversation.environment.is_some() => {
                conversation.failure = Some(error);
                self.end(key, conversation, &trajectory);
                return Ok(());
            }
            Some(error) => {
                vec![CallResult::error(&error); names.len()]
            }
        };
        if results.len() != names.len() {
            return Err(Error::Environment {
                message: format!("tools: {} results for {} calls", results.len(), names.len()),
            });
        }
        self.stats.num_calls += names.len();
        self.stats.num_failures += results.iter().filter(|result| result.failed).count();
        let answers: Vec<(&str, String)> =
            names.iter().map(String::as_str).zip(results.into_iter().map(|result| result.content)).collect();
        self.answer(key, conversation, trajectory, &answers)
    }

    /// Appends answers, each with the name of its tool. Where they do not fit they are dropped, and the trajectory ends.
    fn answer(
        &mut self,
        key: TrajectoryKey,
        mut conversation: Conversation,
        mut trajectory: Trajectory,
        answers: &[(&str, String)],
    ) -> Result<()> {
        let num_before = trajectory.token_ids.len();
        let mut messages = Vec::new();
        for (name, content) in answers {
            let content = self.cut(content);
            messages.push(json!({"role": "tool", "name": name, "content": content}));
        }
        let step = trajectory.weight_versions.last().copied().unwrap_or_default();
        let numbered = messages.iter().enumerate().map(|(index, message)| {
            let mut message = message.clone();
            message["tool_call_id"] = format!("call{index:05}").into(); // as long as Mistral's templates ask for
            message
        });
        let ended = trajectory.clone();
        self.turns.append(&mut trajectory, &numbered.collect::<Vec<_>>(), step)?;
        let num_tokens = trajectory.token_ids.len();
        let TurnLimits { max_completion_length, max_model_length } = self.limits;
        if num_tokens > max_completion_length || conversation.prompt_len + num_tokens >= max_model_length {
            self.stats.num_overlong += 1;
            self.end(key, conversation, &ended);
            return Ok(());
        }
        conversation.messages.extend(messages);
        conversation.num_answered += 1;
        let context = trajectory.token_ids.split_off(num_before);
        self.open.insert(key, conversation);
        self.done.push((key, TurnOutcome::Continues(context)));
        Ok(())
    }

    /// The answer, without its middle if it is too long.
    fn cut(&mut self, content: &str) -> String {
        let num_chars = content.chars().count();
        if num_chars <= self.max_response_length {
            return content.to_owned();
        }
        self.stats.num_cut += 1;
        let half = self.max_response_length / 2;
        let head: String = content.chars().take(half).collect();
        let tail: String = content.chars().skip(num_chars - half).collect();
        format!("{head}...(truncated)...{tail}")
    }

    fn end(&mut self, key: TrajectoryKey, conversation: Conversation, trajectory: &Trajectory) {
        let num_turns = trajectory.turns().len();
        self.stats.num_trajectories += 1;
        self.stats.num_turns += num_turns;
        self.stats.max_turns = self.stats.max_turns.max(num_turns);
        match (&conversation.environment, conversation.failure) {
            (Some(name), None) => {
                self.asked.insert(self.process.close(conversation.number, name), Asked::Close(key));
                self.open.insert(key, Conversation { failure: None, ..conversation });
            }
            (_, failure) => {
                self.process.forget(conversation.number);
                self.finish(key, EpisodeEnd { messages: conversation.messages, environment: None, failure });
            }
        }
    }

    fn finish(&mut self, key: TrajectoryKey, end: EpisodeEnd) {
        if let Some(failure) = &end.failure {
            self.stats.num_failed += 1;
            if !std::mem::replace(&mut self.has_failed, true) {
                tracing::warn!("an environment is lost, its completion is masked: {failure}; this is said once");
            }
        }
        self.done.push((key, TurnOutcome::Ended(end)));
    }
}
