//! 8-bit GEMMs with more rows than `product` supports, by a Hopper kernel with small tiles and split K, which cuBLASLt does not offer in FP8. In int8,
//! for which cuBLASLt is slow, it serves every number of rows.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::boxes::{lies_well, pairs_boxes, rows_boxes, step};
use super::fp8::ScaledRows;
use super::launch::{Argument, address, address_or_null, code_name, invalid, ordinal, queue, strided};
use crate::cuda::capability::Capability;
use crate::cuda::context::Context;
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::WIDE_PRODUCT;
pub(super) const NAMES: &[&str] = &[
    "wide_product_fp8_1_64",
    "wide_product_fp8_2_64",
    "wide_product_fp8_2_128",
    "wide_product_fp8_3_128",
    "wide_product_fp8_2_256",
    "wide_product_silu_mul_fp8_2_128",
    "wide_product_silu_mul_fp8_3_128",
    "wide_product_silu_mul_fp8_2_256",
    "wide_product_int8_1_64",
    "wide_product_int8_2_64",
    "wide_product_int8_2_128",
    "wide_product_int8_3_128",
    "wide_product_int8_2_256",
    "wide_product_silu_mul_int8_2_128",
    "wide_product_silu_mul_int8_3_128",
    "wide_product_silu_mul_int8_2_256",
];

const OP: &str = "wide_product";
const OP_SILU_MUL: &str = "wide_product_silu_mul";
/// Bytes of shared memory for the pipeline stages: if K is long or rows are few, and otherwise; and the alignment of the stages.
const STAGES_BYTES: usize = 224 << 10;
const STAGES_BYTES_OF_TILES: usize = 208 << 10;
const ALIGNMENT: usize = 1 << 10;
const STEP_BYTES: usize = 128; // of a row in a stage
const MOST_STAGES: usize = 32;
/// Fewest and most rows of e4m3 that this kernel supports; `product` computes GEMMs with fewer.
const FEWEST_ROWS: usize = 65;
const MOST_ROWS: usize = 256;
/// The GPU that tilings are tuned for: its multiprocessors, and how many clusters of 1, 2 .. blocks it runs at once.
const PROCESSORS: usize = 132;
const CLUSTERS: [usize; 4] = [PROCESSORS, 66, 39, 30];
/// Minimum fraction of the GPU that a tiling must use.
const LEAST_FILL: f64 = 0.5;
/// Number of rows above which a weight with a K shorter than `LONG` uses [`TILES`]. With more rows, adding the partial sums of a split K costs as
/// much as the split saves.
const MOST_ROWS_OF_WHOLE: usize = 128;
const LONG: usize = 8192;
/// Tilings for a short K, as (groups of 64 features, rows, parts of K); and those with SwiGLU.
const TILES: [(usize, usize, usize); 5] = [(1, 64, 1), (2, 64, 1), (3, 128, 1), (2, 128, 1), (2, 128, 2)];
const TILES_SILU_MUL: [(usize, usize, usize); 2] = [(3, 128, 1), (2, 128, 1)];
/// Tilings for other numbers of rows, as (groups of 64 features, rows); and those with SwiGLU.
const TILES_OF_ANY: [(usize, usize); 5] = [(1, 64), (2, 64), (2, 128), (3, 128), (2, 256)];
const TILES_OF_ANY_SILU_MUL: [(usize, usize); 3] = [(2, 128), (3, 128), (2, 256)];
/// Cost of adding two partial sums of a split K, expressed as bytes copied to shared memory in the same time.
const BYTES_OF_PARTS: usize = 10 << 20;

/// How a weight is divided among blocks, determined by its shape and by the number of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct WideTiling {
    groups: usize, // of 64 features per tile
    rows: usize,   // per tile
    parts: usize,  // of K
    stages_bytes: usize,
}

