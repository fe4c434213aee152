//! One product's shape, and its description for cuBLASLt, which is column-major: out^T = b^T a^T.
#![allow(unsafe_code)]

use std::ffi::c_void;

use cudarc::cublaslt::sys;
use tch::{Device, Kind, Tensor};

use super::{WORKSPACE_BYTES, status};
use crate::error::{Error, Result};

/// A factor as it lies: row-major with a leading dimension, or the transpose of that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Factor {
    rows: i64,
    columns: i64,
    leading: i64,
    is_transposed: bool,
}

/// Everything that an algorithm's choice depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Problem {
    a: Factor,
    b: Factor,
    out: Factor,
    kind: Kind,
    out_kind: Kind,
    has_bias: bool,
    accumulates: bool,
    alignment: u32, // in bytes, of all three
}

impl Problem {
    pub(super) fn of(
        a: &Tensor,
        b: &Tensor,
        bias: Option<&Tensor>,
        out: &Tensor,
        beta: f32,
        ordinal: usize,
    ) -> Result<Self> {
        let [left, right, result] = [a, b, out].map(|tensor| Factor::of(tensor, ordinal));
        let (left, right, result) = (left?, right?, result?);
        let fits = left.columns == right.rows
            && (result.rows, result.columns) == (left.rows, right.columns)
            && !result.is_transposed
            && a.kind() == b.kind()
            && [a, out].iter().all(|tensor| matches!(tensor.kind(), Kind::Float | Kind::BFloat16))
            && bias.is_none_or(|bias| {
                bias.size() == [right.columns]
                    && bias.kind() == out.kind()
                    && bias.device() == out.device()
                    && bias.is_contiguous()
            });
        if !fits {
            let shape = |tensor: &Tensor| format!("{:?} {:?} {:?}", tensor.kind(), tensor.size(), tensor.stride());
            let got = format!("{} x {} -> {}, bias {:?}", shape(a), shape(b), shape(out), bias.map(shape));
            return Err(invalid("[M, K] x [K, N] + [N] -> [M, N] of f32 or bf16", got));
        }
        let addresses = [a, b, out].map(|tensor| tensor.data_ptr() as usize);
        let alignment = addresses.iter().map(|address| address.trailing_zeros()).min().unwrap_or(0);
        Ok(Self {
            a: left,
            b: right,
            out: result,
            kind: a.kind(),
            out_kind: out.kind(),
            has_bias: bias.is_some(),
            accumulates: beta != 0.0,
            alignment: 1 << alignment.min(8),
        })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.out.rows == 0 || self.out.columns == 0
    }

    pub(super) fn flop(&self) -> f64 {
        2.0 * self.a.rows as f64 * self.a.columns as f64 * self.b.columns as f64
    }

    /// M, N and K, for people.
    pub(super) fn name(&self) -> String {
        format!("{}x{}x{}", self.a.rows, self.b.columns, self.a.columns)
    }

    /// M
    pub(super) fn rows(&self) -> i64 {
        self.out.rows
    }

    /// The same product of another number of rows.
    pub(super) fn with_rows(&self, rows: i64) -> Self {
        let mut other = *self;
        (other.a.rows, other.out.rows) = (rows, rows);
        if other.a.is_transposed {
            other.a.leading = other.a.leading.max(rows);
        }
        other
    }

    /// The same product with nothing promised beyond addresses at multiples of `bytes`.
    pub(super) fn aligned_to_at_most(&self, bytes: u32) -> Self {
        Self { alignment: self.alignment.min(bytes), ..*self }
    }

    /// Elements from one row of the output to the next.
    pub(super) fn row_len(&self) -> i64 {
        self.out.leading
    }

    /// Elements that a spans.
    pub(super) fn a_len(&self) -> i64 {
        self.a.leading * if self.a.is_transposed { self.a.columns } else { self.a.rows }
    }

    pub(super) fn out_kind(&self) -> Kind {
        self.out_kind
    }

    /// 1 where the output is added to, else 0.
    pub(super) fn beta(&self) -> f32 {
        f32::from(u8::from(self.accumulates))
    }
}

