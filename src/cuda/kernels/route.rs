//! Routes a step's tokens to experts and sorts them by expert, entirely on the GPU, so that a step can be captured in a CUDA graph.
//!
//! T tokens, E experts of the layer, k of them per token, D hidden.
#![allow(unsafe_code)]

use std::ops::Range;

use tch::{Kind, Tensor};

use super::launch::{Argument, address, address_or_null, invalid, is_aligned, kind_name, launch_early, ordinal};
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::ROUTE;
pub(super) const NAMES: &[&str] = &[
    "route_bf16_128",
    "route_bf16_512",
    "route_f32_128",
    "route_f32_512",
    "route_biased_bf16_128",
    "route_biased_bf16_512",
    "route_biased_f32_128",
    "route_biased_f32_512",
    "route_sigmoid_bf16_128",
    "route_sigmoid_bf16_512",
    "route_sigmoid_f32_128",
    "route_sigmoid_f32_512",
];

const OP: &str = "route";
pub(super) const THREADS: u32 = 256;
/// Tokens per cluster of blocks, and number of blocks per cluster, which split the columns.
const ROWS: usize = 16;
pub(super) const PARTS: usize = 8;
/// 32-bit words of a tile.
pub(super) const TILE_WORDS: usize = 4;
/// Fewest rows of a full tile.
const LEAST_TILE_ROWS: usize = 32;
/// Largest number of experts in a layer.
pub const MOST_EXPERTS: usize = 512;
/// Largest number of experts per token.
pub const MOST_EXPERTS_PER_TOKEN: usize = 32;

/// Buffers for the routing of a step's tokens on one GPU.
#[derive(Debug)]
pub struct RoutedTokens {
    /// The expert of every choice, -1 for padding.
    pub experts: Tensor, // [T, k] i32
    /// Weight of every choice's output.
    pub weights: Tensor, // [T, k] f32
    /// Choices (t k + rank), sorted by expert.
    pub order: Tensor, // [T k] i32
    /// The number of tiles, then for each tile (expert, first row, number of rows).
    pub tiles: Tensor, // [1 + most tiles, 4] i32
    /// Scratch space for partial logits, on GPUs without distributed shared memory.
    pub logits: Tensor, // flat, f32
    /// Counters of arrived blocks and of choices; zero between launches.
    pub counters: Tensor, // flat, i32
    /// Number of experts in the layer.
    pub num_experts: usize,
    /// Indices of the experts on this rank.
    pub own: Range<usize>,
    /// Rows of a full tile.
    pub tile_rows: usize,
}

/// Lengths of the flat buffers of [`RoutedTokens`], and the maximum number of tiles.
#[derive(Debug, Clone, Copy)]
pub struct RouteSizes {
    /// Length of `logits`.
    pub logits: usize,
    /// Length of `counters`.
    pub counters: usize,
    /// Rows of `tiles`.
    pub tiles: usize,
}

impl RouteSizes {
    /// The sizes for `tokens` tokens that choose `choices` of `experts` experts each.
    pub fn new(tokens: usize, experts: usize, choices: usize) -> Self {
        let rows = tokens * choices;
        Self {
            logits: PARTS * tokens * experts,
            counters: tokens.div_ceil(ROWS) + rows,
            tiles: 1 + rows.min(experts + rows / LEAST_TILE_ROWS),
        }
    }
}

/// Largest number of expert groups.
pub const MOST_EXPERT_GROUPS: usize = 32;

/// How a router's logits become the scores that select experts.
#[derive(Debug, Clone, Copy, Default)]
pub enum RouteScores<'a> {
    /// Softmax of the logits.
    #[default]
    Softmax,
    /// Softmax of the logits plus these biases.
    Biased(&'a Tensor), // [E], like x
    /// Sigmoids of the logits, plus a correction that only affects the selection.
    Sigmoid {
        /// The correction, stored as three summands.
        parts: &'a Tensor, // [3 E], like x
        /// Number of groups of consecutive experts. A group is scored by its two best experts.
        num_groups: usize,
        /// Number of groups from which a token may choose experts.
        groups_per_tok: usize,
        /// Multiplier of the routing weights.
        scale: f64,
    },
}

