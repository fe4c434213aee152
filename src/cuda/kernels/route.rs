//! The experts of a step's tokens, and tokens sorted by expert: all on the device, so that a step can be recorded.
//!
//! T tokens, E experts of the layer, k of them a token, D hidden.
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
const THREADS: u32 = 256;
/// Tokens of a cluster of blocks, which are the parts that the columns are cut into.
const ROWS: usize = 16;
const PARTS: usize = 8;
/// Words of a tile.
pub(super) const TILE_WORDS: usize = 4;
/// The fewest rows of a whole tile.
const LEAST_TILE_ROWS: usize = 32;
/// The most experts of a layer, and of a token.
pub const MOST_EXPERTS: usize = 512;
/// The most experts of a token.
pub const MOST_EXPERTS_PER_TOKEN: usize = 32;

/// Where the routing of a step's tokens goes, on one GPU.
#[derive(Debug)]
pub struct RoutedTokens {
    /// Experts of every choice, -1 for padding.
    pub experts: Tensor, // [T, k] i32
    /// Weights of the experts' outputs.
    pub weights: Tensor, // [T, k] f32
    /// Choices t k + rank sorted by expert.
    pub order: Tensor, // [T k] i32
    /// The number of tiles, then (expert, first row, rows) of each.
    pub tiles: Tensor, // [1 + most tiles, 4] i32
    /// Room for parts of logits, where blocks cannot read one another's shared memory.
    pub logits: Tensor, // flat, f32
    /// Zeros between launches: blocks that have come, and choices as they are made.
    pub counters: Tensor, // flat, i32
    /// The layer's experts.
    pub num_experts: usize,
    /// The experts that this rank has, all of them or a share.
    pub own: Range<usize>,
    /// Rows of a whole tile.
    pub tile_rows: usize,
}

/// How many elements the flat tensors of [`RoutedTokens`] have, and how many tiles there may be.
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
    /// The sizes for `tokens` tokens with `choices` of `experts` each.
    pub fn new(tokens: usize, experts: usize, choices: usize) -> Self {
        let rows = tokens * choices;
        Self {
            logits: PARTS * tokens * experts,
            counters: tokens.div_ceil(ROWS) + rows,
            tiles: 1 + rows.min(experts + rows / LEAST_TILE_ROWS),
        }
    }
}

/// The most groups of experts.
pub const MOST_EXPERT_GROUPS: usize = 32;

/// How a router's logits become the scores by which experts are chosen.
#[derive(Debug, Clone, Copy, Default)]
pub enum RouteScores<'a> {
    /// Softmax of logits.
    #[default]
    Softmax,
    /// Softmax of logits with these biases.
    Biased(&'a Tensor), // [E], like x
    /// Sigmoids, with a correction where experts are chosen.
    Sigmoid {
        /// The correction in three summands.
        parts: &'a Tensor, // [3 E], like x
        /// Groups of consecutive experts, each as good as its best two.
        num_groups: usize,
        /// The groups whose experts a token may choose.
        groups_per_tok: usize,
        /// Factor of the weights.
        scale: f64,
    },
}

impl RouteScores<'_> {
    /// The variant's name, and what its kernel is told behind all else.
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

/// How a layer routes.
#[derive(Debug, Clone, Copy, Default)]
pub struct RouteOptions<'a> {
    /// How logits become scores.
    pub scores: RouteScores<'a>,
    /// The weights of a token's experts are divided by their sum.
    pub normalised: bool,
    /// Slots of the tokens' keys, -1 for padding, which has no experts.
    pub slots: Option<&'a Tensor>, // [T] i32
    /// Experts to take in place of the router's own, -1 where there are none; of token t at t times `stride`.
    pub recorded: Option<&'a Tensor>, // flat, i16, from this layer's first on
    /// Where the experts are recorded, in the same layout.
    pub record: Option<&'a Tensor>, // flat, i16
    /// Choices of a token in all layers.
    pub stride: usize,
}

/// Routes tokens: logits in float32, their scores, the k highest of E, of equal ones the first; then sorts all choices of `to.own`
/// by expert. A token's result does not depend on the tokens beside it. The kernel reads w while the operation before it still runs: that one must
/// not write w, and must itself have waited for any that does. Allocates nothing.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit, or more experts than [`MOST_EXPERTS`]; [`crate::Error::Cuda`].
pub fn route(
    x: &Tensor, // [T, D] f32 or bf16
    w: &Tensor, // [E, D], like x
    to: &RoutedTokens,
    options: &RouteOptions,
) -> Result<()> {
    let (&[rows, dim], &[experts, _], &[_, choices]) = (&x.size()[..], &w.size()[..], &to.experts.size()[..]) else {
        return Err(invalid(OP, "matrices", (x.size(), w.size(), to.experts.size())));
    };
    let (gpu, kind) = (ordinal(OP, x)?, x.kind());
    let [tokens, hidden, num_experts, per_token] = [rows, dim, experts, choices].map(|size| size as usize);
    let sizes = RouteSizes::new(tokens, num_experts, per_token);
    let fits = tokens > 0
        && [x, w].into_iter().all(is_aligned)
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
        return Err(invalid(
            OP,
            format!(
                "tokens that begin at multiples of 16 bytes, at most {MOST_EXPERTS} experts and buffers for {sizes:?}"
            ),
            (x.size(), w.size(), to),
        ));
    }
    let span = options.stride * (tokens - 1) + per_token;
    let noted = |tensor: Option<&Tensor>| -> Result<Argument> {
        match tensor {
            Some(tensor) if tensor.numel() < span => Err(invalid(OP, format!("{span} experts"), tensor.size())),
            tensor => address_or_null(OP, tensor, Kind::Int16, tensor.map_or(0, Tensor::numel), gpu),
        }
    };
    let flat = |tensor: &Tensor, kind: Kind| address(OP, tensor, kind, tensor.numel(), gpu);
    let (variant, of_scores) = options.scores.arguments(kind, num_experts, gpu)?;
    let arguments = [
        address(OP, x, kind, tokens * hidden, gpu)?,
        address(OP, w, kind, num_experts * hidden, gpu)?,
        noted(options.recorded)?,
        address_or_null(OP, options.slots, Kind::Int, tokens, gpu)?,
        flat(&to.logits, Kind::Float)?,
        address(OP, &to.experts, Kind::Int, tokens * per_token, gpu)?,
        address(OP, &to.weights, Kind::Float, tokens * per_token, gpu)?,
        noted(options.record)?,
        address(OP, &to.order, Kind::Int, tokens * per_token, gpu)?,
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
    let blocks = tokens.div_ceil(ROWS) * PARTS;
    let name = format!("route_{variant}{}_{most}", kind_name(OP, x)?);
    let arguments = [&arguments[..], &of_scores].concat();
    // SAFETY: the kernel's parameters in order; all it writes has the room that was checked, and counters are zero before and after. The work
    // before does not write w, which is read before that has ended: the caller's promise.
    unsafe { launch_early(SOURCE, &name, gpu, (blocks as u32, THREADS, 0), &arguments) }
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
