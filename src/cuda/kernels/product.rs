//! GEMMs with few rows and large weights, by a Hopper kernel that prefetches weights while the preceding kernel finishes.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::boxes::{lies_well, rows_boxes, step};
use super::fp8::ScaledRows;
use super::launch::{Argument, address, address_or_null, code_name, invalid, ordinal, queue, strided};
use super::narrow_product;
use crate::cuda::capability::Capability;
use crate::cuda::context::Context;
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::PRODUCT;
pub(super) const NAMES: &[&str] = &[
    "product_64",
    "product_80",
    "product_128",
    "product_288",
    "product_silu_mul_64",
    "product_silu_mul_80",
    "product_silu_mul_128",
    "product_silu_mul_288",
    "product_fp8_64",
    "product_fp8_80",
    "product_fp8_128",
    "product_fp8_288",
    "product_silu_mul_fp8_64",
    "product_silu_mul_fp8_80",
    "product_silu_mul_fp8_128",
    "product_silu_mul_fp8_288",
    "product_int8_64",
    "product_int8_96",
    "product_int8_128",
    "product_int8_288",
    "product_silu_mul_int8_64",
    "product_silu_mul_int8_96",
    "product_silu_mul_int8_128",
    "product_silu_mul_int8_288",
];

const THREADS: u32 = 288;
/// Bytes of shared memory for the pipeline stages, including 1024 for alignment.
const STAGES_BYTES: u32 = 226 << 10;
const MOST_ROWS: usize = 64;
/// Numbers of features per block for which kernels are compiled, and those for int8.
const FEATURES: [usize; 4] = [64, 80, 128, 288];
const FEATURES_INT8: [usize; 4] = [64, 96, 128, 288];
/// The GPU that tilings are tuned for: its multiprocessors, and how many clusters of 1, 2 .. blocks it runs at once.
const PROCESSORS: usize = 132;
const CLUSTERS: [usize; 4] = [PROCESSORS, 66, 39, 30];
/// Minimum fraction of the GPU that a bf16 tiling must use for more than eight rows, and that any other tiling must use. A tiling that qualifies is
/// then timed against cuBLASLt, which is not used for int8.
const LEAST_FILL: f64 = 0.8;
const LEAST_FILL_NARROW: f64 = 0.5;

/// How a weight is divided among blocks, determined by its shape: features per tile, and number of parts of K.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ProductTiling {
    features: usize,
    parts: usize,
}

impl ProductTiling {
    /// The tiling that fills the GPU best with all blocks running at once, if one fills it enough. `narrow_product.cu` has tiles of other sizes.
    fn of((num_features, k): (usize, usize), kind: Kind, is_narrow: bool) -> Option<Self> {
        let tiles: &[usize] = match kind {
            _ if is_narrow => &narrow_product::FEATURES,
            Kind::Int8 => &FEATURES_INT8,
            _ => &FEATURES,
        };
        let steps = k.div_ceil(step(kind));
        let least = match kind {
            Kind::Int8 => 0.0,
            Kind::BFloat16 if !is_narrow => LEAST_FILL,
            _ => LEAST_FILL_NARROW,
        };
        let fill = |cut: &Self| {
            let longest = (cut.features * steps.div_ceil(cut.parts)) as f64;
            (num_features * steps) as f64 / (PROCESSORS as f64 * longest)
        };
        let cuts = tiles.iter().flat_map(|&features| (1..=CLUSTERS.len()).map(move |parts| Self { features, parts }));
        let fits = |cut: &Self| num_features.div_ceil(cut.features) <= CLUSTERS[cut.parts - 1] && cut.parts <= steps;
        // Among equal tilings this takes the last: larger tiles read x less often.
        let best = cuts.filter(fits).max_by(|a, b| fill(a).total_cmp(&fill(b)));
        best.filter(|cut| fill(cut) >= least)
    }
}

/// Whether [`product`], or [`product_8bit`] for e4m3 and int8, supports this number of rows and all of these weights [N, K], one of which has the bias, on
/// their GPU. It only pays if all GEMMs of a layer use it, because each prefetches its weights during the preceding one.
///
/// # Errors
/// [`crate::Error::Cuda`].
pub fn product_serves(rows: usize, weights: &[&Tensor], bias: Option<&Tensor>) -> Result<bool> {
    let Some(first) = weights.first().filter(|_| (1..=MOST_ROWS).contains(&rows)) else { return Ok(false) };
    let fit = weights.iter().all(|w| lies_well(w) && cut_of(rows, w).is_some()) && bias.is_none_or(lies_well);
    if !first.device().is_cuda() || !fit {
        return Ok(false);
    }
    let context = Context::retain(ordinal("product", first)?)?;
    Ok(context.compute_capability()? == Capability::HOPPER && context.num_processors()? == PROCESSORS)
}

/// A cache key that identifies the kernels and tilings, and so the speed of [`product`], for a compute capability.
pub(in crate::cuda) fn product_key(capability: Capability) -> Result<String> {
    let cuts = (FEATURES, narrow_product::FEATURES, CLUSTERS, LEAST_FILL, LEAST_FILL_NARROW);
    let [few, narrow] = [SOURCE, narrow_product::SOURCE].map(|source| nvrtc::key(source, capability));
    Ok(format!("{cuts:?} {} {}", few?, narrow?))
}

