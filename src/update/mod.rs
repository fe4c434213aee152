//! The GRPO update: one generation batch into optimizer steps. Shares sequences out, scores them where that is needed, and runs loss,
//! backward and step. Knows nothing of engines and of how sequences were sampled.
//!
//! | file | what it is |
//! |---|---|
//! | `learner` | [`Learner`], the policy, its reference model and the ranks that train them |
//! | `options` | how a batch becomes updates, what came of them, who is shown the progress |
//! | `hand_out` | log-probabilities of micro-batches, handed out to their sequences |
//! | `denominators` | what token losses are divided by |
//! | `divergence` | KL divergences from the reference model, for rewards that are lessened by them |
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
