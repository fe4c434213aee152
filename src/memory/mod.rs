//! Memory that is mapped and unmapped on demand: the [`Arena`] (an address range with changing physical memory), the [`HostPool`] (host memory that
//! is allocated once and kept) and the [`Ledger`], which records who holds how much.
//!
//! `cpu.rs` and `cuda.rs` (using `chunks.rs`) are the arena's backends. `pages.rs` is the pool's memory: on a machine with a GPU it is pinned, and
//! copies run on separate streams. Knows nothing of models or ranks.

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
