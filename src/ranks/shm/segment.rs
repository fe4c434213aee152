//! The shared memory of the ranks of one host, and its layout.
//!
//! | bytes | what |
//! |---|---|
//! | one page | [`SegmentHeader`]: magic, sizes, the first failure |
//! | (PARTITIONS + 1) x ranks x 128 | [`RankLine`]: a rank's progress in a partition; the last row is for the whole world |
//! | PARTITIONS x ranks x slot_bytes | slots, where a rank writes data for its group: two halves, used alternately |
//!
//! A *partition* divides the world into groups, with each rank in exactly one of them, so a rank has one line and one slot per partition.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::MemfdFlags;

use crate::error::{Error, Result, explained};

/// Maximum number of divisions of the world into groups, including that of the whole world.
pub(in crate::ranks) const PARTITIONS: usize = 10;
/// The partition of `World::agree` itself, which has lines but no slots.
pub(super) const CONTROL: usize = PARTITIONS;
/// Maximum length of a stored failure message, in bytes.
pub(super) const MESSAGE_BYTES: usize = 2048;

const MAGIC: u64 = u64::from_le_bytes(*b"colo-shm");
const HEADER_BYTES: usize = 4096;
/// Name of the segment in errors.
const NAME: &str = "memory shared by ranks";

/// The first page of the segment.
#[repr(C)]
pub(super) struct SegmentHeader {
    magic: AtomicU64,
    /// A number that distinguishes runs on one host.
    run: AtomicU64,
    num_ranks: AtomicU64,
    slot_bytes: AtomicU64,
    /// Epoch and state of the failure below; see `member`.
    pub failure_state: AtomicU64,
    pub failure_rank: AtomicU32,
    pub failure_code: AtomicU32,
    pub message_len: AtomicU32,
    pub message: [AtomicU8; MESSAGE_BYTES],
}

/// Progress of one rank in one partition. Only that rank writes it, except `sleepers`.
#[repr(C, align(128))]
pub(super) struct RankLine {
    /// Number of exchanges that the rank has published; a futex word.
    pub arrived: AtomicU32,
    /// Number of peers that sleep on `arrived`.
    pub sleepers: AtomicU32,
    /// The operation that the rank called, for each half.
    pub signature: [AtomicU64; 2],
}

/// The mapped segment. All access is through atomics, and through pointers used according to the protocol of `group`.
#[derive(Debug)]
pub(in crate::ranks) struct Segment {
    map: MmapRaw,
    num_ranks: usize,
    slot_bytes: usize,
}

