//! The CUDA backend: addresses reserved once, physical memory of the GPU mapped behind them in chunks. An access to an
//! unmapped part is an error of the kernel that makes it.
#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::sys;

use super::arena::AddressRange;
use super::ledger::{Ledger, Place};
use crate::cuda::{Context, Stream, check};
use crate::error::{Error, Result};

/// Physical memory comes in pieces of this size: smaller ones take longer to map, larger ones bring nothing.
const CHUNK_BYTES: usize = 64 << 20;

/// Reserved addresses of one GPU.
#[derive(Debug)]
pub(super) struct CudaRange {
    name: &'static str,
    context: Arc<Context>,
    zeroing: Stream,
    start: sys::CUdeviceptr,
    bytes: usize,
    page_bytes: usize,
    ends: Vec<usize>, // of the mapped chunks, ascending, from `start`
}

impl CudaRange {
    /// Reserves at least `bytes` of addresses of GPU `ordinal`.
    pub(super) fn reserve(name: &'static str, bytes: usize, ordinal: usize) -> Result<Self> {
        let context = Context::retain(ordinal)?;
        let zeroing = Stream::new(&context)?;
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
        Ok(Self { name, context, zeroing, start, bytes, page_bytes, ends: Vec::new() })
    }

    fn mapped_bytes(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Maps new memory behind `[mapped_bytes, to)`, chunk by chunk, accessible and zeroed. Chunks that came before an error
    /// stay for the caller to unmap.
    fn extend(&mut self, to: usize) -> Result<()> {
        let from = self.mapped_bytes();
        let ordinal = self.context.ordinal();
        while self.mapped_bytes() < to {
            let at = self.mapped_bytes();
            let end = to.min((at / CHUNK_BYTES + 1) * CHUNK_BYTES);
            self.map_chunk(at, end)?;
            self.ends.push(end);
        }
        let access = sys::CUmemAccessDesc {
            location: device_memory(ordinal).location,
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let (first, len) = (self.start + from as u64, to - from);
        // SAFETY: [from, to) was mapped just above.
        check("cuMemSetAccess", unsafe { sys::cuMemSetAccess(first, len, &raw const access, 1) }.result())?;
        // SAFETY: as above, and now accessible; nobody else knows the bytes yet.
        let zeroed = unsafe { sys::cuMemsetD8Async(first, 0, len, self.zeroing.raw().cast()) };
        check("cuMemsetD8Async", zeroed.result())?;
        self.zeroing.synchronize()
    }

    fn map_chunk(&self, at: usize, end: usize) -> Result<()> {
        let (memory, mut chunk) = (device_memory(self.context.ordinal()), 0);
        // SAFETY: both outlive the call.
        let made = unsafe { sys::cuMemCreate(&raw mut chunk, end - at, &raw const memory, 0) };
        check("cuMemCreate", made.result())?;
        // SAFETY: the addresses are reserved and not mapped.
        let mapped = unsafe { sys::cuMemMap(self.start + at as u64, end - at, 0, chunk, 0) };
        // SAFETY: created above; the memory stays until it is unmapped, or goes now if it was not mapped.
        let released = unsafe { sys::cuMemRelease(chunk) };
        check("cuMemMap", mapped.result())?;
        check("cuMemRelease", released.result())
    }

    /// Unmaps every chunk that ends behind `to`, the last first.
    fn shrink(&mut self, to: usize) -> Result<()> {
        while let Some(end) = self.ends.last().copied().filter(|&end| end > to) {
            let at = self.ends.iter().rev().nth(1).copied().unwrap_or(0);
            // SAFETY: exactly one chunk's mapping; by the arena's contract nothing queued later uses it.
            check("cuMemUnmap", unsafe { sys::cuMemUnmap(self.start + at as u64, end - at) }.result())?;
            self.ends.pop();
        }
        Ok(())
    }

    fn out_of_memory(&self, requested_bytes: usize) -> Error {
        let free = self.context.memory_bytes().map_or_else(
            |error| error.to_string(),
            |(free, total)| format!("{} of {} MiB free", free >> 20, total >> 20),
        );
        let owner =
            format!("{} (GPU {}: {free}; {})", self.name, self.context.ordinal(), Ledger::summary(Place::Device));
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
        // What an unmap that failed left behind still holds its old content.
        self.shrink(from)?;
        self.extend(to).map_err(|error| {
            let undone = self.shrink(from);
            match (error, undone) {
                (Error::Cuda { code: 2, .. }, Ok(())) => self.out_of_memory(to - from),
                (_, Err(error)) | (error, Ok(())) => error,
            }
        })
    }

    /// Waits for all work of this process on the GPU first: a kernel still running must not lose its memory.
    fn unmap(&mut self, _to: usize) -> Result<()> {
        self.context.synchronize()?;
        self.shrink(0)
    }

    fn resident_bytes(&self) -> Result<usize> {
        Ok(self.mapped_bytes())
    }
}

impl Drop for CudaRange {
    fn drop(&mut self) {
        // At the process's end the driver may be gone already, and its memory with it: nothing to mend.
        if self.context.synchronize().is_ok() && self.shrink(0).is_ok() {
            // SAFETY: reserved by `reserve`, nothing mapped.
            let _ = unsafe { sys::cuMemAddressFree(self.start, self.bytes) };
        }
    }
}

/// Plain memory of GPU `ordinal`.
fn device_memory(ordinal: usize) -> sys::CUmemAllocationProp {
    let mut memory = sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        // SAFETY: a plain structure of numbers, for which zeros are valid.
        location: unsafe { std::mem::zeroed() },
        win32HandleMetaData: std::ptr::null_mut(),
        // SAFETY: as above.
        allocFlags: unsafe { std::mem::zeroed() },
    };
    memory.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    memory.location.id = ordinal as i32;
    memory
}
