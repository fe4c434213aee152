//! A trainer with functions of the caller's own: rewards, advantages, a loss, and what is called after each step.

use std::fmt;
use std::sync::Arc;

use tch::Tensor;

use super::{Trainer, setup};
use crate::checkpoint;
use crate::config::{Circumstance, Config};
use crate::error::{Error, Result};
use crate::grpo::{Denominators, LossFunction, LossInput};
use crate::metrics::MetricValues;
use crate::phase::{self, Phase};
use crate::ranks::World;
use crate::reward::{RewardFunction, RewardInput, RewardPool};
use crate::tools::ToolProcess;
use crate::types::RolloutGroup;

/// A step that is over, as a function of [`TrainerBuilder::on_step`] is told of it.
#[derive(Debug, Clone, Copy)]
pub struct StepReport<'a> {
    /// Optimizer updates made.
    pub step: u64,
    /// Updates of the whole run.
    pub max_steps: u64,
    /// Passes over the data so far.
    pub epoch: f64,
    /// The step's metrics over all ranks, the same on each.
    pub metrics: &'a MetricValues,
}

type AdvantageFunction = dyn Fn(&mut [RolloutGroup]) -> Result<()>;
type StepFunction = dyn FnMut(&StepReport<'_>) -> Result<()>;

/// Functions of the caller that a trainer calls.
#[derive(Default)]
pub(super) struct Functions {
    pub advantages: Option<Box<AdvantageFunction>>,
    pub loss: Option<LossFunction>,
    pub on_step: Option<Box<StepFunction>>,
}

impl fmt::Debug for Functions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Functions")
            .field("advantages", &self.advantages.is_some())
            .field("loss", &self.loss)
            .field("on_step", &self.on_step.is_some())
            .finish()
    }
}

/// Makes a [`Trainer`] that calls functions of the program: [`Trainer::builder`]. Every rank gives the same ones.
///
/// ```no_run
/// # use std::sync::Arc;
/// # use colo_grpo::{Config, Result, Trainer, World};
/// # fn train(config: Config, world: Arc<World>) -> Result<()> {
/// let mut trainer = Trainer::builder(config, world)
///     .reward("brevity", |input| Ok(1.0 / (1.0 + input.token_ids.len() as f32)))
///     .on_step(|report| {
///         tracing::info!("step {}: reward {:.3}", report.step, report.metrics["reward"]);
///         Ok(())
///     })
///     .build()?;
/// trainer.run()?;
/// # Ok(())
/// # }
/// ```
#[must_use]
pub struct TrainerBuilder {
    config: Config,
    world: Arc<World>,
    rewards: Vec<(String, RewardFunction)>,
    pool: Option<RewardPool>,
    tools: Option<ToolProcess>,
    functions: Functions,
}

impl fmt::Debug for TrainerBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.rewards.iter().map(|(name, _)| name).collect();
        f.debug_struct("TrainerBuilder")
            .field("rewards", &names)
            .field("functions", &self.functions)
            .finish_non_exhaustive()
    }
}

impl TrainerBuilder {
    pub(super) fn new(config: Config, world: Arc<World>) -> Self {
        Self { config, world, rewards: Vec::new(), pool: None, tools: None, functions: Functions::default() }
    }

