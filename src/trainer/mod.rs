//! The GRPO trainer. [`Trainer::run`] is a run, and [`Trainer::train_step`] one step.
//!
//! | file | what it does |
//! |---|---|
//! | `construction`, `functions` | builds a trainer, with functions of the caller's own |
//! | `preflight`, `planned_run`, `engine_memory` | checks and plans a run before any process starts |
//! | `rows`, `teacher`, `resume` | rows, a teacher, and a checkpoint to go on from |
//! | `step`, `run` | the parts of a step, and what a run does around its steps |
//! | `sampling`, `batches`, `carry` | draws and samples generation batches; carries unfinished groups on |
//! | `ahead` | lets engines sample later batches beside an update |
//! | `dynamic_sampling`, `replacement`, `verdict` | leaves out or replaces groups that teach nothing |
//! | `turns`, `episodes`, `engine_groups` | tools and agents, and the ranks that share an engine |
//! | `policy_and_engine` | the policy and the engine of this rank |
//! | `curriculum`, `penalty`, `fruitless`, `best` | solve rates, KL in the reward, steps without a score, the best evaluation |
//! | `records`, `output` | groups as sequences and metrics; files, bars and the report |

mod ahead;
mod batches;
mod best;
mod carry;
mod construction;
mod curriculum;
mod dynamic_sampling;
mod engine_groups;
mod engine_memory;
mod episodes;
mod fruitless;
mod functions;
mod output;
mod penalty;
mod planned_run;
mod policy_and_engine;
mod preflight;
mod records;
mod replacement;
mod resume;
mod rows;
mod run;
mod sampling;
mod step;
mod teacher;
#[cfg(test)]
mod together_tests;
mod turns;
#[cfg(test)]
mod turns_tests;
mod verdict;

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use crate::checkpoint::{CarriedGroup, Claim, Saver};
use crate::config::{BatchPlan, Config};
use crate::cuda::Placement;
use crate::data::{Curriculum, Dataset, PromptSampler};
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
use batches::DataPosition;
pub use construction::TrainerBuilder;
use construction::TrainerParts;
use curriculum::RowsById;
use fruitless::FruitlessSteps;
use functions::Functions;
pub use functions::StepReport;
use output::RunOutput;
pub use planned_run::PlannedRun;
use policy_and_engine::PolicyAndEngine;
use rows::TrainingRows;
pub use step::TrainingBatch;
pub(crate) use turns::{RunTurns, generate};

/// A GRPO run on this rank.
#[derive(Debug)]
pub struct Trainer {
    config: Config,
    world: Arc<World>,
    batch: BatchPlan,
    plan: MemoryPlan,
    functions: Functions,
    data: TrainingData,
    model: PolicyAndEngine,
    generation: Generation,
    rewards: RewardPool,
    fruitless: FruitlessSteps,
    schedule: Schedule,
    progress: TrainingProgress,
    output: RunOutput,
    checkpoints: Checkpoints,
    /// The rate of this rank's chip in the run's dtype, where a data sheet has it.
    chip_flop_per_s: Option<f64>,
}

/// The rows, and the place in them where the run is.
#[derive(Debug)]
struct TrainingData {
    train: Dataset,
    eval: Option<Dataset>,
    sampler: PromptSampler,
    rows_by_id: RowsById,
    /// Unfinished groups of all ranks that the next step goes on with, the same on each rank.
    carried: Vec<CarriedGroup>,
    /// How many of them each rank has, in the order of ranks, where they stay with it: it has their tools.
    carried_by: Vec<usize>,
    /// A batch of prompts that a program has drawn to sample for itself.
    drawn: Option<DrawnPrompts>,
}

/// The place in the data before a program drew prompts, and when it did.
#[derive(Debug)]
struct DrawnPrompts {
    before: DataPosition,
    start: Instant,
}

/// The state of sampling beside the engine's.
#[derive(Debug)]
struct Generation {
    /// Tools, where completions may call some, or the agent that plays episodes.
    turns: Option<RunTurns>,
    /// Batches of the steps to come, the next one first; only in split mode.
    ahead: VecDeque<QueuedBatch>,
    /// Ranks that share this rank's engine, where they agree on pauses.
    pause_group: Option<HostGroup>,
    /// Ranks with engines, where groups are replaced.
    verdict_group: Option<HostGroup>,
}

/// The run's checkpoints.
#[derive(Debug)]
struct Checkpoints {
    saver: Saver,
    /// The claim on the output folder, on the first rank.
    claim: Option<Claim>,
    /// The newest step in a checkpoint.
    newest_step: u64,
}

/// How far the run is.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct TrainingProgress {
    /// Optimizer updates made or skipped.
    global_step: u64,
    /// Updates before the newest batch.
    previous_step: u64,
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
        prompts: Vec<Prompt>,
        spread_lengths: Option<LengthSpread>,
        functions: &[(&str, RewardFunction)],
        world: Arc<World>,
    ) -> Result<Self> {
        let placement = Placement::in_world(config.device, config.dtype, world.device())?;
        let room = Room::common(placement, &world)?;
        let preflight =
            PlannedRun::of_shape(&config, &spec, placement)?.preflight(placement, world.world_size(), room)?;
        let (seed, kind, device) = (config.seed, preflight.kind, world.device());
        let parts = TrainerParts {
            preflight,
            weights: &|layout| init_unit_on(layout, seed, kind, device),
            rewards: RewardPool::with_functions(&config, functions)?,
            tools: None,
            rows: TrainingRows::made(Dataset::new(prompts)),
            source: ModelSource { base: config.model_name_or_path.clone(), adapters: None },
            checkpoint: None,
            claim: None,
            writes_files: false,
            spread_lengths,
        };
        let assembled = construction::assemble(config, world.clone(), parts);
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

    /// Updates of the whole run.
    fn max_steps(&self) -> u64 {
        self.schedule.total_steps as u64
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

impl TrainingData {
    /// The rows of a run at their beginning.
    fn new(config: &Config, batch: &BatchPlan, rows: TrainingRows) -> Self {
        let TrainingRows { train, eval, .. } = rows;
        let sampler = PromptSampler::new(train.len(), config.seed, config.shuffle_dataset);
        let mut sampler = sampler.with_curriculum(Curriculum::new(&config.curriculum));
        if config.dataloader_drop_last {
            sampler = sampler.dropping_last(batch.num_prompts);
        }
        let rows_by_id = RowsById::new(config, &train);
        Self { train, eval, sampler, rows_by_id, carried: Vec::new(), carried_by: Vec::new(), drawn: None }
    }

    /// The place in the rows where the run is now.
    fn position(&self) -> DataPosition {
        DataPosition { sampler: self.sampler.state().clone(), carried: self.carried.clone() }
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
