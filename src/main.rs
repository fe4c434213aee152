//! The executable: runs the library's `main` and exits with its code.
#![allow(unsafe_code)]

/// The allocator that lets work on untrusted files be limited to a memory budget.
#[global_allocator]
static ALLOCATOR: colo_grpo::MeteredAllocator = colo_grpo::MeteredAllocator;

/// Holds back signals from the first instruction on, as libraries (libtorch above all) take up to a second to initialise.
#[used]
#[unsafe(link_section = ".preinit_array")]
static HOLD_SIGNALS: extern "C" fn() = colo_grpo::internal::launch::hold_signals;

fn main() {
    colo_grpo::internal::launch::exit_now(colo_grpo::internal::cli::run(std::env::args_os()) as i32);
}
