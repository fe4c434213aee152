//! The GRPO trainer. [`Trainer::run`] performs a run, and [`Trainer::train_step`] one step.
//!
//! | file | what it does |
//! |---|---|
//! | `construction`, `functions` | builds a trainer, with functions of the caller |
//! | `preflight`, `planned_run`, `engine_memory` | checks and plans a run before any process starts |
//! | `rows`, `teacher`, `resume` | training rows, a teacher, and resuming from a checkpoint |
//! | `step`, `run` | the parts of a step, and a run's work around its steps |
//! | `sampling`, `batches`, `carry` | draws and samples generation batches; carries unfinished groups to the next step |
//! | `ahead` | lets engines sample later batches during an update |
//! | `dynamic_sampling`, `replacement`, `verdict` | leaves out or replaces groups without a learning signal |
//! | `turns`, `episodes`, `engine_groups` | tools and agents, and the ranks that share an engine |
//! | `policy_and_engine` | the policy and the engine of this rank |
//! | `curriculum`, `penalty`, `fruitless`, `best` | solve rates, KL in the reward, steps without a score, the best evaluation |
//! | `records`, `output` | groups as sequences and metrics; files, bars and the report |
//!
//! A run of one step, with a callback of the program's own:
//!
//! ```no_run
//! use std::sync::Arc;
//! use colo_grpo::trainer::{RunSummary, StepReport, TrainerBuilder, TrainingBatch};
//! use colo_grpo::{Config, Result, Trainer, World};
//!
//! fn one_step(config: Config, world: Arc<World>) -> Result<RunSummary> {
//!     let builder: TrainerBuilder = Trainer::builder(config, world);
//!     let on_step = |report: &StepReport<'_>| {
//!         println!("step {} of {}: {}", report.step, report.max_steps, report.metrics["reward"]);
//!         Ok(())
//!     };
//!     let mut trainer = builder.on_step(on_step).build()?;
//!     trainer.run_with(|trainer| {
//!         trainer.start()?;
//!         let batch: TrainingBatch = trainer.rollout()?;
//!         let metrics = trainer.update(batch)?;
//!         trainer.finish_step(&metrics)?;
//!         trainer.finish()
//!     })
//! }
//! ```
//!
//! At a lower level, a [`Colocated`](crate::Colocated) makes updates from sequences; [`Learner`] has the policy and the reference model:
//!
//! ```no_run
//! use colo_grpo::grpo::LossFunction;
//! use colo_grpo::trainer::{Divergence, Learner, Policy, Reference, ReferenceSync, Sequence};
//! use colo_grpo::trainer::{UpdateOptions, UpdateOutcome, UpdateProgress};
//! use colo_grpo::{Colocated, Result};
//!
//! /// An update with a custom loss and without progress display.
//! fn update(colocated: &mut Colocated, rows: &[Sequence], options: UpdateOptions, loss: LossFunction) -> Result<f64> {
//!     let options = UpdateOptions { loss_function: Some(loss), ..options };
//!     let moves: Option<ReferenceSync> = options.reference_sync;
//!     let progress: &dyn UpdateProgress = &();
//!     let apart: Vec<Divergence> = colocated.divergences(rows, &options, progress)?;
//!     let outcome: UpdateOutcome = colocated.update(rows, &options, progress)?;
//!     println!("{} sequences, {moves:?}, gradient norm {}", apart.len(), outcome.grad_norm);
//!     Ok(outcome.loss)
//! }
//!
//! fn describe(learner: &Learner) {
//!     let (policy, reference): (&Policy, Option<&Reference>) = (learner.policy(), learner.reference());
//!     println!("weights of version {}, a reference model: {}", policy.version(), reference.is_some());
//! }
//! ```
//!
//! Metrics declare how they are reduced over ranks:
//!
//! ```
//! use colo_grpo::World;
//! use colo_grpo::trainer::{MetricValues, Reduce, StepMetrics};
//!
//! let mut step = StepMetrics::default();
//! step.set("loss", 0.5, Reduce::Sum);
//! step.set_mean("completions/mean_length", 120.0, 4.0); // of 4 completions
//! let values: MetricValues = step.reduce(&*World::single().group())?;
//! assert_eq!(values["loss"], 0.5);
//! # Ok::<(), colo_grpo::Error>(())
//! ```
//!
//! [`MemoryPlan`] counts the bytes of every phase before a run begins:
//!
//! ```no_run
//! use colo_grpo::trainer::{ClassBytes, PlanInput, Role, Room};
//! use colo_grpo::{MemoryPlan, Result};
//!
//! /// Peak bytes of a rank that both trains and samples, with 80 GiB.
//! fn peak_bytes(input: PlanInput<'_>) -> Result<usize> {
//!     let room = Room { available_bytes: 80 << 30, swap_bytes: None };
//!     let plan = MemoryPlan::new(&PlanInput { role: Role::Both, room, ..input }, &|_| Ok(0))?;
//!     plan.classes.iter().for_each(|class: &ClassBytes| println!("{}: {} bytes", class.class, class.train_bytes));
//!     Ok(plan.peak_bytes())
//! }
//! ```

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
#[cfg(test)]
mod lengths_tests;
#[cfg(test)]
mod long_turns_tests;
mod output;
mod own_teacher;
#[cfg(test)]
mod own_teacher_tests;
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
mod sharing;
mod sizing;
mod step;
mod teacher;
#[cfg(test)]
mod together_tests;
mod training_table;
mod turns;
#[cfg(test)]
mod turns_tests;
mod verdict;

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use crate::checkpoint::{CarriedGroup, Claim, Saver};
use crate::config::{BatchPlan, Config};
use crate::data::{Curriculum, Dataset, PromptSampler};
use crate::error::Result;
use crate::grpo::EntropyControl;
use crate::ranks::{HostGroup, World};
use crate::reward::{RewardPool, RewardTicket};
use crate::rollout::CompletionLimit;
use crate::train::Schedule;
use crate::types::RolloutGroup;

