//! Exact GEMMs with a long K. K is split into two halves, each a GEMM of the exact class with float32 sums, which are then added and rounded.
//!
//! Without this, an output that is much narrower than K has too few tiles to fill a GPU in decode steps: `down` of Qwen2.5-7B uses 56 of 132
//! multiprocessors for 16 to 64 rows. Whether K is split depends only on the weight's shape, so that training has the same sums.
#![allow(unsafe_code)]

use tch::{Kind, Tensor};

use super::algorithms::lock;
use super::descriptors::Descriptors;
use super::problem::Problem;
use super::{Products, Tuning};
use crate::cuda::kernels;
use crate::error::Result;

const PARTS: i64 = 2;
/// The smallest K that is split; each half must be a multiple of `STEP`, the tensor-core kernels' step.
const LONG: i64 = 8192;
const STEP: i64 = 64;
/// Maximum number of rows whose partial sums are held at once.
pub(super) const MOST_ROWS: i64 = 2048;

/// Whether K is split for a weight [features, k].
pub(super) fn is_cut(features: i64, k: i64) -> bool {
    k >= LONG && k % (PARTS * STEP) == 0 && 2 * features <= k && features % 8 == 0
}

impl Products {
    /// GPU memory in bytes that exact GEMMs with a weight [features, k] need in addition to [`Products::BYTES`].
    pub fn bytes_of_parts(features: usize, k: usize) -> usize {
        let is_cut = is_cut(features as i64, k as i64);
        if is_cut { (PARTS * MOST_ROWS) as usize * features * size_of::<f32>() } else { 0 }
    }

    /// Computes out = a b + bias with a split K.
    pub(super) fn run_in_parts(&self, a: &Tensor, b: &Tensor, bias: Option<&Tensor>, out: &Tensor) -> Result<()> {
        let (rows, features, half) = (a.size()[0], b.size()[1], b.size()[0] / PARTS);
        for first in (0..rows).step_by(MOST_ROWS as usize) {
            let count = MOST_ROWS.min(rows - first);
            let [a, out] = [a, out].map(|all| all.narrow(0, first, count));
            let sums = |of: &Tensor| of.narrow(0, 0, PARTS * count * features).view([PARTS, count, features]);
            let problem = |sums: &Tensor| {
                let factors = (&a.narrow(1, 0, half), &b.narrow(0, 0, half));
                let first = Problem::of(factors.0, factors.1, None, &sums.get(0), 0.0, self.context.ordinal())?;
                Ok::<_, crate::error::Error>(first.in_parts(PARTS))
            };
            let known = lock(&self.sums).get(&features).map(Tensor::shallow_clone);
            let held = match known {
                Some(held) => held,
                None => {
                    let held = Tensor::f_empty([PARTS * MOST_ROWS * features], (Kind::Float, a.device()))?;
                    self.refuse_capture(&problem(&sums(&held))?)?;
                    lock(&self.sums).insert(features, held.shallow_clone());
                    held
                }
            };
            let sums = sums(&held);
            let problem = problem(&sums)?;
            let descriptors = Descriptors::new(&problem, None, None)?;
            let algorithm = self.algorithm(&problem, &descriptors, Tuning::Exact, (&a, b, None, &sums))?;
            // SAFETY: the descriptors describe both halves of the operands, and two consecutive outputs; all live in stream order.
            unsafe { self.queue(&descriptors, &algorithm, [b, &a, &sums, &sums].map(Tensor::data_ptr), 0.0)? };
            kernels::exact_sum(&sums, bias, &out)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_long_sums_with_few_outputs_are_split() {
        // down of 7B, 1.5B and 32B
        for [features, k] in [[3584, 18_944], [1536, 8960], [5120, 27_648]] {
            assert!(is_cut(features, k), "{features} x {k}");
        }
        // o and gate_up of 7B, down of 0.5B, qkv and the head of 70B, a K that is no multiple
        for [features, k] in
            [[3584, 3584], [37_888, 3584], [896, 4864], [10_240, 8192], [128_256, 8192], [3584, 18_880]]
        {
            assert!(!is_cut(features, k), "{features} x {k}");
        }
        assert_eq!(Products::bytes_of_parts(3584, 18_944), 2 * 2048 * 3584 * 4);
        assert_eq!(Products::bytes_of_parts(3584, 3584), 0);
        // The head of 7B, for 256 rows: its weight and the rows, three times 256 rows of logits.
        let head = 2 * (152_064 + 256) * 3584 + 3 * 256 * 152_064 * 4 + (128 << 20);
        assert_eq!(Products::trial_bytes(256, [152_064, 3584]), head);
    }
}
