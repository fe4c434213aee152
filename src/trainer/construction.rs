//! Constructs a trainer: all inputs are read and checked before anything is trained. [`TrainerBuilder`] takes the caller's functions and starts
//! rewards and tools; `load` reads model and rows; `assemble` creates the trainer.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;

use tch::Tensor;

use super::fruitless::FruitlessSteps;
use super::functions::{Functions, StepReport};
use super::output::RunOutput;
use super::own_teacher::OwnTeacher;
use super::policy_and_engine::{PolicyAndEngine, WeightSources, read_unit};
use super::preflight::{Preflight, open_model, source};
use super::rows::TrainingRows;
use super::{Checkpoints, Generation, Trainer, TrainingData};
use super::{engine_groups, resume, turns};
use crate::checkpoint::{self, Checkpoint, CheckpointOptions, Claim, OpenedFolder, Saver};
use crate::config::{Circumstance, Config};
use crate::console::rows_progress;
use crate::cuda::{Placement, chip_flop_per_s};
use crate::error::{Error, Result};
use crate::grpo::{Denominators, LossFunction, LossInput};
use crate::memory;
use crate::model::{ModelSource, UnitLayout, WeightFiles};
use crate::phase::{self, Phase};
use crate::plan::Room;
use crate::ranks::World;
use crate::reward::{RewardFunction, RewardInput, RewardPool};
use crate::tools::ToolProcess;
use crate::torch;
use crate::train::Schedule;
use crate::types::RolloutGroup;

/// Builds a [`Trainer`] that calls functions of the program; see [`Trainer::builder`]. Every rank must pass the same functions.
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

    /// Adds a reward function under its `name` in `reward_funcs`. It is called on separate threads while sampling continues. If it returns an error,
    /// the sample is masked.
    pub fn reward(
        mut self,
        name: &str,
        reward: impl Fn(&RewardInput<'_>) -> Result<f32> + Send + Sync + 'static,
    ) -> Self {
        self.rewards.push((name.to_owned(), Arc::new(reward)));
        self
    }

    /// Calls `assign` with this rank's groups of each step, after the configured advantages were computed, so that it can set
    /// [`Trajectory::advantage`](crate::Trajectory::advantage).
    pub fn advantages(mut self, assign: impl Fn(&mut [RolloutGroup]) -> Result<()> + 'static) -> Self {
        self.functions.advantages = Some(Box::new(assign));
        self
    }

    /// Trains with `loss` instead of the configured objective. It returns a micro-batch's contribution, a scalar; libtorch computes its gradient with
    /// respect to `LossInput::logprobs`. See [`LossFunction`].
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

    /// Takes an existing reward pool, so that its processes can be started before the world is joined.
    pub(crate) fn reward_pool(mut self, pool: RewardPool) -> Self {
        self.pool = Some(pool);
        self
    }

    /// Takes an existing tool process, started before the world is joined.
    pub(crate) fn tool_process(mut self, tools: Option<ToolProcess>) -> Self {
        self.tools = tools;
        self
    }

    /// Loads model, data and tokenizer, and resumes if the configuration says so; collective over the world. Starts the processes of rewards unless a
    /// pool was passed.
    ///
    /// # Errors
    /// All errors of configuration, files or memory, before anything is trained.
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
        arm_fault(&config, &world);
        let loaded = phase::scope(Phase::Load, || {
            let num_trainers = config.roles(world.size())?.num_trainers;
            let shard_group = config.zero.shard_group(num_trainers, world.local_size());
            let nodes = (world.num_nodes() > 1).then_some(Circumstance::SeveralNodes);
            config.combination().in_circumstances(nodes).check()?; // before the output folder is claimed
            let changes = |checkpoint: &_| resume::unsafe_changes(&config, &world, checkpoint);
            let opened = checkpoint::open_output(&config.output, &config.saving, &world, shard_group, &changes)?;
            load(config, world.clone(), pool, tools, opened)
        });
        world.agree(loaded.map(|trainer| Trainer { functions, ..trainer }))
    }
}

/// Refuses functions that would not be called, and configuration keys that have no effect with a custom loss.
fn check(config: &Config, rewards: &[(String, RewardFunction)], functions: &Functions) -> Result<()> {
    if let Some((name, _)) = rewards.iter().find(|(name, _)| !config.reward_funcs.contains(name)) {
        let expected = format!("a list that contains \"{name}\", a reward function passed by the calling program");
        return Err(Error::invalid_value("reward_funcs", config.reward_funcs.join(", "), expected));
    }
    if functions.loss.is_some() {
        config.combination().in_circumstances([Circumstance::OwnLoss]).check()?;
    }
    Ok(())
}

/// Arms the configured fault injection, only in a run's first attempt, so that a restart succeeds.
fn arm_fault(config: &Config, world: &World) {
    let fault = config.fault.as_ref().filter(|_| world.attempt() == 0).and_then(|fault| fault.parse().ok());
    let device = world.device();
    phase::on_fill(move |left_bytes| memory::fill(device, left_bytes));
    phase::arm_fault(fault, world.rank());
}

