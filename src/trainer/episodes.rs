//! Episodes that an agent plays: a server over the engine while it is awake, a process for each episode, and the groups that come of it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::setup::Preflight;
use crate::config::{AutoOr, Config};
use crate::data::{Reply, Tokenizer, ToolCallParser, Turns};
use crate::endpoint::{
    self, ClientLimits, Episodes, PlayedConversation, PlayedEpisode, ServerOptions, drive_beside, engine_queue,
};
use crate::error::{Error, Result};
use crate::http::HttpServer;
use crate::metrics::{Reduce, StepMetrics};
use crate::rollout::{Rollout, RolloutEngine};
use crate::tools::{Agent, EpisodeOutcome, ToolProcess};
use crate::types::{FinishReason, Prompt, RolloutGroup, SamplingParams, Trajectory};

/// The only machine that may ask: this one.
const HOST: &str = "127.0.0.1";
/// The model's name in answers; requests may name any.
const MODEL_NAME: &str = "policy";
/// Largest body of a request.
const MAX_BODY_BYTES: usize = 32 << 20;
/// How long what nobody waits for any more may hold up the end of a rollout.
const GRACE: Duration = Duration::from_secs(10);

/// The agent of this rank.
#[derive(Debug)]
pub(super) struct RunEpisodes {
    agent: Agent,
    tokenizer: Arc<Tokenizer>,
    eos_token_ids: Vec<u32>,
    tool_calls: Option<ToolCallParser>,
    max_model_length: usize,
    max_requests: usize,
    stats: EpisodeStats,
}

/// Counts of episodes that have ended, on one rank.
#[derive(Debug, Default)]
struct EpisodeStats {
    num_episodes: usize,
    num_requests: usize,
    num_trajectories: usize,
    num_refused: usize,
    num_failed: usize,
    num_timeouts: usize,
    seconds: f64,
    max_seconds: f64,
    /// Time in which nothing was decoded, as every episode was busy elsewhere.
    idle: Duration,
    total: Duration,
    has_failed: bool,
}

/// A group whose episodes are played.
struct OpenGroup {
    group: RolloutGroup,
    /// Conversations of each episode that has ended.
    played: Vec<Vec<PlayedConversation>>,
    num_left: usize,
}

/// The batch of a rollout.
struct OpenBatch {
    groups: Vec<OpenGroup>,
    /// By the number of the agent's request: place of the group, sample, name.
    asked: HashMap<u64, (usize, usize, String)>,
    /// Whether all conversations of an episode are kept, or only the first.
    keeps_branches: bool,
}

impl RunEpisodes {
    /// The agent that `process` has loaded.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`](crate::Error::ChatTemplate) for a template that rewrites earlier turns.
    pub fn new(config: &Config, preflight: &Preflight, rank: usize, process: ToolProcess) -> Result<Self> {
        let tokenizer = Arc::clone(&preflight.tokenizer);
        let eos_token_ids = tokenizer.eos_token_ids(&preflight.spec.eos_token_ids);
        let variables = &config.data.chat_template_kwargs.0;
        Turns::probe(Arc::clone(&tokenizer), &eos_token_ids, &Value::Null, variables, Reply::User)?;
        let tool_calls = match config.tools.tool_call_parser {
            AutoOr::Given(parser) => Some(parser),
            AutoOr::Auto => tokenizer.template_source().and_then(ToolCallParser::of_template),
        };
        Ok(Self {
            agent: Agent::new(process),
            tokenizer,
            eos_token_ids,
            tool_calls,
            max_model_length: preflight.plan_of(rank).max_model_length,
            max_requests: config.tools.agent_max_requests,
            stats: EpisodeStats::default(),
        })
    }

    /// Plays `num_generations` episodes for each group. `done` is called with each group as soon as its last episode has ended.
    ///
    /// # Errors
    /// The errors of the engine, of the server and of [`Agent::ended`].
    pub fn rollout(
        &mut self,
        engine: &mut RolloutEngine<'_>,
        groups: Vec<RolloutGroup>,
        params: &SamplingParams,
        done: impl FnMut(&RolloutGroup),
    ) -> Result<Rollout> {
        let complete = self.play(engine, groups, (params, true), done)?;
        Ok(Rollout {
            complete: complete.into_iter().enumerate().collect(),
            stats: *engine.stats(),
            ..Rollout::default()
        })
    }

