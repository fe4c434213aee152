//! colo-grpo trains a language model with GRPO on one node, every GPU doing both jobs in turn: all ranks generate
//! rollouts, then all ranks train on them.
//!
//! The folders are the architecture. A file may use only floors below its own; `tests/it/tidy.rs` holds the code to it.
//!
//! | floor | room |
//! |---|---|
//! | 0 | [`error`] |
//! | 1 | [`types`], [`phase`], [`untrusted`], [`process`], [`migration`] |
//! | 2 | [`config`] |
//! | 3 | [`torch`], [`data`], [`sandbox`] |
//! | 4 | [`cuda`], [`reward`] |
//! | 5 | [`memory`], [`dist`], [`ops`] |
//! | 6 | [`model`], [`grpo`], [`metrics`] |
//! | 7 | [`rollout`], [`train`], [`eval`] |
//! | 8 | [`plan`], [`update`], [`serve`], [`checkpoint`] |
//! | 9 | [`colocate`], [`split`] |
//! | 10 | [`trainer`], [`sft`], [`launch`] |
//! | 11 | [`bench`](mod@bench) |
//! | 12 | [`cli`] |
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
pub mod migration;
pub mod model;
pub mod ops;
pub mod phase;
pub mod plan;
pub mod process;
pub mod reward;
pub mod rollout;
pub mod sandbox;
pub mod serve;
pub mod sft;
pub mod split;
pub mod torch;
pub mod train;
pub mod trainer;
pub mod types;
pub mod untrusted;
pub mod update;

pub use colocate::Colocated;
pub use config::Config;
pub use dist::World;
pub use error::{Error, ExitCode, Result};
pub use plan::MemoryPlan;
pub use rollout::RolloutEngine;
pub use trainer::Trainer;

/// The example of docs/library.md compiles.
#[cfg(doctest)]
#[doc = include_str!("../docs/library.md")]
struct Library;
