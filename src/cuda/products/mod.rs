//! Matrix products on a GPU through cuBLASLt: float32 sums of bf16, f32 or scaled e4m3 factors, read and written through their leading
//! dimensions, so that a tensor-parallel slice needs no copy.
//!
//! The algorithm of a shape is chosen once (`algorithms`), and so is whether a step has the crate's own products instead (`own`).
//! The workspace is fixed and stays, so that products can be captured in a graph.
#![allow(unsafe_code)]

mod algorithms;
mod descriptors;
mod exact;
mod fixed;
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

/// How the algorithm of a shape is found on first use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tuning {
    /// The heuristics' first: at once, and the same in every process.
    First,
    /// The fastest of the heuristics' list and its variants, timed once and kept in the user's cache folder; of large products the
    /// first. It may differ from machine to machine, and results in their last bits.
    Timed,
    /// The first algorithm of those that sum in one order for every number of rows M: a row's bits do not depend on the rows
    /// beside it.
    Fixed,
    /// The fastest (of large products the first) of those that have the reference's bits for every number of rows, in the engine and in training;
    /// kept in the user's cache folder.
    Exact,
}

/// The products of one stream: cuBLASLt's handle, the workspace that they use one after the other, and the algorithms chosen so
/// far. Dropped after the graphs that have recorded its products.
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
    /// Device memory of the workspace.
    pub const BYTES: usize = WORKSPACE_BYTES;

    /// Products that are queued on `stream`.
    ///
    /// # Errors
    /// [`Error::Environment`] without a GPU or cuBLASLt; [`Error::Cuda`].
    pub fn new(stream: &TorchStream) -> Result<Self> {
        Self::on(stream.context().clone(), stream.raw())
    }

    /// Products that are queued on a stream of the context, which outlives them.
    fn on(context: Arc<Context>, stream: *mut c_void) -> Result<Self> {
        context.make_current()?;
        // SAFETY: opens the library that libtorch has loaded, or the one the loader finds.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::Environment { message: "libcublasLt.so.13 was not found beside libtorch".to_owned() });
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

    /// out = a b + bias + beta out, sums in float32, rounded once. The factors may be views of row-major matrices or of their
    /// transposes (`weight.tr()`): one of their two strides is 1.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for tensors that do not fit, another stream than the one they are for, or a shape that is seen
    /// first while a graph is captured; [`Error::Cuda`] where cuBLASLt has no algorithm.
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
        // SAFETY: `problem` holds the tensors to the sizes that the descriptors state; they live in stream order.
        unsafe { self.queue(&descriptors, &algorithm, [b, a, out, out].map(Tensor::data_ptr), beta) }
    }

    /// out = a b^T + bias of e4m3, each element scaled by the factors of its row of a and of b as it was summed, rounded once. On
    /// Hopper.
    ///
    /// # Errors
    /// The errors of [`Products::run`], and for [`Tuning::Fixed`].
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

    /// out = residual + a b^T of e4m3, as [`Products::run_fp8`] scales and rounds it. By [`Tuning::First`].
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
        // SAFETY: `problem` holds the tensors to the sizes that the descriptors state; they live in stream order.
        unsafe { self.queue(&descriptors, &algorithm, pointers, problem.beta()) }
    }

    /// The workspace is that of one stream.
    fn check_stream(&self) -> Result<()> {
        if torch::current_cuda_stream(self.context.ordinal())? == self.stream {
            return Ok(());
        }
        Err(problem::invalid(
            "libtorch's current stream to be the stream of this cuBLASLt workspace",
            "another".to_owned(),
        ))
    }

    /// # Safety
    /// The pointers (b, a, what `beta` adds, out) span what the descriptors state until the stream has passed this.
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
        // SAFETY: the caller's promise; scalars are read before the call returns. Column-major, the product is
        // out^T = b^T a^T.
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
