//! Matrix products on a GPU through cuBLASLt: float32 sums of bf16 or f32 factors, read and written through their leading
//! dimensions, so that a tensor-parallel slice needs no copy.
//!
//! The algorithm of a shape is chosen once and kept for the process: the heuristics' first, or, where [`Tuning::Timed`] asks
//! for it, the fastest of their list on this GPU. The workspace is fixed and stays, so that products can be captured in a
//! graph.
#![allow(unsafe_code)]

mod problem;

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::cublaslt::sys;
use cudarc::driver::{result, sys as driver};
use tch::{Kind, Tensor};

use self::problem::{Descriptors, Problem};
use super::context::{Context, check};
use super::stream::Event;
use crate::error::{Error, Result};
use crate::torch;

/// What cuBLAS advises for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;
/// Algorithms of the heuristics' list that are timed.
const CANDIDATES: usize = 16;
/// Runs of each; the median counts.
const RUNS: usize = 5;
/// A later algorithm of the list must be faster than an earlier one by this factor.
const GAIN: f64 = 0.98;
/// Rows for which the algorithm of all numbers of rows is chosen.
const FIXED_ROWS: i64 = 256;
/// Larger products take the first: alone in a measurement the chip clocks higher than in a run of them.
const MOST_TIMED_FLOP: f64 = 1e11;
/// Written between timed runs, more than the L2 cache holds: weights come from memory in a decode step.
const FLUSH_BYTES: i64 = 128 << 20;

/// How the algorithm of a shape is found on first use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tuning {
    /// The heuristics' first: at once, and the same in every process.
    First,
    /// The fastest of the heuristics' list, timed once; of large products the first. It may differ from process to process,
    /// and results in their last bits.
    Timed,
    /// The same for every number of rows M, so that a row's bits do not depend on the rows beside it.
    Fixed,
}

/// One GPU's handle of cuBLASLt, its workspace, and the algorithms chosen so far. Products are queued on libtorch's current
/// stream; they share the workspace, so use one stream at a time.
#[derive(Debug)]
pub struct Products {
    context: Arc<Context>,
    handle: sys::cublasLtHandle_t,
    workspace: driver::CUdeviceptr,
    chosen: Mutex<HashMap<(Problem, Tuning), sys::cublasLtMatmulAlgo_t>>,
}

// SAFETY: a cublasLt handle may be used from any thread.
unsafe impl Send for Products {}
// SAFETY: as above.
unsafe impl Sync for Products {}

impl Products {
    /// Those of GPU `ordinal`: one for the process, kept until it ends.
    ///
    /// # Errors
    /// [`Error::Environment`] without a GPU or cuBLASLt; [`Error::Cuda`].
    pub fn of(ordinal: usize) -> Result<Arc<Self>> {
        static OPENED: Mutex<Option<HashMap<usize, Arc<Products>>>> = Mutex::new(None);
        let mut opened = lock(&OPENED);
        let opened = opened.get_or_insert_default();
        if let Some(products) = opened.get(&ordinal) {
            return Ok(products.clone());
        }
        let products = Arc::new(Self::open(ordinal)?);
        opened.insert(ordinal, products.clone());
        Ok(products)
    }

