//! GEMMs of experts with biases; [`experts`](super::experts) has those without.
//!
//! T tokens, E experts on this rank, k choices per token, D hidden, I an expert's width on this rank.

use tch::Tensor;

use super::expert_tile::ExpertTile;
use super::experts::Launch;
use super::launch::{Argument, invalid, ordinal, strided};
use super::route::RoutedTokens;
use crate::error::Result;

/// Computes [`experts_gate_up`](super::experts_gate_up) with biases, and with the clamped SwiGLU instead of SiLU.
///
/// # Errors
/// The errors of [`experts_gate_up`](super::experts_gate_up).
pub fn experts_gate_up_clamped(
    tile: ExpertTile,
    x: &Tensor,    // [T, D] f32 or bf16
    w: &Tensor,    // [E, 2 I, D], like x; strides between rows and experts
    bias: &Tensor, // [E, 2 I], like x; a stride between experts
    routed: &RoutedTokens,
    act: &Tensor, // [T k, I], like x
) -> Result<()> {
    biased(["experts_gate_up", "experts_gate_up_clamped"], tile, (x, x.size()[0]), (w, bias), routed, (act, 2))
}

/// Computes [`experts_down`](super::experts_down) with biases.
///
/// # Errors
/// The errors of [`experts_gate_up`](super::experts_gate_up).
pub fn experts_down_biased(
    tile: ExpertTile,
    act: &Tensor,  // [T k, I] f32 or bf16
    w: &Tensor,    // [E, D, I], like act; strides between rows and experts
    bias: &Tensor, // [E, D], like act; a stride between experts
    routed: &RoutedTokens,
    out: &Tensor, // [T k, D], like act
) -> Result<()> {
    biased(["experts_down", "experts_down_biased"], tile, (act, act.size()[0]), (w, bias), routed, (out, 1))
}

fn biased(
    [op, name]: [&'static str; 2],
    tile: ExpertTile,
    x: (&Tensor, i64),
    (w, bias): (&Tensor, &Tensor),
    routed: &RoutedTokens,
    out: (&Tensor, i64),
) -> Result<()> {
    let launched = Launch::new(op, tile, x, w, routed, out)?;
    if bias.stride()[1] != 1 {
        return Err(invalid(op, "contiguous biases [E, N]", (bias.size(), bias.stride())));
    }
    let bias_at = strided(op, bias, x.0.kind(), &w.size()[..2], ordinal(op, x.0)?)?;
    launched.queue(name, tile, &[bias_at, Argument::Count(bias.stride()[0])])
}
