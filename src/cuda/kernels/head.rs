//! Log-probabilities and entropies of a chunk of logits, and the gradient of these logits.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::launch::{Argument, address, address_or_null, invalid, is_aligned, launch, ordinal};
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::HEAD;
pub(super) const NAMES: &[&str] = &[
    "head_forward_x1",
    "head_forward_x4",
    "head_backward_f32_x1",
    "head_backward_f32_x4",
    "head_backward_bf16_x1",
    "head_backward_bf16_x4",
];

const THREADS: u32 = 512;

/// Computes for each row log softmax(logits / temperature) at the target, the entropy of the distribution, and the log-sum-exp of logits /
/// temperature.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`]. Targets of V or more are undefined behaviour.
pub fn head_forward(
    logits: &Tensor,  // [c, V] f32
    targets: &Tensor, // [c] i64
    temperature: f64,
    [logprobs, entropy, lse]: [&Tensor; 3], // [c] f32 each
) -> Result<()> {
    const OP: &str = "head_forward";
    let HeadLaunch { gpu, rows, vocabulary, width } = HeadLaunch::of(OP, logits)?;
    let number = |tensor: &Tensor| address(OP, tensor, Kind::Float, rows, gpu);
    let arguments = [
        address(OP, logits, Kind::Float, rows * vocabulary, gpu)?,
        address(OP, targets, Kind::Int64, rows, gpu)?,
        number(logprobs)?,
        number(entropy)?,
        number(lse)?,
        Argument::Count(vocabulary as i64),
        Argument::Float((1.0 / temperature) as f32),
    ];
    // SAFETY: the kernel's parameters in order; one block a row.
    unsafe { launch(SOURCE, &format!("{OP}_x{width}"), gpu, (rows as u32, THREADS, 0), &arguments) }
}

/// The inputs of [`head_backward`], by row.
#[derive(Debug, Clone, Copy)]
pub struct HeadRows<'a> {
    /// The target token of each row.
    pub targets: &'a Tensor, // [c] i64
    /// The log-sum-exps from [`head_forward`].
    pub lse: &'a Tensor, // [c] f32
    /// Entropies of the rows' distributions.
    pub entropy: &'a Tensor, // [c] f32
    /// Gradients of the log-probabilities.
    pub dlogprobs: &'a Tensor, // [c] f32
    /// Gradients of the entropies; `None` is zero.
    pub dentropy: Option<&'a Tensor>, // [c] f32
}

/// Returns d_logits [c, V] of `kind` (float32 or bfloat16) in the memory of the logits, each row in its logits' place: (dlogprobs * (onehot - p) -
/// dentropy * p * (log p + entropy)) / temperature.
///
/// # Errors
/// The errors of [`head_forward`].
pub fn head_backward(
    logits: Tensor, // [c, V] f32
    temperature: f64,
    of: &HeadRows<'_>,
    kind: Kind,
) -> Result<Tensor> {
    const OP: &str = "head_backward";
    let HeadLaunch { gpu, rows, vocabulary, width } = HeadLaunch::of(OP, &logits)?;
    let number = |tensor: &Tensor| address(OP, tensor, Kind::Float, rows, gpu);
    let arguments = [
        address(OP, &logits, Kind::Float, rows * vocabulary, gpu)?,
        address(OP, of.targets, Kind::Int64, rows, gpu)?,
        number(of.lse)?,
        number(of.entropy)?,
        number(of.dlogprobs)?,
        address_or_null(OP, of.dentropy, Kind::Float, rows, gpu)?,
        Argument::Count(vocabulary as i64),
        Argument::Float((1.0 / temperature) as f32),
    ];
    let (kind_name, d_logits) = match kind {
        Kind::Float => ("f32", logits.shallow_clone()),
        Kind::BFloat16 => ("bf16", logits.f_view_dtype(kind)?.f_narrow(1, 0, vocabulary as i64)?),
        other => return Err(invalid(OP, "gradients in float32 or bfloat16", other)),
    };
    let name = format!("{OP}_{kind_name}_x{width}");
    // SAFETY: the kernel's parameters in order; one block a row, which writes within its row.
    unsafe { launch(SOURCE, &name, gpu, (rows as u32, THREADS, 0), &arguments)? };
    Ok(d_logits)
}

struct HeadLaunch {
    gpu: usize,
    rows: usize,
    vocabulary: usize,
    width: usize,
}

impl HeadLaunch {
    fn of(op: &'static str, logits: &Tensor) -> Result<Self> {
        let [rows, vocabulary] = logits.size()[..] else { return Err(invalid(op, "logits [c, V]", logits.size())) };
        let width = if vocabulary % 4 == 0 && is_aligned(logits) { 4 } else { 1 };
        Ok(Self { gpu: ordinal(op, logits)?, rows: rows as usize, vocabulary: vocabulary as usize, width })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernels::launch::assert_declared;

    #[test]
    fn rust_constants_match_the_kernel_source() {
        assert_declared(SOURCE, &[("THREADS", THREADS as usize)]);
    }
}
