//! An allocator that limits the memory of a thread.
//!
//! Rust code cannot recover from a failed allocation: it aborts. If a metered thread exceeds its budget, it is
//! therefore blocked inside the allocator forever; the thread that waits for it sees a flag and reports the error.
//!
//! A blocked thread keeps its locks, so it must hold none that other threads need. A panicking thread holds the standard
//! library's backtrace lock: it may exceed its budget until the panic is caught. Work on such threads shares no lock with other
//! threads, and static values of libraries are initialized before (`data::statics`).
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

thread_local! {
    /// Bytes that this thread may still allocate; `None` means no limit. It has no destructor, so it can be read at any time.
    static LEFT: Cell<Option<(isize, &'static AtomicBool)>> = const { Cell::new(None) };
}

/// The system's allocator with counting for metered threads. The `colo-grpo` program installs it; a program that uses the library
/// may do so, too. Without it, only the memory limit of untrusted work is not enforced.
#[derive(Debug, Clone, Copy, Default)]
pub struct MeteredAllocator;

// SAFETY: every request goes to the system's allocator unchanged; counting neither allocates nor unwinds.
unsafe impl GlobalAlloc for MeteredAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        // SAFETY: the caller's promises are the system allocator's conditions.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        take(new_size);
        give_back(layout.size());
        // SAFETY: as above.
        unsafe { System.realloc(old, layout, new_size) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        give_back(layout.size());
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// Runs `work` with a budget of `max_bytes` for its live memory. If it needs more, `is_exceeded` is set and this thread blocks
/// forever.
pub(super) fn metered<T>(max_bytes: usize, is_exceeded: &'static AtomicBool, work: impl FnOnce() -> T) -> T {
    LEFT.set(Some((max_bytes as isize, is_exceeded)));
    let outcome = work();
    LEFT.set(None);
    outcome
}

fn take(bytes: usize) {
    if let Some((left, is_exceeded)) = LEFT.get() {
        let left = left.saturating_sub_unsigned(bytes);
        LEFT.set(Some((left, is_exceeded)));
        if left < 0 && !std::thread::panicking() {
            is_exceeded.store(true, Ordering::Release);
            loop {
                std::thread::sleep(Duration::from_secs(3600)); // allocates nothing
            }
        }
    }
}

fn give_back(bytes: usize) {
    if let Some((left, is_exceeded)) = LEFT.get() {
        LEFT.set(Some((left.saturating_add_unsigned(bytes), is_exceeded)));
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{alone, ends_if_it_hangs};
    use super::super::{ThreadLimits, once};
    use super::*;

    #[global_allocator]
    static ALLOCATOR: MeteredAllocator = MeteredAllocator;

    const LIMITS: ThreadLimits = ThreadLimits { stack_bytes: 1 << 20, memory_bytes: 1 << 20, cpu_s: 10 };

    #[test]
    fn freed_memory_is_returned_to_the_budget() {
        let total = once("test", LIMITS, || (0..100).map(|_| vec![1_u8; 1 << 19].len()).sum::<usize>());
        assert_eq!(total.unwrap(), 100 << 19);
    }

    #[test]
    fn exceeding_the_memory_budget_ends_only_that_thread() {
        let grown = || (0..100).fold(String::from("a"), |text, _| format!("{text}{text}")).len();
        let at_once = || std::hint::black_box(vec![0_u8; 1 << 40]).len();
        for outcome in [once("test", LIMITS, grown), once("test", LIMITS, at_once)] {
            assert_eq!(outcome.unwrap_err(), "processing it needs more than 1 MiB of memory");
        }
    }

    #[test]
    fn a_panic_beyond_the_budget_hangs_no_other_thread() {
        alone("untrusted::meter::tests::panics_beyond_the_budget");
    }

    #[test]
    #[ignore = "in a process of its own"]
    fn panics_beyond_the_budget() {
        ends_if_it_hangs();
        let limits = ThreadLimits { memory_bytes: 4 << 10, ..LIMITS }; // a backtrace takes far more
        for _ in 0..3 {
            let outcome = once("test", limits, || -> () { panic!("within the budget") });
            assert_eq!(outcome.unwrap_err(), "panic: within the budget");
            std::thread::spawn(|| panic!("elsewhere")).join().unwrap_err();
        }
        // Once the panic is caught, the budget holds again.
        let grown = || {
            let _ = std::panic::catch_unwind(|| panic!("within the budget"));
            std::hint::black_box(vec![0_u8; 1 << 20]).len()
        };
        assert_eq!(once("test", limits, grown).unwrap_err(), "processing it needs more than 0 MiB of memory");
        std::thread::spawn(|| panic!("elsewhere")).join().unwrap_err();
    }
}
