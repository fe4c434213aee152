//! How memory of tensors is kept, returned and counted: the C heap, from which libtorch's CPU tensors come, and libtorch's own
//! allocator on a GPU.
#![allow(unsafe_code)]

use tch::Device;

use super::ffi;
use crate::error::Result;

/// Blocks from this size on are mapped one by one, as by default from 128 KiB to 32 MiB on.
const MAPPED_BYTES: i32 = 1 << 30;
/// What the heap grows by.
const GROWTH_BYTES: i32 = 64 << 20;
/// Free memory that is not worth returning: a small model would spend a tenth of every step on getting it back.
const KEPT_BYTES: usize = 512 << 20;

/// Keeps the memory of freed tensors for the next ones, until [`release_memory`]. By default the heap maps every large
/// tensor anew and returns it when it dies, so that the kernel clears the same pages again in every operation (a fifth of
/// a small model's training step). Call once, before the first tensor. Does nothing where the C library is not glibc.
pub fn keep_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: `mallopt` takes its own lock; a value that it refuses leaves the default in force.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_BYTES);
        libc::mallopt(libc::M_TRIM_THRESHOLD, -1);
        libc::mallopt(libc::M_TOP_PAD, GROWTH_BYTES);
    }
}

/// Returns free memory of the heap to the operating system where it is more than 512 MiB, and all that libtorch keeps of
/// `device` if that is a GPU.
///
/// # Errors
/// [`crate::Error::Environment`] if libtorch's CUDA half is not loaded.
pub fn release_memory(device: Device) -> Result<()> {
    release_heap();
    ffi::release_cache(device)
}

/// Bytes that libtorch's allocator holds of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Of live tensors.
    pub allocated: usize,
    /// The most of them since [`reset_peak_memory`].
    pub peak_allocated: usize,
    /// Taken from the device: live tensors and what is kept for later ones.
    pub reserved: usize,
    /// The most of that since [`reset_peak_memory`].
    pub peak_reserved: usize,
}

/// What libtorch holds of `device`; nothing is counted on a CPU.
///
/// # Errors
/// [`crate::Error::Environment`] if libtorch's CUDA half is not loaded.
pub fn device_memory(device: Device) -> Result<Option<DeviceMemory>> {
    let Device::Cuda(ordinal) = device else { return Ok(None) };
    let [allocated, peak_allocated, reserved, peak_reserved] = ffi::memory_stats(ordinal)?;
    Ok(Some(DeviceMemory { allocated, peak_allocated, reserved, peak_reserved }))
}

/// Begins the maxima of [`device_memory`] anew; nothing to do on a CPU.
///
/// # Errors
/// As [`device_memory`].
pub fn reset_peak_memory(device: Device) -> Result<()> {
    match device {
        Device::Cuda(ordinal) => ffi::reset_peak_memory(ordinal),
        _ => Ok(()),
    }
}

fn release_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: both calls take the heap's own locks; the second touches free memory only.
    unsafe {
        if libc::mallinfo2().fordblks > KEPT_BYTES {
            libc::malloc_trim(0);
        }
    }
}

#[cfg(all(test, target_env = "gnu"))]
mod tests {
    use super::*;

    #[test]
    fn large_blocks_come_from_the_heap() {
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
