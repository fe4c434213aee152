//! The host pool's memory: ordinary pages for tensors on the CPU; pinned memory and two streams for tensors on a GPU.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::cpu::CpuRange;
use super::host::available_host_bytes;
use super::ledger::{Ledger, MemoryKind};
use super::numa;
use super::range::AddressRange;
use crate::cuda::{Context, OUT_OF_MEMORY, Stream, check};
use crate::error::{Error, Result};

/// Pinned memory is allocated in chunks of this size; each takes about a second, so that a progress bar can advance.
const CHUNK_BYTES: usize = 1 << 30;

/// Host memory, either one range of ordinary pages or several pinned chunks of [`CHUNK_BYTES`].
#[derive(Debug)]
pub(super) enum Pages {
    Ordinary(CpuRange),
    Pinned(Arc<PinnedPages>), // shared with the thread that feeds a paced copy
}

impl Pages {
    /// Allocates ordinary pages and touches them.
    pub(super) fn ordinary(name: &'static str, bytes: usize) -> Result<Self> {
        let mut range = CpuRange::reserve(name, bytes)?;
        let bytes = range.reserved_bytes();
        range.map(0, bytes)?;
        // SAFETY: the whole range was mapped read-write just above and is not yet shared.
        unsafe { std::ptr::write_bytes(range.as_ptr(), 0, bytes) };
        Ok(Pages::Ordinary(range))
    }

    pub(super) fn len_bytes(&self) -> usize {
        match self {
            Pages::Ordinary(range) => range.reserved_bytes(),
            Pages::Pinned(pinned) => pinned.bytes,
        }
    }

    /// Addresses and lengths of the pieces that make up the byte range.
    pub(super) fn pieces(&self, Range { start, end }: Range<usize>) -> Vec<(*mut u8, usize)> {
        match self {
            Pages::Ordinary(range) => vec![(range.as_ptr().wrapping_add(start), end - start)],
            Pages::Pinned(pinned) => cut(start..end)
                .map(|piece| {
                    let chunk = pinned.chunks[piece.start / CHUNK_BYTES].0;
                    (chunk.wrapping_add(piece.start % CHUNK_BYTES), piece.len())
                })
                .collect(),
        }
    }
}

/// Pinned memory that every GPU can copy from and to, and one GPU's streams for both directions.
#[derive(Debug)]
pub(super) struct PinnedPages {
    chunks: Vec<PinnedAllocation>,
    bytes: usize,
    pub(super) copy_out: Stream,
    pub(super) copy_in: Stream,
}

/// One allocation of pinned memory, freed when dropped.
#[derive(Debug)]
struct PinnedAllocation(*mut u8);

// SAFETY: memory owned by this value alone; its address is valid in every thread.
unsafe impl Send for PinnedAllocation {}
// SAFETY: shared references only read the address.
unsafe impl Sync for PinnedAllocation {}

impl PinnedPages {
    /// Pins `bytes` for copies to and from GPU `ordinal`. Calls `progress(done, total)`, in bytes, after every chunk. Memory that the driver pins
    /// does not count against RLIMIT_MEMLOCK. The free bytes of the control group and of the kernel are checked before every chunk, so that the
    /// out-of-memory killer is never triggered.
    pub(super) fn new(
        name: &'static str,
        bytes: usize,
        ordinal: usize,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self> {
        let context = Context::retain(ordinal)?;
        let (copy_out, copy_in) = (Stream::new(&context)?, Stream::new(&context)?);
        let node = numa::node_of_pci_device(&context.pci_address()?);
        let mut pages = Self { chunks: Vec::new(), bytes, copy_out, copy_in };
        for piece in cut(0..bytes) {
            let out_of_memory = |why: &str| {
                let held = Ledger::summary(MemoryKind::Host);
                let owner =
                    format!("{name} (pinned memory, {} of {bytes} bytes allocated; {why}; {held})", piece.start);
                Error::OutOfMemory { owner, requested_bytes: piece.len() }
            };
            let available = available_host_bytes()?;
            if piece.len() > available {
                return Err(out_of_memory(&format!("the host has only {available} bytes left")));
            }
            // SAFETY: a new allocation of the size asked for, freed by the chunk's drop.
            let allocate = || unsafe { result::malloc_host(piece.len(), sys::CU_MEMHOSTALLOC_PORTABLE) };
            let address = numa::on_node(node, allocate);
            let address = check("cuMemHostAlloc", address).map_err(|error| match error {
                Error::Cuda { code: OUT_OF_MEMORY, .. } => out_of_memory("the CUDA driver can pin no more memory"),
                other => other,
            })?;
            pages.chunks.push(PinnedAllocation(address.cast()));
            progress(piece.end, bytes);
        }
        Ok(pages)
    }
}

impl Drop for PinnedPages {
    fn drop(&mut self) {
        // Running copies must end before their memory is freed. If that cannot be determined, the memory is leaked.
        let is_idle = self.copy_out.synchronize().is_ok() && self.copy_in.synchronize().is_ok();
        for chunk in self.chunks.drain(..).filter(|_| is_idle) {
            // SAFETY: allocated by `new`; no copy runs any more.
            let _ = unsafe { result::free_host(chunk.0.cast()) };
        }
    }
}

/// Divides a byte range at the borders of chunks.
fn cut(Range { start, end }: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let mut at = start;
    std::iter::from_fn(move || {
        let from = at;
        at = end.min((from / CHUNK_BYTES + 1) * CHUNK_BYTES);
        (from < end).then_some(from..at)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_split_at_chunk_boundaries() {
        const GIB: usize = CHUNK_BYTES;
        let cuts = |range| cut(range).map(|piece| (piece.start, piece.end)).collect::<Vec<_>>();
        assert_eq!(cuts(0..5), [(0, 5)]);
        assert_eq!(cuts(7..2 * GIB + 1), [(7, GIB), (GIB, 2 * GIB), (2 * GIB, 2 * GIB + 1)]);
        assert_eq!(cuts(GIB..2 * GIB), [(GIB, 2 * GIB)]);
        assert_eq!(cut(3..3).count(), 0);
    }
}
