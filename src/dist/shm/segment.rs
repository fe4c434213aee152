//! The mapped memory that the ranks of one host share, and its layout.
//!
//! | bytes | what |
//! |---|---|
//! | one page | [`Header`]: magic, sizes, the first failure |
//! | (PARTITIONS + 1) x ranks x 128 | [`Line`]: how far a rank has come in a partition; the last row is the world's own |
//! | PARTITIONS x ranks x slot_bytes | what a rank shows its group: two halves, used in turn |
//!
//! A *partition* divides the world into groups, each rank in exactly one, so that a rank has one line and one slot there.
#![allow(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use memmap2::{MmapOptions, MmapRaw};

use crate::error::{Error, Result};

/// Most ways in which a world can be divided into groups, the world group included.
pub(in crate::dist) const PARTITIONS: usize = 8;
/// The partition of `World::agree` itself: it has lines but no slots.
pub(super) const CONTROL: usize = PARTITIONS;
/// Longest failure message kept, in bytes.
pub(super) const MESSAGE_BYTES: usize = 2048;

const MAGIC: u64 = u64::from_le_bytes(*b"colo-shm");
const HEADER_BYTES: usize = 4096;
const FOLDER: &str = "/dev/shm";

/// The first page.
#[repr(C)]
pub(super) struct Header {
    magic: AtomicU64,
    num_ranks: AtomicU64,
    slot_bytes: AtomicU64,
    /// Epoch and state of the failure below; see `member`.
    pub failure_state: AtomicU64,
    pub failure_rank: AtomicU32,
    pub failure_code: AtomicU32,
    pub message_len: AtomicU32,
    pub message: [AtomicU8; MESSAGE_BYTES],
}

/// How far one rank has come in one partition. Written by that rank alone, but for `sleepers`.
#[repr(C, align(128))]
pub(super) struct Line {
    /// Operations (chunks) that the rank has published; a futex word.
    pub arrived: AtomicU32,
    /// Peers asleep on `arrived`.
    pub sleepers: AtomicU32,
    /// What the rank called, for each half.
    pub signature: [AtomicU64; 2],
}

/// The mapping. All access goes through atomics and through pointers that the protocol of `group` hands out.
#[derive(Debug)]
pub(in crate::dist) struct Segment {
    map: MmapRaw,
    num_ranks: usize,
    slot_bytes: usize,
}

/// A segment's file, removed when this is dropped: as soon as every rank has mapped it.
#[derive(Debug)]
pub(in crate::dist) struct SegmentFile(PathBuf);

impl SegmentFile {
    pub(in crate::dist) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for SegmentFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Segment {
    /// Whether /dev/shm has room for a world.
    ///
    /// # Errors
    /// [`Error::Environment`] with what is free and what is needed.
    pub(in crate::dist) fn check_room(num_ranks: usize, slot_bytes: usize) -> Result<()> {
        require_space(total_bytes(num_ranks, slot_bytes), free_bytes()?, num_ranks)
    }

    /// Makes the world's file in /dev/shm, with all its memory reserved so that no later access can fail.
    ///
    /// # Errors
    /// [`Error::Environment`] if /dev/shm is too small.
    pub(in crate::dist) fn create(num_ranks: usize, slot_bytes: usize) -> Result<(Self, SegmentFile)> {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        Self::check_room(num_ranks, slot_bytes)?;
        let bytes = total_bytes(num_ranks, slot_bytes);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let path = Path::new(FOLDER).join(format!("colo-grpo-{}-{number}", std::process::id()));
        let _ = std::fs::remove_file(&path); // of an earlier process with this id
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path);
        let file = file.map_err(Error::io(&path))?;
        let name = SegmentFile(path);
        // SAFETY: plain system call on an open file.
        if unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, bytes as libc::off_t) } != 0 {
            require_space(bytes, free_bytes()?.min(bytes - 1), num_ranks)?;
        }
        let segment = Self::map(&file, name.path(), num_ranks, slot_bytes)?;
        segment.initialise();
        Ok((segment, name))
    }

    /// Maps the file that rank 0 made.
    pub(in crate::dist) fn open(path: &Path, num_ranks: usize, slot_bytes: usize) -> Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(Error::io(path))?;
        let segment = Self::map(&file, path, num_ranks, slot_bytes)?;
        let header = segment.header();
        let found = [&header.magic, &header.num_ranks, &header.slot_bytes].map(|word| word.load(Ordering::Acquire));
        if found != [MAGIC, num_ranks as u64, slot_bytes as u64] {
            let message = format!(
                "{}: made for {} ranks with slots of {} bytes, this rank expects {num_ranks} with {slot_bytes}",
                path.display(),
                found[1],
                found[2]
            );
            return Err(Error::Environment { message });
        }
        Ok(segment)
    }

    /// Memory of this process alone, for ranks that are threads.
    #[cfg(test)]
    pub(in crate::dist) fn in_process(num_ranks: usize, slot_bytes: usize) -> Result<Self> {
        let bytes = total_bytes(num_ranks, slot_bytes);
        let map = MmapOptions::new().len(bytes).map_anon();
        let map = map.map_err(|_| Error::OutOfMemory { owner: "collectives".into(), requested_bytes: bytes })?;
        let segment = Self { map: map.into(), num_ranks, slot_bytes };
        segment.initialise();
        Ok(segment)
    }

    fn map(file: &File, path: &Path, num_ranks: usize, slot_bytes: usize) -> Result<Self> {
        let bytes = total_bytes(num_ranks, slot_bytes);
        if file.metadata().map_err(Error::io(path))?.len() < bytes as u64 {
            let message = format!("{}: shorter than the {bytes} bytes of {num_ranks} ranks", path.display());
            return Err(Error::Environment { message });
        }
        let map = MmapOptions::new().len(bytes).map_raw(file).map_err(Error::io(path))?;
        Ok(Self { map, num_ranks, slot_bytes })
    }

    fn initialise(&self) {
        let header = self.header();
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

    pub(super) fn header(&self) -> &Header {
        // SAFETY: the mapping starts with a header: page-aligned, zeroed at first, accessed by atomics alone.
        unsafe { &*self.map.as_ptr().cast::<Header>() }
    }

    pub(super) fn line(&self, partition: usize, rank: usize) -> &Line {
        assert!(partition <= CONTROL && rank < self.num_ranks);
        let index = partition * self.num_ranks + rank;
        // SAFETY: the index lies within the lines, which are aligned and accessed by atomics alone.
        unsafe { &*self.map.as_ptr().add(HEADER_BYTES).cast::<Line>().add(index) }
    }

    /// Start of one half of a rank's slot. Reading and writing it follows the protocol of `group`.
    pub(super) fn half(&self, partition: usize, rank: usize, half: usize) -> *mut u8 {
        assert!(partition < PARTITIONS && rank < self.num_ranks && half < 2);
        let slot = partition * self.num_ranks + rank;
        let offset = slots_offset(self.num_ranks) + slot * self.slot_bytes + half * self.half_bytes();
        // SAFETY: the offset lies within the mapping, whose size is `total_bytes`.
        unsafe { self.map.as_mut_ptr().add(offset) }
    }
}