impl Factor {
    fn of(tensor: &Tensor, ordinal: usize) -> Result<Self> {
        let (size, stride) = (tensor.size(), tensor.stride());
        let (&[rows, columns], &[down, across]) = (size.as_slice(), stride.as_slice()) else {
            return Err(invalid("matrices", format!("{size:?}")));
        };
        if tensor.device() != Device::Cuda(ordinal) {
            return Err(invalid("matrices on one GPU", format!("{:?}", tensor.device())));
        }
        let is_transposed = across != 1 && columns > 1; // the stride along a single column says nothing
        let (leading, unit, unit_len, others) =
            if is_transposed { (across, down, rows, columns) } else { (down, across, columns, rows) };
        if unit_len > 1 && unit != 1 {
            return Err(invalid("a matrix with one stride of 1", format!("strides {stride:?} of {size:?}")));
        }
        let leading = if others > 1 { leading } else { leading.max(unit_len) };
        Ok(Self { rows, columns, leading, is_transposed })
    }

    /// (rows, columns, leading dimension) of the column-major matrix at the same address.
    fn column_major(&self) -> (u64, u64, i64) {
        let (rows, columns) = if self.is_transposed { (self.rows, self.columns) } else { (self.columns, self.rows) };
        (rows as u64, columns as u64, self.leading.max(rows))
    }
}

/// cuBLASLt's description of a problem, destroyed with this.
#[derive(Debug)]
pub(super) struct Descriptors {
    operation: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3], // b, a, out
}

impl Descriptors {
    pub(super) fn new(problem: &Problem, bias: Option<&Tensor>) -> Result<Self> {
        let mut made = Self { operation: std::ptr::null_mut(), layouts: [std::ptr::null_mut(); 3] };
        let (compute, scale) = (sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, sys::cudaDataType::CUDA_R_32F);
        // SAFETY: the handle is written on success and destroyed with `made`.
        let code = unsafe { sys::cublasLtMatmulDescCreate(&raw mut made.operation, compute, scale) };
        status("cublasLtMatmulDescCreate", code)?;
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let operation = |factor: &Factor| i32::from(factor.is_transposed); // CUBLAS_OP_N, CUBLAS_OP_T
        made.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &operation(&problem.b))?;
        made.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &operation(&problem.a))?;
        if problem.has_bias {
            made.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS)?;
        }
        if let Some(bias) = bias {
            made.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias.data_ptr())?;
        }
        let factors = [(&problem.b, problem.kind), (&problem.a, problem.kind), (&problem.out, problem.out_kind)];
        for (layout, (factor, kind)) in made.layouts.iter_mut().zip(factors) {
            let (rows, columns, leading) = factor.column_major();
            // SAFETY: as above.
            let code =
                unsafe { sys::cublasLtMatrixLayoutCreate(&raw mut *layout, data_type(kind), rows, columns, leading) };
            status("cublasLtMatrixLayoutCreate", code)?;
        }
        Ok(made)
    }

    fn set<T>(&self, attribute: sys::cublasLtMatmulDescAttributes_t, value: &T) -> Result<()> {
        // SAFETY: the value is of the attribute's type and copied by the call.
        let code = unsafe {
            sys::cublasLtMatmulDescSetAttribute(
                self.operation,
                attribute,
                (&raw const *value).cast::<c_void>(),
                size_of::<T>(),
            )
        };
        status("cublasLtMatmulDescSetAttribute", code)
    }

    pub(super) fn operation(&self) -> sys::cublasLtMatmulDesc_t {
        self.operation
    }

    /// Of b, a and out.
    pub(super) fn layouts(&self) -> [sys::cublasLtMatrixLayout_t; 3] {
        self.layouts
    }

    /// At most `most` algorithms, the most promising first. Sums split over K are added in a fixed order, in float32.
    pub(super) fn candidates(
        &self,
        handle: sys::cublasLtHandle_t,
        problem: &Problem,
        most: usize,
    ) -> Result<Vec<sys::cublasLtMatmulAlgo_t>> {
        let preference = Preference::new(problem.alignment)?;
        // SAFETY: plain numbers, for which zeros are valid.
        let mut found = vec![unsafe { std::mem::zeroed::<sys::cublasLtMatmulHeuristicResult_t>() }; most];
        let mut count = 0;
        let [b, a, out] = self.layouts;
        // SAFETY: all descriptors are alive; at most `most` results are written.
        let code = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                self.operation,
                b,
                a,
                out,
                out,
                preference.0,
                most as i32,
                found.as_mut_ptr(),
                &raw mut count,
            )
        };
        status("cublasLtMatmulAlgoGetHeuristic", code)?;
        let usable = found.iter().take(count as usize);
        let usable = usable.filter(|result| result.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS);
        Ok(usable.map(|result| result.algo).collect())
    }

    /// Whether the library serves the problem by an algorithm that it gave another process.
    pub(super) fn accept(&self, handle: sys::cublasLtHandle_t, algorithm: &sys::cublasLtMatmulAlgo_t) -> bool {
        // SAFETY: plain numbers, for which zeros are valid.
        let mut result = unsafe { std::mem::zeroed::<sys::cublasLtMatmulHeuristicResult_t>() };
        let [b, a, out] = self.layouts;
        // SAFETY: all descriptors are alive; the result is written.
        let code =
            unsafe { sys::cublasLtMatmulAlgoCheck(handle, self.operation, b, a, out, out, algorithm, &raw mut result) };
        code == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS && result.workspaceSize <= WORKSPACE_BYTES
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: created by `new` where not null, and not used after this.
        unsafe {
            for layout in self.layouts.into_iter().filter(|layout| !layout.is_null()) {
                sys::cublasLtMatrixLayoutDestroy(layout);
            }
            sys::cublasLtMatmulDescDestroy(self.operation);
        }
    }
}

