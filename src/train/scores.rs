//! What a pass over a micro-batch gives, and what its backward is given.

use tch::Tensor;

use crate::ops::head::TopScores;

/// Log-probabilities and entropies of a micro-batch's completion tokens, in the accumulation type.
#[derive(Debug)]
pub struct Scores {
    /// Log-probability of each token at the temperature, in nats.
    pub logprobs: Tensor, // [C]
    /// Entropy of the distribution each token was drawn from, in nats.
    pub entropy: Tensor, // [C]
    /// Scores of other tokens of each distribution, where some were asked for. `[C, K]`
    pub top: Option<TopScores>,
    /// In training, of a model with experts: the loss that keeps these equally busy, a scalar.
    pub aux_loss: Option<Tensor>,
    /// Where the sampler's experts were taken: how many choices the router by itself would have made otherwise, and how many there are.
    pub differing_experts: Option<Tensor>, // [2] i64
}

/// The loss's gradients with respect to [`Scores`].
#[derive(Debug)]
pub struct TokenGradients {
    /// With respect to the log-probabilities.
    pub dlogprobs: Tensor, // [C]
    /// With respect to the entropies; `None` is zero.
    pub dentropy: Option<Tensor>, // [C]
    /// With respect to the log-probabilities of the teacher's tokens; `None` is zero.
    pub dtop: Option<Tensor>, // [C, K]
    /// With respect to [`Scores::aux_loss`].
    pub daux_loss: f64,
}
