//! The agent of a run, and what is counted of its episodes.

use std::sync::Arc;

use serde_json::Value;

use super::turns::add_session_metrics;
use crate::config::{AutoOr, Config};
use crate::data::{Reply, Tokenizer, ToolCallParser, TurnContext};
use crate::endpoint::{EpisodePlayer, PlayerOptions};
use crate::error::Result;
use crate::metrics::{Reduce, StepMetrics};
use crate::ranks::HostGroup;
use crate::tools::ToolProcess;

/// The player of the agent that `process` has loaded, for ranks that share an engine. The model is its tokenizer, the ids that end its
/// turns and its longest sequence.
///
/// # Errors
/// [`Error::ChatTemplate`](crate::Error::ChatTemplate) for a template that rewrites earlier turns.
pub(super) fn player(
    config: &Config,
    engine_ranks: HostGroup,
    process: ToolProcess,
    (tokenizer, eos_token_ids, max_model_length): (&Arc<Tokenizer>, &[u32], usize),
) -> Result<EpisodePlayer> {
    let variables = &config.data.chat_template_kwargs.0;
    TurnContext::probe(Arc::clone(tokenizer), eos_token_ids, &Value::Null, variables, Reply::User)?;
    let tool_calls = match config.tools.tool_call_parser {
        AutoOr::Given(parser) => Some(parser),
        AutoOr::Auto => tokenizer.template_source().and_then(ToolCallParser::of_template),
    };
    let options = PlayerOptions {
        engine_ranks,
        tokenizer: Arc::clone(tokenizer),
        eos_token_ids: eos_token_ids.to_vec(),
        tool_calls,
        max_sequence_length: max_model_length,
        max_requests: config.tools.agent_max_requests,
    };
    Ok(EpisodePlayer::new(process, options))
}

/// Adds the player's counts since the last call.
pub(super) fn add_metrics(player: &mut EpisodePlayer, metrics: &mut StepMetrics) {
    let stats = player.take_stats();
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
    add_session_metrics(metrics, "agent", &stats.sessions);
}
