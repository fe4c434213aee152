//! Merges two attention results of the same queries, by their log-sum-exps.
#![allow(unsafe_code)]

use tch::Kind;

use super::launch::{Argument, address, blocks, invalid, is_aligned, launch, ordinal};
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;
use crate::torch::Attended;

pub(super) const SOURCE: &KernelSource = &nvrtc::MERGE_ATTENTION;
pub(super) const NAMES: &[&str] = &["merge_attention_bf16"];

const THREADS: usize = 256;
const MOST_BLOCKS: usize = 1 << 14;
/// Elements that a thread processes at once.
const PACK: usize = 8;

/// Writes lse = log(exp(lse_a) + exp(lse_b)) and o = exp(lse_a - lse) o_a + exp(lse_b - lse) o_b into `to`. Outputs are [T, H, hd] bf16; log-sum-exps
/// are [T, H] f32 with any strides.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit, or for a head width that is not a multiple of 8; [`crate::Error::Cuda`].
pub fn merge_attention(a: &Attended, b: &Attended, to: &Attended) -> Result<()> {
    const OP: &str = "merge_attention";
    let (gpu, size, n) = (ordinal(OP, &a.o)?, a.o.size(), a.o.numel());
    let [tokens, heads, head_dim] = size[..] else { return Err(invalid(OP, "[T, H, hd]", size)) };
    if head_dim % PACK as i64 != 0 {
        return Err(invalid(OP, "a head width that is a multiple of 8", head_dim));
    }
    let mut arguments = Vec::new();
    for Attended { o, lse } in [a, b, to] {
        let fits = lse.size() == [tokens, heads] && lse.kind() == Kind::Float && lse.device() == o.device();
        if !fits || !is_aligned(o) {
            return Err(invalid(OP, format!("log-sum-exp [{tokens}, {heads}] f32 beside aligned outputs"), lse.size()));
        }
        let strides = lse.stride();
        arguments.extend([address(OP, o, Kind::BFloat16, n, gpu)?, Argument::Address(lse.data_ptr())]);
        arguments.extend(strides.iter().map(|&stride| Argument::Count(stride)));
    }
    let packs = n / PACK;
    arguments.extend([heads, head_dim / PACK as i64, packs as i64].map(Argument::Count));
    let grid = blocks(packs, THREADS, MOST_BLOCKS);
    // SAFETY: the kernel's parameters in order; every output has n elements from an aligned address, every log-sum-exp a place
    // for each token and head at its strides.
    unsafe { launch(SOURCE, NAMES[0], gpu, (grid, THREADS as u32, 0), &arguments) }
}
