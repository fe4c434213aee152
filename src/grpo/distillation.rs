//! On-policy distillation: divergences of the policy from a teacher, on sequences that the policy sampled. Either the reverse KL divergence,
//! estimated on the sampled tokens, or a divergence over the teacher's most probable tokens.

use tch::{Kind, Tensor};

use super::options::TopDivergence;
use super::surrogate::Terms;

/// Log-probabilities of the teacher's most probable tokens, in float32 or float64.
#[derive(Debug, Clone, Copy)]
pub struct TopLogprobs<'a> {
    /// The policy's log-probabilities, from the forward pass that is differentiated.
    pub logprobs: &'a Tensor, // [C, K]
    /// The teacher's log-probabilities.
    pub teacher_logprobs: &'a Tensor, // [C, K]
}

impl TopLogprobs<'_> {
    /// Converts both to `kind`: the policy's, the teacher's.
    pub(super) fn to_kind(self, kind: Kind) -> [Tensor; 2] {
        [self.logprobs, self.teacher_logprobs].map(|logprobs| logprobs.to_kind(kind))
    }
}

/// A divergence of each token, with its gradient.
#[derive(Debug)]
pub(super) struct TopTerms {
    pub divergence: Tensor, // [C]
    /// Gradient with respect to the policy's log-probabilities.
    pub d_logprobs: Tensor, // [C, K]
}

/// `stop_gradient(d min(exp(log_ratio), clip_max)) logprob` of each token, where `d = logprob - teacher`. In the mean over the policy's samples, its
/// gradient is that of the reverse KL divergence: a policy gradient with the advantage `-d`. It equals TRL 1.16's `SDPOTrainer` with
/// `distillation_mode = "sampled_token"`. Also returns d. All are `[C]`.
pub(super) fn sampled_divergence(
    logprobs: &Tensor,
    teacher_logprobs: &Tensor,
    log_ratio: &Tensor,
    clip_max: Option<f64>,
) -> (Terms, Tensor) {
    let difference = logprobs - teacher_logprobs;
    let d_logprob = match bounded_ratio(log_ratio, clip_max) {
        Some(ratio) => &difference * ratio,
        None => difference.shallow_clone(),
    };
    (Terms { value: &d_logprob * logprobs, d_log_ratio: d_logprob.zeros_like(), d_logprob }, difference)
}

/// `min(exp(log_ratio), clip_max)`, if there is a bound. `[C]`
pub(super) fn bounded_ratio(log_ratio: &Tensor, clip_max: Option<f64>) -> Option<Tensor> {
    clip_max.map(|clip_max| log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp_max(clip_max))
}

/// The divergence over the given tokens `[C, K]`, which are the teacher's most probable ones. It equals TRL 1.16's `SDPOTrainer` with
/// `distillation_mode = "topk_logits"` and scores from a server.
///
/// Gradient terms that are a constant times the policy's probabilities are left out: they add nothing, because probabilities always sum to 1. So for
/// `alpha` 0 and 1, a teacher that equals the policy gives exactly zero.
pub(super) fn top_divergence([logprobs, teacher]: &[Tensor; 2], of: TopDivergence) -> TopTerms {
    let (own, other) = (Support::new(logprobs, of), Support::new(teacher, of));
    let (log_p, log_t) = (&own.logprobs, &other.logprobs);
    let (p, t) = (log_p.exp(), log_t.exp());
    let (value, d_support) = if of.alpha == 0.0 {
        (&t * (log_t - log_p), &p - &t)
    } else if of.alpha == 1.0 {
        let terms = &p * (log_p - log_t);
        (terms.shallow_clone(), terms)
    } else {
        let mixture = (log_p + (1.0 - of.alpha).ln()).logaddexp(&(log_t + of.alpha.ln()));
        let of_own: Tensor = &p * (log_p - &mixture) * (1.0 - of.alpha);
        (&of_own + t * (log_t - mixture) * of.alpha, of_own)
    };
    TopTerms { divergence: sum(&value).squeeze_dim(1), d_logprobs: own.backward(&d_support, &p) }
}

/// A distribution over the tokens, with or without one more token for all others.
struct Support {
    logprobs: Tensor, // [C, K] or [C, K + 1]
    /// Probability of all other tokens, 0 where it is too small for a gradient; `None` if they are left out.
    tail: Option<Tensor>, // [C, 1]
}

impl Support {
    fn new(logprobs: &Tensor, of: TopDivergence) -> Self {
        let total = logprobs.logsumexp([1i64], true); // [C, 1]
        if !of.adds_tail {
            return Self { logprobs: logprobs - total, tail: None };
        }
        let tail = -total.clamp_max(MAX_LOG_TOTAL).expm1();
        let logprobs = Tensor::cat(&[logprobs, &tail.log()], 1);
        Self { logprobs, tail: Some(tail.masked_fill(&total.gt(MAX_LOG_TOTAL), 0.0)) }
    }

    /// The gradient with respect to the original log-probabilities, from the gradient with respect to those of this distribution; `p` are the
    /// exponentials of the latter.
    fn backward(&self, d_support: &Tensor, p: &Tensor) -> Tensor {
        let Some(tail) = &self.tail else {
            return d_support - p * sum(d_support);
        };
        let num_tokens = p.size()[1] - 1;
        let of_tail = d_support.narrow(1, num_tokens, 1) / tail;
        let of_tail = of_tail.masked_fill(&tail.eq(0.0), 0.0);
        d_support.narrow(1, 0, num_tokens) - p.narrow(1, 0, num_tokens) * of_tail
    }
}

/// Sum over the tokens. `[C, K] -> [C, 1]`
fn sum(values: &Tensor) -> Tensor {
    values.sum_dim_intlist(1, true, values.kind())
}

/// Bound on the absolute log of a ratio, as in TRL.
const MAX_LOG_RATIO: f64 = 20.0;
/// Bound on the log of the tokens' total probability, which leaves some for the other tokens, as in TRL.
const MAX_LOG_TOTAL: f64 = -1e-7;
