//! GEMMs of tokens with their experts' weights and adapters, for rows that [`route`](super::route()) has sorted.
//!
//! T tokens, E experts on this rank, k choices per token, D hidden, I an expert's width on this rank, r rank of an adapter.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::expert_tile::{ExpertTile, FLOAT, SCALED_SLACK, SLACK};
use super::fp8::ScaledRows;
use super::launch::{Argument, address, invalid, is_aligned, launch_early, ordinal, strided};
use super::route::RoutedTokens;
use crate::cuda::context::Context;
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::EXPERTS;

/// Average rows per expert from which the kernel prefetches the first experts' weights before it knows whether they are needed.
const SURE_ROWS: usize = 4;

/// The adapters of one of the experts' matrices, for rows whose inner products x A^T are computed.
#[derive(Debug, Clone, Copy)]
pub struct ExpertAdapter<'a> {
    /// The sorted rows' inner products with A, from [`experts_low`](super::experts_low()).
    pub low: &'a Tensor, // [T k, r]
    /// B times the adapters' scale.
    pub b: &'a Tensor, // [E, features of the matrix, r]; strides between rows and experts
}

/// Computes act = silu(gate) * up for each sorted row's token with its expert's weight, including the adapter's part if there is one. The weight's
/// rows are g0 u0 g1 u1 .. Gate and up are rounded as if they were stored. Allocates nothing.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit, or in bfloat16 for sizes that are not multiples of 8; [`crate::Error::Cuda`].
pub fn experts_gate_up(
    tile: ExpertTile,
    x: &Tensor, // [T, D] f32 or bf16
    w: &Tensor, // [E, 2 I, D], like x; strides between rows and experts
    adapter: Option<ExpertAdapter<'_>>,
    routed: &RoutedTokens,
    act: &Tensor, // [T k, I], like x
) -> Result<()> {
    product("experts_gate_up", tile, (x, None), (w, None), adapter, routed, (act, 2))
}

/// Computes [`experts_gate_up`] with e4m3 operands on Hopper's tensor cores. Sums are scaled before the adapter's part is added.
///
/// # Errors
/// The errors of [`experts_gate_up`]; row lengths must be multiples of 16.
pub fn experts_gate_up_fp8(
    tile: ExpertTile,
    x: &ScaledRows, // [T, D]
    w: &ScaledRows, // [E 2 I, D]
    adapter: Option<ExpertAdapter<'_>>,
    routed: &RoutedTokens,
    act: &Tensor, // [T k, I] bf16
) -> Result<()> {
    scaled("experts_gate_up", tile, x, w, adapter, routed, (act, 2))
}

/// Computes [`experts_down`] with e4m3 operands, like [`experts_gate_up_fp8`].
///
/// # Errors
/// The errors of [`experts_gate_up_fp8`].
pub fn experts_down_fp8(
    tile: ExpertTile,
    act: &ScaledRows, // [T k, I]
    w: &ScaledRows,   // [E D, I]
    adapter: Option<ExpertAdapter<'_>>,
    routed: &RoutedTokens,
    out: &Tensor, // [T k, D] bf16
) -> Result<()> {
    scaled("experts_down", tile, act, w, adapter, routed, (out, 1))
}

fn scaled(
    op: &'static str,
    tile: ExpertTile,
    x: &ScaledRows,
    w: &ScaledRows,
    adapter: Option<ExpertAdapter<'_>>,
    routed: &RoutedTokens,
    out: (&Tensor, i64),
) -> Result<()> {
    let (size, experts) = (w.values.size(), routed.own.len() as i64);
    if experts == 0 || size[0] % experts != 0 || !ExpertTile::SCALED.contains(&tile) {
        return Err(invalid(
            op,
            "matrices of this rank's experts and a tile size that the FP8 kernel supports",
            (size, tile),
        ));
    }
    let weights = w.values.view([experts, size[0] / experts, size[1]]);
    product(op, tile, (&x.values, Some(&x.scales)), (&weights, Some(&w.scales)), adapter, routed, out)
}

/// Computes out = act w^T for each sorted row with its expert's weight, including the adapter's part if there is one, and writes it at the position
/// of the token's choice. Allocates nothing.
///
/// # Errors
/// The errors of [`experts_gate_up`].
pub fn experts_down(
    tile: ExpertTile,
    act: &Tensor, // [T k, I] f32 or bf16
    w: &Tensor,   // [E, D, I], like act; strides between rows and experts
    adapter: Option<ExpertAdapter<'_>>,
    routed: &RoutedTokens,
    out: &Tensor, // [T k, D], like act
) -> Result<()> {
    product("experts_down", tile, (act, None), (w, None), adapter, routed, (out, 1))
}

