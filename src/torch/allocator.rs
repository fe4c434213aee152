//! How memory of tensors is kept, returned and counted: the C heap, from which libtorch's CPU tensors come, and libtorch's own
//! allocator on a GPU.
//!
//! libtorch's cache keeps every block that it asks the driver for. Where micro-batches differ in size it came to hold twice its
//! tensors. So before each update but the first (libraries allocate for good in that one) the update's memory is allocated as one
//! block, of the plan's size and 3 % more, from which all tensors are cut (`keep_block`). A user who sets `PYTORCH_CUDA_ALLOC_CONF`
//! gets libtorch's own behaviour.
#![allow(unsafe_code)]

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use tch::{Device, Kind, Tensor};

use super::ffi;
use crate::error::Result;

/// Blocks from this size on are mapped one by one, as by default from 128 KiB to 32 MiB on.
const MAPPED_BYTES: i32 = 1 << 30;
/// The bytes by which the heap grows.
const GROWTH_BYTES: i32 = 64 << 20;
/// Free memory that is not worth returning: a small model would spend a tenth of every step on getting it back.
pub const KEPT_BYTES: usize = 512 << 20;

/// Keeps the memory of freed tensors for the next ones, until [`release_memory`]. By default the heap maps every large
/// tensor anew and returns it when it dies, so that the kernel clears the same pages again in every operation (a fifth of
/// a small model's training step). Tensors then come from `malloc`, since memory that was aligned otherwise is not found again.
/// Call once, before the first tensor. Does nothing where the C library is not glibc.
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

/// The address at which the main heap begins, once [`keep_memory`] was called.
static HEAP_START: OnceLock<usize> = OnceLock::new();

/// Returns free memory of the heap to the operating system where it is more than 512 MiB, and all that libtorch keeps of
/// `device` if that is a GPU.
///
/// # Errors
/// [`crate::Error::Environment`] if libtorch's CUDA half is not loaded.
pub fn release_memory(device: Device) -> Result<()> {
    release_heap();
    BLOCK_BYTES.store(0, Ordering::Relaxed);
    ffi::release_cache(device)
}

/// Variables that configure libtorch's GPU allocator.
const ALLOCATOR_VARIABLES: [&str; 2] = ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"];
/// Size of the block that [`keep_block`] took last, unless it was released. A process uses one GPU.
static BLOCK_BYTES: AtomicUsize = AtomicUsize::new(0);
/// The maxima until [`keep_block`] took the last block, since [`reset_peak_memory`].
static EARLIER: Maxima = Maxima::new();

/// Maxima of libtorch's bytes that outlive its own count of them.
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

    /// The count of libtorch since, with the maxima before it.
    fn with(&self, since: DeviceMemory) -> DeviceMemory {
        let most = |count: usize, earlier: &AtomicUsize| count.max(earlier.load(Ordering::Relaxed));
        DeviceMemory {
            peak_allocated: most(since.peak_allocated, &self.allocated),
            peak_reserved: most(since.peak_reserved, &self.reserved),
            ..since
        }
    }
}

/// Whether [`keep_block`] would take a new block: the one it took last is smaller than `bytes`, or was released. Always false on a
/// CPU, and where the user configured libtorch's allocator.
pub fn lacks_block(device: Device, bytes: usize) -> bool {
    let is_configured = || ALLOCATOR_VARIABLES.iter().any(|name| std::env::var_os(name).is_some());
    device.is_cuda() && BLOCK_BYTES.load(Ordering::Relaxed) < bytes && !is_configured()
}

/// Makes libtorch's cache on a GPU hold one free block of at least `bytes`, from which later tensors are cut, unless it does
/// already ([`lacks_block`]). Other cached memory is released before.
///
/// Without such a block the cache asks the driver for every tensor that no free block is large enough for, and keeps each of these
/// allocations: micro-batches of ever new sizes then hold up to twice the memory of their tensors. Neighbours within one
/// allocation merge when they are freed, so a block that all tensors come from serves every size again.
///
/// Where the GPU does not have that much, the cache stays empty and asks the driver as before.
///
/// # Errors
/// [`crate::Error::Environment`] if libtorch's CUDA half is not loaded.
pub fn keep_block(device: Device, bytes: usize) -> Result<()> {
    if !lacks_block(device, bytes) {
        return Ok(());
    }
    release_memory(device)?;
    if let Some(memory) = device_memory(device)? {
        EARLIER.keep(memory);
    }
    // The tensor dies at once; its memory stays in the cache.
    if let Err(error) = Tensor::f_empty([bytes as i64], (Kind::Uint8, device)) {
        tracing::debug!("cannot reserve a block of {bytes} bytes for training tensors: {error}");
    }
    BLOCK_BYTES.store(bytes, Ordering::Relaxed);
    // It was nobody's tensor: the maximum of tensors goes on without it.
    forget_peaks(device)
}

/// Bytes that libtorch's allocator holds of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Bytes of live tensors.
    pub allocated: usize,
    /// The most of them since [`reset_peak_memory`].
    pub peak_allocated: usize,
    /// Taken from the device: live tensors and what is kept for later ones.
    pub reserved: usize,
    /// The most of that since [`reset_peak_memory`].
    pub peak_reserved: usize,
}

/// The memory of `device` that libtorch holds; nothing is counted on a CPU.
///
/// # Errors
/// [`crate::Error::Environment`] if libtorch's CUDA half is not loaded.
pub fn device_memory(device: Device) -> Result<Option<DeviceMemory>> {
    let Device::Cuda(ordinal) = device else { return Ok(None) };
    let [allocated, peak_allocated, reserved, peak_reserved] = ffi::memory_stats(ordinal)?;
    Ok(Some(EARLIER.with(DeviceMemory { allocated, peak_allocated, reserved, peak_reserved })))
}

/// Begins the maxima of [`device_memory`] anew; nothing to do on a CPU.
///
/// # Errors
/// The errors of [`device_memory`].
pub fn reset_peak_memory(device: Device) -> Result<()> {
    EARLIER.reset();
    forget_peaks(device)
}

/// Begins libtorch's own maxima anew.
fn forget_peaks(device: Device) -> Result<()> {
    match device {
        Device::Cuda(ordinal) => ffi::reset_peak_memory(ordinal),
        _ => Ok(()),
    }
}

/// The main heap is that of the thread that trains. The heaps of other threads are left out: each has 64 MiB that count as free and
/// that nobody has touched, so that with a few threads every call would return what the next step needs.
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

    /// Before a block 5 of 7 bytes were tensors' and 9 reserved; the block is 20 of them and no tensor; behind it 6 are tensors'.
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

    /// A run keeps a little at every step. Where that took a part of a freed tensor's place, the heap grew at every step.
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
        let block = vec![1u8; 48 << 20]; // by default always mapped; other tests can only lower the count
        assert!(num_mapped() <= before);
        drop(block);
        release_memory(Device::Cpu).unwrap();
    }
}
