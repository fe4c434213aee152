//! Bit-exact GEMMs: a row has the same bits for any number of rows, in the engine and in training. The algorithms that agree in their bits are called
//! a class.
//!
//! An element's bits depend on the multiply instruction, on how many values of K it processes at once, and on the order in which it receives K. On
//! Hopper, bf16 kernels without split K agree in all of these, whatever their tiles; kernels with split K, stream-K, or that start from the existing
//! output do not. cuBLASLt does not always report which algorithm is which. So membership is decided by comparing bits with a kernel whose order is
//! known ([`kernels::exact_reference`]). The operands span 40 powers of two and their terms cancel, so that the result consists only of rounding
//! errors, in every row and column.
//!
//! Among the members the fastest is used for all numbers of rows up to a power of two (or the first, for GEMMs above 1e11 operations, which are not
//! timed). It is compared with the reference again in each eighth of those numbers, and cached per GPU and library version. If no algorithm is a
//! member, an error says so.
//!
//! A long K is split into parts (`parts`), each a GEMM of the class. In float32 the class is a kernel of this crate.
#![allow(unsafe_code)]

use cudarc::cublaslt::sys;
use tch::{Kind, Tensor};

use super::descriptors::Descriptors;
use super::members::{self, MemberTrials, TrialRows};
use super::order::describe;
use super::problem::{Problem, invalid};
use super::{Products, algorithms, fixed, parts};
use crate::cuda::{cache, kernels};
use crate::error::Result;

/// Rows that the reference computes at once, as it needs them in float32.
const REFERENCE_ROWS: i64 = 256;
/// Rows of test operands that are generated at once, in float32.
const HOSTILE_ROWS: i64 = 1024;
/// Number of float32 copies of these rows that are in memory: while generating operands, and while comparing with the reference.
const HOSTILE_COPIES: usize = 5;
const REFERENCE_COPIES: usize = 3;
/// Exponents of the operands are within plus or minus this; those of products span twice as much.
const MOST_EXPONENT: f64 = 20.0;

/// The result of a trial of one algorithm.
#[derive(Debug, Clone)]
pub struct ExactVerdict {
    /// The algorithm's family, tile, stages and split-K factor.
    pub algorithm: String,
    /// Whether its result equals the reference bit for bit.
    pub is_equal: bool,
}

/// Operands whose sums differ in their bits if they are added in another order, and the tensors to compare.
struct HostileTrial<'a> {
    x: Tensor,                // [M, parts K], with the strides of the GEMM's rows
    w: Tensor,                // [N, parts K], with the strides of the weight
    bias: Option<&'a Tensor>, // [N]
    out: &'a Tensor,          // [M, N], of several parts [parts, M, N]; written to
    parts: i64,
}

/// Trials of the algorithms of a GEMM: its bucket's candidates, on hostile operands for the rows at hand.
struct GemmTrials<'a> {
    products: &'a Products,
    descriptors: &'a Descriptors,
    bucket: Problem,
    operands: [&'a Tensor; 3], // a, b, out
    trial: HostileTrial<'a>,
}

impl MemberTrials for GemmTrials<'_> {
    fn name(&self) -> String {
        self.bucket.name()
    }

    fn place(&self) -> Result<String> {
        self.products.key()
    }

    fn tried(&self) -> Result<Vec<sys::cublasLtMatmulAlgo_t>> {
        self.products.tried(&self.bucket, self.descriptors)
    }

    fn is_member(&self, algorithm: &sys::cublasLtMatmulAlgo_t, which: TrialRows) -> Result<bool> {
        self.products.is_member(&self.trial, self.descriptors, algorithm, which)
    }

    fn fastest(&self, members: &[sys::cublasLtMatmulAlgo_t]) -> Result<Option<sys::cublasLtMatmulAlgo_t>> {
        let [a, b, out] = self.operands;
        self.products.fastest_of(&self.bucket, self.descriptors, members, (a, b, out))
    }
}

