//! Scores of a policy with experts together with its load-balancing loss, for evaluation.

use super::micro_batch::MicroBatch;
use super::policy::Policy;
use super::scores::Scores;
use crate::error::Result;

impl Policy {
    /// Scores like [`Policy::forward_logprobs`], with the load-balancing loss if the model has experts.
    ///
    /// # Errors
    /// The errors of [`Policy::forward_logprobs`].
    pub fn balanced_logprobs(&mut self, micro_batch: &MicroBatch, temperature: f64) -> Result<Scores> {
        self.network.balances = true;
        let scores = self.forward_logprobs(micro_batch, temperature);
        self.network.balances = false;
        scores
    }
}