    fn open(ordinal: usize) -> Result<Self> {
        let context = Context::retain(ordinal)?;
        // SAFETY: opens the library that libtorch has loaded, or the one the loader finds.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::Environment { message: "libcublasLt.so.13 was not found beside libtorch".to_owned() });
        }
        let mut handle = std::ptr::null_mut();
        // SAFETY: the handle outlives the call and is kept.
        status("cublasLtCreate", unsafe { sys::cublasLtCreate(&raw mut handle) })?;
        // SAFETY: kept until the process ends.
        let workspace = check("cuMemAlloc", unsafe { result::malloc_sync(WORKSPACE_BYTES) })?;
        Ok(Self { context, handle, workspace, chosen: Mutex::default() })
    }

    /// out = a b + bias + beta out, sums in float32, rounded once. The factors may be views of row-major matrices or of their
    /// transposes (`weight.tr()`): one of their two strides is 1.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for tensors that do not fit, or a shape that is seen first while a graph is captured;
    /// [`Error::Cuda`] where cuBLASLt has no algorithm.
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
        let stream = torch::current_cuda_stream(self.context.ordinal())?;
        let descriptors = Descriptors::new(&problem, bias)?;
        let algorithm = self.algorithm(&problem, &descriptors, tuning, stream, (a, b, out))?;
        // SAFETY: `problem` holds the tensors to the sizes that the descriptors state; they live in stream order.
        unsafe { self.queue(&descriptors, &algorithm, [b.data_ptr(), a.data_ptr(), out.data_ptr()], beta, stream) }
    }

    fn algorithm(
        &self,
        problem: &Problem,
        descriptors: &Descriptors,
        tuning: Tuning,
        stream: *mut c_void,
        (a, b, out): (&Tensor, &Tensor, &Tensor),
    ) -> Result<sys::cublasLtMatmulAlgo_t> {
        if tuning == Tuning::Fixed && problem.rows() != FIXED_ROWS {
            let fixed = problem.with_rows(FIXED_ROWS);
            return self.algorithm(&fixed, &Descriptors::new(&fixed, None)?, tuning, stream, (a, b, out));
        }
        if let Some(algorithm) = lock(&self.chosen).get(&(*problem, tuning)) {
            return Ok(*algorithm);
        }
        // Partial sums of a split K take room with the rows: what fits for some would not for more.
        let splits_sums = tuning != Tuning::Fixed;
        let candidates = descriptors.candidates(self.handle, problem, (WORKSPACE_BYTES, splits_sums), CANDIDATES)?;
        let [first, ..] = candidates.as_slice() else {
            return Err(problem::failed(
                "cublasLtMatmulAlgoGetHeuristic",
                sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED as u32,
                &format!("no algorithm for {problem:?}"),
            ));
        };
        // SAFETY: the stream is libtorch's current one.
        let capturing = check("cuStreamIsCapturing", unsafe { result::stream::is_capturing(stream.cast()) })?;
        let algorithm = match tuning {
            Tuning::First | Tuning::Fixed => *first,
            Tuning::Timed if problem.flop() > MOST_TIMED_FLOP => *first,
            Tuning::Timed if capturing != driver::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => {
                return Err(problem::invalid("a shape that has run before it is captured", format!("{problem:?}")));
            }
            // Into an output of its own: with beta the real one would be changed.
            Tuning::Timed => {
                let shape = [out.size()[0], problem.row_len()];
                let scratch = Tensor::f_empty(shape, (out.kind(), out.device()));
                let flushed = Tensor::f_empty([FLUSH_BYTES], (Kind::Uint8, out.device()));
                match (scratch, flushed) {
                    (Ok(scratch), Ok(flushed)) => {
                        let pointers = [b.data_ptr(), a.data_ptr(), scratch.data_ptr()];
                        self.fastest(descriptors, &candidates, pointers, &flushed, stream)?
                    }
                    _ => *first, // no memory to time in
                }
            }
        };
        lock(&self.chosen).insert((*problem, tuning), algorithm);
        Ok(algorithm)
    }

    fn fastest(
        &self,
        descriptors: &Descriptors,
        candidates: &[sys::cublasLtMatmulAlgo_t],
        pointers: [*mut c_void; 3],
        flushed: &Tensor,
        stream: *mut c_void,
    ) -> Result<sys::cublasLtMatmulAlgo_t> {
        let mut best = (candidates[0], f64::INFINITY);
        for algorithm in candidates {
            let mut times = [0.0; RUNS];
            for time in &mut times {
                let _ = flushed.shallow_clone().f_zero_()?;
                let start = Event::record_libtorch(&self.context)?;
                // SAFETY: as in `run`; the output is a scratch of the same shape.
                unsafe { self.queue(descriptors, algorithm, pointers, 0.0, stream)? };
                *time = start.time_until(&Event::record_libtorch(&self.context)?)?.as_secs_f64();
            }
            times.sort_by(f64::total_cmp);
            if times[RUNS / 2] < best.1 * GAIN {
                best = (*algorithm, times[RUNS / 2]);
            }
        }
        Ok(best.0)
    }

    /// # Safety
    /// The pointers (b, a, out) span what the descriptors state until `stream` has passed this.
    unsafe fn queue(
        &self,
        descriptors: &Descriptors,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        [b, a, out]: [*mut c_void; 3],
        beta: f32,
        stream: *mut c_void,
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
                out,
                out_layout,
                out,
                out_layout,
                algorithm,
                self.workspace as *mut c_void,
                WORKSPACE_BYTES,
                stream.cast(),
            )
        };
        status("cublasLtMatmul", code)
    }
}

fn status(op: &'static str, code: sys::cublasStatus_t) -> Result<()> {
    match code {
        sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        code => Err(problem::failed(op, code as u32, &format!("{code:?}"))),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
