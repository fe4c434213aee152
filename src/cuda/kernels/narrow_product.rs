//! GEMMs with up to eight rows, by a Hopper kernel that uses nearly all shared memory for weights in flight.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::boxes::{rows_boxes, step};
use super::launch::{Argument, address_or_null, ordinal, queue, strided};
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::NARROW_PRODUCT;
pub(super) const NAMES: &[&str] = &[
    "narrow_product_64",
    "narrow_product_128",
    "narrow_product_192",
    "narrow_product_256",
    "narrow_product_320",
    "narrow_product_silu_mul_64",
    "narrow_product_silu_mul_128",
    "narrow_product_silu_mul_192",
    "narrow_product_silu_mul_256",
    "narrow_product_silu_mul_320",
    "narrow_product_fp8_64",
    "narrow_product_fp8_128",
    "narrow_product_fp8_192",
    "narrow_product_fp8_256",
    "narrow_product_fp8_320",
    "narrow_product_silu_mul_fp8_64",
    "narrow_product_silu_mul_fp8_128",
    "narrow_product_silu_mul_fp8_192",
    "narrow_product_silu_mul_fp8_256",
    "narrow_product_silu_mul_fp8_320",
    "narrow_product_int8_64",
    "narrow_product_int8_128",
    "narrow_product_int8_192",
    "narrow_product_int8_256",
    "narrow_product_int8_320",
    "narrow_product_silu_mul_int8_64",
    "narrow_product_silu_mul_int8_128",
    "narrow_product_silu_mul_int8_192",
    "narrow_product_silu_mul_int8_256",
    "narrow_product_silu_mul_int8_320",
];

/// Most rows that this kernel supports; `product.cu` computes GEMMs with more.
pub const MOST_ROWS: usize = 8;
const THREADS: u32 = 160;
/// Bytes of shared memory: the pipeline stages, and 1024 for alignment.
const SHARED_BYTES: u32 = 209 << 10;
/// Rows of w per box that is copied.
const UNIT: usize = 64;
/// Numbers of features per tile for which kernels are compiled.
pub(super) const FEATURES: [usize; 5] = [64, 128, 192, 256, 320];

/// Queues out = x w^T + bias or, if `columns_of_one` is 2, out = silu(gate) * up. [`super::product_serves`] must have accepted the operands. Tiles
/// have `features` features, and K is split into `parts`.
pub(super) fn run(
    (op, name): (&'static str, &str), // the operation, and the kernel's name without `narrow_` and the features
    (x, w): (&Tensor, &Tensor),       // [R, K], [N, K]
    scales: Option<[&Tensor; 2]>,     // [R], [N], of 8-bit operands
    bias: Option<&Tensor>,            // [N] bf16
    (out, columns_of_one): (&Tensor, i64),
    (features, parts): (usize, usize),
) -> Result<()> {
    let (gpu, [rows, k], n, kind) = (ordinal(op, x)?, [0, 1].map(|dim| x.size()[dim]), w.size()[0], w.kind());
    let [of_x, of_w] = [(0, rows), (1, n)].map(|(operand, len)| {
        address_or_null(op, scales.map(|scales| scales[operand]), Kind::Float, len as usize, gpu)
    });
    strided(op, x, kind, &[rows, k], gpu)?;
    strided(op, w, kind, &[n, k], gpu)?;
    let arguments = [
        rows_boxes(x, MOST_ROWS)?,
        rows_boxes(w, UNIT)?,
        strided(op, out, Kind::BFloat16, &[rows, n / columns_of_one], gpu)?,
        address_or_null(op, bias, Kind::BFloat16, n as usize, gpu)?,
        Argument::Count(out.stride()[0]),
        Argument::Count(rows),
        Argument::Count(n),
        Argument::Count((k as usize).div_ceil(step(kind)) as i64),
        of_x?,
        of_w?,
    ];
    let grid = (n as usize).div_ceil(features) * parts;
    let shape = (grid as u32, THREADS, SHARED_BYTES);
    // SAFETY: the kernel's parameters in order; boxes beyond x and w read as zeros, and only rows and features of out are written.
    // Of what it reads, w, its scales and the bias alone are read before the work before has ended, which does not write them: the caller's
    // promise.
    unsafe { queue(SOURCE, &format!("narrow_{name}_{features}"), gpu, shape, (parts as u32, true), &arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernels::launch::assert_declared;

    #[test]
    fn rust_constants_match_the_kernel_source() {
        assert_declared(SOURCE, &[("ROWS", MOST_ROWS), ("UNIT", UNIT)]);
        for features in FEATURES {
            assert!(SOURCE.text.contains(&format!("NARROW_PRODUCTS({features})")));
        }
    }
}
