//! The CUDA backend of an arena: addresses are reserved once, and physical GPU memory is mapped to them in chunks. A kernel that accesses an unmapped
//! part fails.
//!
//! Memory is zeroed when it is mapped (0.25 ms per GiB, queued on libtorch's stream). It may contain another tensor's data, and a NaN in an unused
//! slot of the KV cache would spread through masked attention.
#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::sys;

use super::chunks::{CHUNK_BYTES, Chunk, ChunkPool, device_memory};
use super::ledger::{Ledger, MemoryKind};
use super::range::AddressRange;
use crate::cuda::{Context, OUT_OF_MEMORY, check};
use crate::error::{Error, Result};
use crate::torch;

/// Reserved addresses of one GPU, with the chunks that are mapped.
#[derive(Debug)]
pub(super) struct CudaRange {
    name: &'static str,
    context: Arc<Context>,
    pool: Arc<ChunkPool>,
    start: sys::CUdeviceptr,
    bytes: usize,
    page_bytes: usize,
    chunks: Vec<Chunk>, // mapped consecutively from `start`
    mapped_bytes: usize,
}

impl CudaRange {
    /// Reserves at least `bytes` of addresses on GPU `ordinal`.
    pub(super) fn reserve(name: &'static str, bytes: usize, ordinal: usize) -> Result<Self> {
        let context = Context::retain(ordinal)?;
        let pool = ChunkPool::of(&context);
        let mut page_bytes = 0;
        let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let memory = device_memory(ordinal);
        // SAFETY: both outlive the call.
        let asked = unsafe { sys::cuMemGetAllocationGranularity(&raw mut page_bytes, &raw const memory, minimum) };
        check("cuMemGetAllocationGranularity", asked.result())?;
        let out_of_memory = || Error::OutOfMemory { owner: format!("{name} (addresses)"), requested_bytes: bytes };
        let bytes = bytes.max(1).checked_next_multiple_of(page_bytes).ok_or_else(out_of_memory)?;
        let mut start = 0;
        // SAFETY: new addresses of the driver's choice.
        let asked = unsafe { sys::cuMemAddressReserve(&raw mut start, bytes, CHUNK_BYTES, 0, 0) };
        check("cuMemAddressReserve", asked.result()).map_err(|_| out_of_memory())?;
        Ok(Self { name, context, pool, start, bytes, page_bytes, chunks: Vec::new(), mapped_bytes: 0 })
    }

