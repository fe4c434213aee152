//! On-policy distillation: the reverse KL divergence from the policy to a teacher, on tokens that the policy sampled.

use tch::Tensor;

use super::surrogate::Terms;

/// How a loss has a divergence from a teacher.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Distillation {
    /// Weight of the divergence; all other terms but an entropy bonus have the rest.
    pub weight: f64,
    /// Upper bound of the policy ratio that it is multiplied by; `None` is no ratio.
    pub clip_max: Option<f64>,
}

/// `stop_gradient(d min(exp(log_ratio), clip_max)) logprob` by token, where `d = logprob - teacher`: its gradient is that of the reverse
/// KL divergence in the mean over the policy's samples, which is a policy gradient with the advantage `-d`. TRL 1.16's `SDPOTrainer`
/// has it as `distillation_mode = "sampled_token"`. Returns d too. All are `[C]`.
pub(super) fn sampled_divergence(
    logprobs: &Tensor,
    teacher_logprobs: &Tensor,
    log_ratio: &Tensor,
    clip_max: Option<f64>,
) -> (Terms, Tensor) {
    let difference = logprobs - teacher_logprobs;
    let d_logprob = match clip_max {
        Some(clip_max) => &difference * log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp_max(clip_max),
        None => difference.shallow_clone(),
    };
    (Terms { value: &d_logprob * logprobs, d_log_ratio: d_logprob.zeros_like(), d_logprob }, difference)
}

/// Bound of the logarithm of a ratio, as in TRL.
const MAX_LOG_RATIO: f64 = 20.0;
