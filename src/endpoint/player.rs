//! Groups whose completions are episodes that an agent plays against the server: their processes, their conversations and the engine's
//! session. Each rank plays the episodes of its own groups, against a server of its own. Ranks that share an engine exchange before every
//! step what was asked for on each, so that all submit the same requests before the same steps.
//!
//! A session may end in the middle of episodes: harnesses go on, and what they ask for waits for the session that goes on with their group.

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

/// The only machine that may ask: this one.
const HOST: &str = "127.0.0.1";
/// The model's name in answers; requests may name any.
const MODEL_NAME: &str = "policy";
/// Largest body of a request.
const MAX_BODY_BYTES: usize = 32 << 20;

/// How episodes are served.
#[derive(Debug)]
pub struct PlayerOptions {
    /// The ranks that share this rank's engine.
    pub engine_ranks: HostGroup,
    /// The model that the episodes ask.
    pub model: TurnModel,
    /// The format of the model's tool calls; none leaves them in the text.
    pub tool_calls: Option<ToolCallParser>,
    /// Most requests of an episode.
    pub max_requests: usize,
}

/// The agent of this rank and all episodes that it plays.
#[derive(Debug)]
pub struct EpisodePlayer {
    agent: Agent,
    options: PlayerOptions,
    episodes: Arc<Episodes>,
    client: EngineClient,
    queue: EngineQueue,
    server: Option<HttpServer>,
    groups: HashMap<GroupKey, PlayedGroup>,
    /// By the number of the agent's request: group and sample.
    asked: HashMap<u64, (GroupKey, usize)>,
    /// Commands that wait for a session with their group.
    held: Vec<EngineCommand>,
    stats: EpisodeStats,
    /// Whether the first lost episode was told.
    has_failed: bool,
    /// Why the first episode since the last [`EpisodePlayer::take_loss`] was lost.
    loss: Option<String>,
}

/// Counts of episodes on one rank.
#[derive(Debug, Default)]
pub struct EpisodeStats {
    /// Episodes that have ended.
    pub num_episodes: usize,
    /// Requests of theirs that were served.
    pub num_requests: usize,
    /// Conversations of theirs.
    pub num_trajectories: usize,
    /// Requests that were refused.
    pub num_refused: usize,
    /// Episodes that were lost.
    pub num_failed: usize,
    /// Episodes whose time was over.
    pub num_timeouts: usize,
    /// Seconds of all episodes.
    pub seconds: f64,
    /// Seconds of the longest one.
    pub max_seconds: f64,
    /// Costs of their turns.
    pub sessions: SessionCosts,
}

impl EpisodePlayer {
    /// A player with the agent that `process` has loaded.
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

    /// The episodes as a session takes them. Without `keeps_branches` the first conversation of each counts alone.
    pub fn turns(&mut self, keeps_branches: bool) -> Box<dyn GroupTurns + '_> {
        Box::new(PlayedSession::new(self, keeps_branches))
    }

    /// Ends all episodes.
    pub fn reset(&mut self) {
        let keys: Vec<GroupKey> = self.groups.keys().copied().collect();
        keys.into_iter().for_each(|key| self.forget(key));
    }

    /// Ends the episodes of a group that nobody goes on with.
    pub fn forget(&mut self, key: GroupKey) {
        let Some(group) = self.groups.remove(&key) else { return };
        for (id, name) in group.playing() {
            self.agent.give_up(id);
            self.asked.remove(&id);
            self.episodes.close(name);
        }
        self.held.retain(|command| command.group() != Some(key));
    }

    /// Why an episode was lost since the last call: the first of them.
    pub fn take_loss(&mut self) -> Option<String> {
        self.loss.take()
    }

    /// The counts since the last call.
    pub fn take_stats(&mut self) -> EpisodeStats {
        EpisodeStats { num_refused: self.episodes.take_num_refused(), ..std::mem::take(&mut self.stats) }
    }

    /// Starts the server, if it does not answer yet.
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

    /// Takes in the end of an episode and returns whose it was.
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

/// An episode that has ended.
#[derive(Debug)]
struct EndedEpisode {
    key: GroupKey,
    sample: usize,
    /// All tokens of each of its conversations.
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