    /// Plays episodes of `prompts`, of each of which the first conversation counts.
    ///
    /// # Errors
    /// The errors of [`RunEpisodes::rollout`].
    pub fn generate(
        &mut self,
        engine: &mut RolloutEngine<'_>,
        prompts: &[Prompt],
        params: &SamplingParams,
        done: impl FnMut(&RolloutGroup),
    ) -> Result<Vec<RolloutGroup>> {
        let groups = prompts.iter().cloned().map(RolloutGroup::new).collect();
        self.play(engine, groups, (params, false), done)
    }

    fn play(
        &mut self,
        engine: &mut RolloutEngine<'_>,
        groups: Vec<RolloutGroup>,
        (params, keeps_branches): (&SamplingParams, bool),
        mut done: impl FnMut(&RolloutGroup),
    ) -> Result<Vec<RolloutGroup>> {
        let episodes = Arc::new(Episodes::new(params, self.max_requests));
        let (client, queue) = engine_queue(ClientLimits { max_queue: usize::MAX, grace: GRACE });
        let options = self.server_options(engine, &episodes);
        let server = endpoint::open(HttpServer::bind(HOST, 0)?, options, client.clone())?;
        let base_url = format!("http://{}/episodes", server.address());
        let mut batch = OpenBatch { groups: Vec::new(), asked: HashMap::new(), keeps_branches };
        for (place, group) in groups.into_iter().enumerate() {
            for sample in 0..params.num_generations {
                let name = episodes.open(group.prompt.id, sample);
                let id = self.agent.play(&group.prompt.columns, &format!("{base_url}/{name}/v1"));
                batch.asked.insert(id, (place, sample, name));
            }
            let played = (0..params.num_generations).map(|_| Vec::new()).collect();
            batch.groups.push(OpenGroup { group, played, num_left: params.num_generations });
        }
        let Self { agent, tokenizer, stats, .. } = self;
        let (start, mut last, mut was_idle) = (Instant::now(), Instant::now(), false);
        let outcome = drive_beside(engine, None, Some(queue), |has_work| {
            let now = Instant::now();
            stats.idle += if was_idle { now - last } else { Duration::ZERO };
            (last, was_idle) = (now, !has_work);
            for ended in agent.ended()? {
                if let Some(group) = batch.take(ended, &episodes, stats, tokenizer)? {
                    group.first_step = params.step;
                    done(group);
                }
            }
            if batch.asked.is_empty() {
                client.stop();
            }
            Ok(())
        });
        stats.num_refused += episodes.num_refused();
        stats.total += start.elapsed();
        server.finish();
        outcome?;
        Ok(batch.groups.into_iter().map(|open| open.group).collect())
    }

    fn server_options(&self, engine: &RolloutEngine<'_>, episodes: &Arc<Episodes>) -> ServerOptions {
        ServerOptions {
            model_name: MODEL_NAME.to_owned(),
            adapters: Vec::new(),
            tokenizer: Arc::clone(&self.tokenizer),
            grammars: engine.grammars(),
            tool_calls: self.tool_calls,
            eos_token_ids: self.eos_token_ids.clone(),
            max_sequence_length: engine.max_sequence_length().min(self.max_model_length),
            api_key: None,
            max_body_bytes: MAX_BODY_BYTES,
            episodes: Some(Arc::clone(episodes)),
        }
    }

    /// Adds the counts since the last call.
    pub fn add_metrics(&mut self, metrics: &mut StepMetrics) {
        let stats = &mut self.stats;
        let stats = std::mem::replace(stats, EpisodeStats { has_failed: stats.has_failed, ..EpisodeStats::default() });
        let num_episodes = stats.num_episodes as f64;
        metrics.set_mean("agent/mean_requests", stats.num_requests as f64, num_episodes);
        metrics.set_mean("agent/mean_trajectories", stats.num_trajectories as f64, num_episodes);
        metrics.set_mean("agent/mean_episode_s", stats.seconds, num_episodes);
        metrics.set("agent/max_episode_s", stats.max_seconds, Reduce::Max);
        for (name, count) in
            [("failed", stats.num_failed), ("timeouts", stats.num_timeouts), ("refused", stats.num_refused)]
        {
            metrics.set(format!("agent/num_{name}"), count as f64, Reduce::Sum);
        }
        metrics.set_mean("agent/idle_share", stats.idle.as_secs_f64(), stats.total.as_secs_f64());
    }
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

