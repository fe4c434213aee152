//! colo-grpo trains a language model with GRPO, every GPU doing both jobs in turn: all ranks generate
//! rollouts, then all ranks train on them.
//!
//! The folders are the architecture. A file may use only floors below its own; `tests/it/tidy.rs` holds the code to it.
//!
//! | floor | room |
//! |---|---|
//! | 0 | [`error`] |
//! | 1 | [`types`], [`phase`], [`console`], [`untrusted`], [`process`], [`migration`], [`http`] |
//! | 2 | [`config`] |
//! | 3 | [`torch`], [`data`], [`sandbox`] |
//! | 4 | [`cuda`], [`reward`] |
//! | 5 | [`memory`], [`ranks`], [`ops`], [`tools`] |
//! | 6 | [`model`], [`grpo`], [`metrics`] |
//! | 7 | [`rollout`], [`train`], [`eval`] |
//! | 8 | [`plan`], [`update`], [`serve`], [`endpoint`], [`watch`], [`checkpoint`] |
//! | 9 | [`colocate`], [`split`] |
//! | 10 | [`trainer`], [`sft`], [`launch`] |
//! | 11 | [`bench`](mod@bench) |
//! | 12 | [`cli`] |
//!
//! One step, from [`trainer::Trainer::train_step`]: the next prompts; `with_rollout` wakes the engine, generates and puts
//! it to sleep; rewards are awaited; advantages assigned; sequences packed; the policy updated. A program of its own begins at
//! [`Trainer::builder`] and [`main`].

#![allow(rustdoc::private_intra_doc_links)] // the floors are for readers of the source

mod bench;
mod checkpoint;
mod cli;
mod colocate;
mod config;
mod console;
mod cuda;
mod data;
mod endpoint;
mod error;
mod eval;
pub mod grpo;
mod http;
mod launch;
mod memory;
mod metrics;
mod migration;
mod model;
mod ops;
mod phase;
mod plan;
mod process;
mod ranks;
pub mod reward;
mod rollout;
mod sandbox;
mod serve;
mod sft;
mod split;
mod tools;
mod torch;
mod train;
mod trainer;
mod types;
mod untrusted;
mod update;
mod watch;

#[doc(hidden)]
pub mod internal;

pub use colocate::Colocated;
pub use config::Config;
pub use error::{Error, ExitCode, Result};
pub use launch::main;
pub use plan::MemoryPlan;
pub use ranks::World;
pub use rollout::RolloutEngine;
pub use trainer::Trainer;
pub use types::Trajectory;
pub use untrusted::MeteredAllocator;

/// The types that signatures of the library mention, beside those at its root.
pub mod signatures {
    pub use crate::config::*;
    pub use crate::metrics::{MetricValues, Reduce, StepMetrics};
    pub use crate::plan::{ClassBytes, PlanInput, Role, Room};
    pub use crate::ranks::{Backend, Collective, Mesh, ReduceOp, WorkerEnv, WorldOptions};
    pub use crate::rollout::{
        Engine, EngineStats, Event, Request, RequestId, Rollout, Session, SessionLoad, StageTimes,
    };
    pub use crate::serve::EngineSlices;
    pub use crate::train::{Policy, Reference, Sequence};
    pub use crate::trainer::{RunSummary, StepReport, TrainerBuilder, TrainingBatch};
    pub use crate::types::*;
    pub use crate::update::{Divergence, Learner, ReferenceSync, UpdateOptions, UpdateOutcome, UpdateProgress};
}

/// The example of docs/library.md compiles.
#[cfg(doctest)]
#[doc = include_str!("../docs/library.md")]
struct Library;
