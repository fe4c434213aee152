//! Memory that comes and goes: the [`Arena`] (an address range whose physical memory is mapped and unmapped), the
//! [`HostPool`] (host memory allocated once and kept) and the [`Ledger`] of who holds what.
//!
//! `cpu.rs` is the CPU backend; another backend implements [`arena::AddressRange`] beside it. Knows nothing of models
//! or ranks.

mod arena;
mod cpu;
mod host;
mod host_pool;
mod ledger;

pub use arena::Arena;
pub use host::{available_host_bytes, peak_resident_bytes};
pub use host_pool::HostPool;
pub use ledger::{Ledger, Place};
