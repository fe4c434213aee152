//! The program: maps the outcome to an exit code, and nothing else.
#![allow(unsafe_code)]

/// Lets work on strangers' files be held to a budget of memory.
#[global_allocator]
static ALLOCATOR: colo_grpo::MeteredAllocator = colo_grpo::MeteredAllocator;

/// Holds signals from the first instruction on: libraries initialise themselves after this, libtorch for a good part of a second.
#[used]
#[unsafe(link_section = ".preinit_array")]
static HOLD_SIGNALS: extern "C" fn() = colo_grpo::internal::launch::hold_signals;

fn main() {
    colo_grpo::internal::launch::exit_now(colo_grpo::internal::cli::run(std::env::args_os()) as i32);
}