impl Segment {
    /// Creates a world's shared memory, with all pages allocated, so that no later access can fail. It has no name in the file system, so nothing
    /// remains however its processes end. `run` is a number that distinguishes it from other runs on this host.
    ///
    /// # Errors
    /// [`Error::Environment`] if the machine has too little memory.
    pub(in crate::ranks) fn create(num_ranks: usize, slot_bytes: usize, run: u64) -> Result<(Self, File)> {
        let bytes = total_bytes(num_ranks, slot_bytes);
        let failed = |error: std::io::Error| Error::Environment {
            message: format!(
                "cannot create shared memory of {bytes} bytes for collectives of {num_ranks} ranks: {}",
                explained(&error)
            ),
        };
        let file = rustix::fs::memfd_create(c"colo-grpo-world", MemfdFlags::CLOEXEC);
        let file = File::from(file.map_err(|error| failed(error.into()))?);
        // SAFETY: plain system call on an open file.
        match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, bytes as libc::off_t) } {
            0 => {}
            code => return Err(failed(std::io::Error::from_raw_os_error(code))),
        }
        let segment = Self::map(&file, num_ranks, slot_bytes)?;
        segment.initialise(run);
        Ok((segment, file))
    }

    /// Maps the memory that another process created for `run`.
    ///
    /// # Errors
    /// [`Error::Environment`] if it belongs to another user or run, or was created for other sizes.
    pub(in crate::ranks) fn open(file: &File, num_ranks: usize, slot_bytes: usize, run: u64) -> Result<Self> {
        let owner = file.metadata().map_err(Error::io(NAME))?.uid();
        if owner != rustix::process::geteuid().as_raw() {
            return Err(Error::Environment {
                message: format!("{NAME}: it belongs to user {owner}, not to the user of this rank"),
            });
        }
        let segment = Self::map(file, num_ranks, slot_bytes)?;
        let header = segment.header();
        let found = [&header.magic, &header.run, &header.num_ranks, &header.slot_bytes];
        let found = found.map(|word| word.load(Ordering::Acquire));
        if found[..2] != [MAGIC, run] {
            return Err(Error::Environment { message: format!("{NAME}: it belongs to another run") });
        }
        if found[2..] != [num_ranks as u64, slot_bytes as u64] {
            let message = format!(
                "{NAME}: it was made for {} ranks with slots of {} bytes, but this rank expects {num_ranks} ranks with \
                 {slot_bytes} bytes",
                found[2], found[3]
            );
            return Err(Error::Environment { message });
        }
        Ok(segment)
    }

    /// Memory of this process only, for ranks that are threads.
    #[cfg(test)]
    pub(in crate::ranks) fn in_process(num_ranks: usize, slot_bytes: usize) -> Result<Self> {
        let bytes = total_bytes(num_ranks, slot_bytes);
        let map = MmapOptions::new().len(bytes).map_anon();
        let map = map.map_err(|_| Error::OutOfMemory { owner: "collectives".into(), requested_bytes: bytes })?;
        let segment = Self { map: map.into(), num_ranks, slot_bytes };
        segment.initialise(0);
        Ok(segment)
    }

    fn map(file: &File, num_ranks: usize, slot_bytes: usize) -> Result<Self> {
        let bytes = total_bytes(num_ranks, slot_bytes);
        if file.metadata().map_err(Error::io(NAME))?.len() < bytes as u64 {
            let message = format!("{NAME}: it is shorter than the {bytes} bytes that {num_ranks} ranks need");
            return Err(Error::Environment { message });
        }
        let map = MmapOptions::new().len(bytes).map_raw(file).map_err(Error::io(NAME))?;
        Ok(Self { map, num_ranks, slot_bytes })
    }

    fn initialise(&self, run: u64) {
        let header = self.header();
        header.run.store(run, Ordering::Relaxed);
        header.num_ranks.store(self.num_ranks as u64, Ordering::Relaxed);
        header.slot_bytes.store(self.slot_bytes as u64, Ordering::Relaxed);
        header.magic.store(MAGIC, Ordering::Release);
    }

    pub(super) fn num_ranks(&self) -> usize {
        self.num_ranks
    }

    /// Bytes of one half of a slot.
    pub(super) fn half_bytes(&self) -> usize {
        self.slot_bytes / 2
    }

    pub(super) fn header(&self) -> &SegmentHeader {
        // SAFETY: the mapping starts with a header: page-aligned, zeroed at first, accessed by atomics alone.
        unsafe { &*self.map.as_ptr().cast::<SegmentHeader>() }
    }

    pub(super) fn line(&self, partition: usize, rank: usize) -> &RankLine {
        assert!(partition <= CONTROL && rank < self.num_ranks);
        let index = partition * self.num_ranks + rank;
        // SAFETY: the index lies within the lines, which are aligned and accessed by atomics alone.
        unsafe { &*self.map.as_ptr().add(HEADER_BYTES).cast::<RankLine>().add(index) }
    }

    /// Start of one half of a rank's slot. Access must follow the protocol of `group`.
    pub(super) fn half(&self, partition: usize, rank: usize, half: usize) -> *mut u8 {
        assert!(partition < PARTITIONS && rank < self.num_ranks && half < 2);
        let slot = partition * self.num_ranks + rank;
        let offset = slots_offset(self.num_ranks) + slot * self.slot_bytes + half * self.half_bytes();
        // SAFETY: the offset lies within the mapping, whose size is `total_bytes`.
        unsafe { self.map.as_mut_ptr().add(offset) }
    }
}

fn slots_offset(num_ranks: usize) -> usize {
    (HEADER_BYTES + (PARTITIONS + 1) * num_ranks * size_of::<RankLine>()).next_multiple_of(4096)
}

fn total_bytes(num_ranks: usize, slot_bytes: usize) -> usize {
    slots_offset(num_ranks) + PARTITIONS * num_ranks * slot_bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_is_anonymous_and_checks_sizes_and_run() {
        let (first, file) = Segment::create(2, 4096, 7).unwrap();
        let link = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
        assert_eq!(link.to_string_lossy(), "/memfd:colo-grpo-world (deleted)");
        let second = Segment::open(&file, 2, 4096, 7).unwrap();
        for (num_ranks, run, expected) in
            [(3, 7, "shorter"), (1, 7, "made for 2 ranks"), (2, 8, "belongs to another run")]
        {
            let refused = Segment::open(&file, num_ranks, 4096, run).unwrap_err().to_string();
            assert!(refused.contains(expected), "{refused}");
        }
        first.line(0, 1).arrived.store(7, Ordering::Release);
        assert_eq!(second.line(0, 1).arrived.load(Ordering::Acquire), 7);
    }
}
