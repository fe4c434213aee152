//! Dequantizes NF4 weights to the network's type.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::launch::{Argument, address, blocks, invalid, kind_name, launch, ordinal};
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::NF4;
pub(super) const NAMES: &[&str] = &["nf4_dequantize_f32", "nf4_dequantize_bf16"];

const THREADS: usize = 256;
const MOST_BLOCKS: usize = 1 << 14;
/// Number of weights that share a scale, and number of scales that share a maximum.
const BLOCK: usize = 64;
const GROUP: usize = 256;

/// A quantized matrix of n = rows * columns weights, whose scales are quantized too.
#[derive(Debug, Clone, Copy)]
pub struct Nf4Codes<'a> {
    /// Codes of the weights, two per byte, the first in the upper 4 bits. [n / 2] u8
    pub codes: &'a Tensor,
    /// Codes of the scales. [n / 64] u8
    pub scales: &'a Tensor,
    /// Maximum of each group of scales. [ceil(n / 64 / 256)] f32
    pub maxima: &'a Tensor,
    /// Added to every scale. [] f32
    pub offset: &'a Tensor,
    /// The value of each weight code. `[16]` f32
    pub levels: &'a Tensor,
    /// The value of each scale code. `[256]` f32
    pub scale_levels: &'a Tensor,
}

/// Writes the matrix's rows to `y`, whose groups of rows have a stride; each row must be contiguous.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn nf4_dequantize(
    matrix: &Nf4Codes<'_>,
    y: &mut Tensor, // [groups, rows of a group, columns], f32 or bf16; columns a multiple of 64
) -> Result<()> {
    const OP: &str = "nf4_dequantize";
    let (gpu, size, strides) = (ordinal(OP, y)?, y.size(), y.stride());
    let (&[groups, period, columns], &[group_stride, row_stride, 1]) = (&size[..], &strides[..]) else {
        return Err(invalid(OP, "groups of rows of contiguous weights", (size, strides)));
    };
    let n = (groups * period * columns) as usize;
    let fits = columns % BLOCK as i64 == 0
        && group_stride % columns == 0
        && (row_stride == columns || period == 1)
        && (y.data_ptr() as usize).is_multiple_of(32);
    if !fits {
        return Err(invalid(OP, "aligned rows of a multiple of 64 weights", (size, strides)));
    }
    let num_scales = n / BLOCK;
    let arguments = [
        address(OP, matrix.codes, Kind::Uint8, n / 2, gpu)?,
        address(OP, matrix.scales, Kind::Uint8, num_scales, gpu)?,
        address(OP, matrix.maxima, Kind::Float, num_scales.div_ceil(GROUP), gpu)?,
        address(OP, matrix.offset, Kind::Float, 1, gpu)?,
        address(OP, matrix.levels, Kind::Float, 16, gpu)?,
        address(OP, matrix.scale_levels, Kind::Float, GROUP, gpu)?,
        Argument::Address(y.data_ptr()),
        Argument::Count(n as i64),
        Argument::Count(columns),
        Argument::Count(period),
        Argument::Count(group_stride / columns),
    ];
    let name = format!("{OP}_{}", kind_name(OP, y)?);
    let grid = blocks(n / 16, THREADS, MOST_BLOCKS);
    // SAFETY: the kernel's parameters in order; the codes are as many as y's weights, whose rows it writes at their strides.
    unsafe { launch(SOURCE, &name, gpu, (grid, THREADS as u32, 0), &arguments) }
}
