//! A reserved address range whose physical memory can be mapped and unmapped while the addresses stay the same.
#![allow(unsafe_code)]

use tch::{Device, Kind, Tensor};

use super::cpu::CpuRange;
use super::cuda::CudaRange;
use super::ledger::{Ledger, MemoryKind};
use super::range::AddressRange;
use crate::error::{Error, Result};

/// The address range of one kind of memory (KV cache, optimizer state, ..). Views made by [`Arena::tensor`] have the same address after every wake.
#[derive(Debug)]
pub struct Arena {
    name: &'static str,
    device: Device,
    range: Box<dyn AddressRange>,
    mapped_bytes: usize,
    kept_error: Option<Error>,
}

impl Arena {
    /// Reserves addresses for at most `bytes`; allocates no memory yet.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the address space is too small; [`Error::InvalidArgument`] on a device without a backend.
    pub fn reserve(name: &'static str, bytes: usize, device: Device) -> Result<Self> {
        let range: Box<dyn AddressRange> = match device {
            Device::Cpu => Box::new(CpuRange::reserve(name, bytes)?),
            Device::Cuda(ordinal) => Box::new(CudaRange::reserve(name, bytes, ordinal)?),
            other => return Err(invalid("Arena::reserve", "the CPU or a GPU", format!("{other:?}"))),
        };
        Ok(Self { name, device, range, mapped_bytes: 0, kept_error: None })
    }

    /// Maps memory to the first `bytes`, rounded up to whole pages. A later call may grow the mapping; it never shrinks it. New memory reads as zero;
    /// on a GPU it is zeroed on libtorch's current stream.
    ///
    /// # Errors
    /// An error of the last [`Arena::unmap`]; [`Error::OutOfMemory`] with this arena's name and the other owners of memory;
    /// [`Error::InvalidArgument`] beyond the reserved range.
    pub fn map(&mut self, bytes: usize) -> Result<()> {
        if let Some(error) = self.kept_error.take() {
            return Err(error);
        }
        let to = bytes.next_multiple_of(self.range.page_bytes());
        if to > self.range.reserved_bytes() {
            let expected = format!(
                "at most the {} bytes of addresses that arena '{}' reserved",
                self.range.reserved_bytes(),
                self.name
            );
            return Err(invalid("Arena::map", expected, bytes));
        }
        if to > self.mapped_bytes {
            self.range.map(self.mapped_bytes, to)?;
            Ledger::resize(self.name, MemoryKind::Device, self.mapped_bytes, to);
            self.mapped_bytes = to;
        }
        Ok(())
    }

    /// Unmaps all memory and keeps the addresses. On a GPU it is immediately available to other arenas, and to other users once
    /// [`settle`](super::settle) returns. Never fails: an error is returned by the next [`Arena::map`].
    pub fn unmap(&mut self) {
        if let Err(error) = self.range.unmap(self.mapped_bytes) {
            self.kept_error = Some(error);
        }
        Ledger::resize(self.name, MemoryKind::Device, self.mapped_bytes, 0);
        self.mapped_bytes = 0;
    }

    /// Unmaps whole chunks after the first `bytes`, without waiting for work on the device; no queued work may use them. On a GPU the memory is kept
    /// for the next arena that maps, until [`release_idle`](super::release_idle) or [`settle`](super::settle). Never fails: an error is returned by
    /// the next [`Arena::map`].
    pub fn shrink(&mut self, bytes: usize) {
        let from = bytes.next_multiple_of(self.range.page_bytes());
        if from >= self.mapped_bytes {
            return;
        }
        let (end, outcome) = self.range.shrink(from, self.mapped_bytes);
        if let Err(error) = outcome {
            self.kept_error = Some(error);
        }
        Ledger::resize(self.name, MemoryKind::Device, self.mapped_bytes, end);
        self.mapped_bytes = end;
    }

    /// Number of bytes that are mapped, from the start of the range.
    pub fn mapped_bytes(&self) -> usize {
        self.mapped_bytes
    }

    /// Number of bytes that are reserved and can be mapped.
    pub fn reserved_bytes(&self) -> usize {
        self.range.reserved_bytes()
    }

    /// First address; it never changes.
    pub fn as_ptr(&self) -> *mut u8 {
        self.range.as_ptr()
    }

    /// The device of the memory.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Number of reserved bytes that are not mapped.
    pub fn absent_bytes(&self) -> usize {
        self.reserved_bytes() - self.mapped_bytes
    }

    /// Bytes of physical memory in the range, as reported by the operating system.
    ///
    /// # Errors
    /// [`Error::Io`] if the system does not report it.
    pub fn resident_bytes(&self) -> Result<usize> {
        self.range.resident_bytes()
    }

