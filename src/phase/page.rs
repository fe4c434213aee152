//! The activity of a process, in counters on one page: in its own memory, or shared with its launcher, which can read it even when the process is
//! stopped or dead.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};

use super::pulse::{LastCollective, Pulse};
use super::{FAILURE, Phase};
use crate::error::{Error, Result};

/// Environment variable with the file descriptor of the page that a launcher created for this process.
pub const PULSE_FD_VARIABLE: &str = "COLO_GRPO_PULSE_FD";

const PAGE_BYTES: usize = 4096;
/// Number of nested phases that are stored; deeper ones are only counted.
const DEPTH: usize = 8;
/// 64-bit words for the name of a collective, and of a group.
const NAME_WORDS: usize = 3;

static LOCAL: Page = Page::new();
/// The shared page, once it exists; it stays mapped.
static SHARED: AtomicPtr<Page> = AtomicPtr::new(std::ptr::null_mut());

/// The page that this process writes to.
pub(super) fn page() -> &'static Page {
    let shared = SHARED.load(Relaxed);
    // SAFETY: null, or a mapping of this process that is never removed and consists of atomics only.
    unsafe { shared.as_ref() }.unwrap_or(&LOCAL)
}

/// The page. The training thread writes it; anyone may read it. The fields are independent, so a reader may see them at slightly different times.
#[repr(C)]
pub(super) struct Page {
    beats: AtomicU64,
    step: AtomicU64,
    depth: AtomicU32,
    left: AtomicU8,
    stack: [AtomicU8; DEPTH],
    num_collectives: AtomicU64,
    collective_bytes: AtomicU64,
    is_waiting: AtomicU8,
    op: [AtomicU64; NAME_WORDS],
    group: [AtomicU64; NAME_WORDS],
}

impl Page {
    const fn new() -> Self {
        Self {
            beats: AtomicU64::new(0),
            step: AtomicU64::new(0),
            depth: AtomicU32::new(0),
            left: AtomicU8::new(0),
            stack: [const { AtomicU8::new(0) }; DEPTH],
            num_collectives: AtomicU64::new(0),
            collective_bytes: AtomicU64::new(0),
            is_waiting: AtomicU8::new(0),
            op: [const { AtomicU64::new(0) }; NAME_WORDS],
            group: [const { AtomicU64::new(0) }; NAME_WORDS],
        }
    }

    pub(super) fn beat(&self) {
        self.is_waiting.store(0, Relaxed);
        self.beats.fetch_add(1, Relaxed);
    }

    pub(super) fn step(&self) -> u64 {
        self.step.load(Relaxed)
    }

    pub(super) fn set_step(&self, step: u64) {
        self.step.store(step, Relaxed);
    }

    /// Pushes a phase on the stack until the result is dropped, also in a panic.
    pub(super) fn enter(&self, phase: Phase) -> Entered<'_> {
        let depth = self.depth.load(Relaxed);
        if let Some(slot) = self.stack.get(depth as usize) {
            slot.store(phase as u8, Relaxed);
        }
        self.depth.store(depth + 1, Relaxed);
        self.beat();
        Entered { page: self, depth, phase }
    }

    pub(super) fn begin_collective(&self, op: &str, group: &str, bytes: usize) -> CollectiveScope {
        store_text(&self.op, op);
        store_text(&self.group, group);
        self.collective_bytes.store(bytes as u64, Relaxed);
        self.num_collectives.fetch_add(1, Relaxed);
        self.beat();
        self.is_waiting.store(1, Relaxed);
        CollectiveScope(())
    }

    pub(super) fn read(&self) -> Pulse {
        let depth = (self.depth.load(Relaxed) as usize).min(DEPTH);
        let phase = |slot: &AtomicU8| Phase::ALL.get(usize::from(slot.load(Relaxed))).copied();
        let number = self.num_collectives.load(Relaxed);
        Pulse {
            beats: self.beats.load(Relaxed),
            step: self.step(),
            stack: self.stack[..depth].iter().filter_map(phase).collect(),
            left: phase(&self.left).unwrap_or(Phase::Startup),
            collective: (number > 0).then(|| LastCollective {
                op: load_text(&self.op),
                group: load_text(&self.group),
                bytes: self.collective_bytes.load(Relaxed),
                number,
                is_waiting: self.is_waiting.load(Relaxed) != 0,
            }),
        }
    }
}

/// A phase on the stack, removed when dropped.
pub(super) struct Entered<'a> {
    page: &'a Page,
    depth: u32,
    phase: Phase,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            FAILURE.record(self.phase);
        }
        self.page.depth.store(self.depth, Relaxed);
        self.page.left.store(self.phase as u8, Relaxed);
        self.page.beat();
    }
}

/// A running collective, which ends when this is dropped.
#[derive(Debug)]
#[must_use = "the collective ends when this is dropped"]
pub struct CollectiveScope(());

impl CollectiveScope {
    /// Keeps the collective marked as running after this call: it is only queued, so the rank may still wait for its peers until its next heartbeat.
    pub fn queued(self) {
        std::mem::forget(self);
    }
}

impl Drop for CollectiveScope {
    fn drop(&mut self) {
        page().beat();
    }
}

/// A page that a launcher shares with one worker process.
#[derive(Debug)]
pub struct SharedPage {
    file: OwnedFd,
    address: *const Page,
}

