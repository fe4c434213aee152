//! The gate of attention's output, in an engine step.
#![allow(unsafe_code)]

use tch::Tensor;

use super::launch::{Argument, address, invalid, is_aligned, kind_name, launch_early, ordinal, strided};
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::GATE;
pub(super) const NAMES: &[&str] = &["gate_f32_x1", "gate_f32_x4", "gate_bf16_x1", "gate_bf16_x8"];

const THREADS: usize = 256;

/// Computes o = o sigmoid(gate) in place; the sigmoid is rounded to the tensors' type. Allocates nothing.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn gate(
    o: &mut Tensor, // [T, H, hd], or its elements in another shape
    gates: &Tensor, // [T, Hkv, G, hd], any strides of whole heads
) -> Result<()> {
    const OP: &str = "gate";
    let (gpu, kind, strides) = (ordinal(OP, o)?, o.kind(), gates.stride());
    let (&[_, kv_heads, group, dim], &[row, group_stride, head, 1]) = (&gates.size()[..], &strides[..]) else {
        return Err(invalid(OP, "gates [T, Hkv, G, hd] of contiguous heads", (gates.size(), strides)));
    };
    let widest = 16 / kind.elt_size_in_bytes();
    let is_wide = is_aligned(o)
        && is_aligned(gates)
        && [row, group_stride, head, dim].iter().all(|step| step % widest as i64 == 0);
    let width = if is_wide { widest } else { 1 };
    let arguments = [
        address(OP, o, kind, gates.numel(), gpu)?,
        strided(OP, gates, kind, &gates.size(), gpu)?,
        Argument::Count(row),
        Argument::Count(group_stride),
        Argument::Count(head),
        Argument::Count(o.numel() as i64),
        Argument::Count(kv_heads),
        Argument::Count(group),
        Argument::Count(dim),
    ];
    let name = format!("gate_{}_x{width}", kind_name(OP, o)?);
    let grid = o.numel().div_ceil(THREADS * width) as u32;
    // SAFETY: the kernel's parameters in order; strides and shapes were read from the tensors.
    unsafe { launch_early(SOURCE, &name, gpu, (grid, THREADS as u32, 0), &arguments) }
}
