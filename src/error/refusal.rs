//! Recognizes out-of-memory errors of libraries and drivers by their messages: libtorch passes on nothing else.

/// Out-of-memory messages of libtorch's allocators, which name the size.
const SIZED: [&str; 2] = ["can't allocate memory: you tried to allocate ", "CUDA out of memory. Tried to allocate "];

/// Out-of-memory messages without a size: of libtorch outside of its cache (`CUDA error: out of memory`), the CUDA driver and runtime, NVRTC, cuBLAS,
/// cuBLASLt and cuDNN, whose handles and workspaces take memory on first use. NCCL reports it through the runtime.
const UNSIZED: [&str; 9] = [
    "CUDA error: out of memory",
    "CUDA out of memory",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "cudaErrorMemoryAllocation",
    "Cuda failure 2 'out of memory'",
    "NVRTC_ERROR_OUT_OF_MEMORY",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
];

/// The bytes that an out-of-memory message says were requested, 0 if it names no size; `None` for any other message.
pub(super) fn requested_bytes(message: &str) -> Option<usize> {
    let sized = SIZED.iter().find_map(|phrase| bytes(message.split_once(phrase)?.1));
    sized.or_else(|| UNSIZED.iter().any(|phrase| message.contains(phrase)).then_some(0))
}

/// Parses a size with its unit as libtorch writes it, in bytes: `4096 bytes`, `1.50 GiB`.
fn bytes(size: &str) -> Option<usize> {
    let (number, unit) = size.split_once(' ')?;
    let scale = ["bytes", "KiB", "MiB", "GiB"].iter().position(|name| unit.starts_with(name))? as i32;
    Some((number.parse::<f64>().ok()? * 1024f64.powi(scale)) as usize)
}

#[cfg(test)]
mod tests {
    use crate::error::{Error, ExitCode};

    #[test]
    fn out_of_memory_messages_of_all_libraries_are_recognized() {
        let host = "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to \
                    allocate 4096 bytes. Error code 12 (Cannot allocate memory)";
        let device = "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 139.81 GiB";
        let unsized_ones = [
            "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
            "cuMemCreate: CUDA code 2, CUDA_ERROR_OUT_OF_MEMORY: out of memory",
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
            "nvrtc: NVRTC_ERROR_OUT_OF_MEMORY",
            "ncclUnhandledCudaError: Call to CUDA function failed. Last error: Cuda failure 2 'out of memory'",
        ];
        let cases = [(host, 4096), (device, 3 << 29)].into_iter().chain(unsized_ones.map(|message| (message, 0)));
        for (message, bytes) in cases {
            let error = Error::of_panic("a test", message.to_owned());
            let Error::OutOfMemory { requested_bytes, .. } = &error else { panic!("{error}") };
            assert_eq!((*requested_bytes, error.exit_code()), (bytes, ExitCode::OutOfMemory));
        }
        for other in ["shapes differ", "CUDA error: an illegal memory access was encountered", "out of range"] {
            assert_eq!(Error::of_panic("a test", other.to_owned()).exit_code(), ExitCode::RankDied);
        }
    }
}
