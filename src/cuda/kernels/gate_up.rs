//! The gate and up GEMM fused with SwiGLU, for many rows and a large weight on Hopper. Gate and up are never written to memory.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::boxes::{lies_well, pairs_boxes, rows_boxes, step};
use super::fp8::ScaledRows;
use super::launch::{Argument, address, code_name, invalid, ordinal, queue, strided};
use crate::cuda::capability::Capability;
use crate::cuda::context::Context;
use crate::cuda::nvrtc::{self, KernelSource};
use crate::error::Result;

pub(super) const SOURCE: &KernelSource = &nvrtc::GATE_UP;
pub(super) const NAMES: &[&str] =
    &["gate_up_256", "gate_up_512", "gate_up_fp8_256", "gate_up_fp8_512", "gate_up_int8_256", "gate_up_int8_512"];

const OP: &str = "gate_up";
/// The kernel's constants: rows per block, features per tile, threads, and bytes of shared memory, including 1024 for alignment.
const ROWS: usize = 256;
const FEATURES: usize = 192;
const THREADS: u32 = 384;
const SHARED_BYTES: u32 = 225 << 10;
/// Most rows of a launch. More rows need several launches, each of which reads the weights again.
const MOST_ROWS: usize = 2 * ROWS;
/// Tiles per pair of blocks, and number of pairs that run at once on the GPU that the kernel is tuned for.
const TILES: usize = 3;
const PAIRS: usize = 66;
/// Number of rows by which the last block may be incomplete; a block takes the same time for any number of rows.
const MOST_MISSING: usize = 15;
/// Minimum fraction of the GPU's time that the pairs of blocks must use.
const LEAST_FILL: f64 = 0.9;

/// Whether [`gate_up`], or [`gate_up_8bit`] for e4m3 and int8, supports this number of rows and this weight on its GPU.
///
/// # Errors
/// [`crate::Error::Cuda`].
pub fn gate_up_serves(rows: usize, w: &Tensor) -> Result<bool> {
    if !fills_blocks(rows) || !w.device().is_cuda() || !lies_well(w) || !fills_the_chip(&w.size(), w.kind()) {
        return Ok(false);
    }
    let context = Context::retain(ordinal(OP, w)?)?;
    Ok(context.compute_capability()? == Capability::HOPPER && context.num_processors()? == 2 * PAIRS)
}

/// A cache key that identifies the kernel version, and so its speed, for a compute capability.
pub(in crate::cuda) fn gate_up_key(capability: Capability) -> Result<String> {
    nvrtc::key(SOURCE, capability)
}

/// Computes y = silu(gate) * up from x w^T with columns g0 u0 g1 u1 .., with float32 sums. Gate and up are rounded as if they were stored. The kernel
/// reads w while the preceding operation still runs: that operation must not write w, and must itself have waited for any that does.
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for tensors that do not fit or that [`gate_up_serves`] refuses; [`crate::Error::Cuda`].
pub fn gate_up(
    x: &Tensor, // [R, K] bf16
    w: &Tensor, // [2 F, K] bf16
    y: &Tensor, // [R, F] bf16
) -> Result<()> {
    run((x, w), None, y)
}

/// Computes y like [`gate_up`], with e4m3 or int8 operands; each sum is multiplied by the scales of its rows.
///
/// # Errors
/// The errors of [`gate_up`].
pub fn gate_up_8bit(
    x: &ScaledRows, // [R, K]
    w: &ScaledRows, // [2 F, K]
    y: &Tensor,     // [R, F] bf16
) -> Result<()> {
    run((&x.values, &w.values), Some([&x.scales, &w.scales]), y)
}

