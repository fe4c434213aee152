//! The CPU backend of an arena: a private anonymous mapping. Unmapped parts are inaccessible, so an access after `unmap` faults instead of reading
//! zeros.
#![allow(unsafe_code)]

use std::io;
use std::path::Path;

use super::host::available_host_bytes;
use super::ledger::{Ledger, MemoryKind};
use super::range::AddressRange;
use crate::error::{Error, Result};

/// Reserved host addresses between two guard pages, which prevent the kernel from merging the range with its neighbours.
#[derive(Debug)]
pub(super) struct CpuRange {
    name: &'static str,
    start: *mut u8, // after the first guard page
    bytes: usize,
    page_bytes: usize,
}

// SAFETY: the range is owned by this value alone; its address is valid in every thread.
unsafe impl Send for CpuRange {}
// SAFETY: shared references only read the address and lengths.
unsafe impl Sync for CpuRange {}

impl CpuRange {
    /// Reserves at least `bytes`, all of them inaccessible.
    pub(super) fn reserve(name: &'static str, bytes: usize) -> Result<Self> {
        // SAFETY: asks for a constant of the system.
        let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        let out_of_memory = || Error::OutOfMemory { owner: format!("{name} (addresses)"), requested_bytes: bytes };
        let bytes = bytes.checked_next_multiple_of(page_bytes).ok_or_else(out_of_memory)?;
        let total = bytes.checked_add(2 * page_bytes).ok_or_else(out_of_memory)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), total, libc::PROT_NONE, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(out_of_memory());
        }
        // SAFETY: the first guard page lies inside the mapping made above.
        let start = unsafe { base.cast::<u8>().add(page_bytes) };
        Ok(Self { name, start, bytes, page_bytes })
    }

    fn out_of_memory(&self, requested_bytes: usize) -> Error {
        Error::OutOfMemory {
            owner: format!("{} ({})", self.name, Ledger::summary(MemoryKind::Device)),
            requested_bytes,
        }
    }

    fn protect(&self, from: usize, to: usize, protection: i32) -> io::Result<()> {
        // SAFETY: [from, to) lies inside the own mapping; nobody holds views of an inaccessible part.
        check(unsafe { libc::mprotect(self.start.add(from).cast(), to - from, protection) })
    }
}

impl AddressRange for CpuRange {
    fn as_ptr(&self) -> *mut u8 {
        self.start
    }

    fn reserved_bytes(&self) -> usize {
        self.bytes
    }

    fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    /// Maps pages, which are allocated on first access. Requests beyond the available memory are refused here, with the arena's name, instead of by
    /// the kernel's out-of-memory killer later.
    fn map(&mut self, from: usize, to: usize) -> Result<()> {
        if to - from > available_host_bytes()? {
            return Err(self.out_of_memory(to - from));
        }
        self.protect(from, to, libc::PROT_READ | libc::PROT_WRITE).map_err(|_| self.out_of_memory(to - from))
    }

    fn unmap(&mut self, to: usize) -> Result<()> {
        self.shrink(0, to).1
    }

    fn shrink(&mut self, from: usize, to: usize) -> (usize, Result<()>) {
        // SAFETY: [from, to) lies inside the own mapping; by the arena's contract no view of it is used any more.
        let gone = check(unsafe { libc::madvise(self.start.add(from).cast(), to - from, libc::MADV_DONTNEED) })
            .and_then(|()| self.protect(from, to, libc::PROT_NONE))
            .map_err(|source| Error::Environment { message: format!("cannot unmap arena '{}': {source}", self.name) });
        (if gone.is_ok() { from } else { to }, gone)
    }

    fn resident_bytes(&self) -> Result<usize> {
        let (start, end) = (self.start as usize, self.start as usize + self.bytes);
        let path = Path::new("/proc/self/smaps");
        let smaps = std::fs::read_to_string(path).map_err(Error::io(path))?;
        let mut inside = false;
        let mut resident_kib = 0;
        for line in smaps.lines() {
            if let Some((from, to)) = address_range(line) {
                inside = from < end && to > start;
            } else if let Some(kib) = line.strip_prefix("Rss:").filter(|_| inside) {
                resident_kib += leading_number(kib);
            }
        }
        Ok(resident_kib << 10)
    }
}

impl Drop for CpuRange {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made by `reserve`, with its guard pages. A failure only leaks addresses.
        unsafe { libc::munmap(self.start.sub(self.page_bytes).cast(), self.bytes + 2 * self.page_bytes) };
    }
}

/// Parses the addresses from the first line of a mapping in smaps, such as `7f12..-7f34.. rw-p ..`.
fn address_range(line: &str) -> Option<(usize, usize)> {
    let (from, to) = line.split_whitespace().next()?.split_once('-')?;
    Some((usize::from_str_radix(from, 16).ok()?, usize::from_str_radix(to, 16).ok()?))
}

/// Parses the leading number: `   123 kB` -> 123.
fn leading_number(text: &str) -> usize {
    text.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or(0)
}

fn check(status: i32) -> io::Result<()> {
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
