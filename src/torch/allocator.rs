//! How tensor memory is cached, released and counted: in the C heap, where libtorch's CPU tensors are allocated, and in libtorch's own GPU allocator.
//!
//! libtorch's cache keeps every block that it requests from the driver. With micro-batches of different sizes it grew to twice the size of its
//! tensors. So before each update except the first (in which libraries make permanent allocations), the update's memory is allocated as one block, 3
//! % larger than planned, from which all tensors are cut (`keep_block`). If a user sets `PYTORCH_CUDA_ALLOC_CONF`, libtorch's own behaviour is
//! unchanged.
#![allow(unsafe_code)]

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use tch::{Device, Kind, Tensor};

use super::ffi;
use crate::error::Result;

/// Blocks of at least this size are mapped separately; by default the threshold is between 128 KiB and 32 MiB.
const MAPPED_BYTES: i32 = 1 << 30;
/// Bytes by which the heap grows.
const GROWTH_BYTES: i32 = 64 << 20;
/// Free memory below this is not returned to the system, because a small model would spend a tenth of every step on getting it back.
pub const KEPT_BYTES: usize = 512 << 20;

/// Keeps the memory of freed CPU tensors for later ones, until [`release_memory`]. By default the heap maps every large tensor and unmaps it when it
/// is freed, so that the kernel clears the same pages in every operation (a fifth of a small model's training step). Tensors then come from `malloc`,
/// since memory with another alignment would not be reused. Call once, before the first tensor. Does nothing if the C library is not glibc.
pub fn keep_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: `mallopt` takes its own lock; a value that it refuses leaves the default in force. `sbrk` reads the heap's end.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_BYTES);
        libc::mallopt(libc::M_TRIM_THRESHOLD, -1);
        libc::mallopt(libc::M_TOP_PAD, GROWTH_BYTES);
        HEAP_START.get_or_init(|| (libc::sbrk(0) as usize).saturating_sub(libc::mallinfo2().arena));
        ffi::allocate_from_heap();
    }
}

/// The start address of the main heap, once [`keep_memory`] was called.
static HEAP_START: OnceLock<usize> = OnceLock::new();

/// Returns free heap memory to the operating system if it exceeds 512 MiB, and everything that libtorch caches on `device` if that is a GPU.
///
/// # Errors
/// [`crate::Error::Environment`] if libtorch's CUDA libraries are not loaded.
pub fn release_memory(device: Device) -> Result<()> {
    release_heap();
    BLOCK_BYTES.store(0, Ordering::Relaxed);
    ffi::release_cache(device)
}

/// Environment variables that configure libtorch's GPU allocator.
const ALLOCATOR_VARIABLES: [&str; 2] = ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"];
/// Size of the block that [`keep_block`] allocated last, or 0 once it is released. A process uses one GPU.
static BLOCK_BYTES: AtomicUsize = AtomicUsize::new(0);
/// Peaks from the last [`reset_peak_memory`] until [`keep_block`] allocated the last block.
static EARLIER: Maxima = Maxima::new();

/// Peaks of libtorch's memory that survive a reset of its own statistics.
#[derive(Debug)]
struct Maxima {
    allocated: AtomicUsize,
    reserved: AtomicUsize,
}

impl Maxima {
    const fn new() -> Self {
        Self { allocated: AtomicUsize::new(0), reserved: AtomicUsize::new(0) }
    }

    fn keep(&self, memory: DeviceMemory) {
        self.allocated.fetch_max(memory.peak_allocated, Ordering::Relaxed);
        self.reserved.fetch_max(memory.peak_reserved, Ordering::Relaxed);
    }

    fn reset(&self) {
        [&self.allocated, &self.reserved].into_iter().for_each(|most| most.store(0, Ordering::Relaxed));
    }

    /// Combines libtorch's current statistics with the earlier peaks.
    fn with(&self, since: DeviceMemory) -> DeviceMemory {
        let most = |count: usize, earlier: &AtomicUsize| count.max(earlier.load(Ordering::Relaxed));
        DeviceMemory {
            peak_allocated: most(since.peak_allocated, &self.allocated),
            peak_reserved: most(since.peak_reserved, &self.reserved),
            ..since
        }
    }
}

/// Whether [`keep_block`] would allocate a new block because the last one is smaller than `bytes` or was released. Always false on a CPU, and if the
/// user has configured libtorch's allocator.
pub fn lacks_block(device: Device, bytes: usize) -> bool {
    let is_configured = || ALLOCATOR_VARIABLES.iter().any(|name| std::env::var_os(name).is_some());
    device.is_cuda() && BLOCK_BYTES.load(Ordering::Relaxed) < bytes && !is_configured()
}

/// Makes libtorch's cache on a GPU contain one free block of at least `bytes`, from which later tensors are cut, unless it already does
/// ([`lacks_block`]). Other cached memory is released first.
///
/// Without such a block the cache requests memory from the driver for every tensor that fits in no free block, and keeps all these allocations;
/// micro-batches of varying sizes then hold up to twice the memory of their tensors. Neighbours within one allocation are merged when freed, so a
/// block that contains all tensors suits any sizes.
///
/// If the GPU does not have that much memory, the cache stays empty and allocates as usual.
///
/// # Errors
/// [`crate::Error::Environment`] if libtorch's CUDA libraries are not loaded.
pub fn keep_block(device: Device, bytes: usize) -> Result<()> {
    if !lacks_block(device, bytes) {
        return Ok(());
    }
    release_memory(device)?;
    if let Some(memory) = device_memory(device)? {
        EARLIER.keep(memory);
    }
    // The tensor is dropped immediately; its memory stays in the cache.
    if let Err(error) = Tensor::f_empty([bytes as i64], (Kind::Uint8, device)) {
        tracing::debug!("cannot reserve a block of {bytes} bytes for training tensors: {error}");
    }
    BLOCK_BYTES.store(bytes, Ordering::Relaxed);
    // The block is no real tensor, so the peak of tensors must not include it.
    forget_peaks(device)
}

