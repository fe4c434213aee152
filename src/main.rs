//! The program: maps the outcome to an exit code, and nothing else.

/// Lets work on strangers' files be held to a budget of memory.
#[global_allocator]
static ALLOCATOR: colo_grpo::MeteredAllocator = colo_grpo::MeteredAllocator;

fn main() {
    colo_grpo::internal::launch::exit_now(colo_grpo::internal::cli::run(std::env::args_os()) as i32);
}
