//! The configuration: parsed, validated, and read-only afterwards. Keys and defaults are those of TRL's `GRPOConfig` where it has them, except for
//! the defaults listed in docs/config.md.
//!
//! [`Config`] is read from a file and `key=value` overrides. Every table of the file is a struct, and every key that accepts a few words is an enum:
//!
//! ```
//! use colo_grpo::{Config, Error, ExitCode};
//!
//! let file = Some("configs/tiny-cpu.toml".as_ref());
//! let config = Config::load(file, &["lora.r=8".to_owned()])?;
//! assert_eq!(config.lora.r, Some(8));
//! assert_eq!(Config::from_toml(&config.to_toml())?, config); // every key with its value
//!
//! let wrong = Config::load(file, &["learning_rat=1", "lora.r=-1"].map(str::to_owned)).unwrap_err();
//! assert!(wrong.exit_code() == ExitCode::Configuration && matches!(&wrong, Error::InvalidConfig(all) if all.len() == 2));
//! assert!(wrong.to_string().contains("did you mean 'learning_rate'?"));
//! # Ok::<(), Error>(())
//! ```
//!
//! The number of ranks is checked before any of them starts:
//!
//! ```
//! use colo_grpo::Config;
//! use colo_grpo::config::{BatchPlan, EngineShape, MAX_ASYNC_STEPS, PipelinePartition, Roles, Sources, WorldSize};
//!
//! let file = Some("configs/tiny-cpu.toml".as_ref());
//! let config = Config::load(file, &["tensor_parallel_size=1".to_owned()])?;
//! let batch: BatchPlan = config.validate_world(1)?;
//! let Roles { num_trainers, num_generators } = batch.roles;
//! println!("{num_trainers} ranks train, {num_generators} generate, at most {MAX_ASYNC_STEPS} steps ahead");
//! let uneven: &Option<PipelinePartition> = &config.pipeline_partition;
//! assert!(uneven.is_none(), "the stages have equal numbers of layers");
//! let engine = EngineShape { tensor_parallel_size: 2, pipeline_parallel_size: 1 };
//! WorldSize { ranks: 8, local_ranks: 8 }.check_engines(0, engine)?;
//! let named: Option<Sources> = Config::sources(file, &[]); // what has to be downloaded
//! assert!(named.is_some());
//! # Ok::<(), colo_grpo::Error>(())
//! ```
//!
//! Supervised training has its own configuration, and a reward with its own process or service has a table:
//!
//! ```
//! use colo_grpo::config::{Files, ProcessReward, SftConfig};
//!
//! fn address(reward: &ProcessReward) -> Option<&str> {
//!     reward.url.as_deref()
//! }
//! fn rows(config: &SftConfig) -> &Files {
//!     &config.data.train_file
//! }
//! ```
//!
//! `NAMES` lists the words of a key:
//!
//! ```
//! use colo_grpo::config::*;
//!
//! assert_eq!(Quantization::NAMES, ["none", "nf4"]);
//! assert_eq!((Quantization::ALL[1], Quantization::Nf4.name()), (Quantization::Nf4, "nf4"));
//! ```

mod batch;
mod best;
mod check;
mod choice;
mod choices;
mod code;
mod curriculum;
mod data;
mod distillation;
mod environments;
mod field;
mod flat;
mod grpo;
mod heartbeat;
mod load;
mod lora;
mod model;
mod numbers;
mod objective;
mod optimizer;
mod pipeline;
mod range;
mod raw;
mod report;
mod reward;
mod run;
mod service_choices;
mod sft;
mod sharding;
mod snapshot;
mod split;
mod together;
mod tools;
mod unknown;
mod unquoted;
mod unread;
mod validate;
mod yaml;

use std::sync::OnceLock;

pub use batch::{BatchPlan, WorldSize};
pub use best::BestConfig;
pub use choice::AutoOr;
pub use choices::*;
pub use code::{CodeConfig, CommandLine};
pub use curriculum::CurriculumConfig;
pub(crate) use data::NamedSplit;
pub use data::{DataConfig, Files, Sources, TemplateVariables};
pub use distillation::DistillationConfig;
pub use environments::{Environment, EnvironmentArguments, EnvironmentHub};
use field::keys;
pub(crate) use field::{KeyDoc, described};
pub use grpo::Config;
pub use heartbeat::HeartbeatConfig;
pub(crate) use load::{ForeignEntry, foreign_entries};
pub(crate) use lora::MAX_RANK;
pub use lora::{LoraConfig, TargetModules};
pub use model::ModelConfig;
pub(crate) use numbers::divisors;
pub use objective::ObjectiveConfig;
pub use optimizer::{LrSchedulerKwargs, MuonConfig, OptimizerConfig};
pub use pipeline::{EngineShape, PipelinePartition};
use range::{ABOVE_ZERO, BELOW_ONE, COUNT, SEED, above, at_least, from_to};
pub(crate) use raw::check_openings;
pub use report::{ReportConfig, ReportTo};
pub use reward::{ProcessReward, ProcessRewards, RewardArguments, RewardConfig};
pub(crate) use reward::{environment_class, is_python, reward_name};
pub use run::{OutputConfig, SavingConfig, SupervisionConfig};
pub use service_choices::*;
pub use sft::SftConfig;
pub use sharding::{ResidencyConfig, ZeroConfig};
pub(crate) use snapshot::toml_value;
pub use split::{MAX_ASYNC_STEPS, Roles, SplitConfig};
#[cfg(test)]
pub(crate) use together::KeyValues;
pub(crate) use together::{Circumstance, Combination, ConflictKind, TABLE, Term};
pub(crate) use tools::INTERPRETER;
pub use tools::{EnvironmentFactories, ToolsConfig};
pub(crate) use unknown::{nearest, pattern as key_pattern};

#[cfg(test)]
mod migration_tests;
#[cfg(test)]
mod tests;
