//! The host pool's memory: ordinary pages for tensors on the CPU, pinned memory and two streams for those on a GPU.
#![allow(unsafe_code)]

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::thread;

use cudarc::driver::sys;
use memmap2::{Advice, MmapMut};

use super::arena::AddressRange;
use super::cpu::CpuRange;
use super::host::available_host_bytes;
use super::ledger::{Ledger, MemoryKind};
use super::numa;
use crate::cuda::{Context, OUT_OF_MEMORY, Stream, check};
use crate::error::{Error, Result};

/// Pinned memory comes in pieces of this size, so that a bar can show how far it is.
const CHUNK_BYTES: usize = 1 << 30;
/// Most threads that touch a chunk's pages at once: the kernel clears each page as it is touched, which takes longer than pinning it.
const MOST_THREADS: usize = 8;
/// Bytes of the smallest page.
const PAGE_BYTES: usize = 4096;

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
                    let chunk = pinned.chunks[piece.start / CHUNK_BYTES].address();
                    (chunk.wrapping_add(piece.start % CHUNK_BYTES), piece.len())
                })
                .collect(),
        }
    }
}

/// Pinned memory that every GPU may copy from and to, and the streams of one GPU for both directions.
#[derive(Debug)]
pub(super) struct PinnedPages {
    chunks: Vec<PinnedChunk>,
    bytes: usize,
    pub(super) copy_out: Stream,
    pub(super) copy_in: Stream,
}

/// A mapping whose pages are pinned.
#[derive(Debug)]
struct PinnedChunk(MmapMut);

impl PinnedChunk {
    /// Pins memory that is there.
    fn pin(mut memory: MmapMut) -> Result<Self> {
        let (address, bytes) = (memory.as_mut_ptr(), memory.len());
        // SAFETY: the mapping spans `bytes` and stays until `drop` has unpinned it.
        let pinned = unsafe { sys::cuMemHostRegister_v2(address.cast(), bytes, sys::CU_MEMHOSTREGISTER_PORTABLE) };
        check("cuMemHostRegister", pinned.result())?;
        Ok(Self(memory))
    }

    fn address(&self) -> *mut u8 {
        self.0.as_ptr().cast_mut()
    }
}

impl Drop for PinnedChunk {
    fn drop(&mut self) {
        // SAFETY: pinned by `new`; `PinnedPages` has waited for its copies.
        let _ = unsafe { sys::cuMemHostUnregister(self.address().cast()) };
    }
}

/// `bytes` of zeros near memory node `node`, all of them there, in huge pages where the kernel has them.
fn touched(bytes: usize, node: Option<usize>) -> io::Result<MmapMut> {
    let mut memory = MmapMut::map_anon(bytes)?;
    // A child process does not get these pages, so that none is copied away from what the GPU writes to.
    memory.advise(Advice::DontFork)?;
    let _ = memory.advise(Advice::HugePage); // fails in kernels without them
    touch(&mut memory, node);
    Ok(memory)
}

/// Writes to every page, from several threads whose new pages come from `node` as long as it has some.
fn touch(memory: &mut [u8], node: Option<usize>) {
    let threads = thread::available_parallelism().map_or(1, usize::from).min(MOST_THREADS);
    let share = memory.len().div_ceil(threads).next_multiple_of(2 << 20);
    thread::scope(|scope| {
        for part in memory.chunks_mut(share) {
            scope.spawn(move || numa::on_node(node, || part.iter_mut().step_by(PAGE_BYTES).for_each(write_zero)));
        }
    });
}

/// A write that is made although the byte is zero already.
fn write_zero(byte: &mut u8) {
    *std::hint::black_box(byte) = 0;
}

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
                let owner = format!("{name} (pinned, {} of {bytes} bytes done; {why}; {held})", piece.start);
                Error::OutOfMemory { owner, requested_bytes: piece.len() }
            };
            let available = available_host_bytes()?;
            if piece.len() > available {
                return Err(out_of_memory(&format!("the host has {available} bytes left")));
            }
            let memory = touched(piece.len(), node).map_err(|error| out_of_memory(&error.to_string()))?;
            pages.chunks.push(PinnedChunk::pin(memory).map_err(|error| match error {
                Error::Cuda { code: OUT_OF_MEMORY, .. } => out_of_memory("the driver has no more"),
                other => other,
            })?);
            progress(piece.end, bytes);
        }
        Ok(pages)
    }
}

impl Drop for PinnedPages {
    fn drop(&mut self) {
        // Copies under way end before their memory goes; where that cannot be known, the memory stays.
        let is_idle = self.copy_out.synchronize().is_ok() && self.copy_in.synchronize().is_ok();
        if !is_idle {
            std::mem::forget(std::mem::take(&mut self.chunks));
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
    fn every_page_is_touched_and_stays_zero() {
        for bytes in [1, PAGE_BYTES, (5 << 20) + 3 * PAGE_BYTES] {
            let mut memory = touched(bytes, None).unwrap();
            let mut is_there = vec![0u8; bytes.div_ceil(PAGE_BYTES)];
            // SAFETY: the mapping spans `bytes`, and there is a byte for each of its pages.
            let asked = unsafe { libc::mincore(memory.as_mut_ptr().cast(), bytes, is_there.as_mut_ptr()) };
            assert_eq!(asked, 0);
            assert!(is_there.iter().all(|page| page & 1 == 1), "{bytes}");
            assert!(memory.iter().all(|&byte| byte == 0));
        }
    }

    #[test]
    fn ranges_are_cut_at_the_borders_of_chunks() {
        const GIB: usize = CHUNK_BYTES;
        let cuts = |range| cut(range).map(|piece| (piece.start, piece.end)).collect::<Vec<_>>();
        assert_eq!(cuts(0..5), [(0, 5)]);
        assert_eq!(cuts(7..2 * GIB + 1), [(7, GIB), (GIB, 2 * GIB), (2 * GIB, 2 * GIB + 1)]);
        assert_eq!(cuts(GIB..2 * GIB), [(GIB, 2 * GIB)]);
        assert_eq!(cut(3..3).count(), 0);
    }
}
