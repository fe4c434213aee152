//! GEMMs with few rows and large weights, by a Hopper kernel that prefetches weights while the preceding kernel finishes.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::boxes::{lies_well, rows_boxes, step};
use super::fp8::ScaledRows;
use super::launch::{Argument, address_or_null, invalid, ordinal, queue, strided};
use crate::cuda::capability::Capability;
use crate::cuda::context::Context;
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

/// The names of the kernels for one type of operands.
macro_rules! names {
    ($kind:literal) => {
        names!($kind: "8" "16" "32" "64")
    };
    ($kind:literal: $($rows:literal)*) => {
        &[$(
            concat!("product", $kind, "_", $rows, "_64"),
            concat!("product", $kind, "_", $rows, "_128"),
            concat!("product", $kind, "_", $rows, "_192"),
            concat!("product", $kind, "_", $rows, "_256"),
            concat!("product", $kind, "_", $rows, "_320"),
            concat!("product_silu_mul", $kind, "_", $rows, "_64"),
            concat!("product_silu_mul", $kind, "_", $rows, "_128"),
            concat!("product_silu_mul", $kind, "_", $rows, "_192"),
            concat!("product_silu_mul", $kind, "_", $rows, "_256"),
            concat!("product_silu_mul", $kind, "_", $rows, "_320"),
        )*]
    };
}

pub(super) const SOURCE: &KernelSource = &nvrtc::PRODUCT;
pub(super) const FP8: &KernelSource = &nvrtc::PRODUCT_FP8;
pub(super) const INT8: &KernelSource = &nvrtc::PRODUCT_INT8;
pub(super) const NAMES: &[&str] = names!("");
pub(super) const FP8_NAMES: &[&str] = names!("_fp8");
pub(super) const INT8_NAMES: &[&str] = names!("_int8");

const THREADS: u32 = 160;
/// Bytes of shared memory: the pipeline stages, and 1024 for alignment.
const SHARED_BYTES: u32 = 209 << 10;
/// Rows of w per box that is copied.
const UNIT: usize = 64;
/// Numbers of rows, and of features per tile, for which kernels are compiled.
const ROWS: [usize; 4] = [8, 16, 32, MOST_ROWS];
const FEATURES: [usize; 5] = [64, 128, 192, 256, 320];
/// Most rows that these kernels support.
pub const MOST_ROWS: usize = 64;
/// The GPU that tilings are tuned for: its multiprocessors, and how many clusters of 1, 2 .. blocks it runs at once.
const PROCESSORS: usize = 132;
const CLUSTERS: [usize; 4] = [PROCESSORS, 66, 39, 30];
/// Minimum fraction of the GPU that a tiling must use. A tiling that qualifies is then timed against cuBLASLt, except in int8, which cuBLASLt does not
/// compute here.
const LEAST_FILL: f64 = 0.5;

/// How a weight is divided among blocks, determined by its shape: features per tile, and number of parts of K.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ProductTiling {
    features: usize,
    parts: usize,
}

impl ProductTiling {
    /// The tiling that fills the GPU best with all blocks running at once, if one fills it enough.
    fn of((num_features, k): (usize, usize), kind: Kind) -> Option<Self> {
        let steps = k.div_ceil(step(kind));
        let least = if kind == Kind::Int8 { 0.0 } else { LEAST_FILL };
        let fill = |cut: &Self| {
            let longest = (cut.features * steps.div_ceil(cut.parts)) as f64;
            (num_features * steps) as f64 / (PROCESSORS as f64 * longest)
        };
        let cuts = FEATURES.into_iter();
        let cuts = cuts.flat_map(|features| (1..=CLUSTERS.len()).map(move |parts| Self { features, parts }));
        let fits = |cut: &Self| num_features.div_ceil(cut.features) <= CLUSTERS[cut.parts - 1] && cut.parts <= steps;
        // Among equal tilings this takes the last: larger tiles read x less often.
        let best = cuts.filter(fits).max_by(|a, b| fill(a).total_cmp(&fill(b)));
        best.filter(|cut| fill(cut) >= least)
    }
}

/// Whether [`product`], or [`product_8bit`] for e4m3 and int8, supports this number of rows and this weight [N, K] with this bias, on their GPU. It
/// pays most if all GEMMs of a layer use it, because each prefetches its weights during the preceding one.
///
/// # Errors
/// [`crate::Error::Cuda`].
pub fn product_serves(rows: usize, w: &Tensor, bias: Option<&Tensor>) -> Result<bool> {
    let lies = lies_well(w) && bias.is_none_or(lies_well);
    Ok((1..=MOST_ROWS).contains(&rows) && lies && cut_of(w).is_some() && has_tuned_gpu(w)?)
}

