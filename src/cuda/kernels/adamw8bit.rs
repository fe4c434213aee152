//! AdamW with 8-bit moments over a flat shard, in one pass over memory.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::AdamWScalars;
use super::launch::{Argument, address, blocks, invalid, is_aligned, kind_name, launch, ordinal};
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::ADAMW8BIT;
pub(super) const NAMES: &[&str] =
    &["adamw8bit_f32_f32", "adamw8bit_f32_bf16", "adamw8bit_bf16_f32", "adamw8bit_bf16_bf16"];

const THREADS: usize = 256;
const MOST_BLOCKS: usize = 1 << 13;
/// Moments that share a scale; one warp processes them.
const BLOCK: usize = 256;
/// Number of codes in a quantization map.
const LEVELS: usize = 256;

/// Quantized moments, with their scales and quantization maps.
#[derive(Debug, Clone, Copy)]
pub struct MomentCodes<'a> {
    /// Codes of first moments. `[n]` u8
    pub m_codes: &'a Tensor,
    /// Codes of second moments. `[n]` u8
    pub v_codes: &'a Tensor,
    /// Scales of first moments. [n / 256] f32
    pub m_absmax: &'a Tensor,
    /// Scales of second moments. [n / 256] f32
    pub v_absmax: &'a Tensor,
    /// Value of each first-moment code, ascending. `[256]` f32
    pub m_levels: &'a Tensor,
    /// Value of each second-moment code, ascending. `[256]` f32
    pub v_levels: &'a Tensor,
}

/// Runs AdamW with moments that are dequantized and quantized again in place; weight decay applies to every element.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn adamw8bit(
    master: &mut Tensor, // [n] f32; n a multiple of 256
    moments: &MomentCodes<'_>,
    grad: &Tensor,       // [n] f32 or bf16
    weight: &mut Tensor, // [n] f32 or bf16
    scalars: &AdamWScalars,
) -> Result<()> {
    const OP: &str = "adamw8bit";
    let (n, gpu) = (master.numel(), ordinal(OP, master)?);
    let wide = [&*master, grad, &*weight];
    let codes = [moments.m_codes, moments.v_codes];
    let fits = n.is_multiple_of(BLOCK)
        && wide.into_iter().all(is_aligned)
        && codes.iter().all(|codes| (codes.data_ptr() as usize).is_multiple_of(8));
    if !fits {
        return Err(invalid(OP, format!("aligned tensors of a multiple of {BLOCK} elements"), n));
    }
    let name = format!("{OP}_{}_{}", kind_name(OP, grad)?, kind_name(OP, weight)?);
    let num_blocks = n / BLOCK;
    let mut arguments = vec![
        address(OP, master, Kind::Float, n, gpu)?,
        address(OP, moments.m_codes, Kind::Uint8, n, gpu)?,
        address(OP, moments.v_codes, Kind::Uint8, n, gpu)?,
        address(OP, moments.m_absmax, Kind::Float, num_blocks, gpu)?,
        address(OP, moments.v_absmax, Kind::Float, num_blocks, gpu)?,
        address(OP, moments.m_levels, Kind::Float, LEVELS, gpu)?,
        address(OP, moments.v_levels, Kind::Float, LEVELS, gpu)?,
        address(OP, grad, grad.kind(), n, gpu)?,
        address(OP, weight, weight.kind(), n, gpu)?,
        Argument::Count(num_blocks as i64),
    ];
    arguments.extend(scalars.arguments());
    let grid = blocks(num_blocks, THREADS / 32, MOST_BLOCKS);
    // SAFETY: the kernel's parameters in order; all tensors have n elements, or one for each block of n.
    unsafe { launch(SOURCE, &name, gpu, (grid, THREADS as u32, 0), &arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rust_constants_match_the_kernel_source() {
        crate::cuda::kernels::launch::assert_declared(
            SOURCE,
            &[("THREADS", THREADS), ("BLOCK", BLOCK), ("LEVELS", LEVELS)],
        );
    }
}