    /// A contiguous view of `shape` and `kind` that starts `byte_offset` bytes into the arena.
    ///
    /// # Safety
    /// The view, and every tensor that shares its storage, must not be used after [`Arena::unmap`] or after the arena is dropped. Two views of the
    /// same bytes must not be written at the same time.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the view is misaligned or exceeds the mapped bytes.
    pub unsafe fn tensor(&self, byte_offset: usize, shape: &[i64], kind: Kind) -> Result<Tensor> {
        check_view("Arena::tensor", self.name, byte_offset, shape, kind, self.mapped_bytes)?;
        // SAFETY: the bytes are mapped and aligned (checked above); their life is the caller's promise.
        unsafe { view(self.as_ptr().add(byte_offset), shape, kind, self.device) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        Ledger::resize(self.name, MemoryKind::Device, self.mapped_bytes, 0);
    }
}

/// A contiguous tensor over memory that has another owner.
///
/// # Safety
/// `ptr` is aligned for `kind` and valid for the elements of `shape` as long as the tensor's storage is used.
pub(super) unsafe fn view(ptr: *mut u8, shape: &[i64], kind: Kind, device: Device) -> Result<Tensor> {
    let mut strides = vec![1; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis] * shape[axis];
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { Tensor::f_from_blob(ptr, shape, &strides, kind, device)? })
}

/// Checks that a view is aligned and within the first `usable_bytes` of `name`.
pub(super) fn check_view(
    op: &'static str,
    name: &str,
    byte_offset: usize,
    shape: &[i64],
    kind: Kind,
    usable_bytes: usize,
) -> Result<()> {
    let element_bytes = kind.elt_size_in_bytes();
    let bytes = shape.iter().try_fold(element_bytes, |bytes, &n| bytes.checked_mul(usize::try_from(n).ok()?));
    let end = bytes.and_then(|bytes| byte_offset.checked_add(bytes));
    if !byte_offset.is_multiple_of(element_bytes) || end.is_none_or(|end| end > usable_bytes) {
        let expected = format!("an aligned view inside the {usable_bytes} mapped bytes of arena '{name}'");
        return Err(invalid(op, expected, format!("{shape:?} {kind:?} at byte {byte_offset}")));
    }
    Ok(())
}

