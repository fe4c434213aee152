//! Physical memory of a GPU, in chunks that pass from one arena to the next.
//!
//! To give memory back to the driver takes about 0.4 ms a GiB, one GPU of the host after the other, and it is worse to take it
//! again soon: the driver clears it first. So what an arena lets go is released by a thread of its own, and an arena that
//! maps meanwhile takes from what is left: the KV cache gets the optimizer's chunks and the other way round. What goes piece by
//! piece while the rest is still copied is not released before the next arena has mapped ([`release_idle`]).
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys;
use tch::Device;

use super::host::available_host_bytes;
use crate::cuda::{Context, OUT_OF_MEMORY, check};
use crate::error::{Error, Result};
use crate::process::detach;

/// Size of a whole chunk: smaller ones take longer to map, up to 64 GiB larger ones bring nothing.
pub(super) const CHUNK_BYTES: usize = 1 << 30;

/// Waits until all memory that arenas on `device` have let go is free for others, such as libtorch. Nothing to do on a CPU.
///
/// # Errors
/// [`Error::Cuda`] if some of it could not be given back.
pub fn settle(device: Device) -> Result<()> {
    match device {
        Device::Cuda(ordinal) => ChunkPool::of(&Context::retain(ordinal)?).settle(),
        _ => Ok(()),
    }
}

/// Starts to give back what arenas on `device` have let go and no other has taken, without waiting. Nothing to do on a CPU.
///
/// # Errors
/// [`Error::Cuda`].
pub fn release_idle(device: Device) -> Result<()> {
    if let Device::Cuda(ordinal) = device {
        ChunkPool::of(&Context::retain(ordinal)?).give(Vec::new());
    }
    Ok(())
}

/// Memory that arenas on `device` may still map, in bytes: on a GPU what is free once all that arenas have let go is back, on a CPU
/// what this process may still use.
///
/// # Errors
/// [`Error::Cuda`]; [`Error::Environment`] where the system does not tell.
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

/// Memory behind no addresses or behind one range of them.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) handle: sys::CUmemGenericAllocationHandle,
    pub(super) bytes: usize,
}

/// One GPU's chunks on their way from an arena to another or back to the driver.
#[derive(Debug)]
pub(super) struct ChunkPool {
    context: Arc<Context>,
    state: Mutex<PoolChunks>,
    settled: Condvar,
}

#[derive(Debug, Default)]
struct PoolChunks {
    idle: Vec<Chunk>,
    /// Whether a thread is releasing.
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

    /// A chunk with whatever content: one of this size that is on its way back, else a new one.
    ///
    /// # Errors
    /// [`Error::Cuda`] with the code [`OUT_OF_MEMORY`] when the GPU does not have it, even after all that was let go is back.
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

    /// Keeps unmapped chunks for the arena that maps next. They are released when others are, or are waited for.
    pub(super) fn keep(&self, chunks: Vec<Chunk>) {
        self.lock().idle.extend(chunks);
    }

    /// Lets unmapped chunks go, and those that were kept, without waiting.
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
            self.release(); // no more threads: then now
        }
    }

    /// Waits until every chunk that was let go is the driver's again.
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

/// Plain memory of GPU `ordinal`.
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
