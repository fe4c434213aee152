//! Engine kernels of a gated delta net, for one step between its projections.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::launch::{Argument, address, invalid, is_aligned, kind_name, launch_early, ordinal, strided};
use crate::cuda::Context;
use crate::cuda::capability::Capability;
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::DELTA_STEP;
/// Kernel for steps with one token per sequence on Hopper, with the head sizes of published models.
pub(super) const DECODE: &KernelSource = &nvrtc::DELTA_DECODE;
pub(super) const DECODE_NAMES: &[&str] = &["delta_decode_f32", "delta_decode_bf16"];
pub(super) const NAMES: &[&str] = &[
    "delta_step_f32_f32_any",
    "delta_step_f32_bf16_any",
    "delta_step_bf16_f32_any",
    "delta_step_bf16_bf16_any",
    "delta_step_bf16_f32_128",
    "delta_step_bf16_bf16_128",
    "delta_runs_f32_f32_any",
    "delta_runs_f32_bf16_any",
    "delta_runs_bf16_f32_any",
    "delta_runs_bf16_bf16_any",
    "delta_runs_bf16_f32_128",
    "delta_runs_bf16_bf16_128",
    "delta_tails_f32",
    "delta_tails_bf16",
];

/// Largest width of a key and of a value, and largest convolution width.
pub(super) const MOST_DELTA_DIM: usize = 128;
pub(super) const MOST_CONV_WIDTH: usize = 4;
/// Columns of a value per warp; elements that a lane moves at once; number of these that a lane has of a state.
const COLUMNS: usize = 16;
const PACK: usize = 4;
const QUADS: usize = MOST_DELTA_DIM / 8;
/// Maximum number of threads per block.
const THREADS: usize = 256;
/// Blocks that one multiprocessor can run at once, limited by registers.
const BLOCKS_PER_PROCESSOR: usize = 2;
/// Configuration of `delta_decode`: threads, shared memory in addition to a state, and blocks per multiprocessor for float32 and for bfloat16 states.
const DECODE_THREADS: usize = 160;
const DECODE_SMALL_BYTES: usize = 3200;
const DECODE_BLOCKS: [usize; 2] = [3, 6];

/// Numbers and widths of the heads of a gated delta net.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaHeads {
    /// Number of query and key heads; it divides the number of value heads.
    pub num_key_heads: usize,
    /// Number of value heads, each of which has a state.
    pub num_value_heads: usize,
    /// Width of a query and of a key head.
    pub key_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
    /// Number of tokens that the convolution spans.
    pub conv_width: usize,
}

/// Projections of the tokens; for kernels, rows may have any stride. C = 2 Hk dk + H dv channels.
#[derive(Debug)]
pub struct DeltaRows {
    /// Queries of all heads, then keys, then values, before the convolution.
    pub qkv: Tensor, // [T, C]
    /// The gate of the output norm.
    pub z: Tensor, // [T, H dv]
    /// The write strengths, before their sigmoid.
    pub b: Tensor, // [T, H]
    /// The decays of the state, before their softplus.
    pub a: Tensor, // [T, H]
}

/// Parameters other than matrices, or the sums to which their gradients are added.
#[derive(Debug)]
pub struct DeltaWeights {
    /// Weights of the convolution.
    pub conv: Tensor, // [C, W]
    /// Logarithm of the maximum decay rate (`A_log`).
    pub a_log: Tensor, // [H]
    /// Bias added to `a` (`dt_bias`).
    pub dt_bias: Tensor, // [H]
    /// Weights of the gated norm.
    pub norm: Tensor, // [dv]
}

/// Parameters of a delta net other than tensors.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeltaOptions {
    /// The heads on this rank.
    pub heads: DeltaHeads,
    /// Epsilon added to the mean square in the gated norm.
    pub eps: f64,
}

/// Pages with the sequences' states. A page's content is ignored before its sequence's first token.
#[derive(Debug, Clone, Copy)]
pub struct DeltaPages<'a> {
    /// Rows before the convolution: that of position p in slot p % slots, of which there are at least W.
    pub rows: &'a Tensor, // [pages, slots, C], of the projections' kind
    /// States of the delta rule, which is computed in float32.
    pub states: &'a Tensor, // [pages, H, dk, dv] f32 or bf16
}