impl RouteScores<'_> {
    /// The kernel's name suffix, and the additional arguments of this variant.
    fn arguments(self, kind: Kind, experts: usize, gpu: usize) -> Result<(&'static str, Vec<Argument>)> {
        Ok(match self {
            Self::Softmax => ("", Vec::new()),
            Self::Biased(bias) => ("biased_", vec![address(OP, bias, kind, experts, gpu)?]),
            Self::Sigmoid { parts, num_groups, groups_per_tok, scale } => {
                let fits = (1..=MOST_EXPERT_GROUPS).contains(&num_groups)
                    && experts.is_multiple_of(num_groups)
                    && (1..=num_groups).contains(&groups_per_tok);
                if !fits {
                    let expected = format!("groups of {experts} experts, at most {MOST_EXPERT_GROUPS}");
                    return Err(invalid(OP, expected, (num_groups, groups_per_tok)));
                }
                let groups = [num_groups, groups_per_tok].map(|count| Argument::Count(count as i64));
                let numbers = address(OP, parts, kind, 3 * experts, gpu)?;
                ("sigmoid_", vec![numbers, groups[0], groups[1], Argument::Float(scale as f32)])
            }
        })
    }
}

/// How a layer routes tokens.
#[derive(Debug, Clone, Copy, Default)]
pub struct RouteOptions<'a> {
    /// How logits become scores.
    pub scores: RouteScores<'a>,
    /// The weights of a token's experts are divided by their sum.
    pub normalised: bool,
    /// Cache slots of the tokens' keys; -1 for padding, which is not routed.
    pub slots: Option<&'a Tensor>, // [T] i32
    /// Experts to use instead of the router's choice (-1: none). Those of token t start at t times `stride`.
    pub recorded: Option<&'a Tensor>, // flat, i16, from this layer's first on
    /// Buffer in which the chosen experts are recorded, in the same layout.
    pub record: Option<&'a Tensor>, // flat, i16
    /// Number of choices per token in all layers together.
    pub stride: usize,
}

/// Routes tokens: computes logits in float32 and their scores, and selects the k best of E experts (ties go to the lower index). Then sorts all
/// choices within `to.own` by expert. A token's result does not depend on other tokens. The kernel reads w while the preceding operation still runs:
/// that operation must not write w, and must itself have waited for any that does. Allocates nothing.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit, or more experts than [`MOST_EXPERTS`]; [`crate::Error::Cuda`].
pub fn route(
    x: &Tensor, // [T, D] f32 or bf16
    w: &Tensor, // [E, D], like x
    to: &RoutedTokens,
    options: &RouteOptions,
) -> Result<()> {
    let (gpu, kind) = (ordinal(OP, x)?, x.kind());
    let &[rows, dim] = &x.size()[..] else { return Err(invalid(OP, "a matrix", x.size())) };
    if !is_aligned(x) {
        return Err(invalid(OP, "rows that begin at multiples of 16 bytes", x.data_ptr()));
    }
    let launch = RouteLaunch::new(OP, [rows, dim], (w, kind), to, options, gpu)?;
    let x = address(OP, x, kind, (rows * dim) as usize, gpu)?;
    let name = format!("route_{}{}_{}", launch.variant, kind_name(OP, w)?, launch.most);
    let arguments = [&[x][..], &launch.arguments].concat();
    // SAFETY: the kernel's parameters in order; all it writes has the room that was checked, and counters are zero before and after. The work
    // before does not write w, which is read before that has ended: the caller's promise.
    unsafe { launch_early(SOURCE, &name, gpu, (launch.blocks, THREADS, 0), &arguments) }
}

/// A router's launch, except for its rows.
pub(super) struct RouteLaunch {
    /// The part of the kernel's name for its scores.
    variant: &'static str,
    /// Most experts of the kernel.
    pub(super) most: usize,
    pub(super) blocks: u32,
    /// All arguments after the rows.
    pub(super) arguments: Vec<Argument>,
}

