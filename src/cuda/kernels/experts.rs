//! Products of tokens with the weights of their experts, and with adapters beside them, for rows that [`route`](super::route()) has
//! sorted.
//!
//! T tokens, E experts that this rank has, k choices of a token, D hidden, I an expert's width on this rank, r inner products of an
//! adapter.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::launch::{Argument, address, address_or_null, invalid, is_aligned, launch_early, ordinal, strided};
use super::route::RoutedTokens;
use crate::cuda::capability::Capability;
use crate::cuda::context::Context;
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::EXPERTS;
pub(super) const NAMES: &[&str] = &[
    "experts_gate_up_few",
    "experts_down_few",
    "experts_gate_up_adapted_few",
    "experts_down_adapted_few",
    "experts_gate_up_clamped_few",
    "experts_down_biased_few",
    "experts_low_tokens_few",
    "experts_low_rows_few",
    "experts_gate_up_some",
    "experts_down_some",
    "experts_gate_up_adapted_some",
    "experts_down_adapted_some",
    "experts_gate_up_clamped_some",
    "experts_down_biased_some",
    "experts_low_tokens_some",
    "experts_low_rows_some",
    "experts_gate_up_many",
    "experts_down_many",
    "experts_gate_up_adapted_many",
    "experts_down_adapted_many",
    "experts_gate_up_clamped_many",
    "experts_down_biased_many",
    "experts_low_tokens_many",
    "experts_low_rows_many",
    "experts_gate_up_small",
    "experts_down_small",
    "experts_gate_up_adapted_small",
    "experts_down_adapted_small",
    "experts_gate_up_clamped_small",
    "experts_down_biased_small",
    "experts_low_tokens_small",
    "experts_low_rows_small",
    "experts_gate_up_f32",
    "experts_down_f32",
    "experts_gate_up_adapted_f32",
    "experts_down_adapted_f32",
    "experts_gate_up_clamped_f32",
    "experts_down_biased_f32",
    "experts_low_tokens_f32",
    "experts_low_rows_f32",
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
const LARGE_SHARED: [Capability; 2] = [Capability::HOPPER, Capability::new(10, 0)];
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

    /// The way of the product behind it, with rows of `width` elements in an expert's `down`, over the same tiles of rows.
    ///
    /// # Errors
    /// [`crate::Error::Cuda`].
    pub fn for_down(self, tokens: usize, choices: usize, experts: usize, (width, gpu): (usize, usize)) -> Result<Self> {
        let is_large = LARGE_SHARED.contains(&Context::retain(gpu)?.compute_capability()?);
        Ok(if is_large { self.narrow(tokens * choices / experts, width) } else { self })
    }

    /// [`FEW`] copies 128 columns at once, the last of which may be half beyond a narrow slice: of 192 columns a quarter of what it copies.
    /// [`SOME`] copies 64, and gives the same bits.
    fn narrow(self, rows: usize, width: usize) -> Self {
        let is_measured = rows > 0 && width > 128;
        if self == FEW && is_measured && width.next_multiple_of(64) < width.next_multiple_of(128) { SOME } else { self }
    }

    /// The variant's name, for reports.
    pub fn name(self) -> &'static str {
        self.name
    }
}

/// The adapters of experts beside one of their matrices, for rows whose inner products are there.
#[derive(Debug, Clone, Copy)]
pub struct ExpertAdapter<'a> {
    /// The sorted rows' products with A, as [`experts_low`] makes them.
    pub low: &'a Tensor, // [T k, r]
    /// B times the adapters' scale.
    pub b: &'a Tensor, // [E, features of the matrix, r]; strides between rows and experts
}

/// Rows that [`experts_low`] multiplies.
#[derive(Debug, Clone, Copy)]
pub enum LowRows<'a> {
    /// The row of each sorted row's token.
    OfTokens(&'a Tensor), // [T, K]
    /// The sorted rows.
    Sorted(&'a Tensor), // [T k, K]
}

/// act = silu(gate) * up of each sorted row's token with its expert's weight, and with the adapter's part if there is one; the weight's rows are g0 u0 g1 u1 .. Gate and up are rounded as
/// where they are written. Allocates nothing.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit, in bfloat16 for sizes that are no multiples of 8; [`crate::Error::Cuda`].
pub fn experts_gate_up(
    tile: ExpertTile,
    x: &Tensor, // [T, D] f32 or bf16
    w: &Tensor, // [E, 2 I, D], like x; strides between rows and experts
    adapter: Option<ExpertAdapter<'_>>,
    routed: &RoutedTokens,
    act: &Tensor, // [T k, I], like x
) -> Result<()> {
    product("experts_gate_up", tile, (x, x.size()[0]), w, adapter, routed, (act, 2))
}

/// out = act w^T of each sorted row with its expert's weight, and with the adapter's part if there is one, at the place of its choice.
/// Allocates nothing.
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
    product("experts_down", tile, (act, act.size()[0]), w, adapter, routed, (out, 1))
}

