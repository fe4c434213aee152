//! The residual sum, fused with the RMSNorm that follows it.
#![allow(unsafe_code)]

use tch::Tensor;

use super::launch::{Argument, address, address_or_null, invalid, kinds_name, launch_early, ordinal, row_len, width};
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::ADD_RMS_NORM;
pub(super) const NAMES: &[&str] = &[
    "add_rms_norm_f32_x1",
    "add_rms_norm_f32_x4",
    "add_rms_norm_bf16_x1",
    "add_rms_norm_bf16_x8",
    "add_rms_norm_f32_bf16_x1",
    "add_rms_norm_f32_bf16_x8",
    "add_rms_norm_fp8_bf16_x8",
    "add_rms_norm_fp8_f32_bf16_x8",
    "add_rms_norm_int8_bf16_x8",
    "add_rms_norm_int8_f32_bf16_x8",
];

/// Parameters of an RMSNorm other than its weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NormOptions {
    /// Epsilon added to the mean square.
    pub eps: f64,
    /// Rows are multiplied by 1 + weight instead of weight.
    pub zero_centred: bool,
}

impl NormOptions {
    /// A norm that multiplies by the weight itself.
    pub fn plain(eps: f64) -> Self {
        Self { eps, zero_centred: false }
    }

    /// The last two arguments of the kernels: epsilon, and the number that is added to the weight (0 or 1).
    pub(super) fn arguments(self) -> [Argument; 2] {
        [Argument::Float(self.eps as f32), Argument::Float(f32::from(u8::from(self.zero_centred)))]
    }
}

/// Computes x += delta, rounded to x's type, and y = x / sqrt(mean(x^2) + eps) * weight, or (1 + weight), in float32 internally. Without `delta` x is
/// unchanged. Allocates nothing.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit or rows too long for one block; [`crate::Error::Cuda`].
pub fn add_rms_norm(
    x: &mut Tensor,         // [T, D] f32 or bf16
    delta: Option<&Tensor>, // [T, D], like weight
    weight: &Tensor,        // [D], like x; bf16 beside x of f32, too
    y: &mut Tensor,         // [T, D], like weight
    norm: NormOptions,
) -> Result<()> {
    const OP: &str = "add_rms_norm";
    let (gpu, kind, numel, dim) = (ordinal(OP, x)?, weight.kind(), x.numel(), row_len(OP, x)?);
    let aligned: Vec<&Tensor> = [&*x, weight, &*y].into_iter().chain(delta).collect();
    let width = width(dim, &aligned);
    if dim > most_columns(width) {
        return Err(invalid(OP, format!("rows of at most {} elements", most_columns(width)), dim));
    }
    let [eps, centre] = norm.arguments();
    let arguments = [
        address(OP, x, x.kind(), numel, gpu)?,
        address_or_null(OP, delta, kind, numel, gpu)?,
        address(OP, weight, kind, dim, gpu)?,
        address(OP, y, kind, numel, gpu)?,
        Argument::Count(dim as i64),
        eps,
        centre,
    ];
    let threads = (dim / width).next_multiple_of(32).min(1024) as u32;
    let name = format!("add_rms_norm_{}_x{width}", kinds_name(OP, x, weight)?);
    // SAFETY: the kernel's parameters in order; one block a row, all of whose packs have a thread.
    unsafe { launch_early(SOURCE, &name, gpu, ((numel / dim) as u32, threads, 0), &arguments) }
}

/// Longest row that one block can process if each memory access moves `width` elements.
pub(super) fn most_columns(width: usize) -> usize {
    let packs_per_thread = if width == 1 { 4 } else { 2 }; // as in the source
    1024 * packs_per_thread * width
}
