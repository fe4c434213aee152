//! Which experts a token goes to, and with which weights: softmax of the router's logits, the k highest probabilities, divided by
//! their sum where the model asks for that. All in the accumulation kind.
//!
//! E experts, K of them a token.

use tch::{Kind, Tensor};

use super::linear;
use crate::error::Result;
use crate::torch::accumulation_kind;

/// How experts are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouterOptions {
    /// Experts of a token.
    pub num_experts_per_tok: usize,
    /// The weights of a token's experts are divided by their sum.
    pub norm_topk_prob: bool,
}

/// The choice for every token.
#[derive(Debug)]
pub struct Routing {
    /// The probabilities of all experts.
    pub probs: Tensor, // [T, E]
    /// The chosen ones.
    pub experts: Tensor, // [T, K] int64
    /// The weights of their outputs.
    pub weights: Tensor, // [T, K]
}

/// Probabilities of all experts, from what they read. [T, E]
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn probabilities(
    x: &Tensor, // [T, D]
    w: &Tensor, // [E, D]
) -> Result<Tensor> {
    let wide = accumulation_kind(x.kind());
    let logits = linear::forward(&x.f_to_kind(wide)?, &w.f_to_kind(wide)?, None)?;
    Ok(logits.f_softmax(-1, None::<Kind>)?)
}

/// The K experts of the highest probability, the highest first. [T, K]
///
/// # Errors
/// [`crate::Error::OutOfMemory`].
pub fn choose(probs: &Tensor /* [T, E] */, options: RouterOptions) -> Result<Tensor> {
    Ok(probs.f_topk(options.num_experts_per_tok as i64, -1, true, true)?.1)
}

impl Routing {
    /// Weights of experts that were chosen.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn new(
        probs: Tensor,   // [T, E]
        experts: Tensor, // [T, K]
        options: RouterOptions,
    ) -> Result<Self> {
        let chosen = probs.f_gather(1, &experts, false)?;
        let weights = if options.norm_topk_prob { chosen.f_div(&sum_of_rows(&chosen)?)? } else { chosen };
        Ok(Self { probs, experts, weights })
    }

    /// The gradient of the logits [T, E] from that of the weights and, if the loss reads them, of the probabilities.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    pub fn backward(
        &self,
        d_weights: &Tensor,       // [T, K]
        d_probs: Option<&Tensor>, // [T, E], or what broadcasts to it
        options: RouterOptions,
    ) -> Result<Tensor> {
        let d_chosen = match options.norm_topk_prob {
            true => {
                let sum = sum_of_rows(&self.probs.f_gather(1, &self.experts, false)?)?;
                d_weights.f_sub(&sum_of_rows(&d_weights.f_mul(&self.weights)?)?)?.f_div_(&sum)?
            }
            false => d_weights.shallow_clone(),
        };
        let mut d = self.probs.f_zeros_like()?.f_scatter_(1, &self.experts, &d_chosen)?;
        if let Some(d_probs) = d_probs {
            d = d.f_add_(d_probs)?;
        }
        Ok(d.f_sub(&sum_of_rows(&d.f_mul(&self.probs)?)?)?.f_mul_(&self.probs)?)
    }
}

/// [T, N] -> [T, 1]
fn sum_of_rows(t: &Tensor) -> Result<Tensor> {
    Ok(t.f_sum_dim_intlist(-1, true, t.kind())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, leaf, rand};

    #[test]
    fn matches_autograd_normalised_or_not() {
        for norm_topk_prob in [true, false] {
            let options = RouterOptions { num_experts_per_tok: 3, norm_topk_prob };
            let (x, w) = (leaf(&rand(&[6, 4])), leaf(&rand(&[7, 4])));
            let (d_weights, d_probs) = (rand(&[6, 3]), rand(&[1, 7]));
            let logits = x.matmul(&w.tr());
            let probs = logits.exp() / logits.exp().sum_dim_intlist(-1, true, Kind::Double);
            let (top, experts) = probs.topk(3, -1, true, true);
            let weights = if norm_topk_prob { &top / top.sum_dim_intlist(-1, true, Kind::Double) } else { top };
            let loss = (&weights * &d_weights).sum(None) + (&probs * &d_probs).sum(None);
            let expected = Tensor::run_backward(&[loss], &[&logits], false, false);

            let own = probabilities(&x.detach(), &w.detach()).unwrap();
            let chosen = choose(&own, options).unwrap();
            assert!(chosen.equal(&experts));
            let routing = Routing::new(own, chosen, options).unwrap();
            assert_close(&routing.weights, &weights);
            assert_close(&routing.backward(&d_weights, Some(&d_probs), options).unwrap(), &expected[0]);
        }
    }
}
