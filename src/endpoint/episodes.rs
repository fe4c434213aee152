//! Episodes that agents play against the server while the policy samples. Like other clients, an agent sends all messages with each request.
//! The server keeps conversations as token ids. For a new request it takes the ids of the longest known conversation with which the messages
//! begin, and renders only the rest. The trained tokens are thus exactly the sampled ones.
//!
//! A request that continues the end of a conversation is its next turn. Any other request begins a new conversation (a branch), whose
//! prompt consists of all known or rendered tokens. Each sampled token is trained on once, in the conversation for which it was sampled.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};

use serde_json::{Map, Value, json};

use super::ask::{ApiRequest, PromptSource, message};
use super::prompt::ServedModel;
use super::refusal::Refusal;
use crate::data::{Conversation, Reply, TurnContext, reasoning};
use crate::error::Error;
use crate::rollout::Request;
use crate::tools::GroupKey;
use crate::types::{SamplingParams, Trajectory};

/// The open episodes of one rank.
#[derive(Debug)]
pub struct Episodes {
    shared: Arc<EpisodesShared>,
    open: Mutex<HashMap<String, Arc<Episode>>>,
}

/// State shared by all episodes of a rank.
#[derive(Debug)]
struct EpisodesShared {
    max_requests: usize,
    /// Context between turns, by tools, template variables and kind of reply.
    turns: Mutex<HashMap<String, Arc<TurnContext>>>,
    num_refused: AtomicUsize,
    /// Ensures that only the first rejected request is logged.
    first_refusal: Once,
}

/// An episode: one sample of one prompt.
#[derive(Debug)]
pub(super) struct Episode {
    shared: Arc<EpisodesShared>,
    /// The run's sampling parameters, for one completion.
    params: SamplingParams,
    /// Number of completions in a group: the sample indexes of an episode's requests differ by this number.
    num_generations: usize,
    group: GroupKey,
    sample: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    num_requests: usize,
    branches: Vec<Branch>,
    has_ended: bool,
}

/// A conversation of an episode.
#[derive(Debug)]
struct Branch {
    setting: Setting,
    prompt: Vec<u32>,
    /// Number of messages in the prompt.
    num_given: usize,
    messages: Vec<Value>,
    trajectory: Trajectory,
    /// For each turn of the model: the numbers of messages and of tokens after the prompt at its end.
    ends: Vec<(usize, usize)>,
}

/// The settings besides its messages with which a conversation is rendered.
#[derive(Debug, Clone, PartialEq)]
struct Setting {
    tools: Value,
    variables: Map<String, Value>,
}

/// A finished episode.
#[derive(Debug, Default)]
pub struct PlayedEpisode {
    /// The conversations, in the order of their first turns.
    pub conversations: Vec<PlayedConversation>,
    /// Number of requests that were served.
    pub num_requests: usize,
}

/// A conversation of a finished episode.
#[derive(Debug)]
pub struct PlayedConversation {
    /// Token ids before the first token sampled for this conversation.
    pub prompt: Vec<u32>,
    /// Tokens sampled for the conversation and the context between them. `messages` are those after the prompt.
    pub trajectory: Trajectory,
}

