//! The norm before a router, fused with the router, in FP8.
//!
//! T tokens, D hidden.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::add_rms_norm::NormOptions;
use super::fp8::ScaledRows;
use super::launch::{Argument, address, address_or_null, invalid, is_aligned, kinds_name, launch_early, ordinal};
use super::route::{PARTS, RouteLaunch, RouteOptions, RouteScores, RoutedTokens, THREADS};
use crate::cuda::abilities::has_clusters;
use crate::cuda::context::Context;
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::NORM_ROUTE;
pub(super) const NAMES: &[&str] = &[
    "norm_route_fp8_bf16_128",
    "norm_route_fp8_bf16_512",
    "norm_route_fp8_f32_bf16_128",
    "norm_route_fp8_f32_bf16_512",
];

const OP: &str = "norm_route_fp8";
/// Columns of a row in a block, of which a cluster has [`PARTS`].
const COLUMNS: usize = 256;
/// Columns of a row.
const DIM: usize = COLUMNS * PARTS;

/// A norm whose result a router reads.
#[derive(Debug)]
pub struct RouterNorm<'a> {
    /// The residual stream, to which `delta` is added.
    pub x: &'a mut Tensor, // [T, D] f32 or bf16
    /// What is added.
    pub delta: &'a Tensor, // [T, D] bf16
    /// The norm's weight.
    pub weight: &'a Tensor, // [D] bf16
    /// Buffer for the rows before they are quantized, if an operation reads them.
    pub y: Option<&'a mut Tensor>, // [T, D] bf16
    /// Buffer for the quantized rows.
    pub to: ScaledRows, // [T, D] e4m3
    /// The norm's other parameters.
    pub norm: NormOptions,
}

/// Whether [`norm_route_fp8`] supports such a norm's weight, and a router with such scores.
///
/// # Errors
/// [`crate::Error::Cuda`].
pub fn norm_route_serves(weight: &Tensor, scores: RouteScores<'_>) -> Result<bool> {
    let fits = weight.numel() == DIM && weight.kind() == Kind::BFloat16 && weight.device().is_cuda();
    if !fits || !is_aligned(weight) || !matches!(scores, RouteScores::Softmax) {
        return Ok(false);
    }
    Ok(has_clusters(Context::retain(ordinal(OP, weight)?)?.compute_capability()?))
}

/// Computes [`add_rms_norm_fp8`](super::add_rms_norm_fp8) and then [`route`](super::route()) of its rows, with the same bits, in one launch. Both
/// weights are read while the preceding operation runs, which must not write them. Allocates nothing.
///
/// # Errors
/// The errors of both; [`crate::Error::InvalidArgument`] for what [`norm_route_serves`] refuses.
pub fn norm_route_fp8(
    norm: RouterNorm<'_>,
    w: &Tensor, // [E, D] bf16
    routed: &RoutedTokens,
    options: &RouteOptions,
) -> Result<()> {
    let RouterNorm { x, delta, weight, y, to, norm } = norm;
    let (gpu, numel, y) = (ordinal(OP, x)?, x.numel(), y.as_deref());
    let rows = numel / DIM;
    let are_aligned = [Some(&*x), Some(delta), y].into_iter().flatten().all(is_aligned);
    if !norm_route_serves(weight, options.scores)? || !are_aligned {
        return Err(invalid(OP, format!("rows of {DIM} elements, aligned to 16 bytes, for a softmax"), x.size()));
    }
    let launch = RouteLaunch::new(OP, [rows as i64, DIM as i64], (w, Kind::BFloat16), routed, options, gpu)?;
    let [eps, centre] = norm.arguments();
    let of_norm = [
        address(OP, x, x.kind(), rows * DIM, gpu)?,
        address(OP, delta, Kind::BFloat16, numel, gpu)?,
        address(OP, weight, Kind::BFloat16, DIM, gpu)?,
        address_or_null(OP, y, Kind::BFloat16, numel, gpu)?,
        address(OP, &to.values, Kind::Float8e4m3fn, numel, gpu)?,
        address(OP, &to.scales, Kind::Float, rows, gpu)?,
        eps,
        centre,
    ];
    let arguments: Vec<Argument> = [&of_norm[..], &launch.arguments].concat();
    let name = format!("{OP}_{}_{}", kinds_name(OP, x, weight)?, launch.most);
    // SAFETY: the kernel's parameters in order; all it writes has the room that was checked, and counters are zero before and after. The work
    // before does not write the weights, which are read before that has ended: the caller's promise.
    unsafe { launch_early(SOURCE, &name, gpu, (launch.blocks, THREADS, 0), &arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernels::launch::assert_declared;

    #[test]
    fn rust_constants_match_the_kernel_source() {
        assert_declared(SOURCE, &[("COLUMNS", COLUMNS), ("PARTS", PARTS), ("THREADS", THREADS as usize)]);
    }
}