/// Computes out = x w^T + bias for at most 64 rows, with float32 sums, rounded once. The kernel reads w while the preceding operation still runs:
/// that operation must not write w, and must itself have waited for any that does. With up to eight rows the next operation may start before this
/// one's inputs are ready, so it must not read early what the operation before this one writes.
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
    let cut = cut_for(op, (x, w), bias, out)?;
    let gpu = ordinal(op, x)?;
    let (kind, name) = match scales {
        Some(_) => (w.kind(), format!("{op}_{}", code_name(op, w)?)),
        None => (Kind::BFloat16, op.to_owned()),
    };
    strided(op, x, kind, &[rows, k], gpu)?;
    strided(op, w, kind, &[features, k], gpu)?;
    if rows as usize <= narrow_product::MOST_ROWS {
        return narrow_product::run(
            (op, &name),
            (x, w),
            scales,
            bias,
            (out, columns_of_one),
            (cut.features, cut.parts),
        );
    }
    let mut arguments = vec![
        rows_boxes(x, MOST_ROWS)?,
        rows_boxes(w, cut.features / 2)?,
        strided(op, out, Kind::BFloat16, &[rows, features / columns_of_one], gpu)?,
        address_or_null(op, bias, Kind::BFloat16, features as usize, gpu)?,
        Argument::Count(out.stride()[0]),
        Argument::Count(rows),
        Argument::Count(features),
        Argument::Count((k as usize).div_ceil(step(kind)) as i64),
    ];
    if let Some([of_x, of_w]) = scales {
        arguments.push(address(op, of_x, Kind::Float, rows as usize, gpu)?);
        arguments.push(address(op, of_w, Kind::Float, features as usize, gpu)?);
    }
    let grid = (features as usize).div_ceil(cut.features) * cut.parts;
    let shape = (grid as u32, THREADS, STAGES_BYTES);
    // SAFETY: the kernel's parameters in order; boxes beyond x and w read as zeros, and only rows and features of out are written.
    // Of what it reads, w alone is read before the work before has ended, which does not write it: the caller's promise.
    unsafe { queue(SOURCE, &format!("{name}_{}", cut.features), gpu, shape, (cut.parts as u32, true), &arguments) }
}

/// The tiling of a weight [N, K] for a number of rows.
fn cut_of(rows: usize, w: &Tensor) -> Option<ProductTiling> {
    let &[features, k] = &w.size()[..] else { return None };
    let is_narrow = rows <= narrow_product::MOST_ROWS;
    ProductTiling::of((features as usize, k as usize), w.kind(), is_narrow).filter(|_| features % 8 == 0)
}

/// The tiling for operands, after checking their shapes.
fn cut_for(op: &'static str, (x, w): (&Tensor, &Tensor), bias: Option<&Tensor>, out: &Tensor) -> Result<ProductTiling> {
    let lie_well = [x, w, out].into_iter().chain(bias).all(lies_well);
    let rows = x.size().first().map_or(0, |&rows| rows as usize);
    let cut = cut_of(rows, w).filter(|_| rows <= MOST_ROWS && x.dim() == 2 && lie_well);
    cut.ok_or_else(|| {
        invalid(
            op,
            "bf16, fp8 or int8 matrices of a supported shape, aligned to 16 bytes (see product_serves)",
            (x.size(), w.size(), out.size()),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernels::launch::assert_declared;

    #[test]
    fn rust_constants_match_the_kernel_source() {
        assert_declared(SOURCE, &[("ROWS", MOST_ROWS), ("CONSUMERS", THREADS as usize - 32)]);
        for features in FEATURES {
            assert!(SOURCE.text.contains(&format!("FLOAT_PRODUCTS({features})")));
        }
        for features in FEATURES_INT8 {
            assert!(SOURCE.text.contains(&format!("INT8_PRODUCTS({features})")));
        }
    }

    #[test]
    fn split_k_is_used_only_if_it_fills_the_gpu() {
        let of =
            |shape, kind, is_narrow| ProductTiling::of(shape, kind, is_narrow).map(|cut| (cut.features, cut.parts));
        let cut = |features, k| of((features, k), Kind::BFloat16, false);
        assert_eq!(cut(4608, 3584), Some((80, 2))); // Qwen2.5-7B
        assert_eq!(cut(3584, 3584), Some((128, 4)));
        assert_eq!(cut(37_888, 3584), Some((288, 1)));
        assert_eq!(cut(3584, 18_944), Some((128, 4)));
        assert_eq!(of((64, 64), Kind::Int8, true), Some((64, 1)), "a block without a step would have no sums");
        assert_eq!(cut(896, 896), None);
        assert_eq!(cut(152_064, 3584), None);
        let of_fp8 =
            [(4608, 3584), (3584, 3584), (37_888, 3584), (3584, 18_944), (6144, 4096), (4096, 14_336), (2048, 1536)];
        assert!(of_fp8.iter().all(|&shape| of(shape, Kind::Float8e4m3fn, false).is_some()));
        let narrow = of_fp8.map(|shape| of(shape, Kind::Float8e4m3fn, true).unwrap());
        assert_eq!(narrow[..4], [(128, 3), (128, 4), (320, 1), (128, 4)]); // the fastest in measurements
        let of_two_ranks = [(2304, 3584), (3584, 1792), (18_944, 3584), (3584, 9472)]; // Qwen2.5-7B's, with half of the bytes
        let narrow = of_two_ranks.map(|shape| of(shape, Kind::BFloat16, true).unwrap());
        assert_eq!(narrow, [(64, 3), (128, 4), (320, 2), (128, 4)]);
    }
}
