//! Products of tokens with the weights of their experts, for rows that [`route`](super::route()) has sorted, and their weighted sum.
//!
//! T tokens, E experts that this rank has, k choices of a token, D hidden, I an expert's width on this rank.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::route::RoutedTokens;
use super::{Argument, address, address_or_null, invalid, kind_name, launch, launch_early, ordinal, strided, width};
use crate::cuda::context::Context;
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::EXPERTS;
pub(super) const NAMES: &[&str] = &[
    "experts_gate_up_few",
    "experts_down_few",
    "experts_gate_up_some",
    "experts_down_some",
    "experts_gate_up_many",
    "experts_down_many",
    "experts_gate_up_small",
    "experts_down_small",
    "experts_gate_up_f32",
    "experts_down_f32",
    "experts_combine_f32_x1",
    "experts_combine_f32_x4",
    "experts_combine_bf16_x1",
    "experts_combine_bf16_x8",
    "experts_gather_f32_x1",
    "experts_gather_f32_x4",
    "experts_gather_bf16_x1",
    "experts_gather_bf16_x8",
];

/// The kernels' ways to cut the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertTile {
    /// Suffix of the kernels' names.
    name: &'static str,
    /// Rows of one expert that a block multiplies at once.
    pub rows: usize,
    threads: u32,
    shared_bytes: u32,
    /// Blocks of a multiprocessor.
    per_processor: usize,
}

/// Bytes that begin stages at a multiple of 128.
const SLACK: u32 = 128;

const fn tile(name: &'static str, rows: usize, threads: u32, stages_kib: u32, per_processor: usize) -> ExpertTile {
    let shared_bytes = if stages_kib == 0 { 0 } else { (stages_kib << 10) + SLACK };
    ExpertTile { name, rows, threads, shared_bytes, per_processor }
}

/// For few, some and many rows an expert; for more than few on chips with little shared memory; and for float32.
const FEW: ExpertTile = tile("few", 32, 128, 72, 3);
const SOME: ExpertTile = tile("some", 32, 128, 100, 2);
const MANY: ExpertTile = tile("many", 128, 256, 192, 1);
const SMALL: ExpertTile = tile("small", 64, 128, 64, 3);
const FLOAT: ExpertTile = tile("f32", 64, 128, 0, 4);
/// Chips whose blocks can have the shared memory of [`SOME`] and [`MANY`].
const LARGE_SHARED: [(i32, i32); 2] = [(9, 0), (10, 0)];
/// Rows an expert, on average, up to which tiles of few and of some rows serve.
const FEW_ROWS: usize = 20;
const SOME_ROWS: usize = 60;
/// Rows an expert, on average, from which on weights of the first experts are asked for before it is known that they are needed.
const SURE_ROWS: usize = 4;

impl ExpertTile {
    /// All ways in bfloat16, for benchmarks and tests.
    pub const ALL: [Self; 4] = [FEW, SOME, MANY, SMALL];

    /// The way for `tokens` with `choices` of `experts` each, in weights of `kind` on a GPU.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    pub fn of(tokens: usize, choices: usize, experts: usize, (kind, gpu): (Kind, usize)) -> Result<Self> {
        if kind != Kind::BFloat16 {
            return Ok(FLOAT);
        }
        let rows = tokens * choices / experts;
        let is_large = LARGE_SHARED.contains(&Context::retain(gpu)?.compute_capability()?);
        Ok(match (rows <= FEW_ROWS, rows <= SOME_ROWS) {
            (true, _) => FEW,
            _ if !is_large => SMALL,
            (_, true) => SOME,
            _ => MANY,
        })
    }

    /// The variant's name, for reports.
    pub fn name(self) -> &'static str {
        self.name
    }
}

/// act = silu(gate) * up of each sorted row's token with its expert's weight, whose rows are g0 u0 g1 u1 .. Gate and up are rounded as
/// where they are written. Allocates nothing.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit, in bfloat16 for sizes that are no multiples of 8; [`crate::Error::Cuda`].
pub fn experts_gate_up(
    tile: ExpertTile,
    x: &Tensor, // [T, D] f32 or bf16
    w: &Tensor, // [E, 2 I, D], like x; strides between rows and experts
    routed: &RoutedTokens,
    act: &Tensor, // [T k, I], like x
) -> Result<()> {
    product("experts_gate_up", tile, (x, x.size()[0]), w, routed, (act, 2))
}

