//! Estimators of the KL divergence from the policy to the reference model.

use tch::{Kind, Tensor};

use crate::config::KlEstimator;

/// The estimate for each token and its derivative with respect to the policy's log-probability (Schulman, "Approximating KL divergence", 2020), with
/// `d = ref_logprob - logprob`:
///
/// - k1 `= -d`, unbiased; `dk1/dlogprob = 1`, whose policy gradient has mean 0 over samples of the policy;
/// - k2 `= d^2 / 2`; `dk2/dlogprob = -d`, whose mean is the gradient of the divergence;
/// - k3 `= exp(d) - d - 1`, unbiased and never negative (arXiv 2402.03300, equation 4); `dk3/dlogprob = 1 - exp(d)`.
///
/// `reference_difference` is d `[C]`; both results are `[C]` in its dtype.
pub(crate) fn kl_estimate(estimator: KlEstimator, reference_difference: &Tensor) -> KlEstimate {
    let (value, d_logprob) = match estimator {
        KlEstimator::K1 => (-reference_difference, reference_difference.ones_like()),
        KlEstimator::K2 => (reference_difference.square() * 0.5, -reference_difference),
        KlEstimator::K3 => {
            let ratio = reference_difference.exp();
            (&ratio - reference_difference - 1.0, 1.0 - ratio)
        }
    };
    KlEstimate { value, d_logprob }
}

/// Estimates of the KL divergence for each token.
pub(crate) struct KlEstimate {
    pub value: Tensor, // [C]
    /// The derivative with respect to the policy's log-probability.
    pub d_logprob: Tensor, // [C]
}

/// Sum of the estimates over a sequence's tokens, in float64. With `use_kl_in_reward`, this times beta is subtracted from the sequence's reward.
/// `logprobs` are the policy's before the update, `ref_logprobs` the reference model's `[L]`.
///
/// TRL 1.16's `RLOOTrainer` subtracts the same sum of k1 from a sequence's reward (arXiv 2402.14740). verl subtracts each token's estimate from that
/// token's reward (`use_kl_in_reward`), and sums a sequence's rewards before comparing them with the group's, which is equivalent.
///
/// ```
/// use colo_grpo::config::KlEstimator;
/// use colo_grpo::grpo::kl_of_sequence;
///
/// let (logprobs, ref_logprobs) = ([-0.5, -1.0], [-0.75, -1.0]);
/// assert_eq!(kl_of_sequence(KlEstimator::K1, &logprobs, &ref_logprobs), 0.25);
/// ```
pub fn kl_of_sequence(estimator: KlEstimator, logprobs: &[f32], ref_logprobs: &[f32]) -> f64 {
    let wide = |values: &[f32]| Tensor::from_slice(values).to_kind(Kind::Double);
    let KlEstimate { value: estimates, .. } = kl_estimate(estimator, &(wide(ref_logprobs) - wide(logprobs)));
    estimates.sum(Kind::Double).double_value(&[])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequence_kl_is_the_sum_over_tokens_for_every_estimator() {
        let (logprobs, ref_logprobs) = ([-1.0_f32, -0.5, -3.0], [-1.5_f32, -0.25, -3.0]);
        let d: Vec<f64> = ref_logprobs.iter().zip(&logprobs).map(|(a, b)| f64::from(a - b)).collect();
        let sum = |f: fn(f64) -> f64| d.iter().copied().map(f).sum::<f64>();
        let of = |estimator| kl_of_sequence(estimator, &logprobs, &ref_logprobs);
        for (got, expected) in [
            (of(KlEstimator::K1), sum(|d| -d)),
            (of(KlEstimator::K2), sum(|d| d * d / 2.0)),
            (of(KlEstimator::K3), sum(|d| d.exp() - d - 1.0)),
        ] {
            assert!((got - expected).abs() < 1e-12, "{got} {expected}");
        }
        assert_eq!(kl_of_sequence(KlEstimator::K3, &[], &[]), 0.0);
    }
}
