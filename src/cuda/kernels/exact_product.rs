//! GEMMs with a fixed order of summation: in bf16 the reference that other algorithms are compared with, in float32 the GEMM itself.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::launch::{
    Argument, address, address_or_null, invalid, is_aligned, kind_name, launch, launch_early, ordinal, strided,
};
use crate::cuda::capability::Capability;
use crate::cuda::context::Context;
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::{Error, Result};

pub(super) const SOURCE: &KernelSource = &nvrtc::EXACT_PRODUCT;
pub(super) const NAMES: &[&str] = &["exact_product_bf16", "exact_product_f32", "exact_sum_bf16", "exact_sum_f32"];

/// Rows and features per block; threads per block in bf16; threads along each side of a block in float32; threads per block of a sum.
const TILE: usize = 64;
const THREADS: u32 = 128;
const SIDE: usize = 16;
const SUM_THREADS: u32 = 256;
/// Columns that one thread of a sum processes.
const PACK: i64 = 8;

/// Computes out = x w^T, adding sixteen values of K at once, in ascending order. For trials only, as it is slow.
///
/// # Errors
/// [`Error::Environment`] on a GPU other than Hopper, which lacks the instructions; [`Error::InvalidArgument`] for tensors that do not fit;
/// [`Error::Cuda`].
pub fn exact_reference(
    x: &Tensor,   // [R, K] bf16, rows of stride 1
    w: &Tensor,   // [N, K] bf16, rows of stride 1
    out: &Tensor, // [R, N] f32, contiguous
) -> Result<()> {
    const OP: &str = "exact_reference";
    let FactorShape { gpu, rows, features, k, .. } = FactorShape::of(OP, x, w)?;
    let capability = Context::retain(gpu)?.compute_capability()?;
    if capability != Capability::HOPPER {
        let message = format!(
            "exact with dtype = bfloat16 needs a Hopper GPU (H100, H200; compute capability 9.0), this one has \
             {capability}; dtype = float32 supports exact on other GPUs"
        );
        return Err(Error::Environment { message });
    }
    let arguments = [
        strided(OP, x, Kind::BFloat16, &[rows, k], gpu)?,
        strided(OP, w, Kind::BFloat16, &[features, k], gpu)?,
        address(OP, out, Kind::Float, (rows * features) as usize, gpu)?,
        Argument::Count(x.stride()[0]),
        Argument::Count(w.stride()[0]),
        Argument::Count(rows),
        Argument::Count(features),
        Argument::Count(k),
    ];
    // SAFETY: the kernel's parameters in order; it reads and writes within the matrices.
    unsafe { launch(SOURCE, NAMES[0], gpu, (blocks(rows, features), THREADS, 0), &arguments) }
}

/// Computes out = x w^T + bias, where each element is a chain of fused multiply-adds over K. With `adds` the sum is added to `out`.
///
/// # Errors
/// [`Error::InvalidArgument`] for tensors that do not fit; [`Error::Cuda`].
pub fn exact_product(
    x: &Tensor,            // [R, K] f32, rows of stride 1
    w: &Tensor,            // [N, K] f32, rows of stride 1
    bias: Option<&Tensor>, // [N] f32
    out: &Tensor,          // [R, N] f32, rows of stride 1
    adds: bool,
) -> Result<()> {
    const OP: &str = "exact_product";
    let FactorShape { gpu, rows, features, k } = FactorShape::of(OP, x, w)?;
    let arguments = [
        strided(OP, x, Kind::Float, &[rows, k], gpu)?,
        strided(OP, w, Kind::Float, &[features, k], gpu)?,
        address_or_null(OP, bias, Kind::Float, features as usize, gpu)?,
        strided(OP, out, Kind::Float, &[rows, features], gpu)?,
        Argument::Count(x.stride()[0]),
        Argument::Count(w.stride()[0]),
        Argument::Count(out.stride()[0]),
        Argument::Count(rows),
        Argument::Count(features),
        Argument::Count(k),
        Argument::Count(i64::from(adds)),
    ];
    // SAFETY: the kernel's parameters in order; it reads and writes within the matrices.
    unsafe { launch(SOURCE, NAMES[1], gpu, (blocks(rows, features), (SIDE * SIDE) as u32, 0), &arguments) }
}

/// Adds the two partial sums of a split-K GEMM and the bias, rounded once.
///
/// # Errors
/// [`Error::InvalidArgument`] for tensors that do not fit; [`Error::Cuda`].
pub fn exact_sum(
    parts: &Tensor,        // [2, R, N] f32, contiguous
    bias: Option<&Tensor>, // [N], like out
    out: &Tensor,          // [R, N] bf16 or f32, rows of stride 1
) -> Result<()> {
    const OP: &str = "exact_sum";
    let (gpu, kind) = (ordinal(OP, parts)?, out.kind());
    let (&[2, rows, features], &[leading, 1]) = (&parts.size()[..], &out.stride()[..]) else {
        return Err(invalid(OP, "[2, R, N] and rows of stride 1", (parts.size(), out.stride())));
    };
    if features % PACK != 0 || leading % PACK != 0 || ![parts, out].into_iter().all(is_aligned) {
        return Err(invalid(
            OP,
            "rows of a multiple of 8 elements, at addresses that are multiples of 16 bytes",
            (features, leading),
        ));
    }
    let arguments = [
        address(OP, parts, Kind::Float, parts.numel(), gpu)?,
        address_or_null(OP, bias, kind, features as usize, gpu)?,
        strided(OP, out, kind, &[rows, features], gpu)?,
        Argument::Count(rows),
        Argument::Count(features),
        Argument::Count(leading),
    ];
    let name = format!("exact_sum_{}", kind_name(OP, out)?);
    let blocks = (rows * features / PACK) as usize;
    let grid = (blocks.div_ceil(SUM_THREADS as usize) as u32, SUM_THREADS, 0);
    // SAFETY: the kernel's parameters in order, a thread for every eight elements of the output.
    unsafe { launch_early(SOURCE, &name, gpu, grid, &arguments) }
}

fn blocks(rows: i64, features: i64) -> u32 {
    ((rows as usize).div_ceil(TILE) * (features as usize).div_ceil(TILE)) as u32
}

struct FactorShape {
    gpu: usize,
    rows: i64,
    features: i64,
    k: i64,
}

impl FactorShape {
    fn of(op: &'static str, x: &Tensor, w: &Tensor) -> Result<Self> {
        match (&x.size()[..], &w.size()[..]) {
            (&[rows, k], &[features, of_w]) if k == of_w && x.stride()[1] == 1 && w.stride()[1] == 1 => {
                Ok(Self { gpu: ordinal(op, x)?, rows, features, k })
            }
            _ => Err(invalid(op, "[R, K] and [N, K], rows of stride 1", (x.size(), x.stride(), w.size(), w.stride()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernels::launch::assert_declared;

    #[test]
    fn rust_constants_match_the_kernel_source() {
        let threads = [("THREADS", THREADS as usize), ("SUM_THREADS", SUM_THREADS as usize)];
        assert_declared(SOURCE, &[("TILE", TILE), ("SIDE", SIDE)]);
        assert_declared(SOURCE, &threads);
    }
}
