//! Memory that comes and goes: the [`Arena`] (an address range whose physical memory is mapped and unmapped), the
//! [`HostPool`] (host memory allocated once and kept) and the [`Ledger`] of who holds what.
//!
//! `cpu.rs` and `cuda.rs` (on the memory of `chunks.rs`) are the arena's backends, `pages.rs` the pool's: on a machine with a
//! GPU its memory is pinned and copies run on streams of their own. Knows nothing of models or ranks.

mod arena;
mod chunks;
mod cpu;
mod cuda;
mod explain;
mod fill;
mod host;
mod host_pool;
mod ledger;
mod numa;
mod paced;
mod pages;
mod range;

pub use arena::Arena;
pub use chunks::{free_bytes, release_idle, settle};
pub use explain::explain_out_of_memory;
pub use fill::fill;
pub use host::{available_host_bytes, peak_resident_bytes, resident_bytes};
pub use host_pool::{Direction, HostPool, Mark, PendingCopy};
pub use ledger::{Account, Ledger, MemoryKind};
pub use paced::{MarkedCopy, Paced};
