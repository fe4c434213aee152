//! The GRPO trainer. [`Trainer::run`] is a run, and [`Trainer::train_step`] one step; `step` has the parts of a step, `run` what
//! is around it, `builder` functions of the caller's own; `setup` loads, `sampling` asks the engines, `ahead` lets them sample
//! later batches beside an update, `records` turns groups into sequences and metrics, `output` writes.
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
//! Below it, a [`Colocated`](crate::Colocated) makes updates from sequences; [`Learner`] has the policy and the reference model:
//!
//! ```no_run
//! use colo_grpo::grpo::LossFunction;
//! use colo_grpo::trainer::{Divergence, Learner, Policy, Reference, ReferenceSync, Sequence};
//! use colo_grpo::trainer::{UpdateOptions, UpdateOutcome, UpdateProgress};
//! use colo_grpo::{Colocated, Result};
//!
//! /// An update with a loss of the program's own, whose progress nobody sees.
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
//! Metrics say how they reduce over ranks:
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
//! /// The peak of a rank that does both halves, with 80 GiB.
//! fn peak_bytes(input: PlanInput<'_>) -> Result<usize> {
//!     let room = Room { available_bytes: 80 << 30, swap_bytes: None };
//!     let plan = MemoryPlan::new(&PlanInput { role: Role::Both, room, ..input }, &|_| Ok(0))?;
//!     plan.classes.iter().for_each(|class: &ClassBytes| println!("{}: {} bytes", class.class, class.train_bytes));
//!     Ok(plan.peak_bytes())
//! }
//! ```

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
use crate::data::{Dataset, PromptSampler};
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
use builder::Functions;
pub use builder::{StepReport, TrainerBuilder};
use curriculum::RowsById;
#[doc(hidden)]
pub use engines::PlannedRun;
use model::PolicyAndEngine;
use output::RunOutput;
#[doc(hidden)]
pub use preflight::Preflight;
pub(crate) use rows::TrainingRows;
use sampling::DataPosition;
use scores::Unscored;
pub(crate) use setup::{TrainerParts, assemble};
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

    /// Bounds the completions of all steps to come, on ranks that have an engine.
    pub(crate) fn limit_completions(&mut self, limit: CompletionLimit) {
        if let Some(engine) = self.model.engine_mut() {
            engine.limit_completions(limit);
        }
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