/// Records a response as a turn of an episode, once it is complete. A response whose client has disconnected is not recorded.
#[derive(Debug)]
pub(super) struct TurnRecorder {
    episode: Arc<Episode>,
    setting: Setting,
    messages: Vec<Value>,
    prompt: Vec<u32>,
    num_begun: usize,
    /// Index of the conversation that the turn continues, and its number of turns before; `None` for a new conversation.
    goes_on: Option<(usize, usize)>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Episodes {
    /// A set of episodes, each of which may make at most `max_requests` requests.
    pub fn new(max_requests: usize) -> Self {
        let shared = EpisodesShared {
            max_requests,
            turns: Mutex::default(),
            num_refused: AtomicUsize::new(0),
            first_refusal: Once::new(),
        };
        Self { shared: Arc::new(shared), open: Mutex::default() }
    }

    /// Begins an episode of a group that is sampled with `params`. Returns its name, which is part of the URL of its requests.
    pub fn open(&self, group: GroupKey, sample: usize, params: &SamplingParams) -> String {
        let name = format!("{:016x}", RandomState::new().hash_one((group, sample)));
        let (num_generations, params) =
            (params.num_generations, SamplingParams { num_generations: 1, ..params.clone() });
        let (shared, state) = (Arc::clone(&self.shared), Mutex::default());
        let episode = Episode { shared, params, num_generations, group, sample, state };
        lock(&self.open).insert(name.clone(), Arc::new(episode));
        name
    }

    /// The trajectories that an episode has recorded so far.
    pub fn recorded(&self, name: &str) -> Vec<Trajectory> {
        let Some(episode) = self.find(name) else { return Vec::new() };
        lock(&episode.state).branches.iter().map(|branch| branch.trajectory.clone()).collect()
    }

    /// Ends an episode and returns what it recorded, without turns that are still being sampled.
    pub fn close(&self, name: &str) -> PlayedEpisode {
        let Some(episode) = lock(&self.open).remove(name) else { return PlayedEpisode::default() };
        let mut state = lock(&episode.state);
        state.has_ended = true;
        let played = std::mem::take(&mut state.branches).into_iter().map(|mut branch| {
            let messages = branch.messages.split_off(branch.num_given);
            PlayedConversation { prompt: branch.prompt, trajectory: Trajectory { messages, ..branch.trajectory } }
        });
        PlayedEpisode { conversations: played.collect(), num_requests: state.num_requests }
    }

    /// Number of rejected requests since the last call.
    pub fn take_num_refused(&self) -> usize {
        self.shared.num_refused.swap(0, Ordering::Relaxed)
    }

    pub(super) fn find(&self, name: &str) -> Option<Arc<Episode>> {
        lock(&self.open).get(name).cloned()
    }
}

impl Episode {
    /// Rejects a request with sampling parameters other than the run's: the trainer would compute different log-probabilities.
    fn check(&self, ask: &ApiRequest) -> Result<(), Refusal> {
        let (asked, own) = (&ask.params, &self.params);
        let same = "expected the value of the training run, or none: the policy is trained on samples of this \
                    distribution";
        let differs = [
            ("temperature", asked.temperature != own.temperature),
            ("top_p", asked.top_p != own.top_p),
            ("top_k", asked.top_k != own.top_k),
            ("min_p", asked.min_p != own.min_p),
            ("repetition_penalty", asked.repetition_penalty != own.repetition_penalty),
            ("seed", ask.has_seed),
        ];
        if let Some((name, _)) = differs.iter().find(|(_, differs)| *differs) {
            return Err(Refusal::of(name, same));
        }
        if asked.structure.is_some() {
            return Err(Refusal::of(
                "response_format",
                "structured output is not supported in training, as it changes the sampled distribution",
            ));
        }
        if asked.num_generations != 1 {
            return Err(Refusal::of("n", "expected 1: send another request for another answer"));
        }
        Ok(())
    }
}

impl EpisodesShared {
    fn turns(&self, model: &ServedModel, setting: &Setting, reply: Reply) -> Result<Arc<TurnContext>, Refusal> {
        let key = json!([setting.tools, setting.variables, reply == Reply::Tool]).to_string();
        let known = lock(&self.turns).get(&key).cloned();
        if let Some(turns) = known {
            return Ok(turns);
        }
        let Setting { tools, variables } = setting;
        let turns = TurnContext::probe(Arc::clone(&model.tokenizer), &model.eos_token_ids, tools, variables, reply);
        let turns = Arc::new(turns.map_err(|error| refused(&error))?);
        lock(&self.turns).insert(key, Arc::clone(&turns));
        Ok(turns)
    }
}

impl Episode {
    /// Converts a request body to the engine's request for the next turn, and returns the recorder for the response.
    pub(super) fn request(
        self: &Arc<Self>,
        model: &ServedModel,
        body: &[u8],
    ) -> Result<(ApiRequest, Request, TurnRecorder), Refusal> {
        self.try_request(model, body).inspect_err(|refusal| {
            self.shared.num_refused.fetch_add(1, Ordering::Relaxed);
            self.shared.first_refusal.call_once(|| {
                let why = refusal.cut_message();
                tracing::warn!(
                    "a request of the agent was refused: {why}; further refusals are only counted (agent/num_refused)"
                );
            });
        })
    }