impl WideTiling {
    fn of(rows: usize, [features, k]: [usize; 2], has_silu: bool) -> Option<Self> {
        let unit = if has_silu { 16 } else { 8 };
        let is_served = (FEWEST_ROWS..=MOST_ROWS).contains(&rows) && features.is_multiple_of(unit);
        if !is_served || (has_silu && rows <= MOST_ROWS_OF_WHOLE) {
            return None;
        }
        let steps = k.div_ceil(STEP_BYTES);
        if rows <= MOST_ROWS_OF_WHOLE || k >= LONG {
            let rows = if rows <= MOST_ROWS_OF_WHOLE { MOST_ROWS_OF_WHOLE } else { MOST_ROWS };
            let parts = parts_of(features, steps).filter(|_| !has_silu)?;
            return Some(Self { groups: 2, rows, parts, stages_bytes: STAGES_BYTES });
        }
        let tiles: &[_] = if has_silu { &TILES_SILU_MUL } else { &TILES };
        let cuts = tiles.iter().map(|&(groups, rows, parts)| Self {
            groups,
            rows,
            parts,
            stages_bytes: STAGES_BYTES_OF_TILES,
        });
        let clusters = |cut: &Self| features.div_ceil(cut.features()) * MOST_ROWS.div_ceil(cut.rows);
        let fits = cuts.filter(|cut| clusters(cut) <= CLUSTERS[cut.parts - 1] && cut.parts <= steps);
        let fill = |cut: &Self| (clusters(cut) * cut.parts) as f64 / PROCESSORS as f64;
        let bytes = |cut: &Self| {
            clusters(cut) * cut.parts * steps.div_ceil(cut.parts) * cut.stage_bytes() + (cut.parts - 1) * BYTES_OF_PARTS
        };
        fits.filter(|cut| fill(cut) >= LEAST_FILL).min_by_key(bytes)
    }

    /// The tiling for any number of rows that copies the fewest bytes to a multiprocessor's shared memory, with each block's tile copied in turn.
    fn of_any(rows: usize, features: usize, has_silu: bool) -> Option<Self> {
        let tiles: &[_] = if has_silu { &TILES_OF_ANY_SILU_MUL } else { &TILES_OF_ANY };
        let cuts =
            tiles.iter().map(|&(groups, rows)| Self { groups, rows, parts: 1, stages_bytes: STAGES_BYTES_OF_TILES });
        let blocks = |cut: &Self| features.div_ceil(cut.features()) * rows.div_ceil(cut.rows);
        cuts.min_by_key(|cut| blocks(cut).div_ceil(PROCESSORS) * cut.stage_bytes())
            .filter(|_| features.is_multiple_of(16))
    }

    fn features(self) -> usize {
        64 * self.groups
    }

    fn stage_bytes(self) -> usize {
        (self.features() + self.rows) * STEP_BYTES
    }

    /// Number of pipeline stages: one per step of the block's part of K, as far as shared memory permits.
    fn stages(self, steps: usize) -> usize {
        MOST_STAGES.min(self.stages_bytes / self.stage_bytes()).min(steps.div_ceil(self.parts))
    }

    /// Bytes of shared memory of a block. With a split K, the partial sums later reuse the memory of the stages.
    fn shared_bytes(self, steps: usize) -> usize {
        let sums = if self.parts > 1 { self.features() * self.rows * size_of::<f32>() } else { 0 };
        (self.stages(steps) * self.stage_bytes()).max(sums) + ALIGNMENT
    }
}

/// Whether [`wide_product_8bit`] supports this number of rows, this weight [N, K] and this bias on its GPU.
///
/// # Errors
/// [`crate::Error::Cuda`].
pub fn wide_product_serves(rows: usize, w: &Tensor, bias: Option<&Tensor>) -> Result<bool> {
    Ok(bias.is_none_or(lies_well) && serves(rows, w, false)?)
}

/// Whether [`wide_product_silu_mul_8bit`] supports this number of rows and this weight [2 F, K] on its GPU.
///
/// # Errors
/// [`crate::Error::Cuda`].
pub fn wide_product_silu_mul_serves(rows: usize, w: &Tensor) -> Result<bool> {
    serves(rows, w, true)
}

