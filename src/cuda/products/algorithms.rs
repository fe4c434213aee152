//! Chooses cuBLASLt's algorithm for each GEMM shape, once per process. Algorithms chosen by timing are also kept in the user's cache folder.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use cudarc::cublaslt::sys;
use cudarc::driver::{result, sys as driver};
use tch::{Kind, Tensor};

use super::descriptors::Descriptors;
use super::order::Order;
use super::problem::{self, Problem};
use super::status::WORKSPACE_BYTES;
use super::{Products, Tuning, fixed};
use crate::cuda::cache;
use crate::cuda::context::check;
use crate::cuda::stream::CudaEvent;
use crate::error::Result;

/// Number of algorithms requested from cuBLASLt's heuristic.
const CANDIDATES: usize = 16;
/// Split-K factors that each algorithm is also timed with, because with few rows more splits are often faster than the heuristic expects.
const PARTS: [u32; 4] = [1, 2, 4, 8];
/// Timed runs of each algorithm; the median is used.
const RUNS: usize = 5;
/// A later algorithm of the list must take less than this fraction of the time of the best one before it.
const GAIN: f64 = 0.98;
/// GEMMs with more operations use the heuristic's first algorithm, because a single timed GEMM would run at a higher clock than it does in practice.
const MOST_TIMED_FLOP: f64 = 1e11;
/// Bytes written between timed runs to flush the L2 cache, because in a decode step weights come from memory.
pub(super) const FLUSH_BYTES: i64 = 128 << 20;

impl Products {
    pub(super) fn algorithm(
        &self,
        problem: &Problem,
        descriptors: &Descriptors,
        tuning: Tuning,
        (a, b, bias, out): (&Tensor, &Tensor, Option<&Tensor>, &Tensor),
    ) -> Result<sys::cublasLtMatmulAlgo_t> {
        let problem = &match tuning {
            Tuning::Fixed => fixed::bucket(problem),
            Tuning::Exact => fixed::part_of_bucket(problem),
            Tuning::First | Tuning::Timed => *problem,
        };
        if let Some(algorithm) = lock(&self.chosen).get(&(*problem, tuning)) {
            return Ok(*algorithm);
        }
        let algorithm = match tuning {
            Tuning::Timed if problem.flop() <= MOST_TIMED_FLOP => {
                self.kept_or_fastest(problem, descriptors, (a, b, out))?
            }
            Tuning::Fixed => self.fixed(problem, b, bias)?,
            Tuning::Exact => self.exact(problem, descriptors, (a, b, bias, out))?,
            _ => self.candidates(problem, descriptors)?[0],
        };
        lock(&self.chosen).insert((*problem, tuning), algorithm);
        Ok(algorithm)
    }

    /// Algorithms from the heuristic; returns at least one, or an error.
    pub(super) fn candidates(
        &self,
        problem: &Problem,
        descriptors: &Descriptors,
    ) -> Result<Vec<sys::cublasLtMatmulAlgo_t>> {
        let candidates = descriptors.candidates(self.handle, problem, CANDIDATES)?;
        if candidates.is_empty() { Err(super::no_algorithm(problem)) } else { Ok(candidates) }
    }

