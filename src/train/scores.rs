//! Scores of a micro-batch's tokens, and the loss's gradients with respect to them.

use tch::Tensor;

use crate::ops::head::TopScores;

/// Log-probabilities and entropies of a micro-batch's completion tokens, in the accumulation dtype.
#[derive(Debug)]
pub struct Scores {
    /// Log-probability of each token at the temperature, in nats.
    pub logprobs: Tensor, // [C]
    /// Entropy, in nats, of the distribution that each token was sampled from.
    pub entropy: Tensor, // [C]
    /// Scores of other tokens of each distribution, if they were requested. `[C, K]`
    pub top: Option<TopScores>,
    /// The load-balancing loss of a model with experts, a scalar; in training and from
    /// [`Policy::balanced_logprobs`](super::Policy::balanced_logprobs).
    pub aux_loss: Option<Tensor>,
    /// If the sampler's routing was replayed: the number of choices where the router itself would differ, and the number of choices.
    pub differing_experts: Option<Tensor>, // [2] i64
}

/// The loss's gradients with respect to [`Scores`].
#[derive(Debug)]
pub struct TokenGradients {
    /// Gradient with respect to the log-probabilities.
    pub dlogprobs: Tensor, // [C]
    /// Gradient with respect to the entropies; `None` is zero.
    pub dentropy: Option<Tensor>, // [C]
    /// Gradient with respect to the log-probabilities of the teacher's tokens; `None` is zero.
    pub dtop: Option<Tensor>, // [C, K]
    /// Gradient with respect to [`Scores::aux_loss`].
    pub daux_loss: f64,
}