fn product(
    op: &'static str,
    tile: ExpertTile,
    (x, x_scales): (&Tensor, Option<&Tensor>),
    (w, w_scales): (&Tensor, Option<&Tensor>),
    adapter: Option<ExpertAdapter<'_>>,
    routed: &RoutedTokens,
    out: (&Tensor, i64),
) -> Result<()> {
    let launched = Launch::new(op, tile, (x, x.size()[0]), w, routed, out)?;
    let (gpu, has_adapter) = (launched.gpu, adapter.is_some());
    let adapter = adapter.map(|adapter| of_adapter(op, adapter, w, routed, (out.0.kind(), gpu))).transpose()?;
    let (adapted, none) = (if has_adapter { "_adapted" } else { "" }, NO_ADAPTER.to_vec());
    let Some((x_scales, w_scales)) = x_scales.zip(w_scales) else {
        return launched.queue(&format!("{op}{adapted}"), tile, &adapter.unwrap_or_default());
    };
    let mut arguments = adapter.unwrap_or(none);
    for scales in [(x_scales, x.size()[0]), (w_scales, w.size()[0] * w.size()[1])] {
        arguments.push(address(op, scales.0, Kind::Float, scales.1 as usize, gpu)?);
    }
    let tile = ExpertTile { shared_bytes: tile.shared_bytes - SLACK + SCALED_SLACK, ..tile };
    launched.queue(&format!("{op}{adapted}_fp8"), tile, &arguments)
}

/// The adapter arguments of a launch without adapters.
pub(super) const NO_ADAPTER: [Argument; 7] = [
    Argument::NULL,
    Argument::NULL,
    Argument::Count(0),
    Argument::Count(0),
    Argument::Count(0),
    Argument::NULL,
    Argument::NULL,
];

/// The adapter arguments of a launch with an adapter of the matrix `w`.
fn of_adapter(
    op: &'static str,
    ExpertAdapter { low, b }: ExpertAdapter<'_>,
    w: &Tensor,
    routed: &RoutedTokens,
    (kind, gpu): (Kind, usize),
) -> Result<Vec<Argument>> {
    let rows = routed.order.numel() as i64;
    let (&[experts, features, _], &[_, _, inner]) = (&w.size()[..], &b.size()[..]) else {
        return Err(invalid(op, "adapters [E, N, r]", b.size()));
    };
    let is_moved = kind == Kind::Float || (inner % 8 == 0 && [low, b].into_iter().all(moves_well));
    if !low.is_contiguous() || b.stride()[2] != 1 || !is_moved {
        let expected = "LoRA adapters whose rank is a multiple of 8";
        return Err(invalid(op, expected, (low.size(), low.stride(), b.size(), b.stride())));
    }
    Ok(vec![
        strided(op, low, kind, &[rows, inner], gpu)?,
        strided(op, b, kind, &[experts, features, inner], gpu)?,
        Argument::Count(b.stride()[0]),
        Argument::Count(b.stride()[1]),
        Argument::Count(inner),
        Argument::NULL,
        Argument::NULL,
    ])
}

/// Elements per 16-byte copy.
fn pack(kind: Kind) -> i64 {
    16 / kind.elt_size_in_bytes() as i64
}

/// Whether rows of bfloat16 or e4m3 can be copied 16 bytes at once.
pub(super) fn moves_well(tensor: &Tensor) -> bool {
    is_aligned(tensor) && tensor.stride().iter().rev().skip(1).all(|stride| stride % pack(tensor.kind()) == 0)
}

/// The number of this rank's experts if nearly all of them will be used, else 0.
pub(super) fn sure_experts(routed: &RoutedTokens) -> usize {
    if routed.order.numel() / routed.num_experts >= SURE_ROWS { routed.own.len() } else { 0 }
}

/// A GEMM's launch, before the arguments of adapters or biases are added.
pub(super) struct Launch {
    arguments: Vec<Argument>,
    blocks: u32,
    gpu: usize,
}

