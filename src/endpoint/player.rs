//! Plays groups whose completions are episodes of an agent against the server: manages the agent's processes, the conversations and the engine's
//! session. Each rank plays the episodes of its own groups against its own server. Before every step, ranks that share an engine exchange
//! their new requests, so that all submit the same requests in the same order.
//!
//! A session may end while episodes are running. The agents continue, and their requests wait for the session that continues their group.

mod groups;
mod session;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use self::groups::PlayedGroup;
use self::session::PlayedSession;
use super::client::{ClientLimits, EngineChannel, EngineClient, EngineCommand, EngineQueue, engine_channel};
use super::episodes::Episodes;
use super::server::{ServerOptions, open};
use crate::data::{GrammarCompiler, ToolCallParser, TurnModel};
use crate::error::Result;
use crate::http::{Guard, HttpServer};
use crate::ranks::HostGroup;
use crate::rollout::GroupTurns;
use crate::tools::{Agent, EpisodeOutcome, GroupKey, SessionCosts, ToolProcess};
use crate::types::{Prompt, RolloutGroup, SamplingParams};

/// The server's address: it accepts requests from this machine only.
const HOST: &str = "127.0.0.1";
/// The model's name in responses. Requests may use any name.
const MODEL_NAME: &str = "policy";
/// Largest size of a request body in bytes.
const MAX_BODY_BYTES: usize = 32 << 20;

/// How episodes are served.
#[derive(Debug)]
pub struct PlayerOptions {
    /// The group of ranks that share this rank's engine.
    pub engine_ranks: HostGroup,
    /// The model that agents query.
    pub model: TurnModel,
    /// The format of the model's tool calls; `None` leaves them in the text.
    pub tool_calls: Option<ToolCallParser>,
    /// Largest number of requests per episode.
    pub max_requests: usize,
}

/// Runs this rank's agent process and all its episodes.
#[derive(Debug)]
pub struct EpisodePlayer {
    agent: Agent,
    options: PlayerOptions,
    episodes: Arc<Episodes>,
    client: EngineClient,
    queue: EngineQueue,
    server: Option<HttpServer>,
    groups: HashMap<GroupKey, PlayedGroup>,
    /// Group and sample of each running episode, by the number of the agent process's request.
    asked: HashMap<u64, (GroupKey, usize)>,
    /// Commands that wait for a session with their group.
    held: Vec<EngineCommand>,
    stats: EpisodeStats,
    /// Whether the first failed episode was logged.
    has_failed: bool,
    /// Why an episode failed: the first failure since the last [`EpisodePlayer::take_loss`].
    loss: Option<String>,
}

/// Statistics of episodes on one rank.
#[derive(Debug, Default)]
pub struct EpisodeStats {
    /// Number of ended episodes.
    pub num_episodes: usize,
    /// Number of their requests that were served.
    pub num_requests: usize,
    /// Number of their conversations.
    pub num_trajectories: usize,
    /// Number of rejected requests.
    pub num_refused: usize,
    /// Number of failed episodes.
    pub num_failed: usize,
    /// Number of episodes that exceeded their time limit.
    pub num_timeouts: usize,
    /// Total duration of all episodes in seconds.
    pub seconds: f64,
    /// Duration of the longest episode in seconds.
    pub max_seconds: f64,
    /// Costs of their turns in engine sessions.
    pub sessions: SessionCosts,
}

impl EpisodePlayer {
    /// A player that uses the agent loaded by `process`.
    pub fn new(process: ToolProcess, options: PlayerOptions) -> Self {
        // Every episode asks for one completion at a time, and is the only one to wait for it.
        let EngineChannel { client, queue } =
            engine_channel(ClientLimits { max_queue: usize::MAX, grace: Duration::ZERO });
        Self {
            agent: Agent::new(process),
            episodes: Arc::new(Episodes::new(options.max_requests)),
            options,
            client,
            queue,
            server: None,
            groups: HashMap::new(),
            asked: HashMap::new(),
            held: Vec::new(),
            stats: EpisodeStats::default(),
            has_failed: false,
            loss: None,
        }
    }

