//! Turns of a run: the tools of this rank's trajectories, or the agent that plays its episodes, and their metrics.

use std::sync::Arc;

use super::engine_groups::engine_ranks;
use super::episodes;
use super::preflight::Preflight;
use super::records::session_metrics;
use crate::config::Config;
use crate::data::{DatasetOptions, TurnModel};
use crate::endpoint::EpisodePlayer;
use crate::error::Result;
use crate::metrics::{Reduce, StepMetrics};
use crate::ranks::World;
use crate::rollout::{GroupTurns, RolloutEngine, SampledGroups, SingleTurns, TurnTools};
use crate::tools::{Conversations, GroupKey, ToolProcess};
use crate::types::{Prompt, RolloutGroup, SamplingParams};

/// The source of further turns on this rank.
#[derive(Debug)]
pub(crate) enum RunTurns {
    /// Tools and environments.
    Tools(Box<TurnTools>),
    /// An agent.
    Agent(Box<EpisodePlayer>),
}

/// Creates the turns from the tools or the agent in `process`; collective over the world.
pub(super) fn open(
    config: &Config,
    world: &World,
    preflight: &Preflight,
    process: ToolProcess,
    options: &DatasetOptions,
) -> Result<RunTurns> {
    let model = TurnModel {
        tokenizer: Arc::clone(&preflight.tokenizer),
        eos_token_ids: preflight.tokenizer.eos_token_ids(&preflight.spec.eos_token_ids),
        max_model_length: preflight.plan_of(world.rank()).max_model_length,
    };
    RunTurns::new(config, world, preflight.batch.roles.num_generators, process, options.clone(), &model)
}

/// The turns of groups that are trained on; single turns if there are neither tools nor an agent.
pub(super) fn turns_of(turns: Option<&mut RunTurns>) -> Box<dyn GroupTurns + '_> {
    match turns {
        Some(RunTurns::Tools(tools)) => tools.turns(),
        Some(RunTurns::Agent(player)) => player.turns(true),
        None => Box::<SingleTurns>::default(),
    }
}

/// Samples groups of `prompts` that are not trained on. For an episode, only the first conversation counts.
///
/// # Errors
/// The errors of [`RolloutEngine::generate`] and of the tools.
pub(crate) fn generate<D>(
    turns: Option<&mut RunTurns>,
    engine: &mut RolloutEngine<'_>,
    prompts: &[Prompt],
    params: &SamplingParams,
    done: impl FnMut(&RolloutGroup) -> D,
) -> Result<SampledGroups<D>> {
    let turns = match turns {
        Some(RunTurns::Agent(player)) => player.turns(false),
        turns => turns_of(turns),
    };
    engine.generate_with(turns, prompts, params, done)
}

impl RunTurns {
    /// Creates the turns from the tools or the agent in `process`, for a world whose last `num_generators` ranks have engines of `model`. `options`
    /// say how rows became prompts. Collective over the world.
    ///
    /// # Errors
    /// The errors of [`Conversations::new`]; an error, on every rank, for a chat template that rewrites earlier turns.
    pub fn new(
        config: &Config,
        world: &World,
        num_generators: usize,
        process: ToolProcess,
        options: DatasetOptions,
        model: &TurnModel,
    ) -> Result<Self> {
        let ranks = engine_ranks(config.engine_shape().num_ranks(), world, num_generators);
        let engine_ranks = world.host_group("turns", &ranks)?;
        if config.tools.agent().is_some() {
            let player = episodes::player(config, engine_ranks, process, model);
            return Ok(Self::Agent(Box::new(world.agree(player)?)));
        }
        let conversations = Conversations::new(config, process, model, options);
        let conversations = world.agree(conversations)?;
        Ok(Self::Tools(Box::new(TurnTools { conversations, engine_ranks, waits: config.full_determinism })))
    }

    /// Drops all trajectories, including those of carried groups, and ends their environments and episodes.
    pub fn reset(&mut self) {
        match self {
            Self::Tools(tools) => tools.conversations.reset(),
            Self::Agent(player) => player.reset(),
        }
    }

    /// Drops a group of this rank that will not be continued.
    pub fn forget(&mut self, group: &RolloutGroup) {
        let key = GroupKey { prompt_id: group.prompt.id, first_step: group.first_step };
        match self {
            Self::Tools(tools) => tools.conversations.forget(key),
            Self::Agent(player) => player.forget(key),
        }
    }

    /// The cause of the first loss of an environment or episode since the last call, if any.
    pub fn take_loss(&mut self) -> Option<String> {
        let (what, loss) = match self {
            Self::Tools(tools) => ("environment", tools.conversations.take_loss()),
            Self::Agent(player) => ("episode", player.take_loss()),
        };
        loss.map(|cause| format!("an {what} failed: {cause}"))
    }

    /// Adds the counts since the last call.
    pub fn add_metrics(&mut self, metrics: &mut StepMetrics) {
        match self {
            Self::Tools(tools) => add_tool_metrics(tools, metrics),
            Self::Agent(player) => episodes::add_metrics(player, metrics),
        }
    }

    /// The tokenizer of the tools' turns.
    #[cfg(test)]
    pub fn tokenizer(&self) -> Arc<crate::data::Tokenizer> {
        let Self::Tools(tools) = self else { panic!("no tools") };
        Arc::clone(tools.conversations.tokenizer())
    }
}

/// Adds TRL's tool frequencies, and turns, latencies and time without decoding.
fn add_tool_metrics(tools: &mut TurnTools, metrics: &mut StepMetrics) {
    let stats = tools.conversations.take_stats();
    let num_trajectories = stats.num_trajectories as f64;
    let num_calls = stats.num_calls as f64;
    metrics.set_mean("tools/call_frequency", num_calls, num_trajectories);
    metrics.set_mean("tools/failure_frequency", stats.num_failures as f64, num_calls);
    metrics.set_mean("tools/mean_turns", stats.num_turns as f64, num_trajectories);
    metrics.set("tools/max_turns", stats.max_turns as f64, Reduce::Max);
    for (name, count) in [
        ("unreadable", stats.num_unreadable),
        ("timeouts", stats.num_timeouts),
        ("overlong", stats.num_overlong),
        ("cut", stats.num_cut),
        ("failed", stats.num_failed),
    ] {
        metrics.set(format!("tools/num_{name}"), count as f64, Reduce::Sum);
    }
    metrics.set_mean("tools/mean_latency_s", stats.seconds, stats.num_answers as f64);
    metrics.set("tools/max_latency_s", stats.max_seconds, Reduce::Max);
    session_metrics(metrics, "tools", &stats.sessions);
}