fn run((x, w): (&Tensor, &Tensor), scales: Option<[&Tensor; 2]>, y: &Tensor) -> Result<()> {
    let (&[rows, k], &[features, _]) = (&x.size()[..], &w.size()[..]) else {
        return Err(invalid(OP, "matrices", (x.size(), w.size())));
    };
    let gpu = ordinal(OP, x)?;
    if !gate_up_serves(rows as usize, w)? || ![x, y].into_iter().all(lies_well) {
        return Err(invalid(
            OP,
            "bf16, fp8 or int8 matrices of a supported shape, aligned to 16 bytes (see gate_up_serves)",
            (x.size(), w.size(), y.size()),
        ));
    }
    let code = scales.map(|_| code_name(OP, w)).transpose()?;
    let kind = if code.is_some() { w.kind() } else { Kind::BFloat16 };
    strided(OP, x, kind, &[rows, k], gpu)?;
    strided(OP, w, kind, &[features, k], gpu)?;
    strided(OP, y, Kind::BFloat16, &[rows, features / 2], gpu)?;
    for first in (0..rows).step_by(MOST_ROWS) {
        let count = (rows - first).min(MOST_ROWS as i64);
        let [x, y] = [x, y].map(|whole| whole.narrow(0, first, count));
        let is_tall = count as usize > ROWS;
        let mut arguments = vec![
            rows_boxes(&x, ROWS / 2)?,
            pairs_boxes(w, if is_tall { FEATURES / 2 } else { FEATURES })?,
            strided(OP, &y, Kind::BFloat16, &[count, features / 2], gpu)?,
            Argument::Count(y.stride()[0]),
            Argument::Count(count),
            Argument::Count(features),
            Argument::Count((k as usize).div_ceil(step(kind)) as i64),
        ];
        if let Some([of_x, of_w]) = scales {
            arguments.push(address(OP, &of_x.narrow(0, first, count), Kind::Float, count as usize, gpu)?);
            arguments.push(address(OP, of_w, Kind::Float, features as usize, gpu)?);
        }
        let blocks = 2 * (features as usize).div_ceil(TILES * FEATURES) as u32;
        let code = code.map_or_else(String::new, |code| format!("{code}_"));
        let name = format!("{OP}_{code}{}", if is_tall { MOST_ROWS } else { ROWS });
        let shape = (blocks, THREADS, SHARED_BYTES);
        // SAFETY: the kernel's parameters in order; boxes beyond x and w read as zeros, and only rows and features of y are
        // written. Of what it reads, w alone is read before the work before has ended, which does not write it: the caller's
        // promise, and rows before these write y alone.
        unsafe { queue(SOURCE, &name, gpu, shape, (2, true), &arguments)? };
    }
    Ok(())
}

fn fills_blocks(rows: usize) -> bool {
    rows > 0 && rows.next_multiple_of(ROWS) - rows <= MOST_MISSING
}

/// Whether the pairs of blocks for a weight [2 F, K] keep the GPU busy.
fn fills_the_chip(size: &[i64], kind: Kind) -> bool {
    let &[features, k] = size else { return false };
    let tiles = features as f64 / (TILES * FEATURES) as f64;
    let rounds = (tiles / PAIRS as f64).ceil();
    features % 16 == 0 && k as usize > step(kind) && tiles / (rounds * PAIRS as f64) >= LEAST_FILL
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernels::launch::assert_declared;

    #[test]
    fn rust_constants_match_the_kernel_source() {
        assert_declared(SOURCE, &[("ROWS", ROWS), ("FEATURES", FEATURES), ("THREADS", THREADS as usize)]);
    }

    #[test]
    fn the_fused_gate_up_kernel_declines_unsuitable_row_counts() {
        assert!([241, 256, 497, 512, 753, 1024].into_iter().all(fills_blocks));
        assert!(![0, 1, 64, 240, 257, 496, 513, 1008, 1025].into_iter().any(fills_blocks));
    }

    #[test]
    fn the_fused_gate_up_kernel_declines_small_weights() {
        let fills_the_chip = |size: &[i64]| fills_the_chip(size, Kind::BFloat16);
        assert!(fills_the_chip(&[37_888, 3584])); // Qwen2.5-7B's: 66 pairs
        assert!(fills_the_chip(&[75_776, 128]));
        for size in [[17_920, 1536], [27_648, 5120], [38_400, 3584], [37_880, 3584], [37_888, 64]] {
            assert!(!fills_the_chip(&size), "{size:?}");
        }
    }
}
