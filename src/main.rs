//! The program: maps the outcome to an exit code, and nothing else.

fn main() -> std::process::ExitCode {
    std::process::ExitCode::from(colo_grpo::cli::run(std::env::args().collect()) as u8)
}