    fn book_failure(&mut self, failure: &str) {
        self.num_failed += 1;
        if !std::mem::replace(&mut self.has_failed, true) {
            tracing::warn!("an episode is lost, its completions are masked: {failure}; this is said once");
        }
    }
}

impl OpenBatch {
    /// Takes in the end of an episode; returns its group if that was the last one of it.
    fn take(
        &mut self,
        outcome: EpisodeOutcome,
        episodes: &Episodes,
        stats: &mut EpisodeStats,
        tokenizer: &Tokenizer,
    ) -> Result<Option<&mut RolloutGroup>> {
        let Some((place, sample, name)) = self.asked.remove(&outcome.id) else { return Ok(None) }; // of a rollout that failed
        let PlayedEpisode { conversations: mut played, num_requests } = episodes.close(&name);
        stats.book(&outcome, played.len(), num_requests);
        let (environment, failure) = match outcome.end {
            Ok(_) if played.is_empty() => (None, Some("agent: it has sampled nothing".to_owned())),
            Ok(end) => (Some(Arc::new(end)), None),
            Err(failure) => (None, Some(failure)),
        };
        failure.iter().for_each(|failure| stats.book_failure(failure));
        if !self.keeps_branches {
            played.truncate(1);
        }
        let open = &mut self.groups[place];
        if played.is_empty() {
            let trajectory = Trajectory { finish_reason: Some(FinishReason::Eos), ..Trajectory::default() };
            played.push(PlayedConversation { prompt: Vec::new(), trajectory });
        }
        for PlayedConversation { trajectory, .. } in &mut played {
            trajectory.text = tokenizer.decode(&trajectory.token_ids)?;
            (trajectory.environment, trajectory.failure) = (environment.clone(), failure.clone());
        }
        open.played[sample] = played;
        open.num_left -= 1;
        if open.num_left > 0 {
            return Ok(None);
        }
        let played = std::mem::take(&mut open.played).into_iter().flatten().collect();
        assemble(&mut open.group, played, tokenizer)?;
        Ok(Some(&mut open.group))
    }
}

/// Makes conversations the completions of a group, in the order of episodes. Its prompt becomes what all of them begin with; the rest of a
/// conversation's own prompt is context before its first turn. One that nothing was sampled for has no say.
fn assemble(group: &mut RolloutGroup, played: Vec<PlayedConversation>, tokenizer: &Tokenizer) -> Result<()> {
    let begins = |conversation: &&PlayedConversation| !conversation.trajectory.token_ids.is_empty();
    let prompts = || played.iter().filter(begins).map(|conversation| &conversation.prompt[..]);
    if let Some(first) = prompts().next() {
        let common = |prompt: &[u32]| first.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let token_ids = first[..prompts().map(common).min().unwrap_or(0)].to_vec();
        if token_ids.is_empty() {
            let message = "agent: conversations of a row begin with different tokens: they need a prompt in common, of one token at least";
            return Err(Error::Environment { message: message.to_owned() });
        }
        if token_ids != group.prompt.token_ids {
            let text = tokenizer.decode_all(&token_ids)?;
            group.prompt = Prompt { text, token_ids, ..group.prompt.clone() };
        }
    }
    let num_common = group.prompt.token_ids.len();
    let whole =
        |played: PlayedConversation| whole(played.prompt.get(num_common..).unwrap_or_default(), played.trajectory);
    group.completions = played.into_iter().map(whole).collect();
    Ok(())
}

/// A trajectory with context before its first turn.
fn whole(context: &[u32], trajectory: Trajectory) -> Trajectory {
    if context.is_empty() {
        return trajectory;
    }
    let version = trajectory.weight_versions.first().copied().unwrap_or_default();
    let mut before = Trajectory::default();
    before.push_context(context, version);
    Trajectory {
        token_ids: [&before.token_ids[..], &trajectory.token_ids].concat(),
        loss_mask: [&before.loss_mask[..], &trajectory.loss_mask].concat(),
        rollout_logprobs: [&before.rollout_logprobs[..], &trajectory.rollout_logprobs].concat(),
        weight_versions: [&before.weight_versions[..], &trajectory.weight_versions].concat(),
        ..trajectory
    }
}