fn serves(rows: usize, w: &Tensor, has_silu: bool) -> Result<bool> {
    let is_coded = matches!(w.kind(), Kind::Float8e4m3fn | Kind::Int8) && w.device().is_cuda() && lies_well(w);
    if !is_coded || cut_of(rows, w, has_silu).is_none() {
        return Ok(false);
    }
    let context = Context::retain(ordinal(OP, w)?)?;
    let is_tuned = w.kind() == Kind::Int8 || context.num_processors()? == PROCESSORS;
    Ok(is_tuned && context.compute_capability()? == Capability::HOPPER)
}

/// A cache key that identifies the kernels and tilings, and so the speed of [`wide_product_8bit`], for a compute capability.
pub(in crate::cuda) fn wide_product_key(capability: Capability) -> Result<String> {
    let cuts = (CLUSTERS, LEAST_FILL, MOST_ROWS_OF_WHOLE, LONG, TILES, TILES_SILU_MUL, BYTES_OF_PARTS);
    Ok(format!("{cuts:?} {:?} {}", (STAGES_BYTES, STAGES_BYTES_OF_TILES), nvrtc::key(SOURCE, capability)?))
}

/// Computes out = x w^T + bias for 65 to 256 rows with e4m3 operands, or for any number of rows with int8 operands; each sum is multiplied by the scales of its rows and rounded once. The kernel
/// reads w and the bias while the preceding operation still runs: that operation must not write them, and must itself have waited for any that does.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit or that [`wide_product_serves`] refuses; [`crate::Error::Cuda`].
pub fn wide_product_8bit(
    x: &ScaledRows,        // [R, K]
    w: &ScaledRows,        // [N, K]
    bias: Option<&Tensor>, // [N] bf16
    out: &Tensor,          // [R, N] bf16
) -> Result<()> {
    run(OP, (x, w), bias, out, false)
}

/// Computes y = silu(gate) * up from x w^T with columns g0 u0 g1 u1 .., for 129 to 256 rows with e4m3 operands or any number with int8, under the
/// conditions of [`wide_product_8bit`]. Gate and up are rounded as if they were stored.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit or that [`wide_product_silu_mul_serves`] refuses; [`crate::Error::Cuda`].
pub fn wide_product_silu_mul_8bit(
    x: &ScaledRows, // [R, K]
    w: &ScaledRows, // [2 F, K]
    y: &Tensor,     // [R, F] bf16
) -> Result<()> {
    run(OP_SILU_MUL, (x, w), None, y, true)
}

fn run(
    op: &'static str,
    (x, w): (&ScaledRows, &ScaledRows),
    bias: Option<&Tensor>,
    out: &Tensor,
    has_silu: bool,
) -> Result<()> {
    let (&[rows, k], &[features, _]) = (&x.values.size()[..], &w.values.size()[..]) else {
        return Err(invalid(op, "matrices", (x.values.size(), w.values.size())));
    };
    let gpu = ordinal(op, &x.values)?;
    let is_served =
        serves(rows as usize, &w.values, has_silu)? && [&x.values, out].into_iter().chain(bias).all(lies_well);
    let Some(cut) = cut_of(rows as usize, &w.values, has_silu).filter(|_| is_served) else {
        return Err(invalid(
            op,
            "fp8 or int8 matrices of a supported shape, aligned to 16 bytes (see wide_product_serves)",
            (x.values.size(), w.values.size(), out.size()),
        ));
    };
    let (code, kind) = (code_name(op, &w.values)?, w.values.kind());
    strided(op, &x.values, kind, &[rows, k], gpu)?;
    strided(op, &w.values, kind, &[features, k], gpu)?;
    let columns = if has_silu { features / 2 } else { features };
    let boxes_of_w = if has_silu { pairs_boxes } else { rows_boxes };
    let steps = (k as usize).div_ceil(step(kind));
    let row_tiles = (rows as usize).div_ceil(cut.rows);
    let arguments = [
        rows_boxes(&x.values, cut.rows)?,
        boxes_of_w(&w.values, cut.features())?,
        strided(op, out, Kind::BFloat16, &[rows, columns], gpu)?,
        address_or_null(op, bias, Kind::BFloat16, features as usize, gpu)?,
        Argument::Count(out.stride()[0]),
        Argument::Count(rows),
        Argument::Count(features),
        Argument::Count(steps as i64),
        address(op, &x.scales, Kind::Float, rows as usize, gpu)?,
        address(op, &w.scales, Kind::Float, features as usize, gpu)?,
        Argument::Count(cut.stages(steps) as i64),
        Argument::Count(row_tiles as i64),
    ];
    let blocks = (features as usize).div_ceil(cut.features()) * row_tiles * cut.parts;
    let shape = (blocks as u32, (128 * cut.groups + 32) as u32, cut.shared_bytes(steps) as u32);
    let name = format!("{op}_{code}_{}_{}", cut.groups, cut.rows);
    // SAFETY: the kernel's parameters in order; boxes beyond x and w read as zeros, and only rows and features of out are written.
    // Of what it reads, w, its scales and the bias alone are read before the work before has ended, which does not write them: the
    // caller's promise.
    unsafe { queue(SOURCE, &name, gpu, shape, (cut.parts as u32, true), &arguments) }
}

