//! The GRPO trainer. [`Trainer::run`] is a run, and [`Trainer::train_step`] one step; `step` has the parts of a step, `run` what
//! is around it, `builder` functions of the caller's own; `setup` loads, `sampling` asks the engines, `ahead` lets them sample
//! later batches beside an update, `records` turns groups into sequences and metrics, `output` writes.

mod ahead;
mod best;
mod build;
mod builder;
mod carry;
mod curriculum;
mod engines;
mod episodes;
mod model;
mod output;
mod own_teacher;
#[cfg(test)]
mod own_teacher_tests;
mod penalty;
mod preflight;
mod records;
mod replace;
mod rows;
mod run;
mod sampling;
mod scores;
mod setup;
mod signal;
mod step;
mod teacher;
#[cfg(test)]
mod together_tests;
mod turns;
#[cfg(test)]
mod turns_tests;

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use crate::checkpoint::{CarriedGroup, Claim, Saver};
use crate::config::{BatchPlan, Config};
use crate::cuda::Placement;
use crate::data::{Dataset, PromptSampler};
use crate::error::Result;
use crate::grpo::EntropyControl;
use crate::metrics::StepMetrics;
use crate::model::{ModelSource, ModelSpec, init_unit_on};
use crate::plan::{MemoryPlan, Room};
use crate::ranks::{HostGroup, World};
use crate::reward::{RewardFunction, RewardPool, RewardTicket};
use crate::train::{Policy, Schedule};
use crate::types::{LengthSpread, Prompt, RolloutGroup};

use ahead::QueuedBatch;
use builder::Functions;
pub use builder::{StepReport, TrainerBuilder};
use curriculum::RowsById;
pub use engines::PlannedRun;
use model::PolicyAndEngine;
use output::RunOutput;
use own_teacher::OwnTeacher;
pub use preflight::Preflight;
use sampling::DataPosition;
use scores::Unscored;
use signal::Signal;
pub use step::TrainingBatch;
pub(crate) use turns::{RunTurns, generate};

/// A GRPO run on this rank.
#[derive(Debug)]
pub struct Trainer {
    config: Config,
    world: Arc<World>,
    batch: BatchPlan,
    plan: MemoryPlan,
    model: PolicyAndEngine,
    rewards: RewardPool,
    dataset: Dataset,
    rows_by_id: RowsById,
    sampler: PromptSampler,
    carried: Vec<CarriedGroup>, // of all ranks, the same on each
    /// How many of them each rank has, in the order of ranks, where they stay with it: it has their tools.
    carried_by: Vec<usize>,
    eval_set: Option<Dataset>,
    schedule: Schedule,
    output: RunOutput,
    saver: Saver,
    claim: Option<Claim>, // of the output folder, on the first rank
    /// The rate of this rank's chip in the run's dtype, where a data sheet has it.
    chip_flop_per_s: Option<f64>,
    /// The newest step in a checkpoint.
    saved_step: u64,
    progress: TrainingProgress,
    /// The step before the newest batch.
    previous_step: u64,
    /// Batches of the steps to come, the next one first; only in split mode.
    ahead: VecDeque<QueuedBatch>,
    /// Where the rows were before a program drew prompts for itself, and when.
    drawn: Option<(DataPosition, Instant)>,
    unscored: Unscored,
    signal: Signal,
    functions: Functions,
    /// Mean rewards of the first and the newest evaluation; none of one that no sample was scored in.
    eval_rewards: Option<(Option<f64>, Option<f64>)>,
    /// Ranks with engines, where groups are replaced.
    engines: Option<HostGroup>,
    /// Ranks that share this rank's engine, where they agree on pauses.
    engine_group: Option<HostGroup>,
    /// Tools, where completions may call some, or the agent that plays episodes.
    turns: Option<RunTurns>,
    /// The prompts of the policy as its own teacher, where it is that.
    own_teacher: Option<OwnTeacher>,
}

/// How far the run is.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct TrainingProgress {
    /// Optimizer updates made or skipped.
    global_step: u64,
    /// Generation batches sampled.
    generation_step: u64,
    /// Tokens trained on, over all ranks.
    num_tokens: u64,
    /// Weight of the entropy bonus; on ranks that only generate it stays what it was.
    entropy_control: EntropyControl,
}