fn invalid(op: &'static str, expected: impl Into<String>, got: impl ToString) -> Error {
    Error::InvalidArgument { op, expected: expected.into(), got: got.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Account;

    const MIB: usize = 1 << 20;

    #[test]
    fn mapped_memory_is_zeroed_and_keeps_its_address_over_unmap() {
        let mut arena = Arena::reserve("arena_test", 64 * MIB, Device::Cpu).unwrap();
        let address = arena.as_ptr();
        for _ in 0..2 {
            arena.map(32 * MIB).unwrap();
            // SAFETY: dropped before the arena is unmapped.
            let mut view = unsafe { arena.tensor(0, &[8 * MIB as i64], Kind::Float) }.unwrap();
            assert_eq!(view.sum(Kind::Double).double_value(&[]), 0.0);
            let _ = view.fill_(1.0);
            let resident = arena.resident_bytes().unwrap();
            assert!((32 * MIB..34 * MIB).contains(&resident), "{resident}");
            drop(view);
            arena.unmap();
            assert!(arena.resident_bytes().unwrap() < resident / 20);
            assert_eq!((arena.as_ptr(), arena.mapped_bytes()), (address, 0));
        }
    }

    #[test]
    fn growing_a_mapping_keeps_its_contents() {
        let mut arena = Arena::reserve("arena_growth_test", 8 * MIB, Device::Cpu).unwrap();
        arena.map(MIB).unwrap();
        // SAFETY: dropped before the arena is unmapped.
        let mut first = unsafe { arena.tensor(0, &[4], Kind::Int64) }.unwrap();
        let _ = first.fill_(7);
        arena.map(8 * MIB).unwrap();
        assert_eq!(first.sum(Kind::Int64).int64_value(&[]), 28);
        assert!(Ledger::report().contains(&Account {
            kind: MemoryKind::Device,
            owner: "arena_growth_test",
            bytes: 8 * MIB
        }));
        drop(arena);
        assert!(Ledger::report().iter().all(|account| account.owner != "arena_growth_test"));
    }

    #[test]
    fn shrinking_unmaps_only_the_end() {
        let mut arena = Arena::reserve("arena_shrink_test", 8 * MIB, Device::Cpu).unwrap();
        arena.map(8 * MIB).unwrap();
        // SAFETY: of the part that stays.
        let mut first = unsafe { arena.tensor(0, &[MIB as i64 / 4], Kind::Float) }.unwrap();
        let _ = first.fill_(3.0);
        arena.shrink(5 * MIB);
        arena.shrink(6 * MIB);
        assert_eq!(arena.mapped_bytes(), 5 * MIB);
        arena.shrink(MIB);
        assert_eq!(first.mean(Kind::Double).double_value(&[]), 3.0);
        arena.map(8 * MIB).unwrap();
        assert_eq!(first.mean(Kind::Double).double_value(&[]), 3.0);
        drop(first);
        arena.shrink(0);
        assert_eq!((arena.mapped_bytes(), arena.resident_bytes().unwrap()), (0, 0));
    }

    #[test]
    fn a_thousand_map_cycles_leak_no_memory() {
        let mut arena = Arena::reserve("arena_cycle_test", 4 * MIB, Device::Cpu).unwrap();
        let mut sizes = Vec::new();
        for cycle in 0..1000 {
            arena.map(4 * MIB).unwrap();
            // SAFETY: dropped at the end of the statement.
            let _ = unsafe { arena.tensor(0, &[MIB as i64], Kind::Float) }.unwrap().fill_(1.0);
            arena.unmap();
            if cycle % 100 == 99 {
                sizes.push(arena.resident_bytes().unwrap());
            }
        }
        assert!(sizes.iter().all(|&bytes| bytes < 4 * MIB / 20), "{sizes:?}");
    }

    #[test]
    fn access_after_unmap_faults() {
        let mut arena = Arena::reserve("arena_fault_test", MIB, Device::Cpu).unwrap();
        arena.map(MIB).unwrap();
        arena.unmap();
        // SAFETY: the child only reads one byte, which must end it, or leaves at once by `_exit`.
        let status = unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::signal(libc::SIGSEGV, libc::SIG_DFL);
                std::ptr::read_volatile(arena.as_ptr());
                libc::_exit(0);
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &mut status, 0), child);
            status
        };
        assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV, "status {status}");
    }

    #[test]
    fn mapping_beyond_the_reserved_range_is_refused() {
        let mut arena = Arena::reserve("arena_huge_test", 1 << 44, Device::Cpu).unwrap();
        let Err(Error::OutOfMemory { owner, requested_bytes }) = arena.map(1 << 44) else { panic!("mapped 16 TiB") };
        assert!(owner.contains("arena_huge_test") && requested_bytes == 1 << 44, "{owner}");
        assert_eq!(arena.mapped_bytes(), 0);
        assert!(matches!(arena.map((1 << 44) + 1), Err(Error::InvalidArgument { .. })));
        arena.map(4096).unwrap();
        // SAFETY: refused, so no view comes to be.
        let misplaced =
            [(0, 1025), (2, 1), (4096, 1), (0, -1)].map(|(at, n)| unsafe { arena.tensor(at, &[n], Kind::Float) });
        assert!(misplaced.iter().all(Result::is_err));
    }

    #[test]
    fn an_unmap_error_is_returned_by_the_next_map_and_the_ledger_stays_correct() {
        #[derive(Debug)]
        struct Broken;
        impl AddressRange for Broken {
            fn as_ptr(&self) -> *mut u8 {
                std::ptr::null_mut()
            }
            fn reserved_bytes(&self) -> usize {
                8 * 4096
            }
            fn page_bytes(&self) -> usize {
                4096
            }
            fn map(&mut self, _: usize, _: usize) -> Result<()> {
                Ok(())
            }
            fn unmap(&mut self, _: usize) -> Result<()> {
                Err(Error::Environment { message: "unmap failed".into() })
            }
            fn shrink(&mut self, _: usize, to: usize) -> (usize, Result<()>) {
                (to - 4096, self.unmap(to)) // one page went before it failed
            }
            fn resident_bytes(&self) -> Result<usize> {
                Ok(0)
            }
        }
        let range = Box::new(Broken);
        let mut arena = Arena { name: "broken", device: Device::Cpu, range, mapped_bytes: 0, kept_error: None };
        arena.map(10).unwrap();
        arena.unmap();
        assert_eq!(arena.mapped_bytes(), 0);
        assert!(matches!(arena.map(10), Err(Error::Environment { .. })));
        arena.map(4 * 4096).unwrap();
        arena.shrink(4096);
        assert_eq!(arena.mapped_bytes(), 3 * 4096);
        assert!(Ledger::report().contains(&Account { kind: MemoryKind::Device, owner: "broken", bytes: 3 * 4096 }));
        assert!(matches!(arena.map(10), Err(Error::Environment { .. })));
    }
}
