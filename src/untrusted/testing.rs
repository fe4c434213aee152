//! Helpers for tests of code that could hang a whole process; each runs in its own process.

use std::process::Command;
use std::time::Duration;

/// Runs one ignored test of this crate in its own process, with backtraces enabled.
pub(crate) fn alone(test: &str) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let ended = command.args(["--exact", "--ignored", test]).env("RUST_BACKTRACE", "1").output().unwrap();
    let text = [ended.stdout, ended.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    assert!(ended.status.success() && text.contains("1 passed"), "{test}: {}\n{text}", ended.status);
}

/// Ends the process with status 3 after two minutes.
pub(crate) fn ends_if_it_hangs() {
    std::thread::spawn(|| {
        std::thread::sleep(Duration::from_secs(120));
        std::process::exit(3);
    });
}
