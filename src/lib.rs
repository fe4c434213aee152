//! colo-grpo trains a language model with GRPO on one node, every GPU doing both jobs in turn: all ranks generate
//! rollouts, then all ranks train on them.
//!
//! The folders are the architecture. A file may use only floors below its own; `tests/it/tidy.rs` holds the code to it.
//!
//! | floor | room |
//! |---|---|
//! | 0 | [`error`], [`config`], [`types`], [`phase`], [`untrusted`], [`process`] |
//! | 1 | [`torch`] and [`cuda`] (may see each other); [`data`], [`sandbox`] |
//! | 2 | [`memory`], [`dist`], [`ops`], [`reward`] |
//! | 3 | [`model`], [`grpo`], [`metrics`] |
//! | 4 | [`rollout`], [`train`] |
//! | 5 | [`plan`], [`colocate`], [`split`], [`checkpoint`] |
//! | 6 | [`trainer`], [`sft`], [`eval`], [`bench`](mod@bench) |
//! | 7 | [`launch`], [`cli`] |
//!
//! One step, from [`trainer::Trainer::train_step`]: the next prompts; `with_rollout` wakes the engine, generates and puts
//! it to sleep; rewards are awaited; advantages assigned; sequences packed; the policy updated.

pub mod bench;
pub mod checkpoint;
pub mod cli;
pub mod colocate;
pub mod config;
pub mod cuda;
pub mod data;
pub mod dist;
pub mod error;
pub mod eval;
pub mod grpo;
pub mod launch;
pub mod memory;
pub mod metrics;
pub mod model;
pub mod ops;
pub mod phase;
pub mod plan;
pub mod process;
pub mod reward;
pub mod rollout;
pub mod sandbox;
pub mod sft;
pub mod split;
pub mod torch;
pub mod train;
pub mod trainer;
pub mod types;
pub mod untrusted;

pub use colocate::Colocated;
pub use config::Config;
pub use dist::World;
pub use error::{Error, ExitCode, Result};
pub use plan::MemoryPlan;
pub use rollout::RolloutEngine;
pub use trainer::Trainer;

/// The README's example compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