    /// Adds a reward by the `name` that `reward_funcs` has for it. It is called on threads of its own while others are sampled; an
    /// error masks the sample.
    pub fn reward(
        mut self,
        name: &str,
        reward: impl Fn(&RewardInput<'_>) -> Result<f32> + Send + Sync + 'static,
    ) -> Self {
        self.rewards.push((name.to_owned(), Arc::new(reward)));
        self
    }

    /// Calls `assign` with this rank's groups of each step, after the configured advantages are in them, to set
    /// [`Trajectory::advantage`](crate::Trajectory::advantage).
    pub fn advantages(mut self, assign: impl Fn(&mut [RolloutGroup]) -> Result<()> + 'static) -> Self {
        self.functions.advantages = Some(Box::new(assign));
        self
    }

    /// Trains with `loss` in place of the configured objective: a micro-batch's contribution, a scalar, whose gradient by
    /// `LossInput::logprobs` libtorch finds. [`LossFunction`] has the details.
    pub fn loss(
        mut self,
        loss: impl Fn(&LossInput<'_>, &Denominators) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Self {
        self.functions.loss = Some(LossFunction::new(loss));
        self
    }

    /// Calls `on_step` after each step, on every rank. An error ends the run.
    pub fn on_step(mut self, on_step: impl FnMut(&StepReport<'_>) -> Result<()> + 'static) -> Self {
        self.functions.on_step = Some(Box::new(on_step));
        self
    }

    /// Takes the pool of the configuration's rewards, whose processes can so be started before the world is joined.
    pub(crate) fn reward_pool(mut self, pool: RewardPool) -> Self {
        self.pool = Some(pool);
        self
    }

    /// Takes the process of the configuration's tools, started before the world is joined.
    pub(crate) fn tool_process(mut self, tools: Option<ToolProcess>) -> Self {
        self.tools = tools;
        self
    }

    /// Loads model, data and tokenizer, and resumes where the configuration says so; collective over the world. Rewards in
    /// processes of their own are started now.
    ///
    /// # Errors
    /// Everything that is wrong with configuration, files or memory, before anything is trained.
    pub fn build(self) -> Result<Trainer> {
        let Self { config, world, rewards, pool, tools, functions } = self;
        let tools = world.agree(tools.map_or_else(|| ToolProcess::start(&config), |tools| Ok(Some(tools))))?;
        let classes = tools.as_ref().map(ToolProcess::rewarding_classes).unwrap_or_default();
        let config = world.agree(config.with_environment_rewards(&classes))?;
        let pool = check(&config, &rewards, &functions).and_then(|()| match pool {
            Some(pool) => Ok(pool),
            None => {
                let rewards: Vec<_> =
                    rewards.iter().map(|(name, reward)| (name.as_str(), Arc::clone(reward))).collect();
                RewardPool::with_functions(&config, &rewards).and_then(|pool| pool.start().map(|()| pool))
            }
        });
        let pool = world.agree(pool)?;
        setup::arm_fault(&config, &world);
        let loaded = phase::scope(Phase::Load, || {
            let num_trainers = config.roles(world.size())?.num_trainers;
            let shard_group = config.zero.shard_group(num_trainers, world.local_size());
            let on_each_node = config.save_on_each_node;
            let nodes = (world.num_nodes() > 1).then_some(Circumstance::SeveralNodes);
            config.combination().in_circumstances(nodes).check()?; // before the output folder is claimed
            checkpoint::check_each_node(on_each_node, world.world_size(), shard_group)?;
            checkpoint::check_shared(&config.output_dir, &world, on_each_node)?;
            let claim = checkpoint::claim(&config.output_dir, &world, on_each_node)?;
            let checkpoint = setup::find_checkpoint(&config, &world)?;
            setup::load(config, (pool, tools), world.clone(), checkpoint, claim)
        });
        world.agree(loaded.map(|trainer| Trainer { functions, ..trainer }))
    }
}

/// Refuses functions that would not be called, and keys that a loss of the caller's own leaves without effect.
fn check(config: &Config, rewards: &[(String, RewardFunction)], functions: &Functions) -> Result<()> {
    if let Some((name, _)) = rewards.iter().find(|(name, _)| !config.reward_funcs.contains(name)) {
        let expected = format!("a list with \"{name}\", a reward of the program");
        return Err(Error::invalid_value("reward_funcs", config.reward_funcs.join(", "), expected));
    }
    if functions.loss.is_some() {
        config.combination().in_circumstances([Circumstance::OwnLoss]).check()?;
    }
    Ok(())
}
