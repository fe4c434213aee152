//! GEMMs on a GPU through cuBLASLt: operands in bf16, f32 or scaled e4m3, float32 sums. Leading dimensions are supported, so a tensor-parallel slice
//! needs no copy.
//!
//! The algorithm of a shape is chosen once (`algorithms`), and so is whether a step uses the crate's own kernels instead (`own`). The workspace is
//! allocated once and stays, so that GEMMs can be captured in a CUDA graph.
#![allow(unsafe_code)]

mod algorithms;
mod descriptors;
mod exact;
mod fixed;
mod members;
mod order;
mod own;
mod parts;
mod problem;
mod shared;
mod status;

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex};

use cudarc::cublaslt::sys;
use cudarc::driver::{result, sys as driver};
use tch::{Kind, Tensor};

use self::descriptors::Descriptors;
pub use self::exact::ExactVerdict;
use self::problem::Problem;
use self::status::{WORKSPACE_BYTES, failed, status};
use super::context::{Context, check};
use super::kernels::{self, ScaledRows};
use super::torch_stream::TorchStream;
use crate::error::{Error, Result};
use crate::torch;

/// How the algorithm of a shape is chosen on first use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tuning {
    /// The heuristic's first algorithm: no search, and the same in every process.
    First,
    /// The fastest of the heuristic's list and its variants, timed once and kept in the user's cache folder; the first for large GEMMs. It may differ
    /// between machines, and results may differ in their last bits.
    Timed,
    /// The first algorithm among those that sum in the same order for every number of rows M, so that a row's bits do not depend on other rows.
    Fixed,
    /// The fastest (for large GEMMs the first) among those that match the reference bit for bit for every number of rows, in the engine and in
    /// training; kept in the user's cache folder.
    Exact,
}

/// GEMMs on one stream: cuBLASLt's handle, the workspace that the GEMMs use in turn, and the algorithms chosen so far. Must be dropped after the CUDA
/// graphs that captured its GEMMs.
#[derive(Debug)]
pub struct Products {
    context: Arc<Context>,
    stream: *mut c_void,
    handle: sys::cublasLtHandle_t,
    workspace: driver::CUdeviceptr,
    chosen: Mutex<HashMap<(Problem, Tuning), sys::cublasLtMatmulAlgo_t>>,
    own_are_faster: Mutex<HashMap<(usize, String), bool>>, // by rows and step
    sums: Mutex<HashMap<i64, Tensor>>,                     // of exact products in parts, by features
}

// SAFETY: a cublasLt handle may be used from any thread, and so may a stream.
unsafe impl Send for Products {}
// SAFETY: as above.
unsafe impl Sync for Products {}

impl Products {
    /// Bytes of device memory of the workspace.
    pub const BYTES: usize = WORKSPACE_BYTES;

    /// Creates GEMMs for `stream`.
    ///
    /// # Errors
    /// [`Error::Environment`] without a GPU or cuBLASLt; [`Error::Cuda`].
    pub fn new(stream: &TorchStream) -> Result<Self> {
        Self::on(stream.context().clone(), stream.raw())
    }

