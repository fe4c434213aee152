//! The error message when memory is exhausted: the owners of memory, and the configuration key that would reduce it.

use super::{Ledger, MemoryKind};
use crate::cuda::OUT_OF_MEMORY;
use crate::error::{A_LIBRARY, A_TENSOR, Error};
use crate::phase::{self, Phase};

/// Marks an explained error, so that it is not explained twice.
const MEND: &str = ", to mend: ";

/// Adds the owners of the device's memory, and the key to lower for the phase that failed, to an out-of-memory error; returns every other error
/// unchanged.
pub fn explain_out_of_memory(error: Error) -> Error {
    let (owner, requested_bytes) = match error {
        Error::OutOfMemory { owner, requested_bytes } if [A_TENSOR, A_LIBRARY].contains(&owner.as_str()) => {
            (format!("{owner} in phase {}", phase::at_failure().name()), requested_bytes)
        }
        Error::OutOfMemory { owner, requested_bytes } if !owner.contains(MEND) => (owner, requested_bytes),
        Error::Cuda { op, code: OUT_OF_MEMORY, .. } => (format!("{op} in phase {}", phase::at_failure().name()), 0),
        other => return other,
    };
    let key = match phase::at_failure() {
        Phase::Wake | Phase::Generate | Phase::Prefill | Phase::Decode | Phase::Eval => {
            "lower kv_cache_bytes, max_num_seqs or max_num_batched_tokens"
        }
        Phase::Score | Phase::ForwardBackward => "lower max_tokens_per_micro_batch",
        Phase::Checkpoint => "set save_async = false",
        _ => "raise zero.stage or the number of ranks",
    };
    let held =
        if owner.contains("held") { String::new() } else { format!(" ({})", Ledger::summary(MemoryKind::Device)) };
    Error::OutOfMemory { owner: format!("{owner}{held}{MEND}{key};"), requested_bytes }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ExitCode;

    #[test]
    fn only_out_of_memory_errors_are_explained_and_only_once() {
        let cuda =
            || Error::Cuda { op: "cuGraphInstantiate", code: OUT_OF_MEMORY, message: "out of memory".to_owned() };
        let tensor = || Error::OutOfMemory { owner: A_TENSOR.to_owned(), requested_bytes: 7 };
        for (error, owner) in [(cuda(), "cuGraphInstantiate in "), (tensor(), "a tensor in ")] {
            let explained = explain_out_of_memory(explain_out_of_memory(error));
            let message = explained.to_string();
            assert_eq!(explained.exit_code(), ExitCode::OutOfMemory);
            assert!(message.contains(owner) && message.matches("to mend: ").count() == 1, "{message}");
        }
        let other = Error::Cuda { op: "cuLaunchKernel", code: 700, message: "illegal address".to_owned() };
        assert_eq!(explain_out_of_memory(other).to_string(), "cuLaunchKernel: CUDA code 700, illegal address");
    }
}
