//! Advantages, losses, KL estimator, importance correction: pure functions of rewards and log-probabilities, with their
//! papers. Knows nothing of models or optimizers, and of ranks only how the statistics of rewards merge over them.
//!
//! Legend: C scored (completion) tokens of a micro-batch, packed without padding; N its sequences.
//!
//! Formulas, constants and metric names are those of TRL 1.16's `GRPOTrainer`, with the whole batch as one micro-batch;
//! `scripts/golden_trl.py` runs TRL's own code and the tests here hold these functions to its numbers.

mod advantages;
mod distillation;
mod entropy;
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
pub use function::LossFunction;
pub use kl::kl_of_sequence;
pub use loss::{Denominators, LossInput, LossOutput, policy_loss};
pub use moments::BatchStats;
pub use options::{Distillation, LossConfig, TopDivergence};
pub use signal::has_signal;
pub use staleness::age_stats;
pub use stats::{Aggregate, DeviceStats, LossStats};
