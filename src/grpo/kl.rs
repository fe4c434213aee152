//! Estimators of the KL divergence from the policy to the reference model.

use tch::Tensor;

use crate::config::KlEstimator;

/// The estimate of each token and its derivative by the policy's log-probability (Schulman, "Approximating KL divergence", 2020),
/// with `d = ref_logprob - logprob`:
///
/// - k1 `= -d`, unbiased; `dk1/dlogprob = 1`, which is 0 in the mean over samples of the policy;
/// - k2 `= d^2 / 2`; `dk2/dlogprob = -d`, whose mean is the divergence's gradient;
/// - k3 `= exp(d) - d - 1`, unbiased and never negative (arXiv 2402.03300, equation 4); `dk3/dlogprob = 1 - exp(d)`.
///
/// `reference_difference` is d `[C]`; both results are `[C]` of its kind.
pub(crate) fn kl_estimate(estimator: KlEstimator, reference_difference: &Tensor) -> (Tensor, Tensor) {
    match estimator {
        KlEstimator::K1 => (-reference_difference, reference_difference.ones_like()),
        KlEstimator::K2 => (reference_difference.square() * 0.5, -reference_difference),
        KlEstimator::K3 => {
            let ratio = reference_difference.exp();
            (&ratio - reference_difference - 1.0, 1.0 - ratio)
        }
    }
}
