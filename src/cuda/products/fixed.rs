//! Products of which a row has the same bits in any batch.
//!
//! An element's bits follow from the order of its sum. cuBLASLt's kernels of one family add K up in the same order, whatever their
//! tiles, if they split it into as many parts. So a number of rows has the kernel that suits it, made to split K as for any other
//! number, if it then gives the same bits as theirs in a trial.
#![allow(unsafe_code)]

use cudarc::cublaslt::sys;
use tch::Tensor;

use super::Products;
use super::descriptors::Descriptors;
use super::order::Order;
use super::problem::Problem;
use crate::cuda::kernels;
use crate::error::Result;

/// Rows for which the order of a shape's sums is chosen: that of the heuristics' first.
const TYPICAL_ROWS: i64 = 256;
/// Products of more rows are run in parts of so many: the sums of a split K take room with the rows.
pub(super) const MOST_ROWS: i64 = 1024;

/// Bytes that no algorithm moves more than at once: a better alignment allows no others.
const WIDEST_BYTES: u32 = 16;

/// Numbers of rows up to a power of two share an algorithm, and so do all good alignments: where a tensor lies must not change the
/// order of its sums. What does is part of the shape: alignments below that, and leading dimensions, for which an algorithm of others may
/// be invalid. An engine has one of each a weight, as its rows always lie in buffers of one width.
pub(super) fn bucket(problem: &Problem) -> Problem {
    problem.with_rows((problem.rows() as u64).next_power_of_two() as i64).aligned_to_at_most(WIDEST_BYTES)
}

/// A bucket in eighths: what an algorithm does with one number of rows is held to the reference for numbers near to it alone.
pub(super) fn part_of_bucket(problem: &Problem) -> Problem {
    problem.with_rows(end_of_part(problem.rows())).aligned_to_at_most(WIDEST_BYTES)
}

/// `rows`, up to the next number of four binary digits and zeros.
fn end_of_part(rows: i64) -> i64 {
    let unit = 1 << (rows.max(1).ilog2().saturating_sub(3));
    (rows + unit - 1) / unit * unit
}

impl Products {
    /// The most promising algorithm for a bucket of rows, of those that sum as all others of the shape.
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
        // What follows falls back on it.
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

    /// Whether two algorithms give the same bits for random rows. Without memory for them, no.
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
            // SAFETY: the factors and the output span what the descriptors state, and live in stream order.
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
