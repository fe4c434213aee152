//! The agent of a run, and the metrics of its episodes.

use std::sync::Arc;

use serde_json::Value;

use super::records::session_metrics;
use crate::config::{AutoOr, Config};
use crate::data::{Reply, ToolCallParser, TurnContext, TurnModel};
use crate::endpoint::{EpisodePlayer, PlayerOptions};
use crate::error::Result;
use crate::metrics::{Reduce, StepMetrics};
use crate::ranks::HostGroup;
use crate::tools::ToolProcess;

/// Creates the player that runs episodes of the agent in `process`, for ranks that share an engine.
///
/// # Errors
/// [`Error::ChatTemplate`](crate::Error::ChatTemplate) for a template that rewrites earlier turns.
pub(super) fn player(
    config: &Config,
    engine_ranks: HostGroup,
    process: ToolProcess,
    model: &TurnModel,
) -> Result<EpisodePlayer> {
    let TurnModel { tokenizer, eos_token_ids, .. } = model;
    let variables = &config.data.chat_template_kwargs.0;
    TurnContext::probe(Arc::clone(tokenizer), eos_token_ids, &Value::Null, variables, Reply::User)?;
    let tool_calls = match config.tools.tool_call_parser {
        AutoOr::Given(parser) => Some(parser),
        AutoOr::Auto => tokenizer.template_source().and_then(ToolCallParser::of_template),
    };
    let max_requests = config.tools.agent_max_requests;
    let options = PlayerOptions { engine_ranks, model: model.clone(), tool_calls, max_requests };
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
    session_metrics(metrics, "agent", &stats.sessions);
}