impl RouteLaunch {
    /// Checks everything but the rows [T, D].
    pub(super) fn new(
        op: &'static str,
        [rows, dim]: [i64; 2],
        (w, kind): (&Tensor, Kind), // [E, D]
        to: &RoutedTokens,
        options: &RouteOptions,
        gpu: usize,
    ) -> Result<Self> {
        let (&[experts, _], &[_, choices]) = (&w.size()[..], &to.experts.size()[..]) else {
            return Err(invalid(op, "matrices", (w.size(), to.experts.size())));
        };
        let [tokens, hidden, num_experts, per_token] = [rows, dim, experts, choices].map(|size| size as usize);
        let sizes = RouteSizes::new(tokens, num_experts, per_token);
        let fits = tokens > 0
            && is_aligned(w)
            && num_experts <= MOST_EXPERTS
            && (1..=MOST_EXPERTS_PER_TOKEN.min(num_experts)).contains(&per_token)
            && hidden.is_multiple_of(8)
            && to.num_experts == num_experts
            && to.own.end <= num_experts
            && to.tile_rows >= LEAST_TILE_ROWS
            && to.logits.numel() >= sizes.logits
            && to.counters.numel() >= sizes.counters
            && to.tiles.numel() >= sizes.tiles * TILE_WORDS;
        if !fits {
            let expected = format!(
                "weights that begin at a multiple of 16 bytes, at most {MOST_EXPERTS} experts and buffers for {sizes:?}"
            );
            return Err(invalid(op, expected, (w.size(), to)));
        }
        let span = options.stride * (tokens - 1) + per_token;
        let noted = |tensor: Option<&Tensor>| -> Result<Argument> {
            match tensor {
                Some(tensor) if tensor.numel() < span => Err(invalid(op, format!("{span} experts"), tensor.size())),
                tensor => address_or_null(op, tensor, Kind::Int16, tensor.map_or(0, Tensor::numel), gpu),
            }
        };
        let flat = |tensor: &Tensor, kind: Kind| address(op, tensor, kind, tensor.numel(), gpu);
        let (variant, of_scores) = options.scores.arguments(kind, num_experts, gpu)?;
        let arguments = [
            address(op, w, kind, num_experts * hidden, gpu)?,
            noted(options.recorded)?,
            address_or_null(op, options.slots, Kind::Int, tokens, gpu)?,
            flat(&to.logits, Kind::Float)?,
            address(op, &to.experts, Kind::Int, tokens * per_token, gpu)?,
            address(op, &to.weights, Kind::Float, tokens * per_token, gpu)?,
            noted(options.record)?,
            address(op, &to.order, Kind::Int, tokens * per_token, gpu)?,
            flat(&to.tiles, Kind::Int)?,
            flat(&to.counters, Kind::Int)?,
            Argument::Count(options.stride as i64),
            Argument::Count(rows),
            Argument::Count(dim),
            Argument::Count(experts),
            Argument::Count(choices),
            Argument::Count(to.own.start as i64),
            Argument::Count(to.own.len() as i64),
            Argument::Count(to.tile_rows as i64),
            Argument::Count(options.normalised.into()),
        ];
        let most = if num_experts <= 128 { 128 } else { MOST_EXPERTS };
        let blocks = (tokens.div_ceil(ROWS) * PARTS) as u32;
        Ok(Self { variant, most, blocks, arguments: [&arguments[..], &of_scores].concat() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernels::launch::assert_declared;

    #[test]
    fn rust_constants_match_the_kernel_source() {
        assert_declared(SOURCE, &[("THREADS", THREADS as usize), ("ROWS", ROWS), ("PARTS", PARTS)]);
    }

    #[test]
    fn buffers_hold_every_tile_of_routed_rows() {
        let tiles = |tokens, experts, choices| RouteSizes::new(tokens, experts, choices).tiles;
        assert_eq!(tiles(1, 128, 8), 1 + 8); // one row each
        assert_eq!(tiles(256, 128, 8), 1 + 128 + 64); // each expert's last tile may be almost empty
    }
}