/// Whether [`product`], or [`product_8bit`], supports these operands and this result: [`product_serves`] does, and their rows are aligned.
///
/// # Errors
/// [`crate::Error::Cuda`].
pub fn product_takes(x: &Tensor, w: &Tensor, bias: Option<&Tensor>, out: &Tensor) -> Result<bool> {
    Ok(cut_for((x, w), bias, out).is_some() && has_tuned_gpu(w)?)
}

fn has_tuned_gpu(w: &Tensor) -> Result<bool> {
    if !w.device().is_cuda() {
        return Ok(false);
    }
    let context = Context::retain(ordinal("product", w)?)?;
    Ok(context.compute_capability()? == Capability::HOPPER && context.num_processors()? == PROCESSORS)
}

/// A cache key that identifies the kernels and tilings, and so the speed of [`product`], for a compute capability.
pub(in crate::cuda) fn product_key(capability: Capability) -> Result<String> {
    Ok(format!("{FEATURES:?} {CLUSTERS:?} {LEAST_FILL} {}", nvrtc::key(SOURCE, capability)?))
}

/// Computes out = x w^T + bias for at most 64 rows, with float32 sums, rounded once. The kernel reads w while the preceding operation still runs:
/// that operation must not write w, and must itself have waited for any that does. The next operation may start before this one's inputs are ready,
/// so it must not read early what the operation before this one writes. A row's bits do not depend on the other rows.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit or that [`product_serves`] refuses; [`crate::Error::Cuda`].
pub fn product(
    x: &Tensor,            // [R, K] bf16
    w: &Tensor,            // [N, K] bf16
    bias: Option<&Tensor>, // [N] bf16
    out: &Tensor,          // [R, N] bf16
) -> Result<()> {
    run("product", (x, w), None, bias, (out, 1))
}

/// Computes out = x w^T + bias for at most 64 rows with e4m3 or int8 operands; each sum is multiplied by the scales of its rows and rounded once. The
/// conditions are those of [`product`].
///
/// # Errors
/// The errors of [`product`].
pub fn product_8bit(
    x: &ScaledRows,        // [R, K]
    w: &ScaledRows,        // [N, K]
    bias: Option<&Tensor>, // [N] bf16
    out: &Tensor,          // [R, N] bf16
) -> Result<()> {
    run_scaled("product", (x, w), bias, (out, 1))
}

/// Computes y = silu(gate) * up from x w^T with columns g0 u0 g1 u1 .., like [`product_silu_mul`], with e4m3 or int8 operands.
///
/// # Errors
/// The errors of [`product`].
pub fn product_silu_mul_8bit(
    x: &ScaledRows, // [R, K]
    w: &ScaledRows, // [2 F, K]
    y: &Tensor,     // [R, F] bf16
) -> Result<()> {
    run_scaled("product_silu_mul", (x, w), None, (y, 2))
}

/// Computes y = silu(gate) * up from x w^T with columns g0 u0 g1 u1 .., for at most 64 rows. Gate and up are rounded as if they were stored. The
/// conditions are those of [`product`].
///
/// # Errors
/// The errors of [`product`].
pub fn product_silu_mul(
    x: &Tensor, // [R, K] bf16
    w: &Tensor, // [2 F, K] bf16
    y: &Tensor, // [R, F] bf16
) -> Result<()> {
    run("product_silu_mul", (x, w), None, None, (y, 2))
}

fn run_scaled(
    op: &'static str,
    (x, w): (&ScaledRows, &ScaledRows),
    bias: Option<&Tensor>,
    (out, columns_of_one): (&Tensor, i64),
) -> Result<()> {
    run(op, (&x.values, &w.values), Some([&x.scales, &w.scales]), bias, (out, columns_of_one))
}

