//! Routes tokens to experts: softmax or sigmoid of the router's logits, the k highest scores, and weights that some models divide by their sum. All
//! in the accumulation type.
//!
//! E experts, K of them per token.

use tch::{Kind, Tensor};

use super::linear;
use crate::error::Result;
use crate::torch::accumulation_kind;

/// How a router chooses experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouterOptions {
    /// Number of experts per token.
    pub num_experts_per_tok: usize,
    /// The weights of a token's experts are divided by their sum.
    pub norm_topk_prob: bool,
    /// How logits become scores.
    pub scores: RouterScores,
}

/// How a router's logits become scores of experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RouterScores {
    /// Softmax over all experts.
    Softmax,
    /// A sigmoid for each expert. The selection uses the score plus an untrained correction; routing weights use only the scores.
    Sigmoid {
        /// Number of groups of consecutive experts. A group is scored by its two best experts.
        num_groups: usize,
        /// Number of groups from which a token may choose experts.
        groups_per_tok: usize,
        /// Multiplier of the routing weights.
        scale: f64,
    },
}

/// The routing of every token.
#[derive(Debug)]
pub struct Routing {
    /// The scores of all experts.
    pub probs: Tensor, // [T, E]
    /// The chosen experts.
    pub experts: Tensor, // [T, K] int64
    /// The routing weights of the chosen experts.
    pub weights: Tensor, // [T, K]
}

/// Computes the scores of all experts from the router's input. [T, E]
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn probabilities(
    x: &Tensor,            // [T, D]
    w: &Tensor,            // [E, D]
    bias: Option<&Tensor>, // [E]
    options: RouterOptions,
) -> Result<Tensor> {
    let wide = accumulation_kind(x.kind());
    let bias = bias.map(|bias| bias.f_to_kind(wide)).transpose()?;
    let logits = linear::forward(&x.f_to_kind(wide)?, &w.f_to_kind(wide)?, bias.as_ref())?;
    Ok(match options.scores {
        RouterScores::Softmax => logits.f_softmax(-1, None::<Kind>)?,
        RouterScores::Sigmoid { .. } => logits.f_sigmoid()?,
    })
}

/// Chooses the K experts with the highest scores, the highest first; with sigmoids a `correction` is added to the scores first. [T, K]
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn choose(
    probs: &Tensor,              // [T, E]
    correction: Option<&Tensor>, // [E]
    options: RouterOptions,
) -> Result<Tensor> {
    let mut scores = correction.map_or_else(|| Ok(probs.shallow_clone()), |correction| probs.f_add(correction))?;
    if let RouterScores::Sigmoid { num_groups, groups_per_tok, .. } = options.scores
        && groups_per_tok < num_groups
    {
        let grouped = scores.f_view([scores.size()[0], num_groups as i64, -1])?;
        let best = grouped.f_topk(2.min(grouped.size()[2]), -1, true, true)?.0;
        let groups = sum_of_rows(&best)?.f_squeeze_dim(-1)?.f_topk(groups_per_tok as i64, -1, true, true)?.1;
        let closed = groups.f_new_ones(grouped.size()[..2].to_vec(), (Kind::Bool, scores.device()))?;
        let closed = closed.f_scatter_value(1, &groups, 0)?.f_unsqueeze(-1)?;
        scores = grouped.f_masked_fill(&closed, f64::NEG_INFINITY)?.f_view(scores.size().as_slice())?;
    }
    Ok(scores.f_topk(options.num_experts_per_tok as i64, -1, true, true)?.1)
}

impl RouterOptions {
    fn scale(self) -> f64 {
        match self.scores {
            RouterScores::Softmax => 1.0,
            RouterScores::Sigmoid { scale, .. } => scale,
        }
    }
}

