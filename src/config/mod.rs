//! Configuration: parsed, validated, read-only after. Keys are TRL's `GRPOConfig`'s where one exists, and so are defaults but
//! for those that docs/config.md lists.
//!
//! A file and `key=value` words make a [`Config`]; every table of the file is a struct, and every key that takes one of a few words an enum:
//!
//! ```
//! use colo_grpo::config::*;
//! use colo_grpo::{Config, Error, ExitCode};
//!
//! let words = ["lora.r=8".to_owned(), "tensor_parallel_size=1".to_owned()];
//! let config = Config::load(Some("configs/tiny-cpu.toml".as_ref()), &words)?;
//! let Config { data, curriculum, tools, split, objective, distillation, .. } = &config;
//! let sampling: (&DataConfig, &CurriculumConfig, &ToolsConfig, &SplitConfig) = (data, curriculum, tools, split);
//! let losses: (&ObjectiveConfig, &DistillationConfig) = (objective, distillation);
//! let Config { optimizer, lora, reward, rewards, report, best, .. } = &config;
//! let training: (&OptimizerConfig, &LoraConfig, &BestConfig) = (optimizer, lora, best);
//! let scoring: (&RewardConfig, &ProcessRewards, &ReportConfig) = (reward, rewards, report);
//! let steps: (&MuonConfig, &LrSchedulerKwargs) = (&optimizer.muon, &optimizer.lr_scheduler_kwargs);
//! let Config { output, saving, supervision, .. } = &config;
//! let run: (&OutputConfig, &SavingConfig, &SupervisionConfig) = (output, saving, supervision);
//! let shared: (&ZeroConfig, &ResidencyConfig) = (&config.zero, &config.residency);
//! let (environment, arguments): (&Option<Environment>, &EnvironmentArguments) = (&tools.environment, &tools.environment_args);
//! assert!(environment.as_ref().is_none_or(|environment| environment.hub == EnvironmentHub::OpenEnv), "{arguments:?} {shared:?}");
//! let limits: &HeartbeatConfig = &supervision.heartbeat;
//! let code: (&CodeConfig, &RewardArguments, &CommandLine) = (&reward.code, &reward.arguments, &reward.code.command);
//! let lists: (&Files, &TemplateVariables, &ReportTo) = (&data.train_file, &data.chat_template_kwargs, &report.report_to);
//! let names: (&EnvironmentFactories, &TargetModules) = (&tools.environment_factory, &lora.target_modules);
//! println!("{sampling:?}\n{losses:?}\n{training:?}\n{scoring:?}\n{steps:?}\n{code:?}\n{lists:?}\n{names:?}\n{run:?}\n{limits:?}");
//! assert_eq!(lora.r, Some(8));
//!
//! let wrong = Config::load(None, &["learning_rat=1".to_owned()]).unwrap_err();
//! assert_eq!(wrong.exit_code(), ExitCode::Configuration); // all that is wrong is told together
//! # Ok::<(), Error>(())
//! ```
//!
//! A number of ranks is checked before any of them starts:
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
//! Supervised training has a configuration of its own, and a reward in a process or behind an address a table:
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
//! let of_runs = [Device::NAMES, Mode::NAMES, Dtype::NAMES, ResidualDtype::NAMES, CarriedKv::NAMES, RouterReplay::NAMES];
//! let of_data = [PromptFormat::NAMES, DynamicSampling::NAMES, RewardBatch::NAMES, SandboxLayer::NAMES];
//! let of_losses = [LossType::NAMES, KlEstimator::NAMES, DistillationMode::NAMES, ReferenceModel::NAMES];
//! let of_scales = [AdvantageEstimator::NAMES, MultiObjectiveAggregation::NAMES, ScaleRewards::NAMES];
//! let of_ratios = [ImportanceSamplingLevel::NAMES, ImportanceSamplingMode::NAMES];
//! let of_updates = [LrSchedulerType::NAMES, OptimizerName::NAMES, AdjustLr::NAMES, GradientCheckpointing::NAMES];
//! let of_memory = [OptimizerResidency::NAMES, ReferenceResidency::NAMES, TargetModule::NAMES, MixedPrecision::NAMES];
//! let of_engines = [RolloutQuantization::NAMES, KvCacheDtype::NAMES, StateDtype::NAMES, ToolCallParser::NAMES];
//! let (of_drafts, of_teachers) = ([Speculation::NAMES], [SelfDistillation::NAMES]);
//! let all = [&of_drafts[..], &of_teachers, &of_runs, &of_data, &of_losses, &of_scales, &of_ratios, &of_updates, &of_memory, &of_engines].concat();
//! assert!(all.iter().chain([&ReportService::NAMES]).all(|words| !words.is_empty()));
//! assert_eq!(AutoOr::Given(2), AutoOr::Given(2)); // or `AutoOr::Auto`, which leaves it to the plan
//! ```

mod batch;
mod best;
mod check;
mod choice;
mod choices;
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
pub use curriculum::CurriculumConfig;
pub(crate) use data::NamedSplit;
pub use data::{DataConfig, Files, Sources, TemplateVariables};
pub use distillation::DistillationConfig;
pub use environments::{Environment, EnvironmentArguments, EnvironmentHub};
use field::keys;
pub(crate) use field::{KeyDoc, described};
pub use grpo::{Config, ResidencyConfig, ZeroConfig};
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
pub use reward::{CodeConfig, CommandLine, ProcessReward, ProcessRewards, RewardArguments, RewardConfig};
pub(crate) use reward::{environment_class, is_python, reward_name};
pub use run::{OutputConfig, SavingConfig, SupervisionConfig};
pub use service_choices::*;
pub use sft::SftConfig;
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
