//! The machine's GPUs. libtorch's CUDA libraries are opened at run time, so that one program runs with and without GPUs. This module also has the
//! program's own use of the CUDA driver: contexts, streams, events and kernels. Knows nothing of models.
//!
//! | file | content |
//! |---|---|
//! | `library`, `devices` | libtorch's CUDA half and the one NCCL; which GPUs are visible |
//! | `nvml` | who holds memory of the visible GPUs |
//! | `capability`, `abilities`, `chips` | what GPUs can do: by their number; of what kernels ask for; by their data sheets |
//! | `placement` | where a run computes, and in what kind |
//! | `context`, `stream` | the context shared with libtorch; streams and events beside libtorch's |
//! | `torch_stream`, `graph` | streams that libtorch's operations are sent to; what is queued there, recorded and replayed |
//! | `nvrtc`, `kernel`, `cache`, `packaged_kernels` | `src/kernels/*.cu` compiled once into a cache of cubins, or at packaging; loaded and launched |
//! | `peer_memory` | memory of several GPUs that their processes all map |
//! | `pinned` | host memory that is copied from and to while the host goes on |
//! | `products` | matrix products through cuBLASLt |
//! | `profile`, `launches` | the time of operations by family; of every kernel |
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
mod launches;
mod library;
mod nvml;
mod nvrtc;
mod packaged_kernels;
mod peer_memory;
mod pinned;
mod placement;
mod products;
mod profile;
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
pub use launches::{GpuLaunch, record_launches};
pub use library::require;
pub use nvml::{EnergyMeter, GpuMemory, MemoryMeter, require_free};
pub use packaged_kernels::write_kernels;
pub use peer_memory::{HANDLE_BYTES, PeerMemory};
pub use pinned::PinnedWords;
pub use placement::{Placement, residual_kind};
pub use products::{ExactVerdict, Products, Tuning};
pub(crate) use profile::timed;
pub use profile::{OpCost, OpFamily, profile};
pub use stream::{CudaEvent, Stream};
pub use sustained::Sustained;
pub use torch_stream::{CurrentStream, TorchStream};
