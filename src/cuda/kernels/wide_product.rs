//! Products in FP8 of more rows than `product` serves, by a kernel for Hopper that splits K, which cuBLASLt does not do in FP8.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::boxes::{lies_well, rows_boxes, step};
use super::fp8::Fp8Rows;
use super::{Argument, address, address_or_null, invalid, ordinal, queue, strided};
use crate::cuda::context::Context;
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::WIDE_PRODUCT;
pub(super) const NAMES: &[&str] = &["wide_product_fp8_128", "wide_product_fp8_256"];

const OP: &str = "wide_product_fp8";
const THREADS: u32 = 288;
/// Bytes of the kernel's stages, and what it takes to begin them at a multiple of 1024.
const SHARED_BYTES: u32 = 225 << 10;
/// Features of a tile, and rows that kernels are made for.
const FEATURES: usize = 128;
const ROWS: [usize; 2] = [128, 256];
/// Fewer rows are `product`'s.
const FEWEST_ROWS: usize = 65;
/// The chip that the cuts are for: its multiprocessors, and how many clusters of 1, 2 .. of them run at once.
const PROCESSORS: usize = 132;
const CLUSTERS: [usize; 4] = [PROCESSORS, 66, 39, 30];
/// The least share of the chip that a cut must use.
const LEAST_FILL: f64 = 0.5;
/// Of more rows than this only a long K pays: of a short one, adding the parts' sums up takes what multiplying in parts saves.
const MOST_ROWS_OF_SHORT: usize = 128;
const LONG: usize = 8192;

/// Whether [`wide_product_fp8`] serves so many rows and this weight [N, K], with this bias, on its GPU.
///
/// # Errors
/// [`crate::Error::Cuda`].
pub fn wide_product_serves(rows: usize, w: &Tensor, bias: Option<&Tensor>) -> Result<bool> {
    let &[features, k] = &w.size()[..] else { return Ok(false) };
    let fits = w.kind() == Kind::Float8e4m3fn
        && w.device().is_cuda()
        && lies_well(w)
        && bias.is_none_or(lies_well)
        && name_of(rows, k as usize).is_some()
        && parts_of(features as usize, k as usize).is_some();
    if !fits {
        return Ok(false);
    }
    let context = Context::retain(ordinal(OP, w)?)?;
    Ok(context.compute_capability()? == (9, 0) && context.num_processors()? == PROCESSORS)
}

/// The key of what the speed of [`wide_product_fp8`] depends on, on a GPU of compute capability (major, minor): the kernels and how
/// weights are cut.
pub(in crate::cuda) fn wide_product_key(capability: (i32, i32)) -> Result<String> {
    Ok(format!("{:?} {}", (ROWS, CLUSTERS, LEAST_FILL, MOST_ROWS_OF_SHORT, LONG), nvrtc::key(SOURCE, capability)?))
}

