//! The host pool's memory: ordinary pages for tensors on the CPU, pinned memory and two streams for those on a GPU.
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

/// Pinned memory comes in pieces of this size: each takes about a second, so that a bar can show them.
const CHUNK_BYTES: usize = 1 << 30;

/// Host memory that is either one range or several chunks of [`CHUNK_BYTES`].
#[derive(Debug)]
pub(super) enum Pages {
    Ordinary(CpuRange),
    Pinned(Arc<PinnedPages>), // a copy that is fed by a thread holds them, too
}

impl Pages {
    /// Ordinary pages, touched once.
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

    /// Addresses and lengths of the pieces that `[from, to)` lies in.
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

/// Pinned memory that every GPU may copy from and to, and the streams of one GPU for both directions.
#[derive(Debug)]
pub(super) struct PinnedPages {
    chunks: Vec<PinnedAllocation>,
    bytes: usize,
    pub(super) copy_out: Stream,
    pub(super) copy_in: Stream,
}

/// One allocation of pinned memory.
#[derive(Debug)]
struct PinnedAllocation(*mut u8);

// SAFETY: memory owned by this value alone; its address is valid in every thread.
unsafe impl Send for PinnedAllocation {}
// SAFETY: shared references only read the address.
unsafe impl Sync for PinnedAllocation {}

impl PinnedPages {
    /// Pins `bytes` for copies to and from GPU `ordinal`; `progress(done, total)` in bytes after every chunk. What the
    /// driver pins does not count against RLIMIT_MEMLOCK; what the control group and the kernel still have is asked before
    /// every chunk, so that the host is never driven into its out-of-memory killer.
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
        // Copies under way end before their memory goes; where that cannot be known, the memory stays.
        let is_idle = self.copy_out.synchronize().is_ok() && self.copy_in.synchronize().is_ok();
        for chunk in self.chunks.drain(..).filter(|_| is_idle) {
            // SAFETY: allocated by `new`; no copy runs any more.
            let _ = unsafe { result::free_host(chunk.0.cast()) };
        }
    }
}

/// A range cut at the chunks' borders.
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