impl<'a> HostileTrial<'a> {
    fn new(problem: &Problem, (a, b): (&Tensor, &Tensor), bias: Option<&'a Tensor>, out: &'a Tensor) -> Result<Self> {
        let (w, parts) = (b.tr(), problem.parts);
        Ok(Self { x: hostile(a, 1.0, 1, parts)?, w: hostile(&w, -1.0, 2, parts)?, bias, out, parts })
    }

    /// Whether the sums that an algorithm wrote to `out` equal the reference's, rounded to the output's type: in all rows, or in the first and last
    /// ones.
    fn is_equal(&self, which: TrialRows) -> Result<bool> {
        if self.parts == 1 {
            return self.is_part_equal(which, (&self.x, &self.w), self.out);
        }
        let len = self.x.size()[1] / self.parts;
        for part in 0..self.parts {
            let [x, w] = [&self.x, &self.w].map(|factor| factor.narrow(1, part * len, len));
            if !self.is_part_equal(which, (&x, &w), &self.out.get(part))? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn is_part_equal(&self, which: TrialRows, (x, w): (&Tensor, &Tensor), out: &Tensor) -> Result<bool> {
        let (rows, features) = (x.size()[0], w.size()[0]);
        let last = (rows - 1) / REFERENCE_ROWS * REFERENCE_ROWS;
        for first in (0..rows).step_by(REFERENCE_ROWS as usize) {
            if which == TrialRows::Ends && first > 0 && first < last {
                continue;
            }
            let part = |t: &Tensor| t.narrow(0, first, REFERENCE_ROWS.min(rows - first));
            let x = part(x);
            let mut sums = Tensor::f_empty([x.size()[0], features], (Kind::Float, x.device()))?;
            kernels::exact_reference(&x, w, &sums)?;
            if let Some(bias) = self.bias {
                sums = sums.f_add_(bias)?;
            }
            if !sums.f_to_kind(out.kind())?.f_equal(&part(out))? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Random rows with the shape and strides of `like`. In each part of K, the second half equals the first times `sign`, except for a few elements.
/// Exponents span plus or minus [`MOST_EXPONENT`]. Two such matrices with opposite signs have products that cancel.
fn hostile(like: &Tensor, sign: f64, key: u32, parts: i64) -> Result<Tensor> {
    let [rows, k] = like.size()[..] else { return Err(invalid("a matrix", format!("{:?}", like.size()))) };
    let leading = like.stride()[0].max(k);
    let made = Tensor::f_zeros([rows * leading], (like.kind(), like.device()))?;
    let made = made.f_as_strided([rows, k], [leading, 1], 0)?;
    for first in (0..rows).step_by(HOSTILE_ROWS as usize) {
        let own = made.narrow(0, first, HOSTILE_ROWS.min(rows - first));
        for part in 0..parts {
            // Each part has different numbers, so that swapped parts are detected.
            fill_hostile(&own.narrow(1, part * (k / parts), k / parts), sign, [key + 2 * part as u32, first as u32])?;
        }
    }
    Ok(made)
}

fn fill_hostile(rows: &Tensor /* [R, K] */, sign: f64, [key, place]: [u32; 2]) -> Result<()> {
    let (count, half, kind) = (rows.size()[0], rows.size()[1] / 2, rows.kind());
    let normal = |key: u32| -> Result<Tensor> {
        let mut values = Tensor::f_empty([count * half], (Kind::Float, rows.device()))?;
        kernels::fill_normal(&mut values, [key, place], 1.0)?;
        Ok(values.view([count, half]))
    };
    let exponents = normal(2 * key)?.f_mul_scalar(MOST_EXPONENT / 2.0)?.f_clamp(-MOST_EXPONENT, MOST_EXPONENT)?;
    let first = normal(2 * key + 1)?.f_mul(&exponents.f_round()?.f_exp2()?)?.f_to_kind(kind)?;
    // About one element in twenty differs in the last bit in the second half, so that sums do not cancel to zero.
    let other = exponents.f_abs()?.f_lt(0.6)?.f_to_kind(Kind::Float)?.f_mul_scalar(1.0 / 128.0)?.f_add_scalar(1.0)?;
    let second = first.f_to_kind(Kind::Float)?.f_mul(&other)?.f_mul_scalar(sign)?.f_to_kind(kind)?;
    rows.narrow(1, 0, half).f_copy_(&first)?;
    rows.narrow(1, half, half).f_copy_(&second)?;
    Ok(())
}

impl Products {
    /// GPU memory in bytes that the search for an exact algorithm for [rows, k] x [features, k]^T needs, on a machine's first run.
    pub fn trial_bytes(rows: usize, [features, k]: [usize; 2]) -> usize {
        let at_once = if parts::is_cut(features as i64, k as i64) { rows.min(parts::MOST_ROWS as usize) } else { rows };
        let factors = Kind::BFloat16.elt_size_in_bytes() * (at_once + features) * k;
        let hostile = HOSTILE_COPIES * (HOSTILE_ROWS as usize).min(at_once.max(features)) * k / 2;
        let reference = REFERENCE_COPIES * (REFERENCE_ROWS as usize).min(at_once) * features;
        factors + size_of::<f32>() * hostile.max(reference) + algorithms::FLUSH_BYTES as usize
    }

    /// An algorithm of the class for about this many rows, from the cache or found now. It is the bucket's algorithm, if that is also a member for
    /// these rows.
    pub(super) fn exact(
        &self,
        part: &Problem,
        descriptors: &Descriptors,
        (a, b, bias, out): (&Tensor, &Tensor, Option<&Tensor>, &Tensor),
    ) -> Result<sys::cublasLtMatmulAlgo_t> {
        let key = self.key()?;
        let path = |of: &Problem, what| cache::path("exact", &of.name(), &format!("{key} {what} {of:?}"));
        let bucket = fixed::bucket(part);
        let (path, path_of_bucket) = (path(part, "part")?, path(&bucket, "bucket")?);
        let accepted = |algorithm: &_| descriptors.accept(self.handle, algorithm);
        members::kept_or_found([&path, &path_of_bucket], accepted, || {
            self.refuse_capture(part)?;
            let trial = HostileTrial::new(part, (a, b), bias, out)?;
            Ok(GemmTrials { products: self, descriptors, bucket, operands: [a, b, out], trial })
        })
    }

    /// Tries every candidate algorithm for a GEMM, the most promising first, and reports whether each is exact.
    ///
    /// # Errors
    /// The errors of [`Products::run`].
    pub fn exact_verdicts(
        &self,
        a: &Tensor,            // [M, K] bf16
        b: &Tensor,            // [K, N] bf16, transposed
        bias: Option<&Tensor>, // [N] bf16
        out: &Tensor,          // [M, N], written to
    ) -> Result<Vec<ExactVerdict>> {
        let problem = Problem::of(a, b, bias, out, 0.0, self.context.ordinal())?;
        let descriptors = Descriptors::new(&problem, bias, None)?;
        let trial = HostileTrial::new(&problem, (a, b), bias, out)?;
        let verdict = |algorithm: &sys::cublasLtMatmulAlgo_t| {
            let is_equal = self.is_member(&trial, &descriptors, algorithm, TrialRows::Ends)?;
            Ok(ExactVerdict { algorithm: describe(algorithm)?, is_equal })
        };
        self.tried(&problem, &descriptors)?.iter().map(verdict).collect()
    }

    /// cuBLASLt's candidates, followed by the same algorithms with other split-K factors.
    fn tried(&self, problem: &Problem, descriptors: &Descriptors) -> Result<Vec<sys::cublasLtMatmulAlgo_t>> {
        let mut tried = self.candidates(problem, descriptors)?;
        tried.retain(|algorithm| descriptors.accept(self.handle, algorithm));
        tried.extend(self.variants(descriptors, &tried)?);
        Ok(tried)
    }

    fn is_member(
        &self,
        trial: &HostileTrial<'_>,
        descriptors: &Descriptors,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        which: TrialRows,
    ) -> Result<bool> {
        let pointers = [&trial.w, &trial.x, trial.out, trial.out].map(Tensor::data_ptr);
        // SAFETY: the operands have the layouts of the GEMM that the descriptors describe, and live in stream order.
        unsafe { self.queue(descriptors, algorithm, pointers, 0.0)? };
        trial.is_equal(which)
    }
}