    /// Fails while a graph is captured, because choosing an algorithm may run additional GEMMs.
    pub(super) fn refuse_capture(&self, problem: &Problem) -> Result<()> {
        // SAFETY: the stream is that of the engine.
        let capturing = check("cuStreamIsCapturing", unsafe { result::stream::is_capturing(self.stream.cast()) })?;
        if capturing == driver::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            return Ok(());
        }
        Err(problem::invalid(
            "a GEMM shape that has already run once before the CUDA graph capture",
            format!("{problem:?}"),
        ))
    }

    /// The fastest candidate, from the cache file of an earlier start or timed now.
    fn kept_or_fastest(
        &self,
        problem: &Problem,
        descriptors: &Descriptors,
        (a, b, out): (&Tensor, &Tensor, &Tensor),
    ) -> Result<sys::cublasLtMatmulAlgo_t> {
        let path = cache::path("algorithm", &problem.name(), &format!("{} {problem:?}", self.key()?))?;
        let accepted = |algorithm: &_| descriptors.accept(self.handle, algorithm);
        if let Some(algorithm) = kept(&path, accepted)? {
            return Ok(algorithm);
        }
        self.refuse_capture(problem)?;
        static SAID: Once = Once::new();
        SAID.call_once(|| {
            tracing::info!(
                "choosing the fastest cuBLASLt algorithm of each GEMM, once for this GPU, cuBLASLt and model"
            )
        });
        let candidates = self.candidates(problem, descriptors)?;
        // Timed runs write to a separate output, since with beta = 1 the real one would be changed.
        let scratch = Tensor::f_empty([out.size()[0], problem.row_len()], (out.kind(), out.device()));
        let flushed = Tensor::f_empty([FLUSH_BYTES], (Kind::Uint8, out.device()));
        let (Ok(scratch), Ok(flushed)) = (scratch, flushed) else { return Ok(candidates[0]) }; // no memory for timing
        let pointers = [b, a, &scratch, &scratch].map(Tensor::data_ptr);
        let variants = self.variants(descriptors, &candidates)?;
        let algorithm = self.fastest(descriptors, &[candidates, variants].concat(), pointers, &flushed)?;
        let bytes: Vec<u8> = algorithm.data.iter().flat_map(|word| word.to_le_bytes()).collect();
        cache::keep(&path, &bytes, &format!("the GEMM {} has to be timed", problem.name()));
        Ok(kept(&path, accepted)?.unwrap_or(algorithm)) // if several engines time at once, the first one's choice is used
    }

    /// Key of the cache apart from the GEMM's shape: the GPU, cuBLASLt's version, and the list of candidates.
    pub(super) fn key(&self) -> Result<String> {
        // SAFETY: asks for a number.
        let version = unsafe { sys::cublasLtGetVersion() };
        Ok(format!("{} {version} {WORKSPACE_BYTES} {CANDIDATES} {PARTS:?}", self.context.name()?))
    }

    /// The fastest of some algorithms. Returns the first if the GEMM is too large to be timed or there is no memory for timing.
    pub(super) fn fastest_of(
        &self,
        problem: &Problem,
        descriptors: &Descriptors,
        algorithms: &[sys::cublasLtMatmulAlgo_t],
        (a, b, out): (&Tensor, &Tensor, &Tensor),
    ) -> Result<Option<sys::cublasLtMatmulAlgo_t>> {
        let Ok(flushed) = Tensor::f_empty([FLUSH_BYTES], (Kind::Uint8, out.device())) else { return Ok(None) };
        if problem.flop() > MOST_TIMED_FLOP {
            return Ok(None);
        }
        let pointers = [b, a, out, out].map(Tensor::data_ptr);
        self.fastest(descriptors, algorithms, pointers, &flushed).map(Some)
    }

    /// The candidates with other split-K factors.
    pub(super) fn variants(
        &self,
        descriptors: &Descriptors,
        candidates: &[sys::cublasLtMatmulAlgo_t],
    ) -> Result<Vec<sys::cublasLtMatmulAlgo_t>> {
        let mut variants = Vec::with_capacity(candidates.len() * PARTS.len());
        for candidate in candidates {
            let own = Order::of(candidate)?;
            for order in PARTS.map(|parts| own.in_parts(parts)).into_iter().filter(|&order| order != own) {
                variants.extend(order.impose(*candidate)?);
            }
        }
        variants.retain(|algorithm| descriptors.accept(self.handle, algorithm));
        Ok(variants)
    }

    fn fastest(
        &self,
        descriptors: &Descriptors,
        candidates: &[sys::cublasLtMatmulAlgo_t],
        pointers: [*mut c_void; 4], // b, a, out twice
        flushed: &Tensor,
    ) -> Result<sys::cublasLtMatmulAlgo_t> {
        let mut best = (candidates[0], f64::INFINITY);
        for algorithm in candidates {
            let mut times = [0.0; RUNS];
            for time in &mut times {
                let _ = flushed.shallow_clone().f_zero_()?;
                let start = CudaEvent::record_libtorch(&self.context)?;
                // SAFETY: as in `run`; the output is a scratch of the same shape.
                unsafe { self.queue(descriptors, algorithm, pointers, 0.0)? };
                *time = start.time_until(&CudaEvent::record_libtorch(&self.context)?)?.as_secs_f64();
            }
            times.sort_by(f64::total_cmp);
            if times[RUNS / 2] < best.1 * GAIN {
                best = (*algorithm, times[RUNS / 2]);
            }
        }
        Ok(best.0)
    }
}

/// The algorithm stored in a file, if it is valid and `accepted`. cuBLASLt permits storing its structure for use with the same version.
pub(super) fn kept(
    path: &Path,
    accepted: impl Fn(&sys::cublasLtMatmulAlgo_t) -> bool,
) -> Result<Option<sys::cublasLtMatmulAlgo_t>> {
    cache::read(path, |bytes| {
        let words: Vec<u64> =
            bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("8 bytes"))).collect();
        words.try_into().ok().map(|data| sys::cublasLtMatmulAlgo_t { data }).filter(accepted)
    })
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truncated_algorithm_files_are_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("product");
        assert!(kept(&path, |_| true).unwrap().is_none());
        std::fs::write(&path, [1; 40]).unwrap();
        assert!(kept(&path, |_| true).unwrap().is_none());
        std::fs::write(&path, (0..64).collect::<Vec<u8>>()).unwrap();
        assert_eq!(kept(&path, |_| true).unwrap().unwrap().data[1], 0x0f0e_0d0c_0b0a_0908);
        assert!(kept(&path, |_| false).unwrap().is_none());
        assert!(!path.exists(), "one that does not run makes way for another");
    }
}
