//! Weight gradients of all experts in one launch, on Hopper.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::boxes::{lies_well, rows_boxes};
use super::launch::{Argument, address, invalid, is_aligned, ordinal, queue, strided};
use crate::cuda::capability::Capability;
use crate::cuda::context::Context;
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::GROUPED_WEIGHT;
pub(super) const NAMES: &[&str] = &["grouped_weight"];

const OP: &str = "grouped_weight";
const CONSUMERS: u32 = 256;
const THREADS: u32 = CONSUMERS + 128;
/// Rows per pipeline stage; columns of either operand per stage; number of stages.
const STEP: usize = 64;
const FEATURES: usize = 128;
const COLUMNS: usize = 256;
const STAGES: usize = 4;
/// Bytes of shared memory: the stages, and 1024 for alignment.
const SHARED_BYTES: u32 = (STAGES * STEP * (FEATURES + COLUMNS) * 2 + 1024) as u32;

/// Whether [`grouped_weight`] supports these tensors on their GPU.
///
/// # Errors
/// [`crate::Error::Cuda`].
pub fn grouped_weight_serves(dy: &Tensor, x: &Tensor, dw: &Tensor) -> Result<bool> {
    if !dy.device().is_cuda() || dw.kind() != Kind::Float || !takes(dy, x, dw) {
        return Ok(false);
    }
    Ok(Context::retain(ordinal(OP, dy)?)?.compute_capability()? == Capability::HOPPER)
}

/// Computes dw = dy^T x, or dw += dy^T x if `adds`, for the rows of every group. Each sum is computed in float32, and written or added once. A group's
/// rows are those between the previous group's end and its own.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn grouped_weight(
    dy: &Tensor,   // [R, N] bf16, at least one row
    x: &Tensor,    // [R, K] bf16
    ends: &Tensor, // [E] i32, at most R, not falling
    dw: &Tensor,   // [E, N, K] f32
    adds: bool,
) -> Result<()> {
    let (&[experts, features, columns], gpu) = (&dw.size()[..], ordinal(OP, dy)?) else {
        return Err(invalid(OP, "gradients [E, N, K]", dw.size()));
    };
    if !takes(dy, x, dw) {
        let expected = "rows whose strides and addresses are multiples of 16 bytes";
        return Err(invalid(OP, expected, (dy.size(), dy.stride(), x.size(), x.stride(), dw.stride())));
    }
    let rows = dy.size()[0];
    let arguments = [
        rows_boxes(dy, STEP)?,
        rows_boxes(x, STEP)?,
        address(OP, ends, Kind::Int, experts as usize, gpu)?,
        strided(OP, dw, Kind::Float, &dw.size(), gpu)?,
        Argument::Count(dw.stride()[0]),
        Argument::Count(dw.stride()[1]),
        Argument::Count(experts),
        Argument::Count(features),
        Argument::Count(columns),
        Argument::Count(adds.into()),
    ];
    strided(OP, dy, Kind::BFloat16, &[rows, features], gpu)?;
    strided(OP, x, Kind::BFloat16, &[rows, columns], gpu)?;
    let shape = (Context::retain(gpu)?.num_processors()? as u32, THREADS, SHARED_BYTES);
    // SAFETY: the kernel's parameters in order; ends are rows, the caller's promise; boxes beyond the operands read as zeros, and only elements of dw
    // are written.
    unsafe { queue(SOURCE, OP, gpu, shape, (1, false), &arguments) }
}

/// Whether there are rows, and whether rows are copied, and sums written, 16 bytes at once.
fn takes(dy: &Tensor, x: &Tensor, dw: &Tensor) -> bool {
    let are_rows = |t: &Tensor| {
        t.dim() == 2 && t.kind() == Kind::BFloat16 && lies_well(t) && t.size()[0] > 0 && t.size()[1] % 8 == 0
    };
    let are_aligned = matches!(dw.stride()[..], [expert, row, 1] if expert % 4 == 0 && row % 4 == 0) && is_aligned(dw);
    are_rows(dy) && are_rows(x) && are_aligned
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;
    use crate::cuda::kernels::launch::assert_declared;

    #[test]
    fn rust_constants_match_the_kernel_source() {
        let constants =
            [("CONSUMERS", CONSUMERS as usize), ("STEP", STEP), ("FEATURES", FEATURES), ("COLUMNS", COLUMNS)];
        assert_declared(SOURCE, &constants);
        assert_declared(SOURCE, &[("STAGES", STAGES)]);
    }

    #[test]
    fn unaligned_rows_are_declined_by_the_grouped_weight_kernel() {
        let rows = |columns: i64| Tensor::zeros([4, columns], (Kind::BFloat16, Device::Cpu));
        let sums = |features: i64, columns: i64| Tensor::zeros([2, features, columns], (Kind::Float, Device::Cpu));
        assert!(takes(&rows(16), &rows(8), &sums(16, 8)));
        assert!(takes(&rows(16).narrow(1, 8, 8), &rows(8), &sums(8, 16).narrow(2, 8, 8)));
        assert!(!takes(&rows(16).narrow(0, 0, 0), &rows(8).narrow(0, 0, 0), &sums(16, 8)));
        assert!(!takes(&rows(12), &rows(8), &sums(12, 8)));
        assert!(!takes(&rows(16), &rows(8).to_kind(Kind::Float), &sums(16, 8)));
        assert!(!takes(&rows(16), &rows(8), &sums(16, 16).narrow(2, 2, 8)));
        assert!(!grouped_weight_serves(&rows(16), &rows(8), &sums(16, 8)).unwrap(), "a CPU");
    }
}