/// Which sequence each token of a step belongs to; tokens of a sequence are consecutive.
#[derive(Debug, Clone, Copy)]
pub struct DeltaRuns<'a> {
    /// The page of each sequence; -1 for padding, whose outputs are 0.
    pub pages: &'a Tensor, // [B] i32
    /// Index of each sequence's first token, followed by the number of tokens; `None` if each sequence has one token.
    pub bounds: Option<&'a Tensor>, // [B + 1] i32
    /// Position of each token in its sequence; a sequence starts at 0.
    pub positions: &'a Tensor, // [T] i32
}

/// Whether the kernel supports such heads.
pub fn delta_step_serves(heads: DeltaHeads) -> bool {
    let DeltaHeads { num_key_heads, num_value_heads, key_dim, value_dim, conv_width } = heads;
    num_key_heads > 0
        && num_value_heads.is_multiple_of(num_key_heads)
        && (1..=MOST_DELTA_DIM).contains(&key_dim)
        && (1..=MOST_DELTA_DIM).contains(&value_dim)
        && value_dim.is_multiple_of(PACK)
        && (1..=MOST_CONV_WIDTH).contains(&conv_width)
}

/// The sizes that [`delta_step_serves`] accepts, as text.
pub fn served_delta_sizes() -> String {
    format!(
        "linear_key_head_dim at most {MOST_DELTA_DIM}, linear_value_head_dim a multiple of {PACK} up to {MOST_DELTA_DIM}, \
         linear_conv_kernel_dim at most {MOST_CONV_WIDTH}"
    )
}

/// Computes out = gated_norm(delta_rule(convolution(qkv), a, b), z) and updates the states. A token's bits depend neither on how its sequence is
/// split into steps nor on other sequences. Allocates nothing.
///
/// If each sequence has one token, pages, positions and states are read while the preceding kernel may still run. That kernel must not write them, so
/// two steps of one layer must not follow each other directly.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit or unsupported heads; [`crate::Error::Cuda`].
pub fn delta_step(
    tokens: &DeltaRows,
    weights: &DeltaWeights,
    options: DeltaOptions,
    pages: DeltaPages,
    runs: DeltaRuns,
    out: &mut Tensor, // [T, H dv]
) -> Result<()> {
    const OP: &str = "delta_step";
    let heads = options.heads;
    let (num_tokens, num_runs) = (runs.positions.numel(), runs.pages.numel());
    if runs.bounds.is_none() && num_tokens != num_runs {
        return Err(invalid(OP, format!("one token for each of {num_runs} sequences"), num_tokens));
    }
    let layer = DeltaLayer { tokens, weights, options, pages, num_tokens };
    let LayerArguments { gpu, mut arguments, is_known, kinds } =
        layer.arguments(OP, runs.pages, (runs.positions, num_tokens), out)?;
    let parts = num_runs * heads.num_value_heads;
    let Some(bounds) = runs.bounds else {
        arguments.push(count(num_runs));
        let context = Context::retain(gpu)?;
        let processors = context.num_processors()?;
        let element_bytes = pages.states.kind().elt_size_in_bytes();
        if is_known && context.compute_capability()? == Capability::HOPPER {
            let per_processor = DECODE_BLOCKS[usize::from(pages.states.kind() == Kind::BFloat16)];
            let state_bytes = heads.key_dim * heads.value_dim * element_bytes;
            let shape = (
                parts.min(per_processor * processors) as u32,
                DECODE_THREADS as u32,
                (state_bytes + DECODE_SMALL_BYTES) as u32,
            );
            let name = format!("delta_decode_{}", kind_name(OP, pages.states)?);
            // SAFETY: as below; the shared memory that the kernel divides.
            return unsafe { launch_early(DECODE, &name, gpu, shape, &arguments) };
        }
        let blocks = parts.min(BLOCKS_PER_PROCESSOR * processors);
        let shape = (blocks as u32, threads(heads), state_bytes(heads, pages.states.kind()));
        // SAFETY: the kernel's parameters in order; pages and positions are the caller's. The kernel before writes none of them and no
        // states, which are read while it may still run.
        return unsafe { launch_early(SOURCE, &format!("delta_step_{kinds}"), gpu, shape, &arguments) };
    };
    let bounds = address(OP, bounds, Kind::Int, num_runs + 1, gpu)?;
    let [qkv, .., tails, _, own_pages, positions, _, _, _, _, _, _, _, slots] = arguments[..] else {
        unreachable!("a layer's arguments")
    };
    let qkv_row = arguments[4];
    arguments.push(bounds);
    // SAFETY: the kernel's parameters in order; pages, bounds and positions are the caller's.
    unsafe {
        launch_early(SOURCE, &format!("delta_runs_{kinds}"), gpu, (parts as u32, threads(heads), 0), &arguments)?;
    }
    let (channels, width) = (heads.channels(), heads.conv_width);
    let arguments = [qkv, qkv_row, tails, own_pages, bounds, positions, count(channels), count(width), slots];
    let shape = ((num_runs * channels.div_ceil(THREADS)) as u32, THREADS as u32, 0);
    // SAFETY: as above.
    unsafe { launch_early(SOURCE, &format!("delta_tails_{}", kind_name(OP, &tokens.qkv)?), gpu, shape, &arguments) }
}