/// out = act w^T of each sorted row with its expert's weight, at the place of its choice. Allocates nothing.
///
/// # Errors
/// The errors of [`experts_gate_up`].
pub fn experts_down(
    tile: ExpertTile,
    act: &Tensor, // [T k, I] f32 or bf16
    w: &Tensor,   // [E, D, I], like act; strides between rows and experts
    routed: &RoutedTokens,
    out: &Tensor, // [T k, D], like act
) -> Result<()> {
    product("experts_down", tile, (act, act.size()[0]), w, routed, (out, 1))
}

fn product(
    op: &'static str,
    tile: ExpertTile,
    (x, x_rows): (&Tensor, i64),
    w: &Tensor,
    routed: &RoutedTokens,
    (out, columns_of_one): (&Tensor, i64),
) -> Result<()> {
    let (&[experts, features, k], gpu, kind) = (&w.size()[..], ordinal(op, x)?, x.kind()) else {
        return Err(invalid(op, "weights [E, N, K]", w.size()));
    };
    let rows = routed.order.numel() as i64;
    let (strides, size) = (w.stride(), kind.elt_size_in_bytes());
    let moves_well = |tensor: &Tensor| {
        let strides = tensor.stride();
        (tensor.data_ptr() as usize).is_multiple_of(16)
            && strides.iter().rev().skip(1).all(|stride| (*stride as usize * size).is_multiple_of(16))
    };
    let fits = (kind == Kind::BFloat16) == (tile != FLOAT)
        && tile.rows == routed.tile_rows
        && experts == routed.own.len() as i64
        && strides[2] == 1
        && [x, out].into_iter().all(Tensor::is_contiguous)
        && features % 2 == 0
        && (kind == Kind::Float || (k % 8 == 0 && features % 8 == 0 && moves_well(x) && moves_well(w)));
    if !fits {
        let expected = "experts of this rank with rows of a multiple of 8 elements, sorted into tiles of this size";
        return Err(invalid(op, expected, (x.size(), w.size(), strides, tile)));
    }
    let choices = routed.experts.size()[1];
    let average = rows as usize / routed.num_experts;
    let arguments = [
        strided(op, x, kind, &[x_rows, k], gpu)?,
        strided(op, w, kind, &[experts, features, k], gpu)?,
        strided(op, out, kind, &[rows, features / columns_of_one], gpu)?,
        address(op, &routed.order, Kind::Int, rows as usize, gpu)?,
        address(op, &routed.tiles, Kind::Int, routed.tiles.numel(), gpu)?,
        Argument::Count(x.stride()[0]),
        Argument::Count(strides[0]),
        Argument::Count(strides[1]),
        Argument::Count(out.stride()[0]),
        Argument::Count(k),
        Argument::Count(features),
        Argument::Count(choices),
        Argument::Count(if average >= SURE_ROWS { experts } else { 0 }),
    ];
    let blocks = Context::retain(gpu)?.num_processors()? * tile.per_processor;
    let shape = (blocks as u32, tile.threads, tile.shared_bytes);
    // SAFETY: the kernel's parameters in order; tiles, which `route` has made, name rows of x and out and experts of w. Before what it
    // waits for, weights are brought to the L2 and nothing is read.
    unsafe { launch_early(SOURCE, &format!("{op}_{}", tile.name), gpu, shape, &arguments) }
}

