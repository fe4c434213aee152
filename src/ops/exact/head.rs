//! The log-probability of a token, computed exactly as the sampler does.

use tch::{Kind, Tensor};

use super::{gpu, product_wide};
use crate::error::Result;
use crate::torch::{f32_vec, i64_vec, tensor_on};

/// Computes ln sum exp, stably, in f64 so that the split of the vocabulary over ranks does not change the result.
pub fn log_sum_exp(terms: impl Iterator<Item = f64> + Clone) -> f64 {
    let max = terms.clone().fold(f64::NEG_INFINITY, f64::max);
    if max == f64::NEG_INFINITY {
        return max;
    }
    max + terms.map(|term| (term - max).exp()).sum::<f64>().ln()
}

/// Computes x w^T / divisor in float32. On a GPU the rows are divided instead of their logits, as in an engine step. [c, V]
///
/// # Errors
/// The errors of [`product_wide`].
pub fn logits(
    x: &Tensor, // [c, D]
    w: &Tensor, // [V, D]
    divisor: f64,
) -> Result<Tensor> {
    match (divisor, x.device().is_cuda()) {
        (1.0, _) => product_wide(x, w),
        (_, true) => product_wide(&x.f_mul_scalar(1.0 / divisor)?, w),
        (_, false) => Ok(product_wide(x, w)?.f_div_scalar(divisor)?),
    }
}

/// Computes ln softmax(logits / temperature) at the targets, in float32: on a CPU with [`log_sum_exp`], on a GPU with the sampling kernel. `[c]`
///
/// # Errors
/// [`crate::Error::OutOfMemory`]; on a GPU the errors of its kernel.
pub fn logprobs(
    logits: &Tensor,  // [c, V] f32
    targets: &Tensor, // [c] i64
    temperature: f64,
) -> Result<Tensor> {
    let scale = 1.0 / temperature as f32;
    if logits.device().is_cuda() {
        let lse = gpu::log_sum_exps(logits, temperature as f32)?; // [c] f64
        let own = logits.f_gather(1, &targets.unsqueeze(1), false)?.f_squeeze_dim(1)?;
        let own = own.f_mul_scalar(f64::from(scale))?.f_to_kind(Kind::Double)?;
        return Ok(own.f_sub(&lse)?.f_to_kind(Kind::Float)?);
    }
    let (host, targets) = (f32_vec(logits)?, i64_vec(targets)?);
    let width = logits.size()[1] as usize;
    let logprob = |(row, target): (&[f32], &i64)| {
        let lse = log_sum_exp(row.iter().map(|&logit| f64::from(logit * scale)));
        (f64::from(row[*target as usize] * scale) - lse) as f32
    };
    let logprobs: Vec<f32> = host.chunks_exact(width).zip(&targets).map(logprob).collect();
    tensor_on(&logprobs, logits.device())
}