/// Memory of a GPU that libtorch's allocator holds, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Bytes of live tensors.
    pub allocated: usize,
    /// Peak of `allocated` since [`reset_peak_memory`].
    pub peak_allocated: usize,
    /// Bytes allocated from the driver: live tensors and cached memory.
    pub reserved: usize,
    /// Peak of `reserved` since [`reset_peak_memory`].
    pub peak_reserved: usize,
}

/// The memory of `device` that libtorch holds; `None` on a CPU, where nothing is counted.
///
/// # Errors
/// [`crate::Error::Environment`] if libtorch's CUDA libraries are not loaded.
pub fn device_memory(device: Device) -> Result<Option<DeviceMemory>> {
    let Device::Cuda(ordinal) = device else { return Ok(None) };
    let [allocated, peak_allocated, reserved, peak_reserved] = ffi::memory_stats(ordinal)?;
    Ok(Some(EARLIER.with(DeviceMemory { allocated, peak_allocated, reserved, peak_reserved })))
}

/// Resets the peaks of [`device_memory`]; does nothing on a CPU.
///
/// # Errors
/// The errors of [`device_memory`].
pub fn reset_peak_memory(device: Device) -> Result<()> {
    EARLIER.reset();
    forget_peaks(device)
}

/// Resets libtorch's own peaks.
fn forget_peaks(device: Device) -> Result<()> {
    match device {
        Device::Cuda(ordinal) => ffi::reset_peak_memory(ordinal),
        _ => Ok(()),
    }
}

/// Returns free memory of the main heap, which the training thread uses. Other threads' heaps are excluded: each has 64 MiB that count as free
/// although they were never touched, so with a few threads every call would release memory that the next step needs.
fn release_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: all three take the heap's own locks; the last touches free memory only.
    unsafe {
        let (all, end) = (libc::mallinfo2(), libc::sbrk(0) as usize);
        let of_threads = all.arena.saturating_sub(end - HEAP_START.get().unwrap_or(&0));
        if all.fordblks.saturating_sub(of_threads) > KEPT_BYTES {
            libc::malloc_trim(0);
        }
    }
}

#[cfg(all(test, target_env = "gnu"))]
mod tests {
    use super::*;

    #[test]
    fn no_memory_block_is_kept_on_a_cpu() {
        assert!(!lacks_block(Device::Cpu, usize::MAX));
        keep_block(Device::Cpu, usize::MAX).unwrap();
        assert_eq!(BLOCK_BYTES.load(Ordering::Relaxed), 0);
    }

    /// Before the block, 5 of 7 bytes are tensors and at most 9 are reserved. The block has 20 bytes, which are not tensors. Afterwards 6 bytes are
    /// tensors.
    #[test]
    fn memory_peaks_exclude_the_kept_block_and_keep_earlier_maxima() {
        let memory =
            |peak_allocated, peak_reserved| DeviceMemory { allocated: 3, peak_allocated, reserved: 4, peak_reserved };
        let maxima = Maxima::new();
        maxima.keep(memory(5, 9));
        assert_eq!(maxima.with(memory(3, 23)), memory(5, 23));
        assert_eq!(maxima.with(memory(6, 23)), memory(6, 23));
        maxima.keep(maxima.with(memory(6, 23)));
        assert_eq!(maxima.with(memory(3, 4)), memory(6, 23));
        maxima.reset();
        assert_eq!(maxima.with(memory(3, 4)), memory(3, 4));
    }

    /// A run keeps a few small allocations at every step. When these took part of a freed tensor's place, the heap grew at every step.
    #[test]
    fn freed_memory_is_reused_for_tensors_of_equal_size() {
        keep_memory();
        let (mut kept, mut places) = (Vec::new(), std::collections::BTreeSet::new());
        for _ in 0..100 {
            let tensors = [394_752, 394_752].map(|len| Tensor::empty([len], (Kind::Float, Device::Cpu)));
            places.extend(tensors.iter().map(|tensor| tensor.data_ptr() as usize));
            drop(tensors);
            kept.extend((0..8).map(|words| vec![0_u64; words + 2]));
        }
        assert!(places.iter().all(|place| place % 64 == 0));
        assert!(
            places.len() < 20,
            "200 tensors had {} places, {} small blocks lie beside them",
            places.len(),
            kept.len()
        );
    }

    #[test]
    fn large_allocations_come_from_the_heap() {
        keep_memory();
        // SAFETY: reads counters under the heap's own locks.
        let num_mapped = || unsafe { libc::mallinfo2() }.hblks;
        let before = num_mapped();
        let block = vec![1u8; 48 << 20]; // by default always mapped separately; other tests can only lower the count
        assert!(num_mapped() <= before);
        drop(block);
        release_memory(Device::Cpu).unwrap();
    }
}
