//! Inner products x A^T of experts' narrow LoRA adapters, for rows that [`route`](super::route()) has sorted.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::experts::{moves_well, sure_experts};
use super::launch::{Argument, address, invalid, launch_early, ordinal, strided};
use super::route::{RoutedTokens, TILE_WORDS};
use crate::cuda::context::Context;
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::EXPERTS_NARROW;
pub(super) const NAMES: &[&str] = &["experts_low_tokens", "experts_low_rows"];

/// Warps per block.
const WARPS: usize = 16;
/// Highest rank of adapters that this kernel supports, and experts.cu adds without shared memory.
const INNER: usize = 16;

/// Whether [`low_products`] supports adapters [E, r, K].
pub(super) fn serves(a: &Tensor) -> bool {
    a.kind() == Kind::BFloat16 && a.size()[1] as usize <= INNER
}

/// Computes [`experts_low`](super::experts_low) for narrow adapters; `op` is the kernel. It reads A while the preceding operation still runs: that
/// operation must not write A, and must itself have waited for any that does.
pub(super) fn low_products(
    op: &'static str,
    (x, x_rows): (&Tensor, i64), // [rows, K]
    a: &Tensor,                  // [E, r, K]; strides between rows and experts
    choice: [Argument; 2],
    routed: &RoutedTokens,
    low: &Tensor, // [T k, r]
) -> Result<()> {
    let (&[experts, inner, k], gpu) = (&a.size()[..], ordinal(op, x)?) else {
        return Err(invalid(op, "adapters [E, r, K]", a.size()));
    };
    let strides = a.stride();
    let fits = experts == routed.own.len() as i64
        && strides[2] == 1
        && [x, low].into_iter().all(Tensor::is_contiguous)
        && k % 8 == 0
        && inner % 8 == 0
        && [x, a, low].into_iter().all(moves_well);
    if !fits {
        let expected = "this rank's experts, with rows of a multiple of 8 elements";
        return Err(invalid(op, expected, (x.size(), a.size(), strides)));
    }
    let sorted = routed.order.numel();
    let [owners, adapters] = choice;
    let arguments = [
        address(op, x, Kind::BFloat16, (x_rows * k) as usize, gpu)?,
        strided(op, a, Kind::BFloat16, &[experts, inner, k], gpu)?,
        address(op, low, Kind::BFloat16, sorted * inner as usize, gpu)?,
        address(op, &routed.order, Kind::Int, sorted, gpu)?,
        address(op, &routed.tiles, Kind::Int, routed.tiles.numel(), gpu)?,
        owners,
        adapters,
        Argument::Count(strides[0]),
        Argument::Count(strides[1]),
        Argument::Count(k),
        Argument::Count(inner),
        Argument::Count(routed.experts.size()[1]),
        Argument::Count(sure_experts(routed) as i64),
    ];
    let most_tiles = routed.tiles.numel() / TILE_WORDS - 1;
    let blocks = most_tiles.min(Context::retain(gpu)?.num_processors()?);
    // SAFETY: the kernel's parameters in order; tiles, which `route` has made, name rows of x and low and experts of A, and there is an entry for every
    // block. The work before does not write A, which is read before that has ended: the caller's promise.
    unsafe { launch_early(SOURCE, op, gpu, (blocks as u32, 32 * WARPS as u32, 0), &arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernels::launch::assert_declared;

    #[test]
    fn rust_constants_match_the_kernel_source() {
        assert_declared(SOURCE, &[("WARPS", WARPS), ("INNER", INNER)]);
        assert_declared(crate::cuda::kernels::experts::SOURCE, &[("NARROW", INNER)]);
    }
}