/// out = x w^T + bias of 65 to 256 rows in e4m3, each product of rows scaled as it was summed, rounded once. The kernel reads w and the
/// bias while the operation before it still runs: that one must not write them, and must itself have waited for any that does.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit or that [`wide_product_serves`] refuses; [`crate::Error::Cuda`].
pub fn wide_product_fp8(
    x: &Fp8Rows,           // [R, K]
    w: &Fp8Rows,           // [N, K]
    bias: Option<&Tensor>, // [N] bf16
    out: &Tensor,          // [R, N] bf16
) -> Result<()> {
    let (&[rows, k], &[features, _]) = (&x.values.size()[..], &w.values.size()[..]) else {
        return Err(invalid(OP, "matrices", (x.values.size(), w.values.size())));
    };
    let gpu = ordinal(OP, &x.values)?;
    let cut = name_of(rows as usize, k as usize).zip(parts_of(features as usize, k as usize));
    let served = wide_product_serves(rows as usize, &w.values, bias)? && [&x.values, out].into_iter().all(lies_well);
    let Some(((name, box_rows), parts)) = cut.filter(|_| served) else {
        return Err(invalid(OP, "what wide_product_serves", (x.values.size(), w.values.size(), out.size())));
    };
    strided(OP, &x.values, Kind::Float8e4m3fn, &[rows, k], gpu)?;
    strided(OP, &w.values, Kind::Float8e4m3fn, &[features, k], gpu)?;
    let arguments = [
        rows_boxes(&x.values, box_rows)?,
        rows_boxes(&w.values, FEATURES)?,
        strided(OP, out, Kind::BFloat16, &[rows, features], gpu)?,
        address_or_null(OP, bias, Kind::BFloat16, features as usize, gpu)?,
        Argument::Count(out.stride()[0]),
        Argument::Count(rows),
        Argument::Count(features),
        Argument::Count((k as usize).div_ceil(step(Kind::Float8e4m3fn)) as i64),
        address(OP, &x.scales, Kind::Float, rows as usize, gpu)?,
        address(OP, &w.scales, Kind::Float, features as usize, gpu)?,
    ];
    let blocks = (features as usize).div_ceil(FEATURES) * parts;
    let shape = (blocks as u32, THREADS, SHARED_BYTES);
    // SAFETY: the kernel's parameters in order; boxes beyond x and w read as zeros, and only rows and features of out are written.
    // Of what it reads, w, its scales and the bias alone are read before the work before has ended, which does not write them: the
    // caller's promise.
    unsafe { queue(SOURCE, name, gpu, shape, (parts as u32, true), &arguments) }
}

/// The kernel for so many rows of K elements, and its rows.
fn name_of(rows: usize, k: usize) -> Option<(&'static str, usize)> {
    let mut kernels = NAMES.iter().copied().zip(ROWS).filter(|&(_, most)| most <= MOST_ROWS_OF_SHORT || k >= LONG);
    kernels.find(|&(_, most)| (FEWEST_ROWS..=most).contains(&rows))
}

/// Parts of K that fill the chip best with all blocks at once, if any fill it.
fn parts_of(features: usize, k: usize) -> Option<usize> {
    let (tiles, steps) = (features.div_ceil(FEATURES), k.div_ceil(step(Kind::Float8e4m3fn)));
    let fits = (1..=CLUSTERS.len()).filter(|&parts| tiles <= CLUSTERS[parts - 1] && parts <= steps);
    let parts = fits.max()?;
    let fill = (features * steps) as f64 / (PROCESSORS * FEATURES * steps.div_ceil(parts)) as f64;
    (features.is_multiple_of(8) && fill >= LEAST_FILL).then_some(parts)
}

#[cfg(test)]
mod tests {
    use super::super::assert_declared;
    use super::*;

    #[test]
    fn the_source_has_the_same_constants() {
        assert_declared(SOURCE, &[("FEATURES", FEATURES), ("CONSUMERS", THREADS as usize - 32)]);
        for rows in ROWS {
            assert!(SOURCE.text.contains(&format!("WIDE_PRODUCT({rows})")));
        }
    }

    #[test]
    fn rows_have_the_smallest_kernel_that_holds_them() {
        let of = |k| [64, 65, 128, 129, 256, 257].map(|rows| name_of(rows, k).map(|(_, most)| most));
        assert_eq!(of(18_944), [None, Some(128), Some(128), Some(256), Some(256), None]);
        assert_eq!(of(3584), [None, Some(128), Some(128), None, None, None]);
    }

    #[test]
    fn parts_fill_the_chip_or_there_are_none() {
        assert_eq!(parts_of(3584, 18_944), Some(4)); // Qwen2.5-7B's: down, output, query with key and value
        assert_eq!(parts_of(3584, 3584), Some(4));
        assert_eq!(parts_of(4608, 3584), Some(3));
        assert_eq!(parts_of(4096, 14_336), Some(3)); // Llama-3.1-8B's
        assert_eq!(parts_of(37_888, 3584), None, "more tiles than blocks run at once");
        assert_eq!(parts_of(896, 4864), None, "a fifth of the chip");
        assert_eq!(parts_of(4096, 64), None, "one step, that a quarter of the chip takes");
        assert_eq!(parts_of(3588, 18_944), None, "rows of out that are no multiple of 16 bytes");
    }
}