impl Launch {
    pub(super) fn new(
        op: &'static str,
        tile: ExpertTile,
        (x, x_rows): (&Tensor, i64),
        w: &Tensor,
        routed: &RoutedTokens,
        (out, columns_of_one): (&Tensor, i64),
    ) -> Result<Self> {
        let (&[experts, features, k], gpu, kind) = (&w.size()[..], ordinal(op, x)?, x.kind()) else {
            return Err(invalid(op, "weights [E, N, K]", w.size()));
        };
        let rows = routed.order.numel() as i64;
        let strides = w.stride();
        let out_kind = if kind == Kind::Float8e4m3fn { Kind::BFloat16 } else { kind };
        let fits = (kind != Kind::Float) == (tile != FLOAT)
            && tile.rows == routed.tile_rows
            && experts == routed.own.len() as i64
            && strides[2] == 1
            && [x, out].into_iter().all(Tensor::is_contiguous)
            && features % columns_of_one == 0
            && (kind == Kind::Float
                || (k % pack(kind) == 0 && features % 8 == 0 && [x, w].into_iter().all(moves_well)));
        if !fits {
            let expected =
                "this rank's experts, with rows of a multiple of 8 elements, and tokens sorted for tiles of this size";
            return Err(invalid(op, expected, (x.size(), w.size(), strides, tile)));
        }
        let choices = routed.experts.size()[1];
        let arguments = vec![
            strided(op, x, kind, &[x_rows, k], gpu)?,
            strided(op, w, kind, &[experts, features, k], gpu)?,
            strided(op, out, out_kind, &[rows, features / columns_of_one], gpu)?,
            address(op, &routed.order, Kind::Int, rows as usize, gpu)?,
            address(op, &routed.tiles, Kind::Int, routed.tiles.numel(), gpu)?,
            Argument::Count(x.stride()[0]),
            Argument::Count(strides[0]),
            Argument::Count(strides[1]),
            Argument::Count(out.stride()[0]),
            Argument::Count(k),
            Argument::Count(features),
            Argument::Count(choices),
            Argument::Count(sure_experts(routed) as i64),
        ];
        let blocks = Context::retain(gpu)?.num_processors()? * tile.per_processor;
        Ok(Self { arguments, blocks: blocks as u32, gpu })
    }

    /// Queues the kernel with the given arguments of adapters or biases.
    pub(super) fn queue(mut self, name: &str, tile: ExpertTile, adapter: &[Argument]) -> Result<()> {
        self.arguments.extend_from_slice(adapter);
        let shape = (self.blocks, tile.threads, tile.shared_bytes);
        // SAFETY: the kernel's parameters in order; tiles, which `route` has made, name rows of x and out and experts of w. Before what it
        // waits for, weights are brought to the L2 and nothing is read.
        unsafe { launch_early(SOURCE, &format!("{name}_{}", tile.name), self.gpu, shape, &self.arguments) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares tiles with the .cu file, because a mismatch would give wrong results without an error.
    #[test]
    fn tile_sizes_match_the_kernel_source() {
        let shapes =
            [[4, 1, 1, 4, 2, 3], [4, 1, 2, 4, 1, 5], [4, 1, 2, 8, 1, 4], [4, 2, 2, 8, 2, 3], [4, 1, 1, 8, 1, 4]];
        for (tile, [wm, wn, mt, nt, steps, stages]) in ExpertTile::ALL.into_iter().zip(shapes) {
            let ExpertTile { name, rows, threads, shared_bytes, per_processor } = tile;
            let line =
                format!("PRODUCTS({name}, {threads}, {per_processor}, {wm}, {wn}, {mt}, {nt}, {steps}, {stages})");
            assert!(SOURCE.text.contains(&line), "{line}");
            assert_eq!((rows, threads as usize), (wn * nt * 8, wm * wn * 32), "{name}");
            let features = wm * mt * 16;
            assert_eq!((shared_bytes - SLACK) as usize, stages * steps * (features + rows) * 128, "{name}");
        }
        for (tile, [wm, wn, mt, nt, steps, stages]) in ExpertTile::SCALED.into_iter().zip([
            [4, 1, 1, 4, 2, 3],
            [4, 1, 2, 4, 1, 5],
            [4, 1, 2, 8, 1, 4],
            [8, 1, 2, 16, 1, 4],
        ]) {
            let ExpertTile { name, rows, threads, shared_bytes, per_processor } = tile;
            let line = format!(
                "SCALED_PRODUCTS({name}, {threads}, {per_processor}, {wm}, {wn}, {mt}, {nt}, {steps}, {stages})"
            );
            assert!(SOURCE.text.contains(&line), "{line}");
            assert_eq!((rows, threads as usize), (wn * nt * 8, wm * wn * 32), "{name}");
            assert_eq!((shared_bytes - SLACK) as usize, stages * steps * (wm * mt * 16 + rows) * 128, "{name}");
        }
        let ExpertTile { name, threads, per_processor, .. } = FLOAT;
        for op in [
            "PRODUCT(experts_gate_up",
            "PRODUCT(experts_down",
            "ADAPTER(experts_low_tokens",
            "ADAPTER(experts_low_rows",
        ] {
            let line = format!("{op}_{name}, {threads}, {per_processor}, ");
            assert!(SOURCE.text.contains(&line), "{line}");
        }
    }
}
