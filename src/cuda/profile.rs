//! Measures GPU time by families of operations, with two events around every operation of this thread while [`profile`] runs.

use std::cell::RefCell;
use std::sync::Arc;

use tch::Tensor;

use super::context::Context;
use super::stream::CudaEvent;
use crate::error::Result;

/// The minimum number of floating-point operations and bytes that an operation needs.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct OpCost {
    /// Multiplications and additions in GEMMs.
    pub flop: f64,
    /// Bytes of memory read and written.
    pub bytes: f64,
}

/// All operations of one family during a [`profile`].
#[derive(Debug, Clone, PartialEq)]
pub struct OpFamily {
    /// Name of the family.
    pub name: &'static str,
    /// Number of operations.
    pub calls: usize,
    /// Time of the family's operations on the GPU, in milliseconds.
    pub ms: f64,
    /// Cost of each operation, in order.
    pub work: Vec<OpCost>,
}

struct Span {
    name: &'static str,
    work: OpCost,
    start: CudaEvent,
    end: CudaEvent,
}

struct Recording {
    context: Arc<Context>,
    spans: Vec<Span>,
    is_inside: bool,
}

thread_local! {
    static RECORDING: RefCell<Option<Recording>> = const { RefCell::new(None) };
}

impl OpCost {
    /// The cost of a GEMM [m, k] x [k, n].
    pub fn product(m: i64, n: i64, k: i64) -> Self {
        Self { flop: 2.0 * m as f64 * n as f64 * k as f64, bytes: 0.0 }
    }

    /// The cost of reading or writing each of the tensors once.
    pub fn pass(tensors: &[&Tensor]) -> Self {
        let bytes: usize = tensors.iter().map(|tensor| tensor.numel() * tensor.kind().elt_size_in_bytes()).sum();
        Self { flop: 0.0, bytes: bytes as f64 }
    }
}

/// Runs `run` and measures what it queues on libtorch's current stream of GPU `ordinal`. Returns the families of operations, the one with the longest
/// time first.
///
/// # Errors
/// The errors of `run`; [`crate::Error::Cuda`].
pub fn profile(ordinal: usize, run: impl FnOnce() -> Result<()>) -> Result<Vec<OpFamily>> {
    let recording = Recording { context: Context::retain(ordinal)?, spans: Vec::new(), is_inside: false };
    RECORDING.set(Some(recording));
    let outcome = run();
    let spans = RECORDING.take().map_or_else(Vec::new, |recording| recording.spans);
    outcome?;
    let mut families: Vec<OpFamily> = Vec::new();
    for Span { name, work, start, end } in spans {
        let ms = start.time_until(&end)?.as_secs_f64() * 1e3;
        match families.iter_mut().find(|family| family.name == name) {
            Some(family) => {
                family.calls += 1;
                family.ms += ms;
                family.work.push(work);
            }
            None => families.push(OpFamily { name, calls: 1, ms, work: vec![work] }),
        }
    }
    families.sort_by(|a, b| b.ms.total_cmp(&a.ms));
    Ok(families)
}

/// Calls `run` and, while a [`profile`] of this thread is active, adds its GPU time to family `name`. Nested operations count only for the outer one.
///
/// # Panics
/// If an event cannot be recorded, which means that the GPU has failed.
pub(crate) fn timed<R>(name: &'static str, work: impl FnOnce() -> OpCost, run: impl FnOnce() -> R) -> R {
    let Some((context, start)) = begin() else { return run() };
    let result = run();
    let end = mark(&context);
    RECORDING.with_borrow_mut(|recording| {
        if let Some(recording) = recording {
            recording.is_inside = false;
            recording.spans.push(Span { name, work: work(), start, end });
        }
    });
    result
}

fn begin() -> Option<(Arc<Context>, CudaEvent)> {
    RECORDING.with_borrow_mut(|recording| {
        let recording = recording.as_mut().filter(|recording| !recording.is_inside)?;
        recording.is_inside = true;
        Some((recording.context.clone(), mark(&recording.context)))
    })
}

fn mark(context: &Arc<Context>) -> CudaEvent {
    CudaEvent::record_libtorch(context).expect("an event on a GPU in use")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_profile_kernel_work_is_not_computed() {
        assert_eq!(timed("nothing", || unreachable!(), || 7), 7);
    }

    #[test]
    fn profiled_work_counts_the_bytes_that_must_move() {
        let x = Tensor::zeros([3, 5], (tch::Kind::BFloat16, tch::Device::Cpu));
        assert_eq!(OpCost::pass(&[&x, &x]).bytes, 60.0);
        assert_eq!(OpCost::product(2, 3, 4).flop, 48.0);
    }
}