pub(super) fn count(number: usize) -> Argument {
    Argument::Count(number as i64)
}

/// Threads of a block that has a head's state in registers.
pub(super) fn threads(heads: DeltaHeads) -> u32 {
    32 * heads.value_dim.div_ceil(COLUMNS) as u32
}

/// Shared memory of the quads of such a block.
pub(super) fn state_bytes(heads: DeltaHeads, kind: Kind) -> u32 {
    threads(heads) * (QUADS * PACK * kind.elt_size_in_bytes()) as u32
}

/// A layer's part of a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct DeltaLayer<'a> {
    pub(super) tokens: &'a DeltaRows,
    pub(super) weights: &'a DeltaWeights,
    pub(super) options: DeltaOptions,
    pub(super) pages: DeltaPages<'a>,
    pub(super) num_tokens: usize,
}

/// The first arguments of all kernels of a gated delta net.
#[derive(Debug)]
pub(super) struct LayerArguments {
    pub(super) gpu: usize,
    pub(super) arguments: Vec<Argument>,
    /// The widths are those that the kernels know.
    pub(super) is_known: bool,
    /// Kinds and widths in the kernels' names.
    pub(super) kinds: String,
}

impl DeltaLayer<'_> {
    /// Checks the tensors.
    pub(super) fn arguments(
        &self,
        op: &'static str,
        own_pages: &Tensor,                           // [B] i32
        (positions, num_positions): (&Tensor, usize), // i32
        out: &Tensor,                                 // [T, H dv]
    ) -> Result<LayerArguments> {
        let Self { tokens, weights, options: DeltaOptions { heads, eps }, pages, num_tokens } = *self;
        if !delta_step_serves(heads) {
            return Err(invalid(op, served_delta_sizes(), heads));
        }
        let DeltaHeads { num_key_heads, num_value_heads, key_dim, value_dim, conv_width } = heads;
        let (gpu, kind) = (ordinal(op, &tokens.qkv)?, tokens.qkv.kind());
        let (channels, values) = (heads.channels(), num_value_heads * value_dim);
        let rows = |tensor: &Tensor, columns: usize| {
            let at = strided(op, tensor, kind, &[num_tokens as i64, columns as i64], gpu)?;
            match tensor.stride()[..] {
                [row, 1] => Ok((at, Argument::Count(row))),
                _ => Err(invalid(op, "contiguous rows", tensor.stride())),
            }
        };
        let [(qkv, qkv_row), (z, z_row), (b, b_row), (a, a_row)] = [
            rows(&tokens.qkv, channels)?,
            rows(&tokens.z, values)?,
            rows(&tokens.b, num_value_heads)?,
            rows(&tokens.a, num_value_heads)?,
        ];
        let num_pages = pages.states.size().first().copied().unwrap_or(0) as usize;
        let slots = pages.rows.size().get(1).map_or(0, |&slots| slots as usize);
        if slots < conv_width {
            return Err(invalid(op, format!("pages of at least {conv_width} rows"), pages.rows.size()));
        }
        let states_kind = kind_name(op, pages.states)?;
        let state_len = num_pages * num_value_heads * key_dim * value_dim;
        let states = address(op, pages.states, pages.states.kind(), state_len, gpu)?;
        if !is_aligned(pages.states) {
            return Err(invalid(op, "states at addresses that are multiples of 16 bytes", pages.states.data_ptr()));
        }
        let arguments = vec![
            qkv,
            z,
            b,
            a,
            qkv_row,
            z_row,
            b_row,
            a_row,
            address(op, &weights.conv, kind, channels * conv_width, gpu)?,
            address(op, &weights.a_log, kind, num_value_heads, gpu)?,
            address(op, &weights.dt_bias, kind, num_value_heads, gpu)?,
            address(op, &weights.norm, kind, value_dim, gpu)?,
            address(op, pages.rows, kind, num_pages * slots * channels, gpu)?,
            states,
            address(op, own_pages, Kind::Int, own_pages.numel(), gpu)?,
            address(op, positions, Kind::Int, num_positions, gpu)?,
            address(op, out, kind, num_tokens * values, gpu)?,
            count(num_key_heads),
            count(num_value_heads),
            count(key_dim),
            count(value_dim),
            count(conv_width),
            Argument::Float(eps as f32),
            count(slots),
        ];
        let kind = kind_name(op, &tokens.qkv)?;
        let is_known = kind == "bf16" && [key_dim, value_dim] == [MOST_DELTA_DIM; 2] && conv_width == MOST_CONV_WIDTH;
        let packed = [&tokens.qkv, &tokens.z].iter().all(|rows| rows.stride()[0] % 8 == 0)
            && [&tokens.qkv, &tokens.z, &weights.conv, pages.rows].into_iter().all(is_aligned);
        if is_known && !packed {
            return Err(invalid(
                op,
                "rows at addresses that are multiples of 16 bytes",
                (tokens.qkv.stride(), tokens.z.stride()),
            ));
        }
        let kinds = format!("{kind}_{states_kind}_{}", if is_known { "128" } else { "any" });
        Ok(LayerArguments { gpu, arguments, is_known, kinds })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernels::launch::assert_declared;
    use crate::cuda::nvrtc::texts;

    #[test]
    fn rust_constants_match_the_kernel_source() {
        let constants =
            [("MOST_DIM", MOST_DELTA_DIM), ("MOST_WIDTH", MOST_CONV_WIDTH), ("COLUMNS", COLUMNS), ("THREADS", THREADS)];
        assert_declared(SOURCE, &constants);
        assert!(texts(SOURCE).any(|text| text.contains("constexpr int QUADS = MOST_DIM / 8;")));
        let constants = [
            ("DIM", MOST_DELTA_DIM),
            ("WIDTH", MOST_CONV_WIDTH),
            ("THREADS", DECODE_THREADS),
            ("SMALL_BYTES", DECODE_SMALL_BYTES),
            ("BLOCKS_F32", DECODE_BLOCKS[0]),
            ("BLOCKS_BF16", DECODE_BLOCKS[1]),
        ];
        assert_declared(DECODE, &constants);
    }

    #[test]
    fn head_sizes_of_known_models_are_supported() {
        let heads = |num_key_heads, num_value_heads, key_dim, value_dim, conv_width| DeltaHeads {
            num_key_heads,
            num_value_heads,
            key_dim,
            value_dim,
            conv_width,
        };
        for (heads, is_served) in [
            (heads(16, 32, 128, 128, 4), true),
            (heads(16, 16, 128, 128, 4), true),
            (heads(2, 4, 6, 4, 3), true),
            (heads(2, 3, 64, 64, 4), false),
            (heads(2, 4, 256, 64, 4), false),
            (heads(2, 4, 64, 6, 4), false),
            (heads(2, 4, 64, 64, 5), false),
        ] {
            assert_eq!(delta_step_serves(heads), is_served, "{heads:?}");
        }
    }
}