/// Results of a finished run.
#[derive(Debug, Clone, PartialEq)]
pub struct RunSummary {
    /// Mean reward on the held-out rows before training; none without rows, or where none could be scored.
    pub eval_reward_before: Option<f64>,
    /// Mean reward on the held-out rows after training.
    pub eval_reward_after: Option<f64>,
    /// The final model's folder.
    pub model_dir: PathBuf,
    /// The report, where one was written (rank 0).
    pub report: Option<PathBuf>,
}

impl Trainer {
    /// Loads model, data and tokenizer, and resumes where the configuration says so; collective over the world.
    ///
    /// # Errors
    /// Everything that is wrong with configuration, files or memory, before anything is trained.
    pub fn new(config: Config, world: Arc<World>) -> Result<Self> {
        Self::builder(config, world).build()
    }

    /// A trainer that calls functions of the program: rewards, advantages, a loss, and one after each step.
    pub fn builder(config: Config, world: Arc<World>) -> TrainerBuilder {
        TrainerBuilder::new(config, world)
    }

    /// A trainer of random weights on the given prompts, whose completions end at drawn lengths, and which writes no files; for
    /// benchmarks. The model's tokens are numbers. Collective over the world.
    pub(crate) fn on_random(
        config: Config,
        spec: Arc<ModelSpec>,
        (prompts, spread_lengths): (Vec<Prompt>, Option<LengthSpread>),
        functions: &[(&str, RewardFunction)],
        world: Arc<World>,
    ) -> Result<Self> {
        let placement = Placement::in_world(config.device, config.dtype, world.device())?;
        let room = Room::common(placement, &world)?;
        let preflight =
            PlannedRun::of_shape(&config, &spec, placement)?.preflight(placement, world.world_size(), room)?;
        let (seed, kind, device) = (config.seed, preflight.kind, world.device());
        let parts = setup::TrainerParts {
            preflight,
            weights: &|layout| init_unit_on(layout, seed, kind, device),
            rewards: RewardPool::with_functions(&config, functions)?,
            tools: None,
            rows: rows::TrainingRows::made(Dataset::new(prompts)),
            source: ModelSource { base: config.model_name_or_path.clone(), adapters: None },
            checkpoint: None,
            claim: None,
            writes_files: false,
            spread_lengths,
        };
        let assembled = setup::assemble(config, world.clone(), parts);
        world.agree(assembled)
    }

    /// The trained model, between steps, on a rank that trains.
    pub(crate) fn policy(&self) -> Option<&Policy> {
        self.model.policy()
    }

    /// Puts the ranks' time-lines of phases together, where `trace` is on; collective over the world.
    pub(crate) fn finish_trace(&self) -> Result<()> {
        self.output.finish_trace()
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The ranks that train together.
    pub fn world(&self) -> &Arc<World> {
        &self.world
    }

    /// Optimizer updates made or skipped.
    pub fn global_step(&self) -> u64 {
        self.progress.global_step
    }

    /// The bytes that this rank holds in each phase.
    pub fn plan(&self) -> &MemoryPlan {
        &self.plan
    }

    /// Trains to the end: evaluates, saves and reports as configured; collective over the world.
    ///
    /// # Errors
    /// [`Error::Preempted`](crate::Error::Preempted) after a save if a stop was asked for before the last step; else the first
    /// failure of any rank, panics included.
    pub fn run(&mut self) -> Result<RunSummary> {
        self.run_with(|trainer| {
            trainer.start()?;
            while !trainer.is_finished() {
                let metrics = trainer.train_step()?;
                trainer.finish_step(&metrics)?;
            }
            trainer.finish()
        })
    }

    /// One generation batch and its updates; collective over the world.
    ///
    /// # Errors
    /// The first failure of any rank. Where rewards failed, the batch is the next one again.
    pub fn train_step(&mut self) -> Result<StepMetrics> {
        let batch = self.rollout()?;
        self.update(batch)
    }
}

/// Whether a multiple of `every` lies in (before, after].
fn passes(every: Option<usize>, before: u64, after: u64) -> bool {
    every.is_some_and(|every| after / every as u64 > before / every as u64)
}

/// Has a group scored, while others are generated.
fn submit(group: &RolloutGroup, rewards: &RewardPool, output: &RunOutput) -> RewardTicket {
    let ticket = rewards.submit(group);
    output.advance();
    ticket
}
