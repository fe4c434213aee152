//! Advantages, losses, KL estimators and importance correction: pure functions of rewards and log-probabilities, each with its paper. The module
//! knows nothing of models or optimizers, and of ranks only how statistics of rewards are merged over them.
//!
//! Legend: C scored (completion) tokens of a micro-batch, packed without padding; N its sequences.
//!
//! Formulas, constants and metric names are those of TRL 1.16's `GRPOTrainer`, with the whole batch as one micro-batch. `scripts/golden_trl.py` runs
//! TRL's own code, and the tests compare these functions with its numbers.
//!
//! Advantages of a group with different rewards:
//!
//! ```
//! use std::sync::Arc;
//! use colo_grpo::data::{Prompt, RolloutGroup, Trajectory};
//! use colo_grpo::grpo::{AdvantageConfig, AdvantageStats, BatchStats, assign_advantages};
//!
//! let prompt = Prompt { id: 0, text: "2 + 3 =".to_owned(), token_ids: vec![5, 6], columns: Arc::default() };
//! let rewarded = |reward| Trajectory { reward: Some(reward), ..Trajectory::default() };
//! let mut groups = [RolloutGroup { completions: vec![rewarded(1.0), rewarded(0.0)], ..RolloutGroup::new(prompt) }];
//! let stats: AdvantageStats = assign_advantages(&mut groups, &AdvantageConfig::default(), None)?;
//! let reward: BatchStats = stats.reward;
//! assert_eq!(reward.mean(), 0.5);
//! assert!(groups[0].completions[0].advantage > 0.0 && groups[0].completions[1].advantage < 0.0);
//! # Ok::<(), colo_grpo::Error>(())
//! ```
//!
//! The loss of a micro-batch: two sequences with two tokens and one token, a teacher's two most probable tokens, and an entropy bonus:
//!
//! ```
//! use colo_grpo::grpo::{
//!     Aggregate, Denominators, DeviceStats, Distillation, EntropyControl, EntropyTerm, LossConfig, LossInput,
//!     LossOutput, LossStats, TopDivergence, TopLogprobs, age_stats, policy_loss,
//! };
//! use colo_grpo::config::ObjectiveConfig;
//! use tch::Tensor;
//!
//! let top = TopDivergence { alpha: 1.0, adds_tail: true, num_tokens: 2 };
//! let distillation = Distillation { weight: 0.5, clip_max: None, top: Some(top) };
//! let objective = ObjectiveConfig { entropy_coef: 0.01, ..ObjectiveConfig::default() };
//! let config = LossConfig { objective, distillation: Some(distillation), ..LossConfig::default() };
//! let floats = |values: &[f32]| Tensor::from_slice(values);
//! let (logprobs, teacher) = (floats(&[-0.5, -1.0, -0.25]), floats(&[-0.4, -1.1, -0.3])); // [C]
//! let (own_top, teacher_top) = (floats(&[-0.7; 6]).view([3, 2]), floats(&[-0.8; 6]).view([3, 2])); // [C, 2]
//! let (entropy, advantages) = (floats(&[1.0, 2.0, 0.5]), floats(&[1.0, -1.0])); // [C], [N]
//! let input = LossInput {
//!     logprobs: &logprobs,
//!     old_logprobs: None, // the policy's own, as no update came in between
//!     ref_logprobs: None,
//!     teacher_logprobs: Some(&teacher),
//!     top: Some(TopLogprobs { logprobs: &own_top, teacher_logprobs: &teacher_top }),
//!     rollout_logprobs: None,
//!     advantages: &advantages,
//!     bnpo_divisors: None,
//!     sequence_of_token: &Tensor::from_slice(&[0_i64, 0, 1]),
//!     entropy: Some(&entropy),
//!     entropy_term: Some(EntropyTerm::of_highest(vec![1.0, 2.0, 0.5], 1.0, 0.01)),
//! };
//! let denominators =
//!     Denominators { num_sequences: 2.0, num_tokens: 3.0, num_update_tokens: 3.0, num_sequence_tokens: 3.0 };
//! let LossOutput { loss, dlogprobs, stats, .. } = policy_loss(&input, &config, &denominators)?;
//! assert_eq!(dlogprobs.size(), [3]);
//! let ages: DeviceStats = age_stats(&input, &config, Some(&Tensor::from_slice(&[0_i64, 1, 1])), 1)?;
//! let read: LossStats = stats.join(ages)?.read()?;
//! for (name, aggregate) in read.entries() {
//!     let aggregate: &Aggregate = aggregate;
//!     println!("{name} {}", aggregate.value());
//! }
//! let mut control = EntropyControl::new(&config);
//! control.observe(1.2, &config); // moves the coefficient where `use_adaptive_entropy` is set
//! println!("loss {}", loss.double_value(&[]));
//! # Ok::<(), colo_grpo::Error>(())
//! ```

mod advantages;
mod distillation;
mod entropy;
mod exactness;
mod function;
mod importance;
mod kl;
mod loss;
mod moments;
mod options;
mod segments;
mod signal;
mod staleness;
mod stats;
mod surrogate;

#[cfg(test)]
pub(crate) mod tests;

pub use advantages::{AdvantageConfig, AdvantageStats, assign_advantages, rewards_are_equal};
pub use distillation::TopLogprobs;
pub use entropy::{EntropyControl, EntropyTerm};
pub(crate) use exactness::{check_exactness, exactness_stats};
pub use function::LossFunction;
pub use kl::kl_of_sequence;
pub use loss::{Denominators, LossInput, LossOutput, policy_loss};
pub use moments::BatchStats;
pub use options::{Distillation, LossConfig, TopDivergence};
pub use signal::has_signal;
pub use staleness::age_stats;
pub use stats::{Aggregate, DeviceStats, LossStats};
