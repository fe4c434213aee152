//! The program: maps the outcome to an exit code, and nothing else.

/// Lets work on strangers' files be held to a budget of memory.
#[global_allocator]
static ALLOCATOR: colo_grpo::untrusted::MeteredAllocator = colo_grpo::untrusted::MeteredAllocator;

fn main() {
    colo_grpo::launch::exit_now(colo_grpo::cli::run(std::env::args_os()) as i32);
}
