//! The machine's GPUs. libtorch's CUDA libraries are opened at run time, so that one program runs with and without GPUs. This module also has the
//! program's own use of the CUDA driver: contexts, streams, events and kernels. Knows nothing of models.
//!
//! | file | content |
//! |---|---|
//! | `library`, `devices` | libtorch's CUDA libraries and NCCL; the visible GPUs |
//! | `nvml` | which processes use memory of the visible GPUs |
//! | `capability`, `abilities`, `chips` | compute capability, supported features, and data-sheet throughput of GPUs |
//! | `placement` | device and dtype of a run |
//! | `context`, `stream` | the context shared with libtorch; own streams and events |
//! | `torch_stream`, `graph` | streams for libtorch's operations; CUDA graphs captured on them |
//! | `nvrtc`, `kernel`, `cache`, `packaged_kernels` | compiles `src/kernels/*.cu` into a cache of cubins, or when packaging; loads and launches them
//! |
//! | `peer_memory` | memory of several GPUs that all their processes map |
//! | `pinned` | pinned host memory for asynchronous copies |
//! | `products` | GEMMs through cuBLASLt |
//! | `profile`, `stopwatch` | time of operations by family; time of selected work, summed over a step |
//! | `kernels` | one safe function per kernel, over tensors |

mod abilities;
mod cache;
mod capability;
mod chips;
mod context;
mod devices;
mod graph;
#[cfg(test)]
mod image;
mod kernel;
pub mod kernels;
mod library;
mod nvml;
mod nvrtc;
mod packaged_kernels;
mod peer_memory;
mod pinned;
mod placement;
mod products;
mod profile;
mod stopwatch;
mod stream;
mod sustained;
mod torch_stream;

pub use abilities::cudnn_most_head_dim;
pub use capability::Capability;
pub use chips::{Chip, Rates, chip, chip_flop_per_s};
pub use context::{Context, FreeMemory};
pub(crate) use context::{OUT_OF_MEMORY, check};
pub use devices::{available_bytes, devices, first_name};
pub use graph::Graph;
pub use library::require;
pub use nvml::{EnergyMeter, GpuMemory, MemoryMeter, require_free};
pub use packaged_kernels::write_kernels;
pub use peer_memory::{HANDLE_BYTES, PeerMemory};
pub use pinned::PinnedWords;
pub use placement::{Placement, residual_kind};
pub use products::{ExactVerdict, Products, Tuning};
pub(crate) use profile::timed;
pub use profile::{OpCost, OpFamily, profile};
pub use stopwatch::Stopwatch;
pub use stream::{CudaEvent, Stream};
pub use sustained::Sustained;
pub use torch_stream::{CurrentStream, TorchStream};
