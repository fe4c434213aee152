//! Allocates all remaining memory, for the injected fault `fill`. The next allocation of a phase, in any library, then fails as on a machine whose
//! memory is full.
#![allow(unsafe_code)]

use tch::{Device, Kind, Tensor};

use super::chunks::{release_idle, settle};
use crate::error::{Error, Result};
use crate::torch;

/// Sizes of the allocations as powers of two, largest first; libtorch's allocator uses no blocks below 512 bytes.
const LARGEST: u32 = 34;
const SMALLEST: u32 = 9;

/// Leaves this process `left_bytes` of memory to allocate. On a GPU everything else is allocated permanently; on a CPU the process's address space is
/// limited.
///
/// # Errors
/// The errors of the device or of the operating system.
pub fn fill(device: Device, left_bytes: usize) -> Result<()> {
    match device {
        Device::Cpu => limit_addresses(left_bytes),
        _ => fill_device(device, left_bytes),
    }
}

/// Allocates until neither the driver nor libtorch's cache has memory left.
fn fill_device(device: Device, left_bytes: usize) -> Result<()> {
    release_idle(device)?;
    settle(device)?;
    torch::release_memory(device)?;
    let take = |bytes: i64| Tensor::f_empty([bytes], (Kind::Uint8, device));
    let left = if left_bytes > 0 { Some(take(left_bytes as i64)?) } else { None };
    let mut taken = Vec::new();
    for size in (SMALLEST..=LARGEST).rev() {
        while let Ok(block) = take(1 << size) {
            taken.push(block);
        }
    }
    std::mem::forget(taken); // until the process ends
    drop(left);
    torch::release_memory(device)
}

fn limit_addresses(left_bytes: usize) -> Result<()> {
    let path = "/proc/self/statm";
    let pages = std::fs::read_to_string(path).map_err(Error::io(path))?;
    let pages: usize = pages.split(' ').next().and_then(|pages| pages.parse().ok()).unwrap_or(0);
    // SAFETY: asks for a constant of the system.
    let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    let most = (pages * page_bytes + left_bytes) as libc::rlim_t;
    let limit = libc::rlimit { rlim_cur: most, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the limit outlives the call.
    match unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) } {
        0 => Ok(()),
        _ => Err(Error::io(path)(std::io::Error::last_os_error())),
    }
}
