//! A custom loss function, differentiated by libtorch.

use std::fmt;
use std::sync::Arc;

use tch::{Kind, Tensor, with_grad};

use super::loss::{Denominators, LossInput, LossOutput};
use super::options::LossConfig;
use super::stats::StatsRecorder;
use crate::error::{Error, Result};

type Loss = dyn Fn(&LossInput<'_>, &Denominators) -> Result<Tensor> + Send + Sync;

/// A custom loss function: it maps a micro-batch to the micro-batch's contribution to the loss, a scalar.
///
/// The contributions of all micro-batches and ranks are added, so divide sums by the [`Denominators`], which count over all of them. Only `logprobs`
/// has an autograd graph. `old_logprobs` is `None` if they would equal `logprobs`; use `logprobs.detach()` then. `ref_logprobs` are set if `beta` is
/// not 0, `teacher_logprobs` if there is a teacher. The function is not called for a micro-batch without tokens, which adds nothing.
///
/// REINFORCE over all tokens:
/// ```
/// # use colo_grpo::{Result, grpo::{Denominators, LossFunction, LossInput}};
/// # use tch::{Kind, Tensor};
/// let loss = LossFunction::new(|input: &LossInput<'_>, denominators: &Denominators| {
///     let advantages = input.advantages.index_select(0, input.sequence_of_token); // [C]
///     Ok(-(input.logprobs * advantages).sum(Kind::Float) / denominators.num_tokens)
/// });
/// ```
#[derive(Clone)]
pub struct LossFunction(Arc<Loss>);

impl fmt::Debug for LossFunction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LossFunction")
    }
}

impl LossFunction {
    /// Wraps a function.
    pub fn new(loss: impl Fn(&LossInput<'_>, &Denominators) -> Result<Tensor> + Send + Sync + 'static) -> Self {
        Self(Arc::new(loss))
    }

    /// Loss of a micro-batch and its gradient, like [`policy_loss`](super::policy_loss).
    ///
    /// # Errors
    /// The function's errors; [`Error::InvalidArgument`] for invalid inputs, or a loss that is not a scalar or does not depend on `logprobs`.
    pub fn differentiate(
        &self,
        input: &LossInput<'_>,
        config: &LossConfig,
        denominators: &Denominators,
    ) -> Result<LossOutput> {
        input.validate(config)?;
        let logprobs = input.logprobs;
        let mut recorder = StatsRecorder::new(logprobs.device());
        if let Some(entropy) = input.entropy {
            recorder.mean("entropy", &entropy.sum(Kind::Double), &logprobs.ones_like().sum(logprobs.kind()));
        }
        let (loss, dlogprobs) = match logprobs.numel() {
            0 => (logprobs.sum(logprobs.kind()), logprobs.zeros_like()),
            _ => self.gradient(input, denominators)?,
        };
        Ok(LossOutput { loss, dlogprobs, dentropy: None, dtop: None, mean_entropy: None, stats: recorder.finish()? })
    }

    fn gradient(&self, input: &LossInput<'_>, denominators: &Denominators) -> Result<(Tensor, Tensor)> {
        let leaf = input.logprobs.detach().set_requires_grad(true);
        let loss = with_grad(|| (self.0)(&LossInput { logprobs: &leaf, ..*input }, denominators))?;
        if loss.numel() != 1 || !loss.requires_grad() {
            let expected = "a scalar that depends on logprobs".to_owned();
            let got = if loss.numel() == 1 { "a constant".to_owned() } else { format!("a tensor {:?}", loss.size()) };
            return Err(Error::InvalidArgument { op: "custom loss function", expected, got });
        }
        let mut gradients = Tensor::f_run_backward(&[&loss], &[&leaf], false, false)?;
        Ok((loss.detach().reshape([0_i64; 0]).to_kind(leaf.kind()), gradients.remove(0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grpo::policy_loss;

    /// On policy, the gradient of dapo's loss equals REINFORCE's.
    #[test]
    fn a_custom_loss_equal_to_the_built_in_has_equal_gradients() {
        let logprobs = Tensor::from_slice(&[-0.5_f64, -1.5, -0.25, -2.0]);
        let (advantages, sequence_of_token) = (Tensor::from_slice(&[1.5, -0.5]), Tensor::from_slice(&[0_i64, 0, 1, 1]));
        let input = LossInput {
            logprobs: &logprobs,
            old_logprobs: None,
            ref_logprobs: None,
            teacher_logprobs: None,
            top: None,
            rollout_logprobs: None,
            advantages: &advantages,
            bnpo_divisors: None,
            sequence_of_token: &sequence_of_token,
            entropy: Some(&logprobs),
            entropy_term: None,
        };
        let over =
            Denominators { num_sequences: 2.0, num_tokens: 8.0, num_update_tokens: 4.0, num_sequence_tokens: 4.0 };
        let reinforce = LossFunction::new(|input: &LossInput<'_>, over: &Denominators| {
            let advantages = input.advantages.index_select(0, input.sequence_of_token);
            Ok(-(input.logprobs * advantages).sum(Kind::Double) / over.num_tokens)
        });
        let config = LossConfig::default();
        let (own, expected) =
            (reinforce.differentiate(&input, &config, &over).unwrap(), policy_loss(&input, &config, &over));
        assert!(own.dlogprobs.allclose(&expected.unwrap().dlogprobs, 1e-12, 1e-12, false), "{}", own.dlogprobs);
        assert_eq!(own.loss.double_value(&[]), -(1.5 * -2.0 + -0.5 * -2.25) / 8.0);
        assert_eq!(own.stats.read().unwrap().entries()[0].1.value(), -4.25 / 4.0);

        let nothing = Tensor::zeros([0], (Kind::Double, logprobs.device()));
        let no_indexes = nothing.to_kind(Kind::Int64);
        let empty = LossInput { logprobs: &nothing, sequence_of_token: &no_indexes, entropy: None, ..input };
        assert_eq!(reinforce.differentiate(&empty, &config, &over).unwrap().loss.double_value(&[]), 0.0);
        for (wrong, got) in [(logprobs.copy(), "a tensor [4]"), (Tensor::from(1.0), "a constant")] {
            let wrong = Arc::new(std::sync::Mutex::new(wrong));
            let wrong = LossFunction::new(move |_: &LossInput<'_>, _: &Denominators| Ok(wrong.lock().unwrap().copy()));
            let error = wrong.differentiate(&input, &config, &over).unwrap_err().to_string();
            assert!(error.contains(got), "{error}");
        }
    }
}
