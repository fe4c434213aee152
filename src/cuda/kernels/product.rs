//! Products of few rows with large weights, by a kernel for Hopper whose weights are on their way while the work before ends.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::boxes::{STEP, lies_well, rows_boxes};
use super::{Argument, address_or_null, invalid, ordinal, queue, strided};
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
];

const THREADS: u32 = 288;
/// Bytes of the kernel's stages, and what it takes to begin them at a multiple of 1024.
const STAGES_BYTES: u32 = 226 << 10;
const MOST_ROWS: usize = 64;
/// Features of a block that kernels are made for.
const FEATURES: [usize; 4] = [64, 80, 128, 288];
/// The chip that the cuts are for: its multiprocessors, and how many clusters of 1, 2 .. of them run at once.
const PROCESSORS: usize = 132;
const CLUSTERS: [usize; 4] = [PROCESSORS, 66, 39, 30];
/// The least share of the chip's time that a cut must use.
const LEAST_FILL: f64 = 0.8;

/// How a weight is dealt to blocks, by its shape alone: tiles of features, K of each in parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cut {
    features: usize,
    parts: usize,
}

impl Cut {
    /// The cut that fills the chip best with all blocks at once, if one fills it.
    fn of(num_features: usize, k: usize) -> Option<Self> {
        let steps = k.div_ceil(STEP);
        let fill = |cut: &Self| {
            let longest = (cut.features * steps.div_ceil(cut.parts)) as f64;
            (num_features * steps) as f64 / (PROCESSORS as f64 * longest)
        };
        let cuts =
            FEATURES.into_iter().flat_map(|features| (1..=CLUSTERS.len()).map(move |parts| Self { features, parts }));
        let fits = cuts.filter(|cut| num_features.div_ceil(cut.features) <= CLUSTERS[cut.parts - 1]);
        // Of equal ones the last: larger tiles read x less often.
        let best = fits.max_by(|a, b| fill(a).total_cmp(&fill(b)));
        best.filter(|cut| fill(cut) >= LEAST_FILL)
    }
}

/// Whether [`product`] serves so many rows and all of these weights [N, K], one of them with this bias, on their GPU. It pays where
/// it serves a layer whole, as each product's weights are asked for while the one before is at work.
///
/// # Errors
/// [`crate::Error::Cuda`].
pub fn product_serves(rows: usize, weights: &[&Tensor], bias: Option<&Tensor>) -> Result<bool> {
    let Some(first) = weights.first().filter(|_| (1..=MOST_ROWS).contains(&rows)) else { return Ok(false) };
    let fit = weights.iter().all(|w| lies_well(w) && cut_of(w).is_some()) && bias.is_none_or(lies_well);
    if !first.device().is_cuda() || !fit {
        return Ok(false);
    }
    let context = Context::retain(ordinal("product", first)?)?;
    Ok(context.compute_capability()? == (9, 0) && context.num_processors()? == PROCESSORS)
}

/// The key of what the speed of [`product`] depends on, on a GPU of compute capability (major, minor): the kernels and how
/// weights are cut.
pub(in crate::cuda) fn product_key(capability: (i32, i32)) -> Result<String> {
    let cuts = (FEATURES, CLUSTERS, LEAST_FILL);
    Ok(format!("{cuts:?} {}", nvrtc::key(SOURCE, capability)?))
}

/// out = x w^T + bias for at most 64 rows, sums in float32, rounded once. The kernel reads w while the operation before it still
/// runs: that one must not write w, and must itself have waited for any that does.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit or that [`product_serves`] refuses; [`crate::Error::Cuda`].
pub fn product(
    x: &Tensor,            // [R, K] bf16
    w: &Tensor,            // [N, K] bf16
    bias: Option<&Tensor>, // [N] bf16
    out: &Tensor,          // [R, N] bf16
) -> Result<()> {
    run("product", x, w, bias, (out, 1))
}

/// y = silu(gate) * up of the product x w^T with columns g0 u0 g1 u1 .., for at most 64 rows. Gate and up are rounded as where
/// they are written. What may write w is as for [`product`].
///
/// # Errors
/// As [`product`].
pub fn product_silu_mul(
    x: &Tensor, // [R, K] bf16
    w: &Tensor, // [2 F, K] bf16
    y: &Tensor, // [R, F] bf16
) -> Result<()> {
    run("product_silu_mul", x, w, None, (y, 2))
}

fn run(
    op: &'static str,
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    (out, columns_of_one): (&Tensor, i64),
) -> Result<()> {
    let (&[rows, k], &[features, _]) = (&x.size()[..], &w.size()[..]) else {
        return Err(invalid(op, "matrices", (x.size(), w.size())));
    };
    let lie_well = [x, w, out].into_iter().chain(bias).all(lies_well);
    let cut = cut_of(w).filter(|_| rows as usize <= MOST_ROWS && lie_well);
    let Some(cut) = cut else { return Err(invalid(op, "what product_serves", (x.size(), w.size(), out.size()))) };
    let gpu = ordinal(op, x)?;
    strided(op, x, Kind::BFloat16, &[rows, k], gpu)?;
    strided(op, w, Kind::BFloat16, &[features, k], gpu)?;
    let arguments = [
        rows_boxes(x, MOST_ROWS)?,
        rows_boxes(w, cut.features / 2)?,
        strided(op, out, Kind::BFloat16, &[rows, features / columns_of_one], gpu)?,
        address_or_null(op, bias, Kind::BFloat16, features as usize, gpu)?,
        Argument::Count(out.stride()[0]),
        Argument::Count(rows),
        Argument::Count(features),
        Argument::Count((k as usize).div_ceil(STEP) as i64),
    ];
    let grid = (features as usize).div_ceil(cut.features) * cut.parts;
    let shape = (grid as u32, THREADS, STAGES_BYTES);
    // SAFETY: the kernel's parameters in order; boxes beyond x and w read as zeros, and only rows and features of out are written.
    // Of what it reads, w alone is read before the work before has ended, which does not write it: the caller's promise.
    unsafe { queue(SOURCE, &format!("{op}_{}", cut.features), gpu, shape, (cut.parts as u32, true), &arguments) }
}

fn cut_of(w: &Tensor) -> Option<Cut> {
    let &[features, k] = &w.size()[..] else { return None };
    Cut::of(features as usize, k as usize).filter(|_| features % 8 == 0)
}

#[cfg(test)]
mod tests {
    use super::super::assert_declared;
    use super::*;

    #[test]
    fn the_source_has_the_same_constants() {
        assert_declared(SOURCE, &[("ROWS", MOST_ROWS), ("CONSUMERS", THREADS as usize - 32)]);
        for features in FEATURES {
            assert!(SOURCE.text.contains(&format!("PRODUCT(product, Plain, {features})")));
            assert!(SOURCE.text.contains(&format!("PRODUCT(product_silu_mul, SwiGlu, {features})")));
        }
    }

    #[test]
    fn cuts_fill_the_chip_or_there_is_none() {
        let cut = |features, k| Cut::of(features, k).map(|cut| (cut.features, cut.parts));
        assert_eq!(cut(4608, 3584), Some((80, 2))); // Qwen2.5-7B's
        assert_eq!(cut(3584, 3584), Some((128, 4)));
        assert_eq!(cut(37_888, 3584), Some((288, 1)));
        assert_eq!(cut(3584, 18_944), Some((128, 4)));
        assert_eq!(cut(896, 896), None);
        assert_eq!(cut(152_064, 3584), None);
    }
}
