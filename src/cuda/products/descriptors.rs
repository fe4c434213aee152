//! Describes a GEMM to cuBLASLt, which is column-major: it computes out^T = b^T a^T.
#![allow(unsafe_code)]

use std::ffi::c_void;

use cudarc::cublaslt::sys;
use tch::{Kind, Tensor};

use super::problem::{Factor, Problem};
use super::status::{WORKSPACE_BYTES, status};
use crate::error::Result;

/// cuBLASLt's descriptors of a GEMM, destroyed when dropped.
#[derive(Debug)]
pub(super) struct Descriptors {
    operation: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3], // b, a, out
}

impl Descriptors {
    /// Creates the descriptors. `scales` are one per row of a and one per column of b, for FP8 operands.
    pub(super) fn new(problem: &Problem, bias: Option<&Tensor>, scales: Option<[&Tensor; 2]>) -> Result<Self> {
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
        if let Some([of_a, of_b]) = scales {
            let mode = sys::cublasLtMatmulMatrixScale_t::CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
            made.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &mode)?;
            made.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &mode)?;
            made.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &of_b.data_ptr())?;
            made.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &of_a.data_ptr())?;
            // FP8 sums are accumulated in the tensor cores, as in vLLM and in this crate's kernels.
            made.set(Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &1i8)?;
        }
        let factors = [(&problem.b, problem.kind), (&problem.a, problem.kind), (&problem.out, problem.out_kind)];
        for (layout, (factor, kind)) in made.layouts.iter_mut().zip(factors) {
            let (rows, columns, leading) = factor.column_major();
            // SAFETY: as above.
            let code =
                unsafe { sys::cublasLtMatrixLayoutCreate(&raw mut *layout, data_type(kind), rows, columns, leading) };
            status("cublasLtMatrixLayoutCreate", code)?;
        }
        if problem.parts > 1 {
            use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
            for (layout, stride) in made.layouts.into_iter().zip(problem.part_strides()) {
                set_of_layout(layout, Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &(problem.parts as i32))?;
                set_of_layout(layout, Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride)?;
            }
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

    /// The matrix layouts of b, a and out.
    pub(super) fn layouts(&self) -> [sys::cublasLtMatrixLayout_t; 3] {
        self.layouts
    }

    /// Returns at most `most` algorithms, the most promising first. With split K, the partial sums are added in a fixed order, in float32.
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

    /// Whether cuBLASLt supports the GEMM with an algorithm that was stored by another process.
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

fn set_of_layout<T>(
    layout: sys::cublasLtMatrixLayout_t,
    attribute: sys::cublasLtMatrixLayoutAttribute_t,
    value: &T,
) -> Result<()> {
    // SAFETY: the value is of the attribute's type and copied by the call.
    let code = unsafe {
        sys::cublasLtMatrixLayoutSetAttribute(layout, attribute, (&raw const *value).cast::<c_void>(), size_of::<T>())
    };
    status("cublasLtMatrixLayoutSetAttribute", code)
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

/// cuBLASLt's search preferences, which limit the algorithms.
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
    match kind {
        Kind::Float => sys::cudaDataType::CUDA_R_32F,
        Kind::Float8e4m3fn => sys::cudaDataType::CUDA_R_8F_E4M3,
        _ => sys::cudaDataType::CUDA_R_16BF,
    }
}
