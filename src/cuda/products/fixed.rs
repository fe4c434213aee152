//! GEMMs in which a row has the same bits in any batch.
//!
//! An element's bits depend on the order in which its sum is computed. cuBLASLt's kernels of one family sum K in the same order, whatever their
//! tiles, if they use the same split-K factor. So each number of rows uses the kernel that suits it, with the split-K factor that all numbers of rows
//! share, if a trial gives the same bits as the other kernels.
#![allow(unsafe_code)]

use cudarc::cublaslt::sys;
use tch::Tensor;

use super::Products;
use super::descriptors::Descriptors;
use super::order::Order;
use super::problem::Problem;
use crate::cuda::kernels;
use crate::error::Result;

/// The number of rows for which the summation order of a shape is chosen: that of the heuristic's first algorithm.
const TYPICAL_ROWS: i64 = 256;
/// GEMMs with more rows are run in parts of this size, because the partial sums of a split K need memory per row.
pub(super) const MOST_ROWS: i64 = 1024;

/// The widest memory access of any algorithm, in bytes; better alignment enables no further algorithms.
const WIDEST_BYTES: u32 = 16;

/// The key for which an algorithm is chosen. Numbers of rows up to a power of two share an algorithm. So do all alignments of at least
/// [`WIDEST_BYTES`], because a tensor's address must not change the order of its sums. Worse alignments and leading dimensions stay part of the key,
/// as they can make an algorithm invalid. An engine has only one key per weight and bucket, since its rows are always in buffers of one width.
pub(super) fn bucket(problem: &Problem) -> Problem {
    problem.with_rows((problem.rows() as u64).next_power_of_two() as i64).aligned_to_at_most(WIDEST_BYTES)
}

/// One eighth of a bucket. An exact algorithm is compared with the reference separately for each eighth, because its behaviour can change with the
/// number of rows.
pub(super) fn part_of_bucket(problem: &Problem) -> Problem {
    problem.with_rows(end_of_part(problem.rows())).aligned_to_at_most(WIDEST_BYTES)
}

/// Rounds `rows` up to a number whose binary digits are zero after the first four.
fn end_of_part(rows: i64) -> i64 {
    let unit = 1 << (rows.max(1).ilog2().saturating_sub(3));
    (rows + unit - 1) / unit * unit
}

impl Products {
    /// The most promising algorithm for a bucket of rows, among those that sum in the shape's common order.
    pub(super) fn fixed(
        &self,
        problem: &Problem,
        b: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<sys::cublasLtMatmulAlgo_t> {
        self.refuse_capture(problem)?;
        let typical = problem.with_rows(TYPICAL_ROWS);
        let most = Descriptors::new(&problem.with_rows(MOST_ROWS), None, None)?;
        let candidates = self.candidates(&typical, &Descriptors::new(&typical, None, None)?)?;
        let serves_all = candidates.iter().find(|algorithm| most.accept(self.handle, algorithm));
        let reference = *serves_all.ok_or_else(|| super::no_algorithm(&problem.with_rows(MOST_ROWS)))?;
        // The reference algorithm is the fallback, so it must be valid.
        let descriptors = Descriptors::new(problem, bias, None)?;
        if !descriptors.accept(self.handle, &reference) {
            return Err(super::no_algorithm(problem));
        }
        if problem.rows() == TYPICAL_ROWS {
            return Ok(reference);
        }
        let order = Order::of(&reference)?;
        for candidate in self.candidates(problem, &descriptors)? {
            let algorithm = order.impose(candidate)?.filter(|algorithm| descriptors.accept(self.handle, algorithm));
            if let Some(algorithm) = algorithm
                && self.agree(problem, &descriptors, [&algorithm, &reference], b)?
            {
                return Ok(algorithm);
            }
        }
        Ok(reference)
    }

    /// Whether two algorithms give the same bits for random rows; false if there is no memory to test it.
    fn agree(
        &self,
        problem: &Problem,
        descriptors: &Descriptors,
        algorithms: [&sys::cublasLtMatmulAlgo_t; 2],
        b: &Tensor,
    ) -> Result<bool> {
        let (a_len, out_len) = (problem.a_len(), problem.rows() * problem.row_len());
        let options = (problem.out_kind, b.device());
        let (Ok(mut a), Ok(first), Ok(second)) = (
            Tensor::f_empty([a_len], (b.kind(), b.device())),
            Tensor::f_zeros([out_len], options),
            Tensor::f_zeros([out_len], options),
        ) else {
            return Ok(false);
        };
        kernels::fill_normal(&mut a, [0, 0], 1.0)?;
        for (algorithm, out) in algorithms.into_iter().zip([&first, &second]) {
            let pointers = [b, &a, out, out].map(Tensor::data_ptr);
            // SAFETY: the operands and the output have the sizes that the descriptors state, and live in stream order.
            unsafe { self.queue(descriptors, algorithm, pointers, problem.beta())? };
        }
        Ok(first.f_equal(&second)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_buckets_have_eight_sizes_per_power_of_two() {
        let ends = |rows: std::ops::RangeInclusive<i64>| {
            let mut ends: Vec<i64> = rows.map(end_of_part).collect();
            ends.dedup();
            ends
        };
        assert_eq!(ends(1..=16), (1..=16).collect::<Vec<_>>());
        assert_eq!(ends(129..=256), [144, 160, 176, 192, 208, 224, 240, 256]);
        assert_eq!((end_of_part(0), end_of_part(8193), end_of_part(16_384)), (0, 9216, 16_384));
    }
}