fn cut_of(rows: usize, w: &Tensor, has_silu: bool) -> Option<WideTiling> {
    let &[features, k] = &w.size()[..] else { return None };
    let [features, k] = [features as usize, k as usize];
    let (tuned, any) = (WideTiling::of(rows, [features, k], has_silu), WideTiling::of_any(rows, features, has_silu));
    match w.kind() {
        Kind::Int8 if k < LONG => any, // measured to be as fast or faster
        Kind::Int8 => tuned.or(any),
        _ => tuned,
    }
}

/// Number of parts of K that fill the GPU best when all blocks, with all rows and 128 features each, run at once; `None` if no number fills it
/// enough.
fn parts_of(features: usize, steps: usize) -> Option<usize> {
    const FEATURES: usize = 128;
    let tiles = features.div_ceil(FEATURES);
    let fits = (1..=CLUSTERS.len()).filter(|&parts| tiles <= CLUSTERS[parts - 1] && parts <= steps);
    let parts = fits.max()?;
    let fill = (features * steps) as f64 / (PROCESSORS * FEATURES * steps.div_ceil(parts)) as f64;
    (fill >= LEAST_FILL).then_some(parts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernels::launch::assert_declared;

    #[test]
    fn every_split_k_variant_has_a_compiled_kernel() {
        assert_declared(SOURCE, &[("MOST_STAGES", MOST_STAGES)]);
        let whole = [(2, MOST_ROWS_OF_WHOLE, 1), (2, MOST_ROWS, 1)];
        let plain = TILES.iter().chain(&whole).map(|&(groups, rows, _)| (OP, false, groups, rows));
        let silu_mul = TILES_SILU_MUL.iter().map(|&(groups, rows, _)| (OP_SILU_MUL, true, groups, rows));
        let of_any = TILES_OF_ANY.iter().map(|&(groups, rows)| (OP, false, groups, rows));
        let of_any_silu_mul = TILES_OF_ANY_SILU_MUL.iter().map(|&(groups, rows)| (OP_SILU_MUL, true, groups, rows));
        for (op, has_silu, groups, rows) in plain.chain(silu_mul).chain(of_any).chain(of_any_silu_mul) {
            assert!(SOURCE.text.contains(&format!("WIDE_PRODUCT({op}_##SUFFIX, KIND, {has_silu}, {groups}, {rows})")));
            assert!(
                ["fp8", "int8"].iter().all(|code| NAMES.contains(&format!("{op}_{code}_{groups}_{rows}").as_str()))
            );
        }
    }

    fn cut(rows: usize, features: usize, k: usize, has_silu: bool) -> Option<(usize, usize, usize)> {
        WideTiling::of(rows, [features, k], has_silu).map(|cut| (cut.groups, cut.rows, cut.parts))
    }

    #[test]
    fn row_tiles_cover_the_rows_or_the_kernel_declines() {
        let of = |k| [64, 65, 128, 129, 256, 257].map(|rows| cut(rows, 3584, k, false).map(|(_, most, _)| most));
        assert_eq!(of(18_944), [None, Some(128), Some(128), Some(256), Some(256), None]);
        assert_eq!(of(3584), [None, Some(128), Some(128), Some(128), Some(128), None]);
    }

    #[test]
    fn split_k_is_used_only_if_it_fills_the_gpu() {
        let few = |features, k| cut(128, features, k, false).map(|(_, _, parts)| parts);
        assert_eq!(few(3584, 18_944), Some(4)); // Qwen2.5-7B: down, output, QKV
        assert_eq!(few(3584, 3584), Some(4));
        assert_eq!(few(4608, 3584), Some(3));
        assert_eq!(few(4096, 14_336), Some(3)); // Llama-3.1-8B
        assert_eq!(few(37_888, 3584), None, "more tiles than blocks run at once");
        assert_eq!(few(896, 4864), None, "a fifth of the chip");
        assert_eq!(few(4096, 64), None, "one step, that a quarter of the chip takes");
        assert_eq!(few(3588, 18_944), None, "rows of out that are no multiple of 16 bytes");
    }

    /// The fastest tilings for Qwen2.5-7B's matrices and for quarters of them, as measured.
    #[test]
    fn split_k_of_short_sums_follows_measurements() {
        for rows in [129, 200, 256] {
            let of = |features, k| cut(rows, features, k, false);
            assert_eq!(of(4608, 3584), Some((2, 128, 1)));
            assert_eq!(of(3584, 3584), Some((2, 128, 2)));
            assert_eq!(of(1152, 3584), Some((1, 64, 1)));
            assert_eq!(of(3584, 896), Some((2, 64, 1)));
            assert_eq!(of(3584, 4736), Some((2, 128, 2)));
            assert_eq!(of(640, 896), None, "half of the chip lies idle");
            assert_eq!(cut(rows, 9472, 3584, true), Some((3, 128, 1)));
            assert_eq!(cut(rows, 37_888, 3584, true), None, "gate_up.cu's");
        }
        assert_eq!(cut(128, 9472, 3584, true), None);
    }

    /// The fastest tilings of int8 for Qwen2.5-7B's matrices, as measured on an H200.
    #[test]
    fn tilings_for_any_number_of_rows_follow_measurements() {
        let of = |rows, features| WideTiling::of_any(rows, features, false).map(|cut| (cut.groups, cut.rows));
        assert_eq!([512, 2048, 8192].map(|rows| of(rows, 4608)), [Some((3, 128)), Some((3, 128)), Some((2, 256))]);
        assert_eq!([128, 256, 512].map(|rows| of(rows, 3584)), [Some((1, 64)), Some((2, 64)), Some((2, 128))]);
        assert_eq!([2048, 8192].map(|rows| of(rows, 3584)), [Some((2, 256)); 2]);
        let of_silu = |rows| WideTiling::of_any(rows, 37_888, true).map(|cut| (cut.groups, cut.rows));
        assert_eq!([128, 300, 8192].map(of_silu), [Some((3, 128)), Some((3, 128)), Some((2, 256))]);
        assert_eq!(of(600, 3336), None, "features that are no multiple of 16");
    }

    #[test]
    fn pipeline_stages_and_sums_fit_into_shared_memory() {
        for (features, k) in [(4608, 3584), (3584, 3584), (1152, 3584), (3584, 896), (3584, 4736), (3584, 18_944)] {
            for rows in [128, 256] {
                let (Some(cut), steps) = (WideTiling::of(rows, [features, k], false), k.div_ceil(128)) else {
                    continue;
                };
                assert!(cut.stages(steps) >= 2.min(steps.div_ceil(cut.parts)), "{cut:?}");
                assert!(cut.shared_bytes(steps) <= STAGES_BYTES + ALIGNMENT, "{cut:?}");
            }
        }
    }
}
