//! Memory of several GPUs of a node, one per process, that all of these processes map (CUDA IPC).
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::{result, sys};
use tch::{Device, Kind, Tensor};

use super::context::{Context, OUT_OF_MEMORY, check};
use crate::error::{Error, Result};
use crate::types::Place;

/// Size of the IPC handle by which another process maps a rank's memory.
pub const HANDLE_BYTES: usize = 64;

/// This rank's memory, and its peers' once they are mapped. It is never freed before the process ends, since peers may have it mapped and a drop
/// cannot wait for them.
#[derive(Debug)]
pub struct PeerMemory {
    context: Arc<Context>,
    rank: usize,
    addresses: Vec<sys::CUdeviceptr>, // of every rank's memory in this process; 0 if not mapped
    bytes: usize,
    abort: &'static AtomicU32, // host memory; kernels that wait for peers poll it
}

impl PeerMemory {
    /// Allocates `bytes` of zeroed memory for one rank.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::Cuda`].
    pub fn allocate(context: &Arc<Context>, place: Place, bytes: usize) -> Result<Self> {
        context.make_current()?;
        // SAFETY: plain allocations, never freed.
        let own = unsafe { result::malloc_sync(bytes) };
        let own = check("cuMemAlloc", own).map_err(|error| match error {
            Error::Cuda { code: OUT_OF_MEMORY, .. } => {
                Error::OutOfMemory { owner: "peer memory".to_owned(), requested_bytes: bytes }
            }
            other => other,
        })?;
        // SAFETY: as above.
        let abort = check("cuMemHostAlloc", unsafe { result::malloc_host(size_of::<AtomicU32>(), 0) })?;
        // SAFETY: four bytes of pinned memory that starts a page and is never freed; host and GPU access it as one word.
        let abort = unsafe { &*abort.cast::<AtomicU32>() };
        let mut addresses = vec![0; place.size];
        addresses[place.rank] = own;
        let memory = Self { context: context.clone(), rank: place.rank, addresses, bytes, abort };
        memory.clear()?;
        Ok(memory)
    }

    /// Allocates the memories of `num_ranks` ranks within this process on one GPU, for tests with more ranks than the machine has GPUs.
    ///
    /// # Errors
    /// The errors of [`PeerMemory::allocate`].
    pub fn of_one_gpu(context: &Arc<Context>, num_ranks: usize, bytes: usize) -> Result<Vec<Self>> {
        let ranks = (0..num_ranks).map(|rank| Self::allocate(context, Place { rank, size: num_ranks }, bytes));
        let mut ranks = ranks.collect::<Result<Vec<Self>>>()?;
        let addresses: Vec<sys::CUdeviceptr> = ranks.iter().map(|memory| memory.addresses[memory.rank]).collect();
        ranks.iter_mut().for_each(|memory| memory.addresses.clone_from(&addresses));
        Ok(ranks)
    }

    /// The IPC handle by which peers map this rank's memory.
    ///
    /// # Errors
    /// [`Error::Cuda`] if the system does not let processes share memory.
    pub fn handle(&self) -> Result<[u8; HANDLE_BYTES]> {
        let mut handle = sys::CUipcMemHandle { reserved: [0; HANDLE_BYTES] };
        // SAFETY: the handle outlives the call; the address is that of an allocation.
        let asked = unsafe { sys::cuIpcGetMemHandle(&raw mut handle, self.addresses[self.rank]) };
        check("cuIpcGetMemHandle", asked.result())?;
        Ok(handle.reserved.map(|byte| byte as u8))
    }

    /// Maps another rank's memory, which has the same size.
    ///
    /// # Errors
    /// [`Error::Cuda`] if this GPU cannot access that rank's memory.
    pub fn map(&mut self, rank: usize, handle: &[u8; HANDLE_BYTES]) -> Result<()> {
        self.context.make_current()?;
        let handle = sys::CUipcMemHandle { reserved: handle.map(|byte| byte as std::ffi::c_char) };
        let flags = sys::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        // SAFETY: the address outlives the call; the mapping stays until the process ends.
        let asked = unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut self.addresses[rank], handle, flags) };
        check("cuIpcOpenMemHandle", asked.result())
    }

    /// Makes kernels stop waiting for peers, now and until [`PeerMemory::clear`]. Any thread may call this.
    pub fn abort(&self) {
        self.abort.store(1, Ordering::Release);
    }

    /// Waits until the GPU is idle, zeroes this rank's memory, and lets kernels wait for peers again. No other rank may access this memory meanwhile.
    ///
    /// # Errors
    /// [`Error::Cuda`], including failures of earlier work.
    pub fn clear(&self) -> Result<()> {
        self.context.synchronize()?;
        // SAFETY: exactly the allocation.
        check("cuMemsetD8", unsafe { result::memset_d8_sync(self.addresses[self.rank], 0, self.bytes) })?;
        self.context.synchronize()?;
        self.abort.store(0, Ordering::Release);
        Ok(())
    }

    /// Bytes of each rank's memory.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Address of this rank's memory.
    pub fn address(&self) -> usize {
        self.addresses[self.rank] as usize
    }

    /// Number of ranks.
    pub fn num_ranks(&self) -> usize {
        self.addresses.len()
    }

    /// Index of this rank.
    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    /// Index of this rank's GPU.
    pub(super) fn ordinal(&self) -> usize {
        self.context.ordinal()
    }

    /// Addresses of every rank's memory in this process.
    pub(super) fn addresses(&self) -> &[sys::CUdeviceptr] {
        &self.addresses
    }

    /// Address of the word that makes kernels stop waiting.
    pub(super) fn abort_address(&self) -> *mut std::ffi::c_void {
        self.abort.as_ptr().cast()
    }

    /// A matrix stored in a part of this rank's memory.
    pub(super) fn matrix(&self, offset: usize, (rows, dim): (usize, usize), kind: Kind) -> Result<Tensor> {
        assert!(offset + rows * dim * kind.elt_size_in_bytes() <= self.bytes, "a part of the memory");
        let address = (self.address() + offset) as *const u8;
        let (shape, strides) = ([rows as i64, dim as i64], [dim as i64, 1]);
        // SAFETY: within the allocation, which is never freed.
        Ok(unsafe { Tensor::f_from_blob(address, &shape, &strides, kind, Device::Cuda(self.ordinal()))? })
    }
}