pub use crate::metrics::{MetricValues, Reduce, StepMetrics};
pub use crate::plan::{ClassBytes, MemoryPlan, PlanInput, Role, Room};
pub use crate::train::{Policy, Reference, Sequence};
pub use crate::update::{Divergence, Learner, ReferenceSync, UpdateOptions, UpdateOutcome, UpdateProgress};
use ahead::QueuedBatch;
use batches::DataPosition;
pub use construction::TrainerBuilder;
pub(crate) use construction::{TrainerParts, assemble};
use curriculum::RowsById;
use fruitless::FruitlessSteps;
use functions::Functions;
pub use functions::StepReport;
use output::RunOutput;
use own_teacher::OwnTeacher;
#[doc(hidden)]
pub use planned_run::PlannedRun;
use policy_and_engine::PolicyAndEngine;
#[doc(hidden)]
pub use preflight::Preflight;
pub(crate) use rows::TrainingRows;
#[doc(hidden)]
pub use sizing::ExpectedStep;
pub use step::TrainingBatch;
pub(crate) use turns::{RunTurns, generate};

/// A GRPO run on this rank.
///
/// ```no_run
/// use std::sync::Arc;
/// use colo_grpo::{Config, Result, Trainer, World};
///
/// fn train() -> Result<()> {
///     let config = Config::load(Some("run.toml".as_ref()), &["learning_rate=2e-6".to_owned()])?;
///     let mut trainer = Trainer::new(config.clone(), Arc::new(World::for_run(&config)?))?;
///     println!("{} bytes at most", trainer.plan().peak_bytes());
///     println!("reward on held-out rows: {:?}", trainer.run()?.eval_reward_after);
///     Ok(())
/// }
/// ```
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
    /// FLOP/s of this rank's GPU in the run's dtype, if known from its data sheet.
    chip_flop_per_s: Option<f64>,
}

/// The rows, and the run's current place in them.
#[derive(Debug)]
struct TrainingData {
    train: Dataset,
    eval: Option<Dataset>,
    sampler: PromptSampler,
    rows_by_id: RowsById,
    /// Unfinished groups of all ranks that the next step continues; equal on each rank.
    carried: Vec<CarriedGroup>,
    /// Number of carried groups on each rank, in rank order, if groups stay with the rank that has their tools.
    carried_by: Vec<usize>,
    /// A batch of prompts that the program has drawn to sample by itself.
    drawn: Option<DrawnPrompts>,
}

/// The place in the data before a program drew prompts, and the time when it did.
#[derive(Debug)]
struct DrawnPrompts {
    before: DataPosition,
    start: Instant,
}