    /// The episodes as turns of an engine session. Without `keeps_branches`, only the first conversation of each episode is used.
    pub fn turns(&mut self, keeps_branches: bool) -> Box<dyn GroupTurns + '_> {
        Box::new(PlayedSession::new(self, keeps_branches))
    }

    /// Ends all episodes.
    pub fn reset(&mut self) {
        let keys: Vec<GroupKey> = self.groups.keys().copied().collect();
        keys.into_iter().for_each(|key| self.forget(key));
    }

    /// Ends the episodes of a group that is not continued.
    pub fn forget(&mut self, key: GroupKey) {
        let Some(group) = self.groups.remove(&key) else { return };
        for (id, name) in group.playing() {
            self.agent.give_up(id);
            self.asked.remove(&id);
            self.episodes.close(name);
        }
        self.held.retain(|command| command.group() != Some(key));
    }

    /// Why an episode failed: the first failure since the last call.
    pub fn take_loss(&mut self) -> Option<String> {
        self.loss.take()
    }

    /// The statistics since the last call.
    pub fn take_stats(&mut self) -> EpisodeStats {
        EpisodeStats { num_refused: self.episodes.take_num_refused(), ..std::mem::take(&mut self.stats) }
    }

    /// Starts the HTTP server, if it is not running yet.
    fn serve(&mut self) -> Result<()> {
        if self.server.is_some() {
            return Ok(());
        }
        let PlayerOptions { model, tool_calls, .. } = &self.options;
        let TurnModel { tokenizer, eos_token_ids, max_model_length } = model;
        let options = ServerOptions {
            model_name: MODEL_NAME.to_owned(),
            adapters: Vec::new(),
            tokenizer: Arc::clone(tokenizer),
            grammars: Arc::new(GrammarCompiler::new(Arc::clone(tokenizer), eos_token_ids.clone())),
            tool_calls: *tool_calls,
            eos_token_ids: eos_token_ids.clone(),
            max_sequence_length: *max_model_length,
            api_key: None,
            guard: Guard::new(HOST, &[], &[]),
            max_body_bytes: MAX_BODY_BYTES,
            sampling: SamplingParams::default(),
            episodes: Some(Arc::clone(&self.episodes)),
        };
        self.server = Some(open(HttpServer::bind(HOST, 0)?, options, self.client.clone())?);
        Ok(())
    }

    /// Begins the episodes of a group.
    fn begin(&mut self, key: GroupKey, prompt: &Prompt, params: &SamplingParams, keeps_branches: bool) {
        let address = self.server.as_ref().map(|server| server.address().to_string()).unwrap_or_default();
        let mut playing = Vec::with_capacity(params.num_generations);
        for sample in 0..params.num_generations {
            let name = self.episodes.open(key, sample, params);
            let id = self.agent.play(&prompt.columns, &format!("http://{address}/episodes/{name}/v1"));
            self.asked.insert(id, (key, sample));
            playing.push((id, name));
        }
        let group = RolloutGroup { first_step: key.first_step, ..RolloutGroup::new(prompt.clone()) };
        self.groups.insert(key, PlayedGroup::new(group, playing, keeps_branches));
    }

    /// Records the end of an episode. Returns its group and sample; `None` for an episode that was cancelled.
    fn take(&mut self, outcome: EpisodeOutcome) -> Result<Option<EndedEpisode>> {
        let Some((key, sample)) = self.asked.remove(&outcome.id) else { return Ok(None) }; // of a group that was forgotten
        let Some(group) = self.groups.get_mut(&key) else { return Ok(None) };
        let played = group.name(sample).map(|name| self.episodes.close(name)).unwrap_or_default();
        self.stats.book(&outcome, played.conversations.len(), played.num_requests);
        let token_ids = played.conversations.iter().map(|it| [&it.prompt[..], &it.trajectory.token_ids].concat());
        let ended = EndedEpisode { key, sample, token_ids: token_ids.collect() };
        if let Some(failure) = group.take(sample, outcome.end, played.conversations, &self.options.model.tokenizer)? {
            self.stats.num_failed += 1;
            if !std::mem::replace(&mut self.has_failed, true) {
                tracing::warn!(
                    "an episode failed, its completions are masked: {failure}; further failures are not reported"
                );
            }
            self.loss.get_or_insert(failure);
        }
        Ok(Some(ended))
    }
}

/// An ended episode.
#[derive(Debug)]
struct EndedEpisode {
    key: GroupKey,
    sample: usize,
    /// All tokens of each conversation of the episode.
    token_ids: Vec<Vec<u32>>,
}

impl EpisodeStats {
    fn book(&mut self, outcome: &EpisodeOutcome, num_trajectories: usize, num_requests: usize) {
        self.num_episodes += 1;
        self.num_requests += num_requests;
        self.num_trajectories += num_trajectories;
        self.num_timeouts += usize::from(outcome.is_late);
        self.seconds += outcome.seconds;
        self.max_seconds = self.max_seconds.max(outcome.seconds);
    }
}
