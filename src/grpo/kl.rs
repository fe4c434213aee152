//! The KL estimator between the policy and the reference model.

use tch::Tensor;

/// k3 of each token and its derivative by the policy's log-probability (Schulman, "Approximating KL divergence", 2020;
/// arXiv 2402.03300, equation 4):
///
/// `k3 = exp(d) - d - 1`, `dk3/dlogprob = 1 - exp(d)`, with `d = ref_logprob - logprob`. Unbiased and never negative.
///
/// `reference_difference` is d `[C]`; both results are `[C]` of its kind.
pub(crate) fn k3(reference_difference: &Tensor) -> (Tensor, Tensor) {
    let ratio = reference_difference.exp();
    (&ratio - reference_difference - 1.0, 1.0 - ratio)
}