    fn try_request(
        self: &Arc<Self>,
        model: &ServedModel,
        body: &[u8],
    ) -> Result<(ApiRequest, Request, TurnRecorder), Refusal> {
        let params = &self.params;
        let mut ask = ApiRequest::read_with(body, true, params)?;
        self.check(&ask)?;
        let [PromptSource::Conversation(Conversation { messages, tools, variables, add_generation_prompt })] =
            &ask.prompts[..]
        else {
            return Err(Refusal::of("messages", "expected a conversation"));
        };
        if !add_generation_prompt {
            return Err(Refusal::of("add_generation_prompt", "expected true"));
        }
        let setting = Setting { tools: tools.clone(), variables: variables.clone() };
        let mut state = lock(&self.state);
        if state.has_ended {
            return Err(Refusal::new(404, "the episode has ended"));
        }
        if state.num_requests >= self.shared.max_requests {
            let most = self.shared.max_requests;
            return Err(Refusal::new(
                400,
                format!("this episode has used all of its agent_max_requests = {most} requests"),
            ));
        }
        let (prompt, begun, goes_on) = match state.longest(&setting, messages) {
            Some((place, end)) => {
                let branch = &state.branches[place];
                let (num_messages, num_tokens) = branch.ends[end];
                let replies = &messages[num_messages..];
                let turns = self.shared.turns(model, &setting, Reply::of(replies))?;
                let mut begun = head(&branch.trajectory, num_tokens);
                let version = begun.weight_versions.last().copied().unwrap_or_default();
                let most = params.max_completion_length.max(model.max_sequence_length);
                if !turns.append(&mut begun, replies, version, most).map_err(|error| refused(&error))? {
                    let message = format!(
                        "the newest messages alone leave no room for an answer: a conversation may have {most} tokens"
                    );
                    return Err(Refusal::of_length("messages", message));
                }
                match end + 1 == branch.ends.len() {
                    true => (branch.prompt.clone(), begun, Some((place, branch.ends.len()))),
                    false => ([&branch.prompt[..], &begun.token_ids].concat(), Trajectory::default(), None),
                }
            }
            None => {
                let requests = model.token_ids(&ask.prompts[0])?;
                (requests, Trajectory::default(), None)
            }
        };
        let num_begun = begun.token_ids.len();
        let most = params.max_completion_length.min(model.max_sequence_length.saturating_sub(prompt.len()));
        if num_begun >= most {
            let context = prompt.len() + num_begun;
            let message = format!(
                "a conversation of {context} tokens, {num_begun} of them after the first request, leaves no room for \
                 an answer: at most max_completion_length = {} tokens may follow the first request, and {} tokens in \
                 all",
                params.max_completion_length, model.max_sequence_length
            );
            return Err(Refusal::of_length("messages", message));
        }
        let max_tokens = ask.max_tokens.unwrap_or(most).max(1);
        let stop = params.stop.iter().chain(&ask.params.stop).cloned().collect();
        ask.params = SamplingParams {
            max_completion_length: most.min(num_begun.saturating_add(max_tokens)),
            stop,
            top_logprobs: ask.params.top_logprobs,
            ..params.clone()
        };
        let request = Request {
            prompt_id: self.group.prompt_id,
            token_ids: prompt.clone(),
            first_step: self.group.first_step,
            first_sample: self.sample + self.num_generations * state.num_requests, // other random keys for each
            params: Arc::new(ask.params.clone()),
            begun: if num_begun == 0 { Vec::new() } else { vec![begun] },
            adapter: None,
        };
        state.num_requests += 1;
        let (episode, messages) = (Arc::clone(self), messages.clone());
        Ok((ask, request, TurnRecorder { episode, setting, messages, prompt, num_begun, goes_on }))
    }
}

impl State {
    /// Finds the longest recorded turn that `messages` continue. Returns the indexes of its conversation and of the turn in it. The messages after
    /// the
    /// turn must not include one of the assistant, because it was not sampled in this conversation.
    fn longest(&self, setting: &Setting, messages: &[Value]) -> Option<(usize, usize)> {
        let known: Vec<Value> = messages.iter().map(canonical).collect();
        let goes_on = |branch: &Branch, num_messages: usize| {
            num_messages < known.len()
                && branch.setting == *setting
                && branch.messages[..num_messages].iter().map(canonical).eq(known[..num_messages].iter().cloned())
                && messages[num_messages..].iter().all(|message| message["role"] != "assistant")
        };
        let ends = self.branches.iter().enumerate().flat_map(|(place, branch)| {
            branch.ends.iter().enumerate().map(move |(end, (num_messages, _))| (branch, *num_messages, place, end))
        });
        let found = ends.filter(|(branch, num_messages, ..)| goes_on(branch, *num_messages));
        // Of equally long ones one that nothing follows yet.
        let longest = found.max_by_key(|(branch, num_messages, _, end)| (*num_messages, *end + 1 == branch.ends.len()));
        longest.map(|(_, _, place, end)| (place, end))
    }
}

impl TurnRecorder {
    /// Appends the turn to its conversation, or begins a new one if another turn was appended there first.
    pub fn record(self, trajectory: Trajectory, answer: Value) {
        let Self { episode, setting, mut messages, prompt, num_begun, goes_on } = self;
        let num_given = messages.len();
        messages.push(message(&answer).unwrap_or(answer));
        let mut state = lock(&episode.state);
        if state.has_ended {
            return;
        }
        if let Some(branch) = goes_on.and_then(|(place, num_turns)| {
            state.branches.get_mut(place).filter(|branch| branch.ends.len() == num_turns)
        }) {
            branch.ends.push((messages.len(), trajectory.token_ids.len()));
            (branch.messages, branch.trajectory) = (messages, trajectory);
            return;
        }
        let prompt = [&prompt[..], &trajectory.token_ids[..num_begun]].concat();
        let trajectory = behind(&trajectory, num_begun);
        let ends = vec![(messages.len(), trajectory.token_ids.len())];
        state.branches.push(Branch { setting, prompt, num_given, messages, trajectory, ends });
    }
}

/// The normalized form in which messages are compared, because a client sends an answer back in its own form.
fn canonical(message: &Value) -> Value {
    let content = message["content"].as_str().unwrap_or_default();
    let is_answer = message["role"] == "assistant";
    let call = |call: &Value| json!([call["function"]["name"], call["function"]["arguments"]]);
    let calls: Vec<Value> = message["tool_calls"].as_array().into_iter().flatten().map(call).collect();
    json!([message["role"], if is_answer { content.trim() } else { content }, reasoning(message), calls])
}

/// The first tokens of a trajectory. Routed experts, which begin with those of the prompt, are not shortened.
fn head(trajectory: &Trajectory, num_tokens: usize) -> Trajectory {
    let mut head = trajectory.clone();
    head.token_ids.truncate(num_tokens);
    head.loss_mask.truncate(num_tokens);
    head.rollout_logprobs.truncate(num_tokens);
    head.weight_versions.truncate(num_tokens);
    head
}

/// The tokens of a trajectory after the first `num_before`.
pub(super) fn behind(trajectory: &Trajectory, num_before: usize) -> Trajectory {
    Trajectory {
        token_ids: trajectory.token_ids[num_before..].to_vec(),
        loss_mask: trajectory.loss_mask[num_before..].to_vec(),
        rollout_logprobs: trajectory.rollout_logprobs[num_before..].to_vec(),
        weight_versions: trajectory.weight_versions[num_before..].to_vec(),
        ..trajectory.clone()
    }
}

fn refused(error: &Error) -> Refusal {
    Refusal::of("messages", error.to_string())
}

#[cfg(test)]
mod tests;