/// low = x A^T of each sorted row with the A of its expert, rounded. Where adapters of several names are stacked, `choice` has whose each
/// row of A is `[r]` i32, and whose each token's are `[T]` i32: products with another's are zero. Allocates nothing.
///
/// # Errors
/// The errors of [`experts_gate_up`].
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
    let launched = Launch::new(op, tile, (x, x.size()[0]), a, routed, (low, 1))?;
    let (tokens, inner, gpu) = (routed.experts.size()[0], a.size()[1], ordinal(op, x)?);
    let of_choice = |index: usize, numel: i64| {
        address_or_null(op, choice.map(|choice| choice[index]), Kind::Int, numel as usize, gpu)
    };
    let adapter = [
        Argument::NULL,
        Argument::NULL,
        Argument::Count(0),
        Argument::Count(0),
        Argument::Count(0),
        of_choice(0, inner)?,
        of_choice(1, tokens)?,
    ];
    launched.queue(op, tile, &adapter)
}

fn product(
    op: &'static str,
    tile: ExpertTile,
    x: (&Tensor, i64),
    w: &Tensor,
    adapter: Option<ExpertAdapter<'_>>,
    routed: &RoutedTokens,
    out: (&Tensor, i64),
) -> Result<()> {
    let launched = Launch::new(op, tile, x, w, routed, out)?;
    let Some(ExpertAdapter { low, b }) = adapter else { return launched.queue(op, tile, &[]) };
    let (kind, gpu, rows) = (x.0.kind(), ordinal(op, x.0)?, routed.order.numel() as i64);
    let (&[experts, features, _], &[_, _, inner]) = (&w.size()[..], &b.size()[..]) else {
        return Err(invalid(op, "adapters [E, N, r]", b.size()));
    };
    let is_moved = kind == Kind::Float || (inner % 8 == 0 && [low, b].into_iter().all(moves_well));
    if !low.is_contiguous() || b.stride()[2] != 1 || !is_moved {
        let expected = "adapters whose inner products are a multiple of 8";
        return Err(invalid(op, expected, (low.size(), low.stride(), b.size(), b.stride())));
    }
    let adapter = [
        strided(op, low, kind, &[rows, inner], gpu)?,
        strided(op, b, kind, &[experts, features, inner], gpu)?,
        Argument::Count(b.stride()[0]),
        Argument::Count(b.stride()[1]),
        Argument::Count(inner),
        Argument::NULL,
        Argument::NULL,
    ];
    launched.queue(&format!("{op}_adapted"), tile, &adapter)
}

/// Whether rows of bfloat16 are copied 16 bytes at once.
fn moves_well(tensor: &Tensor) -> bool {
    is_aligned(tensor) && tensor.stride().iter().rev().skip(1).all(|stride| stride % 8 == 0)
}

/// A product's launch, without what adapters or biases add to it.
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
        let fits = (kind == Kind::BFloat16) == (tile != FLOAT)
            && tile.rows == routed.tile_rows
            && experts == routed.own.len() as i64
            && strides[2] == 1
            && [x, out].into_iter().all(Tensor::is_contiguous)
            && features % columns_of_one == 0
            && (kind == Kind::Float || (k % 8 == 0 && features % 8 == 0 && [x, w].into_iter().all(moves_well)));
        if !fits {
            let expected = "experts of this rank with rows of a multiple of 8 elements, sorted into tiles of this size";
            return Err(invalid(op, expected, (x.size(), w.size(), strides, tile)));
        }
        let choices = routed.experts.size()[1];
        let average = rows as usize / routed.num_experts;
        let arguments = vec![
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
        Ok(Self { arguments, blocks: blocks as u32, gpu })
    }

    /// Queues the kernel, with what it is told of adapters or biases.
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

    #[test]
    fn narrow_slices_are_copied_by_steps_that_fit() {
        assert_eq!(FEW.rows, SOME.rows, "both read what one router has sorted");
        for rows in [1, 4, 16] {
            assert_eq!(FEW.narrow(rows, 192), SOME); // Qwen3-30B-A3B's 768 over four ranks, 16 to 256 sequences
        }
        for (rows, width) in [(16, 768), (16, 384), (16, 96), (16, 64), (0, 192)] {
            assert_eq!(FEW.narrow(rows, width), FEW, "{rows} rows of {width}");
        }
        for tile in [SOME, MANY, SMALL, FLOAT] {
            assert_eq!(tile.narrow(16, 192), tile);
        }
    }

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