fn slots_offset(num_ranks: usize) -> usize {
    (HEADER_BYTES + (PARTITIONS + 1) * num_ranks * size_of::<Line>()).next_multiple_of(4096)
}

fn total_bytes(num_ranks: usize, slot_bytes: usize) -> usize {
    slots_offset(num_ranks) + PARTITIONS * num_ranks * slot_bytes
}

fn free_bytes() -> Result<usize> {
    let folder = std::ffi::CString::new(FOLDER).expect("a path without NUL");
    let mut stat = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: both pointers are valid for the call.
    if unsafe { libc::statvfs(folder.as_ptr(), stat.as_mut_ptr()) } != 0 {
        return Err(Error::Io { path: FOLDER.into(), source: std::io::Error::last_os_error() });
    }
    // SAFETY: the call succeeded and filled it.
    let stat = unsafe { stat.assume_init() };
    Ok(stat.f_bavail as usize * stat.f_frsize as usize)
}

fn require_space(needed: usize, free: usize, num_ranks: usize) -> Result<()> {
    if needed <= free {
        return Ok(());
    }
    let mib = |bytes: usize| bytes as f64 / (1 << 20) as f64;
    let message = format!(
        "{FOLDER} has {:.1} MiB free, but collectives of {num_ranks} ranks need {:.1} MiB; \
         enlarge it (docker: --shm-size, Kubernetes: an emptyDir with medium Memory) or remove files from it",
        mib(free),
        mib(needed)
    );
    Err(Error::Environment { message })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_gone_after_mapping_and_sizes_must_agree() {
        let (first, file) = Segment::create(2, 4096).unwrap();
        let second = Segment::open(file.path(), 2, 4096).unwrap();
        assert!(Segment::open(file.path(), 3, 4096).is_err());
        let mismatch = Segment::open(file.path(), 1, 4096).unwrap_err().to_string();
        assert!(mismatch.contains("made for 2 ranks"), "{mismatch}");
        let path = file.path().to_owned();
        drop(file);
        assert!(!path.exists());
        first.line(0, 1).arrived.store(7, Ordering::Release);
        assert_eq!(second.line(0, 1).arrived.load(Ordering::Acquire), 7);
    }

    #[test]
    fn too_little_shared_memory_is_refused_with_the_numbers() {
        let error = require_space(64 << 20, 16 << 20, 4).unwrap_err();
        assert_eq!(error.exit_code(), crate::error::ExitCode::Environment);
        assert!(error.to_string().contains("16.0 MiB free") && error.to_string().contains("need 64.0 MiB"), "{error}");
        assert!(Segment::create(2, 1 << 44).is_err());
    }
}
