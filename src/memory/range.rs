//! The interface between an arena and the memory of a device.

use crate::error::Result;

/// A backend of an arena: reserved addresses, with physical memory mapped to the first bytes.
pub(super) trait AddressRange: std::fmt::Debug + Send {
    fn as_ptr(&self) -> *mut u8;
    /// Number of reserved bytes, a multiple of [`AddressRange::page_bytes`].
    fn reserved_bytes(&self) -> usize;
    /// The smallest unit of mapping.
    fn page_bytes(&self) -> usize;
    /// Maps zeroed memory to `[from, to)`, both multiples of the page size; either all of it or none.
    fn map(&mut self, from: usize, to: usize) -> Result<()>;
    /// Unmaps the memory of `[0, to)`; later accesses fault.
    fn unmap(&mut self, to: usize) -> Result<()>;
    /// Unmaps as much as possible of `[from, to)`, which no queued work may use. Returns where the remaining mapping ends, also if unmapping failed.
    fn shrink(&mut self, from: usize, to: usize) -> (usize, Result<()>);
    /// Bytes of physical memory currently in the range.
    fn resident_bytes(&self) -> Result<usize>;
}