/// The state of sampling outside the engine.
#[derive(Debug)]
struct Generation {
    /// Tools that completions may call, or the agent that plays episodes.
    turns: Option<RunTurns>,
    /// Builds the prompts of the policy as its own teacher, if it is.
    own_teacher: Option<OwnTeacher>,
    /// Batches sampled ahead for later steps, the next one first; only in split mode.
    ahead: VecDeque<QueuedBatch>,
    /// The ranks of this rank's engine, if they must agree on pauses.
    pause_group: Option<HostGroup>,
    /// The ranks with engines, if groups are replaced.
    verdict_group: Option<HostGroup>,
}

/// The run's checkpoints.
#[derive(Debug)]
struct Checkpoints {
    saver: Saver,
    /// The exclusive claim on the output folder, on rank 0.
    claim: Option<Claim>,
    /// The newest step that has a checkpoint.
    newest_step: u64,
    /// Identities of the weights that the run reads but does not train.
    frozen_weights: BTreeMap<String, String>,
}

/// The progress of the run.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct TrainingProgress {
    /// Optimizer updates so far, including skipped ones.
    global_step: u64,
    /// Value of `global_step` before the newest batch.
    previous_step: u64,
    /// Number of generation batches sampled.
    generation_step: u64,
    /// Tokens trained on, over all ranks.
    num_tokens: u64,
    /// Weight of the entropy bonus. On ranks that only generate it keeps its initial value.
    entropy_control: EntropyControl,
}

/// Results of a finished run.
#[derive(Debug, Clone, PartialEq)]
pub struct RunSummary {
    /// Mean reward on the held-out rows before training; `None` without such rows, or if none could be scored.
    pub eval_reward_before: Option<f64>,
    /// Mean reward on the held-out rows after training.
    pub eval_reward_after: Option<f64>,
    /// Folder of the final model.
    pub model_dir: PathBuf,
    /// Path of the report, on the rank that wrote it (rank 0).
    pub report: Option<PathBuf>,
}

impl Trainer {
    /// Loads model, data and tokenizer, and resumes if the configuration says so; collective over the world.
    ///
    /// # Errors
    /// All errors of configuration, files or memory, before anything is trained.
    pub fn new(config: Config, world: Arc<World>) -> Result<Self> {
        Self::builder(config, world).build()
    }

    /// Creates a trainer that calls functions of the program: rewards, advantages, a loss, and a callback after each step.
    pub fn builder(config: Config, world: Arc<World>) -> TrainerBuilder {
        TrainerBuilder::new(config, world)
    }

    /// Limits the completions of all future steps, on ranks that have an engine.
    pub(crate) fn limit_completions(&mut self, limit: CompletionLimit) {
        if let Some(engine) = self.model.engine_mut() {
            engine.limit_completions(limit);
        }
    }

    /// The trained model between steps, on a rank that trains.
    pub(crate) fn policy(&self) -> Option<&Policy> {
        self.model.policy()
    }

    /// Merges the ranks' time-lines of phases, if `trace` is on; collective over the world.
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

    /// Optimizer updates so far, including skipped ones.
    pub fn global_step(&self) -> u64 {
        self.progress.global_step
    }

    /// Total updates of the run.
    fn max_steps(&self) -> u64 {
        self.schedule.total_steps as u64
    }

    /// The planned memory of this rank in each phase.
    pub fn plan(&self) -> &MemoryPlan {
        &self.plan
    }

    /// Trains to the end, with evaluation, checkpoints and report as configured; collective over the world.
    ///
    /// # Errors
    /// [`Error::Preempted`](crate::Error::Preempted), after saving a checkpoint, if a stop was requested before the last step; else the first failure
    /// of any rank, including panics.
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

    /// Runs one generation batch and its updates; collective over the world.
    ///
    /// # Errors
    /// The first failure of any rank. If rewards failed, the next call uses the same batch again.
    pub fn train_step(&mut self) -> Result<StepMetrics> {
        let batch = self.rollout()?;
        self.update(batch)
    }
}

impl TrainingData {
    /// The state at the beginning of a run.
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

    /// The current place in the rows.
    fn position(&self) -> DataPosition {
        DataPosition { sampler: self.sampler.state().clone(), carried: self.carried.clone() }
    }
}

/// Whether a multiple of `every` is in (before, after].
fn passes(every: Option<usize>, before: u64, after: u64) -> bool {
    every.is_some_and(|every| after / every as u64 > before / every as u64)
}

/// Submits a group for scoring, while others are generated.
fn submit(group: &RolloutGroup, rewards: &RewardPool, output: &RunOutput) -> RewardTicket {
    let ticket = rewards.submit(group);
    output.advance();
    ticket
}
