//! The GRPO update: turns one generation batch into optimizer steps. It distributes sequences over ranks, scores them if needed, and runs loss,
//! backward and step. Knows nothing of engines and of how sequences were sampled.
//!
//! | file | content |
//! |---|---|
//! | `learner` | [`Learner`], the policy, its reference model and the ranks that train them |
//! | `options` | settings of updates, their results, and progress reporting |
//! | `hand_out` | distributes log-probabilities of micro-batches to their sequences |
//! | `denominators` | denominators of token losses |
//! | `divergence` | KL divergences from the reference model, for rewards with a KL penalty |
//! | `loss` | the loss of an update's micro-batches, summed on the device |

mod denominators;
mod divergence;
#[cfg(test)]
mod golden;
mod hand_out;
mod learner;
mod loss;
mod options;

pub use divergence::{Divergence, await_divergences};
pub use learner::Learner;
pub use options::{ReferenceSync, UpdateOptions, UpdateOutcome, UpdateProgress};