// SAFETY: the page is atomics alone and mapped until this is dropped.
unsafe impl Send for SharedPage {}

impl SharedPage {
    /// Creates a page in anonymous memory, whose descriptor the worker inherits.
    ///
    /// # Errors
    /// [`Error::Environment`] if the kernel has no memory for it.
    pub fn new() -> Result<Self> {
        let failed = |error: std::io::Error| Error::Environment {
            message: format!("cannot create shared memory for heartbeats: {error}"),
        };
        // SAFETY: the name outlives the call.
        let fd = unsafe { libc::memfd_create(c"colo-grpo-pulse".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(failed(std::io::Error::last_os_error()));
        }
        // SAFETY: the descriptor was made just now and is nobody else's.
        let file = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: plain system call on an open descriptor.
        if unsafe { libc::ftruncate(fd, PAGE_BYTES as libc::off_t) } != 0 {
            return Err(failed(std::io::Error::last_os_error()));
        }
        let address = map(fd, libc::PROT_READ).map_err(failed)?;
        Ok(Self { file, address })
    }

    /// The descriptor to set in [`PULSE_FD_VARIABLE`].
    pub fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// The worker's latest activity.
    pub fn read(&self) -> Pulse {
        // SAFETY: mapped until this is dropped, all of it atomics; zeroed memory is a valid page.
        unsafe { &*self.address }.read()
    }
}

impl Drop for SharedPage {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made by `new`; nothing of it is used any more.
        unsafe { libc::munmap(self.address.cast_mut().cast(), PAGE_BYTES) };
    }
}

/// Moves this process's counters to its launcher's page, if [`PULSE_FD_VARIABLE`] names one. Must be called before anything else reports.
///
/// # Errors
/// [`Error::Environment`] if the variable names no such page.
pub fn publish() -> Result<()> {
    let Ok(text) = std::env::var(PULSE_FD_VARIABLE) else { return Ok(()) };
    let refuse = |why: String| Error::Environment { message: format!("{PULSE_FD_VARIABLE}={text}: {why}") };
    let fd: RawFd = text.parse().map_err(|_| refuse("not a file descriptor".to_owned()))?;
    let address = map(fd, libc::PROT_READ | libc::PROT_WRITE).map_err(|error| refuse(error.to_string()))?;
    // SAFETY: the launcher opened it for this process; the mapping outlives it.
    drop(unsafe { OwnedFd::from_raw_fd(fd) });
    SHARED.store(address, Relaxed);
    Ok(())
}

/// Whether a launcher reads this process's page.
pub fn is_watched() -> bool {
    !SHARED.load(Relaxed).is_null()
}

fn map(fd: RawFd, protection: i32) -> std::io::Result<*mut Page> {
    const { assert!(size_of::<Page>() <= PAGE_BYTES) };
    // SAFETY: a new shared mapping at an address of the kernel's choice.
    let address = unsafe { libc::mmap(std::ptr::null_mut(), PAGE_BYTES, protection, libc::MAP_SHARED, fd, 0) };
    if address == libc::MAP_FAILED { Err(std::io::Error::last_os_error()) } else { Ok(address.cast()) }
}

fn store_text(words: &[AtomicU64; NAME_WORDS], text: &str) {
    let mut bytes = [0; NAME_WORDS * 8];
    let len = text.len().min(bytes.len());
    bytes[..len].copy_from_slice(&text.as_bytes()[..len]);
    for (word, bytes) in words.iter().zip(bytes.chunks_exact(8)) {
        word.store(u64::from_ne_bytes(bytes.try_into().expect("chunks of 8")), Relaxed);
    }
}

fn load_text(words: &[AtomicU64; NAME_WORDS]) -> String {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.load(Relaxed).to_ne_bytes()).collect();
    String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_heartbeat_page_shows_the_current_phase() {
        let page = Page::new();
        assert_eq!(page.read().to_string(), "step 0, startup; no collective yet");
        page.set_step(3);
        let outer = page.enter(Phase::Generate);
        let inner = page.enter(Phase::Decode);
        page.begin_collective("all_reduce", "tensor", 64).queued();
        let pulse = page.read();
        let expected =
            "step 3, generate > decode; collective 1: all_reduce of 64 bytes in group 'tensor', waiting for peers";
        assert_eq!(pulse.to_string(), expected);
        assert!(pulse.is_waiting() && pulse.phase() == Phase::Decode);
        drop(inner);
        assert!(!page.read().is_waiting() && page.read().beats > pulse.beats);
        drop(outer);
        assert_eq!((page.read().place().as_str(), page.read().phase()), ("after generate", Phase::Generate));
    }

    #[test]
    fn phases_nested_beyond_the_maximum_depth_are_only_counted() {
        let page = Page::new();
        let entered: Vec<_> = (0..2 * DEPTH).map(|_| page.enter(Phase::Load)).collect();
        assert_eq!(page.read().stack.len(), DEPTH);
        entered.into_iter().rev().for_each(drop);
        assert!(page.read().stack.is_empty());
    }

    #[test]
    fn a_heartbeat_page_is_readable_from_another_process() {
        let shared = SharedPage::new().unwrap();
        let other = map(shared.fd(), libc::PROT_READ | libc::PROT_WRITE).unwrap();
        // SAFETY: mapped just now and never unmapped.
        unsafe { &*other }.set_step(7);
        assert_eq!(shared.read().step, 7);
    }
}