impl Routing {
    /// Computes the routing weights of the chosen experts.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn new(
        probs: Tensor,   // [T, E]
        experts: Tensor, // [T, K]
        options: RouterOptions,
    ) -> Result<Self> {
        let chosen = probs.f_gather(1, &experts, false)?;
        let mut weights = if options.norm_topk_prob { chosen.f_div(&sum_of_rows(&chosen)?)? } else { chosen };
        if options.scale() != 1.0 {
            weights = weights.f_mul_scalar(options.scale())?;
        }
        Ok(Self { probs, experts, weights })
    }

    /// Returns the gradient of the logits [T, E], given that of the weights and, if the loss reads them, of the probabilities.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn backward(
        &self,
        d_weights: &Tensor,       // [T, K]
        d_probs: Option<&Tensor>, // [T, E], or what broadcasts to it
        options: RouterOptions,
    ) -> Result<Tensor> {
        let mut d_chosen = match options.norm_topk_prob {
            true => {
                let sum = sum_of_rows(&self.probs.f_gather(1, &self.experts, false)?)?;
                let mut mean = sum_of_rows(&d_weights.f_mul(&self.weights)?)?;
                if options.scale() != 1.0 {
                    mean = mean.f_div_scalar(options.scale())?;
                }
                d_weights.f_sub(&mean)?.f_div_(&sum)?
            }
            false => d_weights.shallow_clone(),
        };
        if options.scale() != 1.0 {
            d_chosen = d_chosen.f_mul_scalar(options.scale())?;
        }
        let mut d = self.probs.f_zeros_like()?.f_scatter_(1, &self.experts, &d_chosen)?;
        if let Some(d_probs) = d_probs {
            d = d.f_add_(d_probs)?;
        }
        Ok(match options.scores {
            RouterScores::Softmax => d.f_sub(&sum_of_rows(&d.f_mul(&self.probs)?)?)?.f_mul_(&self.probs)?,
            RouterScores::Sigmoid { .. } => d.f_mul_(&self.probs)?.f_mul_(&self.probs.f_neg()?.f_add_scalar_(1.0)?)?,
        })
    }
}

/// Sums each row: [T, N] -> [T, 1].
fn sum_of_rows(t: &Tensor) -> Result<Tensor> {
    Ok(t.f_sum_dim_intlist(-1, true, t.kind())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, leaf, rand};

    #[test]
    fn router_matches_autograd_with_and_without_normalization() {
        let sigmoid = RouterScores::Sigmoid { num_groups: 1, groups_per_tok: 1, scale: 2.5 };
        let both = |scores| [(scores, true), (scores, false)];
        for (scores, norm_topk_prob) in [RouterScores::Softmax, sigmoid].into_iter().flat_map(both) {
            let options = RouterOptions { num_experts_per_tok: 3, norm_topk_prob, scores };
            let (x, w) = (leaf(&rand(&[6, 4])), leaf(&rand(&[7, 4])));
            let (d_weights, d_probs) = (rand(&[6, 3]), rand(&[1, 7]));
            let logits = x.matmul(&w.tr());
            let (probs, correction) = match scores {
                RouterScores::Softmax => (logits.exp() / logits.exp().sum_dim_intlist(-1, true, Kind::Double), None),
                RouterScores::Sigmoid { .. } => (1.0 / (1.0 + (-&logits).exp()), Some(rand(&[7]))),
            };
            let corrected = correction.as_ref().map_or(probs.detach(), |correction| probs.detach() + correction);
            let experts = corrected.topk(3, -1, true, true).1;
            let top = probs.gather(1, &experts, false);
            let weights = if norm_topk_prob { &top / top.sum_dim_intlist(-1, true, Kind::Double) } else { top };
            let weights = weights * options.scale();
            let loss = (&weights * &d_weights).sum(None) + (&probs * &d_probs).sum(None);
            let expected = Tensor::run_backward(&[loss], &[&logits], false, false);

            let own = probabilities(&x.detach(), &w.detach(), None, options).unwrap();
            let chosen = choose(&own, correction.as_ref(), options).unwrap();
            assert!(chosen.equal(&experts));
            let routing = Routing::new(own, chosen, options).unwrap();
            assert_close(&routing.weights, &weights);
            assert_close(&routing.backward(&d_weights, Some(&d_probs), options).unwrap(), &expected[0]);
        }
    }

    /// Experts 0 to 3 and 4 to 7 are groups: the first contains the best expert, the second the better best two.
    #[test]
    fn tokens_choose_experts_within_their_best_groups() {
        let scores = RouterScores::Sigmoid { num_groups: 2, groups_per_tok: 1, scale: 1.0 };
        let options = RouterOptions { num_experts_per_tok: 2, norm_topk_prob: true, scores };
        let probs = Tensor::from_slice(&[0.9f32, 0.1, 0.1, 0.1, 0.6, 0.5, 0.2, 0.1]).view([1, 8]);
        let chosen = |correction: &[f32]| {
            let experts = choose(&probs, Some(&Tensor::from_slice(correction)), options).unwrap();
            Vec::<i64>::try_from(experts.view(-1)).unwrap()
        };
        assert_eq!(chosen(&[0.0; 8]), [4, 5]);
        assert_eq!(chosen(&[0.0, 0.2, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]), [0, 1]);
        assert_eq!(chosen(&[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.35, 0.0]), [4, 6]);
    }
}
