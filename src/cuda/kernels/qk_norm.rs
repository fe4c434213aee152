//! In a decode step, the RMSNorm of queries over all heads together, and of keys.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::launch::{Argument, address, invalid, kind_name, launch_early, ordinal, strided};
use super::rope_write_kv::QkvViews;
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::QK_NORM;
pub(super) const NAMES: &[&str] = &["qk_squares_f32", "qk_squares_bf16", "qk_scale_f32", "qk_scale_bf16"];

const THREADS: u32 = 256;

/// Computes the sums of squares of each token's queries and of its keys, in float32; 0 for keys that another rank counts. Allocates nothing.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn qk_squares(
    qkv: &QkvViews,
    counts_k: bool,
    sums: &mut Tensor, // [T, 2] f32
) -> Result<()> {
    const OP: &str = "qk_squares";
    let Views { gpu, tokens, heads: [q, k], layout, .. } = Views::of(OP, qkv)?;
    let mut arguments = vec![q, k];
    arguments.extend(layout);
    arguments.extend([address(OP, sums, Kind::Float, 2 * tokens, gpu)?, Argument::Count(i64::from(counts_k))]);
    let name = format!("qk_squares_{}", kind_name(OP, &qkv.q)?);
    // SAFETY: the kernel's parameters in order; strides and shapes were read from the tensors.
    unsafe { launch_early(SOURCE, &name, gpu, (tokens as u32, THREADS, 0), &arguments) }
}

/// Computes x = x / sqrt(sum / width + eps) * weight in place, for queries and keys. Allocates nothing.
///
/// # Errors
/// The errors of [`qk_squares`].
pub fn qk_scale(
    qkv: &QkvViews,
    weights: [&Tensor; 2], // [H hd] and [Hkv hd] of this rank
    sums: &Tensor,         // [T, 2] f32, over all ranks
    widths: [usize; 2],    // of queries and keys on all ranks
    eps: f64,
) -> Result<()> {
    const OP: &str = "qk_scale";
    let Views { gpu, tokens, heads: [q, k], columns, layout } = Views::of(OP, qkv)?;
    let mut arguments = vec![q, k];
    for (weight, columns) in weights.into_iter().zip(columns) {
        arguments.push(address(OP, weight, qkv.q.kind(), columns, gpu)?);
    }
    arguments.extend(layout);
    arguments.push(address(OP, sums, Kind::Float, 2 * tokens, gpu)?);
    arguments.extend(widths.map(|width| Argument::Float(width as f32)));
    arguments.push(Argument::Float(eps as f32));
    let name = format!("qk_scale_{}", kind_name(OP, &qkv.q)?);
    // SAFETY: the kernel's parameters in order; strides and shapes were read from the tensors.
    unsafe { launch_early(SOURCE, &name, gpu, (tokens as u32, THREADS, 0), &arguments) }
}

struct Views {
    gpu: usize,
    tokens: usize,
    heads: [Argument; 2],
    /// Number of elements of a token's queries, and of its keys.
    columns: [usize; 2],
    layout: [Argument; 7],
}

impl Views {
    fn of(op: &'static str, QkvViews { q, k, .. }: &QkvViews) -> Result<Self> {
        let gpu = ordinal(op, q)?;
        let (&[tokens, kv_heads, group, dim], q_stride, k_stride) = (&q.size()[..], q.stride(), k.stride()) else {
            return Err(invalid(op, "queries [T, Hkv, G, hd]", q.size()));
        };
        let heads =
            [strided(op, q, q.kind(), &q.size(), gpu)?, strided(op, k, q.kind(), &[tokens, kv_heads, dim], gpu)?];
        if (q_stride[2], q_stride[3], k_stride[2]) != (dim, 1, 1) {
            return Err(invalid(op, "contiguous heads", (q_stride, k_stride)));
        }
        let columns = [kv_heads * group * dim, kv_heads * dim].map(|columns| columns as usize);
        let sizes = [q_stride[0], q_stride[1], k_stride[0], k_stride[1], kv_heads, group * dim, dim];
        Ok(Self { gpu, tokens: tokens as usize, heads, columns, layout: sizes.map(Argument::Count) })
    }
}