/// What an algorithm may use.
struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new(alignment: u32) -> Result<Self> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let mut made = Self(std::ptr::null_mut());
        // SAFETY: the handle is written on success and destroyed with `made`.
        let code = unsafe { sys::cublasLtMatmulPreferenceCreate(&raw mut made.0) };
        status("cublasLtMatmulPreferenceCreate", code)?;
        made.set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &(WORKSPACE_BYTES as u64))?;
        let reduction = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        made.set(Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reduction)?;
        for attribute in [
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            made.set(attribute, &alignment)?;
        }
        Ok(made)
    }

    fn set<T>(&self, attribute: sys::cublasLtMatmulPreferenceAttributes_t, value: &T) -> Result<()> {
        // SAFETY: the value is of the attribute's type and copied by the call.
        let code = unsafe {
            sys::cublasLtMatmulPreferenceSetAttribute(
                self.0,
                attribute,
                (&raw const *value).cast::<c_void>(),
                size_of::<T>(),
            )
        };
        status("cublasLtMatmulPreferenceSetAttribute", code)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: created by `new` and not used after this.
        unsafe { sys::cublasLtMatmulPreferenceDestroy(self.0) };
    }
}

fn data_type(kind: Kind) -> sys::cudaDataType {
    if kind == Kind::Float { sys::cudaDataType::CUDA_R_32F } else { sys::cudaDataType::CUDA_R_16BF }
}

pub(super) fn invalid(expected: &str, got: String) -> Error {
    Error::InvalidArgument { op: "Products::run", expected: expected.to_owned(), got }
}

pub(super) fn failed(op: &'static str, code: u32, message: &str) -> Error {
    Error::Cuda { op, code, message: message.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::products::fixed::bucket;

    /// [rows, 72] x [72, 40]
    fn problem(rows: i64, alignment: u32) -> Problem {
        let factor = |rows, columns, is_transposed| Factor { rows, columns, leading: 72, is_transposed };
        Problem {
            a: factor(rows, 72, false),
            b: factor(72, 40, true),
            out: factor(rows, 40, false),
            kind: Kind::BFloat16,
            out_kind: Kind::Float,
            has_bias: true,
            accumulates: false,
            alignment,
        }
    }

    #[test]
    fn a_bucket_has_powers_of_two_of_rows_and_all_good_alignments() {
        assert_eq!(bucket(&problem(1, 16)), problem(1, 16));
        assert_eq!(bucket(&problem(33, 256)), problem(64, 16));
        assert_eq!(bucket(&problem(64, 32)), problem(64, 16));
        assert_eq!(bucket(&problem(65, 8)), problem(128, 8), "an algorithm for 16 bytes may not take 8");
    }
}