/// Loads model, tokenizer, rows and rewards; collective over the world.
fn load(
    config: Config,
    world: Arc<World>,
    rewards: RewardPool,
    tools: Option<ToolProcess>,
    opened: OpenedFolder,
) -> Result<Trainer> {
    torch::set_deterministic(config.full_determinism)?;
    let placement = Placement::in_world(config.model.device, config.model.dtype, world.device())?;
    let room = Room::common(placement, &world)?;
    let model = open_model(&config, placement)?;
    config.validate_world(world.size())?;
    config.validate_context(model.spec.max_position_embeddings)?;
    let told = rows_progress("load");
    let rows = TrainingRows::read(&config, &model, rewards.required_columns(), tools.as_ref(), told)?;
    let preflight = Preflight::of_model(&rows.planned(&config), model, placement, world.world_size(), room)?;
    rows.check_same(&config, &world)?;
    rows.check_batch(&config, &preflight.batch)?;
    rows.check_columns(&rewards)?;
    rows.say_unreadable(&rewards, &world)?;
    rows.say_unsolvable(&config, &rewards, &world);
    let source = source(&config)?;
    let files = WeightFiles::open(&source.base, preflight.spec.clone())?;
    let frozen = resume::frozen_weights(&config, &files, preflight.teacher.as_ref())?;
    if let Some(checkpoint) = &opened.checkpoint {
        checkpoint.check_frozen(&frozen, config.output.force_resume, world.rank() == 0)?;
    }
    let weights = |layout: &UnitLayout| read_unit(&files, layout);
    let parts = TrainerParts {
        preflight,
        weights: &weights,
        rewards,
        tools,
        rows,
        source,
        checkpoint: opened.checkpoint,
        claim: opened.claim,
        writes_files: true,
    };
    let mut trainer = assemble(config, world, parts)?;
    trainer.checkpoints.frozen_weights = frozen;
    Ok(trainer)
}

/// The parts of a trainer, without its configuration.
pub(crate) struct TrainerParts<'a> {
    pub preflight: Preflight,
    /// Returns whole units of the initial weights.
    pub weights: &'a dyn Fn(&UnitLayout) -> Result<Tensor>,
    pub rewards: RewardPool,
    /// The process of the run's tools, if any.
    pub tools: Option<ToolProcess>,
    pub rows: TrainingRows,
    pub source: ModelSource,
    pub checkpoint: Option<Checkpoint>,
    pub claim: Option<Claim>,
    /// Whether metrics, checkpoints and the report are written.
    pub writes_files: bool,
}

/// Creates the trainer from its parts; collective over the world.
pub(crate) fn assemble(config: Config, world: Arc<World>, parts: TrainerParts<'_>) -> Result<Trainer> {
    let TrainerParts { preflight, weights, rewards, tools, rows, source, writes_files, .. } = parts;
    let config = config.sharing(preflight.plan.sequence_parallel_size);
    let checkpoint = parts.checkpoint.as_ref();
    let (batch, spec) = (preflight.batch, &preflight.spec);
    let mut description = rows.description();
    description.extend(preflight.tokenizer.notice().map(str::to_owned));
    let mixed = resume::mixed_reference(&config, spec, checkpoint)?;
    let of_reference =
        |layout: &UnitLayout| mixed.as_ref().map_or_else(|| weights(layout), |files| read_unit(files, layout));
    let sources = WeightSources { policy: weights, reference: &of_reference, adapters: source.adapters.as_deref() };
    let mut model = PolicyAndEngine::load(&config, &world, &preflight, &sources)?;
    let num_generators = batch.roles.num_generators;
    let max_model_length = preflight.plan_of(world.rank()).max_model_length;
    let generation = Generation {
        verdict_group: engine_groups::verdict_group(&config, &world, num_generators)?,
        pause_group: engine_groups::pause_group(&config, &world, num_generators)?,
        turns: tools.map(|tools| turns::open(&config, &world, &preflight, tools, &rows.options)).transpose()?,
        own_teacher: OwnTeacher::new(&config, &rows.options, &preflight.tokenizer, max_model_length),
        ahead: VecDeque::new(),
    };
    let mut data = TrainingData::new(&config, &batch, rows);
    let schedule =
        Schedule::new(config.learning_rate, &config.optimizer, config.updates_in_epochs(&batch, data.train.len()));
    let progress = resume::restore(checkpoint, &config, spec.vocab_size, &mut model, &mut data)?;
    let options = CheckpointOptions::new(&config.output, &config.saving, source.base);
    if writes_files {
        let saved = model.saved_models(config.objective.sync_ref_model);
        checkpoint::check_room(&options, &world, saved, config.saving.save_steps.is_some())?;
    }
    let saver = Saver::new(options, checkpoint);
    let max_steps = schedule.total_steps as u64;
    let output = RunOutput::new(&config, &world, max_steps, checkpoint, &preflight.tokenizer, writes_files)?;
    output.say(&format!("plan\n{preflight}"));
    if let Some(checkpoint) = checkpoint {
        resume::say_carried(checkpoint, &config, &data.carried, &output);
        resume::say_sharing(checkpoint, &config, &output);
    }
    description.iter().for_each(|line| output.say(line));
    let mut trainer = Trainer {
        plan: preflight.plan_of(world.rank()).clone(),
        chip_flop_per_s: chip_flop_per_s(world.device(), preflight.kind)?,
        config,
        world,
        batch,
        functions: Functions::default(),
        data,
        model,
        generation,
        rewards,
        fruitless: FruitlessSteps::default(),
        schedule,
        progress,
        output,
        checkpoints: Checkpoints {
            saver,
            claim: parts.claim,
            newest_step: progress.global_step,
            frozen_weights: BTreeMap::new(),
        },
    };
    if let Some(checkpoint) = checkpoint {
        trainer.restore_ahead(checkpoint, &preflight)?;
    }
    Ok(trainer)
}