    /// Creates GEMMs for a raw stream of the context; the stream must outlive them.
    fn on(context: Arc<Context>, stream: *mut c_void) -> Result<Self> {
        context.make_current()?;
        // SAFETY: opens the library that libtorch has loaded, or the one the loader finds.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::Environment { message: "libcublasLt.so.13 was not found next to libtorch".to_owned() });
        }
        // SAFETY: freed by drop alone.
        let workspace = check("cuMemAlloc", unsafe { result::malloc_sync(WORKSPACE_BYTES) })?;
        let handle = std::ptr::null_mut();
        let (chosen, own_are_faster, sums) = Default::default();
        let mut products = Self { context, stream, handle, workspace, chosen, own_are_faster, sums };
        // SAFETY: the handle is written on success and destroyed with `products`.
        status("cublasLtCreate", unsafe { sys::cublasLtCreate(&raw mut products.handle) })?;
        Ok(products)
    }

    /// Computes out = a b + bias + beta out, with float32 sums, rounded once. The operands may be views of row-major matrices or of their transposes
    /// (`weight.tr()`): one of their two strides must be 1.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for tensors that do not fit, for another current stream than the one given at creation, or for a new shape while a
    /// graph is captured; [`Error::Cuda`] if cuBLASLt has no algorithm.
    pub fn run(
        &self,
        a: &Tensor,            // [M, K] f32 or bf16
        b: &Tensor,            // [K, N], like a
        bias: Option<&Tensor>, // [N], like out
        out: &Tensor,          // [M, N] f32 or bf16, rows of stride 1
        beta: f32,
        tuning: Tuning,
    ) -> Result<()> {
        let problem = Problem::of(a, b, bias, out, beta, self.context.ordinal())?;
        if problem.is_empty() {
            return Ok(());
        }
        self.check_stream()?;
        if tuning == Tuning::Exact && a.kind() == Kind::Float && matches!(beta, 0.0 | 1.0) {
            return kernels::exact_product(a, &b.tr(), bias, out, beta == 1.0);
        }
        if tuning == Tuning::Exact && beta != 0.0 {
            return Err(problem::invalid("beta = 0 (a GEMM that overwrites its output)", format!("beta {beta}")));
        }
        if tuning == Tuning::Exact && parts::is_cut(b.size()[1], b.size()[0]) {
            return self.run_in_parts(a, b, bias, out);
        }
        if tuning == Tuning::Fixed && problem.rows() > fixed::MOST_ROWS {
            return (0..problem.rows()).step_by(fixed::MOST_ROWS as usize).try_for_each(|row| {
                let part = |of: &Tensor| of.narrow(0, row, fixed::MOST_ROWS.min(problem.rows() - row));
                self.run(&part(a), b, bias, &part(out), beta, tuning)
            });
        }
        let descriptors = Descriptors::new(&problem, bias, None)?;
        let algorithm = self.algorithm(&problem, &descriptors, tuning, (a, b, bias, out))?;
        // SAFETY: `problem` has checked the tensors against the sizes in the descriptors; they live in stream order.
        unsafe { self.queue(&descriptors, &algorithm, [b, a, out, out].map(Tensor::data_ptr), beta) }
    }

    /// Computes out = a b^T + bias with e4m3 operands. Each sum is multiplied by the scales of its row of a and of b, and rounded once. Hopper only.
    ///
    /// # Errors
    /// The errors of [`Products::run`]; also for [`Tuning::Fixed`].
    pub fn run_fp8(
        &self,
        a: &ScaledRows,        // [M, K]
        b: &ScaledRows,        // [N, K]
        bias: Option<&Tensor>, // [N] bf16
        out: &Tensor,          // [M, N] bf16, or f32 without a bias, rows of stride 1
        tuning: Tuning,
    ) -> Result<()> {
        self.multiply_fp8((a, b), (bias, None), out, tuning)
    }

    /// Computes out = residual + a b^T with e4m3 operands, scaled and rounded like [`Products::run_fp8`], with [`Tuning::First`].
    ///
    /// # Errors
    /// The errors of [`Products::run_fp8`].
    pub fn run_fp8_onto(
        &self,
        residual: &Tensor, // [M, N], like out
        a: &ScaledRows,    // [M, K]
        b: &ScaledRows,    // [N, K]
        out: &Tensor,      // [M, N] bf16 or f32, rows of stride 1
    ) -> Result<()> {
        self.multiply_fp8((a, b), (None, Some(residual)), out, Tuning::First)
    }

    fn multiply_fp8(
        &self,
        (a, b): (&ScaledRows, &ScaledRows),
        (bias, residual): (Option<&Tensor>, Option<&Tensor>),
        out: &Tensor,
        tuning: Tuning,
    ) -> Result<()> {
        let problem = Problem::of_fp8(a, b, (bias, residual), out, self.context.ordinal())?;
        if problem.is_empty() {
            return Ok(());
        }
        self.check_stream()?;
        if !matches!(tuning, Tuning::First | Tuning::Timed) {
            return Err(problem::invalid("operands in bf16 or f32, as FP8 has no exact GEMM", "e4m3".to_owned()));
        }
        let descriptors = Descriptors::new(&problem, bias, Some([&a.scales, &b.scales]))?;
        let (a, b) = (&a.values, b.values.tr());
        let algorithm = self.algorithm(&problem, &descriptors, tuning, (a, &b, bias, out))?;
        let pointers = [&b, a, residual.unwrap_or(out), out].map(Tensor::data_ptr);
        // SAFETY: `problem` has checked the tensors against the sizes in the descriptors; they live in stream order.
        unsafe { self.queue(&descriptors, &algorithm, pointers, problem.beta()) }
    }

    /// Checks that the current stream is the one that the workspace belongs to.
    fn check_stream(&self) -> Result<()> {
        if torch::current_cuda_stream(self.context.ordinal())? == self.stream {
            return Ok(());
        }
        Err(problem::invalid(
            "libtorch's current stream to be the stream of this cuBLASLt workspace",
            "another".to_owned(),
        ))
    }

    /// Queues a GEMM with the chosen algorithm.
    ///
    /// # Safety
    /// The pointers (b, a, the addend of `beta`, out) must span the sizes in the descriptors until the stream has passed the GEMM.
    unsafe fn queue(
        &self,
        descriptors: &Descriptors,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        [b, a, added, out]: [*mut c_void; 4],
        beta: f32,
    ) -> Result<()> {
        let one = 1f32;
        let (alpha, beta) = ((&raw const one).cast(), (&raw const beta).cast());
        let [b_layout, a_layout, out_layout] = descriptors.layouts();
        // SAFETY: guaranteed by the caller; scalars are read before the call returns. Column-major, the GEMM is out^T = b^T a^T.
        let code = unsafe {
            sys::cublasLtMatmul(
                self.handle,
                descriptors.operation(),
                alpha,
                b,
                b_layout,
                a,
                a_layout,
                beta,
                added,
                out_layout,
                out,
                out_layout,
                algorithm,
                self.workspace as *mut c_void,
                WORKSPACE_BYTES,
                self.stream.cast(),
            )
        };
        status("cublasLtMatmul", code)
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        // SAFETY: both are this one's own; freeing waits for the work that is queued. A null handle was never made.
        unsafe {
            if !self.handle.is_null() {
                sys::cublasLtDestroy(self.handle);
            }
            let _ = self.context.make_current().map(|()| result::free_sync(self.workspace));
        }
    }
}

fn no_algorithm(problem: &Problem) -> Error {
    let code = sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED as u32;
    failed("cublasLtMatmulAlgoGetHeuristic", code, &format!("no algorithm for {problem:?}"))
}