/// y = the sum of a token's rows, each times its weight, in the order of its choices, in float32, rounded once. Choices of other ranks'
/// experts and of padding have no part in it. Allocates nothing.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::Cuda`].
pub fn experts_combine(
    rows: &Tensor, // [T k, D] f32 or bf16
    routed: &RoutedTokens,
    y: &Tensor, // [T, D], like rows
) -> Result<()> {
    const OP: &str = "experts_combine";
    let (&[tokens, dim], &[_, choices], gpu) = (&y.size()[..], &routed.experts.size()[..], ordinal(OP, rows)?) else {
        return Err(invalid(OP, "a matrix", y.size()));
    };
    let width = width(dim as usize, &[rows, y]);
    let arguments = [
        address(OP, rows, rows.kind(), (tokens * choices * dim) as usize, gpu)?,
        address(OP, &routed.experts, Kind::Int, (tokens * choices) as usize, gpu)?,
        address(OP, &routed.weights, Kind::Float, (tokens * choices) as usize, gpu)?,
        address(OP, y, rows.kind(), (tokens * dim) as usize, gpu)?,
        Argument::Count(dim),
        Argument::Count(choices),
        Argument::Count(routed.own.start as i64),
        Argument::Count(routed.own.len() as i64),
    ];
    let threads = (dim as usize / width).next_multiple_of(32).min(256) as u32;
    let name = format!("{OP}_{}_x{width}", kind_name(OP, rows)?);
    // SAFETY: the kernel's parameters in order; one block a token.
    unsafe { launch_early(SOURCE, &name, gpu, (tokens as u32, threads, 0), &arguments) }
}

/// The sum of the rows at a token's places, in their order, each times its weight if there are any, in float32. [T, D] f32
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit; [`crate::Error::OutOfMemory`]; [`crate::Error::Cuda`].
pub fn experts_gather(
    rows: &Tensor,            // [R, D] f32 or bf16
    places: &Tensor,          // [T, k] int64, below R
    weights: Option<&Tensor>, // [T, k] f32
) -> Result<Tensor> {
    const OP: &str = "experts_gather";
    let (&[_, dim], &[tokens, choices], gpu) = (&rows.size()[..], &places.size()[..], ordinal(OP, rows)?) else {
        return Err(invalid(OP, "matrices", (rows.size(), places.size())));
    };
    let y = Tensor::f_empty([tokens, dim], (Kind::Float, rows.device()))?;
    let width = width(dim as usize, &[rows]);
    let arguments = [
        address(OP, rows, rows.kind(), rows.numel(), gpu)?,
        address(OP, places, Kind::Int64, (tokens * choices) as usize, gpu)?,
        address_or_null(OP, weights, Kind::Float, (tokens * choices) as usize, gpu)?,
        address(OP, &y, Kind::Float, y.numel(), gpu)?,
        Argument::Count(dim),
        Argument::Count(choices),
    ];
    let threads = (dim as usize / width).next_multiple_of(32).min(256) as u32;
    let name = format!("{OP}_{}_x{width}", kind_name(OP, rows)?);
    // SAFETY: the kernel's parameters in order; one block a token; places are rows, the caller's promise.
    unsafe { launch(SOURCE, &name, gpu, (tokens as u32, threads, 0), &arguments)? };
    Ok(y)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tile of other sizes than the source's would give wrong results, and no error.
    #[test]
    fn tiles_are_those_of_the_source() {
        let shapes = [[4, 1, 1, 4, 2, 3], [4, 1, 2, 4, 1, 5], [4, 2, 2, 8, 2, 3], [4, 1, 1, 8, 1, 4]];
        for (tile, [wm, wn, mt, nt, steps, stages]) in ExpertTile::ALL.into_iter().zip(shapes) {
            let ExpertTile { name, rows, threads, shared_bytes, per_processor } = tile;
            let line =
                format!("PRODUCTS({name}, {threads}, {per_processor}, {wm}, {wn}, {mt}, {nt}, {steps}, {stages})");
            assert!(SOURCE.text.contains(&line), "{line}");
            assert_eq!((rows, threads as usize), (wn * nt * 8, wm * wn * 32), "{name}");
            let features = wm * mt * 16;
            assert_eq!((shared_bytes - SLACK) as usize, stages * steps * (features + rows) * 128, "{name}");
        }
        let ExpertTile { name, threads, per_processor, .. } = FLOAT;
        for op in ["gate_up", "down"] {
            let line = format!("PRODUCT(experts_{op}_{name}, {threads}, {per_processor}, ");
            assert!(SOURCE.text.contains(&line), "{line}");
        }
    }
}
