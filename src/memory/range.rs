//! The memory of a device, as an arena maps it.

use crate::error::Result;

/// A backend of an arena: reserved addresses, and physical memory behind the first bytes of them.
pub(super) trait AddressRange: std::fmt::Debug + Send {
    fn as_ptr(&self) -> *mut u8;
    /// A multiple of [`AddressRange::page_bytes`].
    fn reserved_bytes(&self) -> usize;
    /// Smallest unit of mapping.
    fn page_bytes(&self) -> usize;
    /// Puts zeroed memory behind `[from, to)`, both multiples of the page; all of it or none.
    fn map(&mut self, from: usize, to: usize) -> Result<()>;
    /// Gives the memory behind `[0, to)` back; a later access faults.
    fn unmap(&mut self, to: usize) -> Result<()>;
    /// Gives back what it can of the memory behind `[from, to)`, of which no work is under way; returns where the rest ends,
    /// also where giving back failed.
    fn shrink(&mut self, from: usize, to: usize) -> (usize, Result<()>);
    /// Bytes of physical memory behind the range now.
    fn resident_bytes(&self) -> Result<usize>;
}
