//! Physical memory of a GPU in chunks, which arenas pass to each other.
//!
//! Returning memory to the driver takes about 0.4 ms per GiB, for one GPU of the host at a time, and allocating it again soon takes longer: the
//! driver clears it first. So a background thread releases what an arena unmaps, and an arena that maps meanwhile takes chunks that are not yet
//! released: the KV cache gets the optimizer's chunks, and vice versa. Chunks that are unmapped one by one, while others are still being copied, are
//! only released after the next arena has mapped ([`release_idle`]).
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys;
use tch::Device;

use super::host::available_host_bytes;
use crate::cuda::{Context, OUT_OF_MEMORY, check};
use crate::error::{Error, Result};
use crate::process::detach;

/// Size of a whole chunk. Smaller ones take longer to map; larger ones, up to 64 GiB, have no advantage.
pub(super) const CHUNK_BYTES: usize = 1 << 30;

/// Waits until all memory that arenas on `device` have unmapped is available to other users, such as libtorch. Does nothing on a CPU.
///
/// # Errors
/// [`Error::Cuda`] if some of it could not be released.
pub fn settle(device: Device) -> Result<()> {
    match device {
        Device::Cuda(ordinal) => ChunkPool::of(&Context::retain(ordinal)?).settle(),
        _ => Ok(()),
    }
}

/// Starts to release memory that arenas on `device` have unmapped and no other arena has taken, without waiting. Does nothing on a CPU.
///
/// # Errors
/// [`Error::Cuda`].
pub fn release_idle(device: Device) -> Result<()> {
    if let Device::Cuda(ordinal) = device {
        ChunkPool::of(&Context::retain(ordinal)?).give(Vec::new());
    }
    Ok(())
}

/// Bytes that arenas on `device` can still map: on a GPU the free memory once everything unmapped is released, on a CPU what this process may still
/// use.
///
/// # Errors
/// [`Error::Cuda`]; [`Error::Environment`] if the system does not report it.
pub fn free_bytes(device: Device) -> Result<usize> {
    match device {
        Device::Cuda(ordinal) => {
            let context = Context::retain(ordinal)?;
            ChunkPool::of(&context).settle()?;
            Ok(context.memory()?.free_bytes)
        }
        _ => available_host_bytes(),
    }
}

/// A piece of physical memory, mapped to at most one address range.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) handle: sys::CUmemGenericAllocationHandle,
    pub(super) bytes: usize,
}

/// One GPU's unmapped chunks, waiting for another arena or for release to the driver.
#[derive(Debug)]
pub(super) struct ChunkPool {
    context: Arc<Context>,
    state: Mutex<PoolChunks>,
    settled: Condvar,
}

#[derive(Debug, Default)]
struct PoolChunks {
    idle: Vec<Chunk>,
    /// Whether the background thread is running.
    is_releasing: bool,
    kept_error: Option<Error>,
}

impl ChunkPool {
    /// The pool of a GPU.
    pub(super) fn of(context: &Arc<Context>) -> Arc<Self> {
        static POOLS: Mutex<Option<HashMap<usize, Arc<ChunkPool>>>> = Mutex::new(None);
        let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
        let (context, state, settled) = (context.clone(), Mutex::default(), Condvar::new());
        let new = || Arc::new(Self { context: context.clone(), state, settled });
        pools.get_or_insert_default().entry(context.ordinal()).or_insert_with(new).clone()
    }

    /// Takes a chunk with arbitrary content: an unmapped one of this size, or else a new one.
    ///
    /// # Errors
    /// [`Error::Cuda`] with the code [`OUT_OF_MEMORY`] if the GPU has no such memory, even after all unmapped chunks are released.
    pub(super) fn take(self: &Arc<Self>, bytes: usize) -> Result<Chunk> {
        {
            let mut state = self.lock();
            if let Some(at) = state.idle.iter().position(|chunk| chunk.bytes == bytes) {
                return Ok(state.idle.swap_remove(at));
            }
        }
        match self.create(bytes) {
            Err(Error::Cuda { code: OUT_OF_MEMORY, .. }) => {
                self.settle()?;
                self.create(bytes)
            }
            created => created,
        }
    }

    /// Keeps unmapped chunks for the next arena that maps. They are released together with others, or when [`settle`] is called.
    pub(super) fn keep(&self, chunks: Vec<Chunk>) {
        self.lock().idle.extend(chunks);
    }

    /// Starts to release unmapped chunks, and those that were kept, without waiting.
    pub(super) fn give(self: &Arc<Self>, chunks: Vec<Chunk>) {
        let mut state = self.lock();
        state.idle.extend(chunks);
        if state.is_releasing || state.idle.is_empty() {
            return;
        }
        state.is_releasing = true;
        drop(state);
        let pool = self.clone();
        let thread = std::thread::Builder::new().name("gpu-release".to_owned());
        if detach(thread, move || pool.release()).is_err() {
            self.release(); // no thread could be started: release now
        }
    }

    /// Waits until every unmapped chunk is released to the driver.
    pub(super) fn settle(self: &Arc<Self>) -> Result<()> {
        self.give(Vec::new());
        let mut state = self.lock();
        while state.is_releasing {
            state = self.settled.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.kept_error.take().map_or(Ok(()), Err)
    }

    fn release(&self) {
        let current = self.context.make_current();
        loop {
            let mut state = self.lock();
            let Some(chunk) = state.idle.pop() else {
                state.is_releasing = false;
                state.kept_error = state.kept_error.take().or(current.err());
                self.settled.notify_all();
                return;
            };
            drop(state);
            // SAFETY: created by `create`, mapped nowhere and known to nobody else.
            let released = unsafe { sys::cuMemRelease(chunk.handle) };
            if let Err(error) = check("cuMemRelease", released.result()) {
                self.lock().kept_error.get_or_insert(error);
            }
        }
    }

    fn create(&self, bytes: usize) -> Result<Chunk> {
        let (memory, mut handle) = (device_memory(self.context.ordinal()), 0);
        // SAFETY: both outlive the call.
        let made = unsafe { sys::cuMemCreate(&raw mut handle, bytes, &raw const memory, 0) };
        check("cuMemCreate", made.result())?;
        Ok(Chunk { handle, bytes })
    }

    fn lock(&self) -> MutexGuard<'_, PoolChunks> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The allocation properties of ordinary memory on GPU `ordinal`.
pub(super) fn device_memory(ordinal: usize) -> sys::CUmemAllocationProp {
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