    /// Maps memory to `[mapped_bytes, to)`, chunk by chunk, and queues zeroing it on libtorch's current stream. After an error, the chunks mapped so
    /// far stay mapped; the caller must unmap them.
    fn extend(&mut self, to: usize) -> Result<()> {
        let from = self.mapped_bytes;
        while self.mapped_bytes < to {
            let chunk = self.pool.take(CHUNK_BYTES.min(to - self.mapped_bytes))?;
            // SAFETY: the addresses are reserved and not mapped.
            let mapped = unsafe { sys::cuMemMap(self.at(self.mapped_bytes), chunk.bytes, 0, chunk.handle, 0) };
            if let Err(error) = check("cuMemMap", mapped.result()) {
                self.pool.give(vec![chunk]);
                return Err(error);
            }
            self.mapped_bytes += chunk.bytes;
            self.chunks.push(chunk);
        }
        let access = sys::CUmemAccessDesc {
            location: device_memory(self.context.ordinal()).location,
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let (first, len) = (self.at(from), to - from);
        // SAFETY: [from, to) was mapped just above.
        check("cuMemSetAccess", unsafe { sys::cuMemSetAccess(first, len, &raw const access, 1) }.result())?;
        let stream = torch::current_cuda_stream(self.context.ordinal())?;
        // SAFETY: as above, and now accessible; nobody else knows the bytes yet, and `unmap` waits for the stream.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(first, 0, len, stream.cast()) }.result())
    }

    /// Unmaps every chunk that ends after `to`, last first, and starts to release them.
    fn cut(&mut self, to: usize) -> Result<()> {
        let (loose, outcome) = self.unmap_behind(to);
        self.pool.give(loose);
        outcome
    }

    /// Unmaps every chunk that ends after `to`, last first, and returns them.
    fn unmap_behind(&mut self, to: usize) -> (Vec<Chunk>, Result<()>) {
        let mut loose = Vec::new();
        let mut outcome = Ok(());
        while let Some(chunk) = self.chunks.pop_if(|_| self.mapped_bytes > to) {
            let at = self.mapped_bytes - chunk.bytes;
            // SAFETY: exactly one chunk's mapping; by the arena's contract nothing queued later uses it.
            let unmapped = unsafe { sys::cuMemUnmap(self.at(at), chunk.bytes) };
            outcome = check("cuMemUnmap", unmapped.result());
            if outcome.is_err() {
                self.chunks.push(chunk);
                break;
            }
            self.mapped_bytes = at;
            loose.push(chunk);
        }
        (loose, outcome)
    }

    fn at(&self, offset: usize) -> sys::CUdeviceptr {
        self.start + offset as u64
    }

    fn out_of_memory(&self, requested_bytes: usize) -> Error {
        let free = self.context.memory().map_or_else(
            |error| error.to_string(),
            |memory| format!("{} of {} MiB free", memory.free_bytes >> 20, memory.total_bytes >> 20),
        );
        let owner =
            format!("{} (GPU {}: {free}; {})", self.name, self.context.ordinal(), Ledger::summary(MemoryKind::Device));
        Error::OutOfMemory { owner, requested_bytes }
    }
}

impl AddressRange for CudaRange {
    fn as_ptr(&self) -> *mut u8 {
        self.start as *mut u8
    }

    fn reserved_bytes(&self) -> usize {
        self.bytes
    }

    fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    fn map(&mut self, from: usize, to: usize) -> Result<()> {
        self.context.make_current()?;
        // Chunks that a failed unmap left behind still have old content.
        self.cut(from)?;
        self.extend(to).map_err(|error| {
            let undone = self.cut(from).and_then(|()| self.pool.settle());
            match (error, undone) {
                (Error::Cuda { code: OUT_OF_MEMORY, .. }, Ok(())) => self.out_of_memory(to - from),
                (_, Err(error)) | (error, Ok(())) => error,
            }
        })
    }

    /// Unmaps everything, after waiting for all work of this process on the GPU, because running kernels may use the memory.
    fn unmap(&mut self, _to: usize) -> Result<()> {
        self.context.synchronize()?;
        self.cut(0)
    }

    fn shrink(&mut self, from: usize, _to: usize) -> (usize, Result<()>) {
        // A chunk can only be unmapped as a whole.
        let ends = self.chunks.iter().scan(0, |end, chunk| {
            *end += chunk.bytes;
            Some(*end)
        });
        let kept = if from == 0 { 0 } else { ends.into_iter().find(|&end| end >= from).unwrap_or(self.mapped_bytes) };
        if let Err(error) = self.context.make_current() {
            return (self.mapped_bytes, Err(error));
        }
        let (loose, outcome) = self.unmap_behind(kept);
        self.pool.keep(loose);
        (self.mapped_bytes, outcome)
    }

    fn resident_bytes(&self) -> Result<usize> {
        Ok(self.mapped_bytes)
    }
}

impl Drop for CudaRange {
    fn drop(&mut self) {
        // At process exit the driver and its memory may be gone already; errors are then ignored.
        if self.context.synchronize().is_ok() && self.cut(0).is_ok() {
            // SAFETY: reserved by `reserve`, nothing mapped.
            let _ = unsafe { sys::cuMemAddressFree(self.start, self.bytes) };
        }
        // No thread may call the driver once the process's main function has returned.
        let _ = self.pool.settle();
    }
}
