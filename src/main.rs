//! The program: maps the outcome to an exit code, and nothing else.

fn main() {
    colo_grpo::launch::exit_now(colo_grpo::cli::run(std::env::args_os()) as i32);
}