fn run(
    op: &'static str,
    (x, w): (&Tensor, &Tensor),
    scales: Option<[&Tensor; 2]>, // for e4m3 and int8
    bias: Option<&Tensor>,
    (out, columns_of_one): (&Tensor, i64),
) -> Result<()> {
    let (&[rows, k], &[features, _]) = (&x.size()[..], &w.size()[..]) else {
        return Err(invalid(op, "matrices", (x.size(), w.size())));
    };
    let expected = "bf16, fp8 or int8 matrices of a supported shape, aligned to 16 bytes (see product_serves)";
    let cut = cut_for((x, w), bias, out).ok_or_else(|| invalid(op, expected, (x.size(), w.size(), out.size())))?;
    let gpu = ordinal(op, x)?;
    let (source, kind, of_kind) = match (scales, w.kind()) {
        (None, _) => (SOURCE, Kind::BFloat16, ""),
        (Some(_), Kind::Int8) => (INT8, Kind::Int8, "_int8"),
        (Some(_), Kind::Float8e4m3fn) => (FP8, Kind::Float8e4m3fn, "_fp8"),
        (Some(_), other) => return Err(invalid(op, "e4m3 or int8", other)),
    };
    let [of_x, of_w] = [(0, rows), (1, features)].map(|(operand, len)| {
        address_or_null(op, scales.map(|scales| scales[operand]), Kind::Float, len as usize, gpu)
    });
    strided(op, x, kind, &[rows, k], gpu)?;
    strided(op, w, kind, &[features, k], gpu)?;
    let most = ROWS.into_iter().find(|&most| rows as usize <= most).expect("a tiling was found for these rows");
    let arguments = [
        rows_boxes(x, most)?,
        rows_boxes(w, UNIT)?,
        strided(op, out, Kind::BFloat16, &[rows, features / columns_of_one], gpu)?,
        address_or_null(op, bias, Kind::BFloat16, features as usize, gpu)?,
        Argument::Count(out.stride()[0]),
        Argument::Count(rows),
        Argument::Count(features),
        Argument::Count((k as usize).div_ceil(step(kind)) as i64),
        of_x?,
        of_w?,
    ];
    let grid = (features as usize).div_ceil(cut.features) * cut.parts;
    let shape = (grid as u32, THREADS, SHARED_BYTES);
    let name = format!("{op}{of_kind}_{most}_{}", cut.features);
    // SAFETY: the kernel's parameters in order; boxes beyond x and w read as zeros, and only rows and features of out are written.
    // Of what it reads, w, its scales and the bias alone are read before the work before has ended, which does not write them: the caller's
    // promise.
    unsafe { queue(source, &name, gpu, shape, (cut.parts as u32, true), &arguments) }
}

/// The tiling of a weight [N, K].
fn cut_of(w: &Tensor) -> Option<ProductTiling> {
    let &[features, k] = &w.size()[..] else { return None };
    ProductTiling::of((features as usize, k as usize), w.kind()).filter(|_| features % 8 == 0)
}

/// The tiling for operands; `None` if the kernels do not support their shapes, or their rows are not aligned.
fn cut_for((x, w): (&Tensor, &Tensor), bias: Option<&Tensor>, out: &Tensor) -> Option<ProductTiling> {
    let lie_well = [x, w, out].into_iter().chain(bias).all(lies_well);
    let rows = x.size().first().map_or(0, |&rows| rows as usize);
    cut_of(w).filter(|_| (1..=MOST_ROWS).contains(&rows) && x.dim() == 2 && lie_well)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernels::launch::assert_declared;

    #[test]
    fn rust_constants_match_the_kernel_source() {
        assert_declared(SOURCE, &[("UNIT", UNIT)]);
        let header = nvrtc::texts(SOURCE).find(|text| text.contains("define PRODUCTS_OF_ROWS")).unwrap();
        for rows in ROWS {
            assert!(header.contains(&format!("PRODUCTS_OF_ROWS(NAME, FORM, KIND, {rows})")), "{rows}");
        }
        for features in FEATURES {
            assert!(header.contains(&format!("PRODUCT(NAME, FORM, KIND, ROWS, {features})")), "{features}");
        }
        assert_eq!(NAMES.len(), 2 * ROWS.len() * FEATURES.len());
    }

    #[test]
    fn split_k_is_used_only_if_it_fills_the_gpu() {
        let of = |shape, kind| ProductTiling::of(shape, kind).map(|cut| (cut.features, cut.parts));
        let cut = |features, k| of((features, k), Kind::BFloat16);
        assert_eq!(of((64, 64), Kind::Int8), Some((64, 1)), "a block without a step would have no sums");
        assert_eq!(cut(896, 896), None);
        assert_eq!(cut(152_064, 3584), None);
        let shapes =
            [(4608, 3584), (3584, 3584), (37_888, 3584), (3584, 18_944), (6144, 4096), (4096, 14_336), (2048, 1536)];
        let of_fp8 = shapes.map(|shape| of(shape, Kind::Float8e4m3fn).unwrap());
        assert_eq!(of_fp8[..4], [(128, 3), (128, 4), (320, 1), (128, 4)]); // Qwen2.5-7B: the fastest in measurements
        let of_two_ranks = [(2304, 3584), (3584, 1792), (18_944, 3584), (3584, 9472)]; // with half of the bytes
        assert_eq!(
            of_two_ranks.map(|(features, k)| cut(features, k).unwrap()),
            [(64, 3), (128, 4), (320, 2), (128, 4)]
        );
    }
}
