//! Inner products x A^T of experts' LoRA adapters, for rows that [`route`](super::route()) has sorted: of narrow adapters by a kernel of their own, of
//! others by those of the GEMMs.
//!
//! T tokens, E experts on this rank, k choices per token, r rank of an adapter.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::expert_tile::ExpertTile;
use super::experts::{Launch, NO_ADAPTER, moves_well, sure_experts};
use super::launch::{Argument, address, address_or_null, invalid, launch_early, ordinal, strided};
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

/// The input rows of [`experts_low`].
#[derive(Debug, Clone, Copy)]
pub enum LowRows<'a> {
    /// One row per token; each sorted row uses its token's.
    OfTokens(&'a Tensor), // [T, K]
    /// One row per sorted row.
    Sorted(&'a Tensor), // [T k, K]
}

/// Computes low = x A^T for each sorted row with its expert's A, rounded. If several named adapters are stacked, `choice` has the adapter of each row
/// of A `[r]` i32 and of each token `[T]` i32; products with another adapter are set to zero. A row's bits do not depend on other rows. A is read while
/// the preceding operation still runs: that operation must not write A, and must itself have waited for any that does. Allocates nothing.
///
/// # Errors
/// The errors of [`experts_gate_up`](super::experts_gate_up).
pub fn experts_low(
    tile: ExpertTile,
    rows: LowRows<'_>,
    a: &Tensor, // [E, r, K], like x; strides between rows and experts
    choice: Option<[&Tensor; 2]>,
    routed: &RoutedTokens,
    low: &Tensor, // [T k, r], like x
) -> Result<()> {
    let (op, x) = match rows {
        LowRows::OfTokens(x) => ("experts_low_tokens", x),
        LowRows::Sorted(x) => ("experts_low_rows", x),
    };
    let &[_, inner, _] = &a.size()[..] else { return Err(invalid(op, "adapters [E, r, K]", a.size())) };
    let (tokens, gpu) = (routed.experts.size()[0], ordinal(op, x)?);
    let of_choice = |index: usize, numel: i64| {
        address_or_null(op, choice.map(|choice| choice[index]), Kind::Int, numel as usize, gpu)
    };
    let of_choices = [of_choice(0, inner)?, of_choice(1, tokens)?];
    if is_narrow(a) {
        let rows = if matches!(rows, LowRows::OfTokens(_)) { tokens } else { routed.order.numel() as i64 };
        return low_products(op, (x, rows), a, of_choices, routed, low);
    }
    let launched = Launch::new(op, tile, (x, x.size()[0]), a, routed, (low, 1))?;
    let [no_adapter @ .., _, _] = NO_ADAPTER;
    launched.queue(op, tile, &[&no_adapter[..], &of_choices].concat())
}

/// Whether [`low_products`] supports adapters [E, r, K].
fn is_narrow(a: &Tensor) -> bool {
    a.kind() == Kind::BFloat16 && a.size()[1] as usize <= INNER
}

/// Computes [`experts_low`] for narrow adapters; `op` is the kernel.
fn low_products(
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
