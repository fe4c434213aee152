//! Helpers that build parts of error messages.

use std::any::Any;
use std::fmt;

/// Maximum number of configuration errors that one message lists.
pub(crate) const MAX_LISTED: usize = 20;

/// A size for messages: `5 bytes`, or `more` if the size is 0 (unknown).
pub(super) fn amount(bytes: usize) -> String {
    if bytes == 0 { "more".to_owned() } else { format!("{bytes} bytes") }
}

/// The text of an operating system error; for a file that is too large it adds the limit to raise (`ulimit -f`).
pub(crate) fn explained(error: &std::io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EFBIG) => {
            let most = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
            let most = most.map_or_else(|| "the file system's".to_owned(), |most| format!("{most} bytes (ulimit -f)"));
            format!(
                "{error}: the limit on the size of a file, which also applies to shared memory, is {most}; raise the \
                 limit"
            )
        }
        _ => error.to_string(),
    }
}

/// The first [`MAX_LISTED`] entries, one per line, and how many more there are.
pub(super) fn lines(list: &[impl fmt::Display]) -> String {
    let mut lines: Vec<_> = list.iter().take(MAX_LISTED).map(ToString::to_string).collect();
    if list.len() > MAX_LISTED {
        lines.push(format!("and {} more", list.len() - MAX_LISTED));
    }
    lines.join("\n")
}

/// The text that a panic carries.
pub fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "(no message)".to_owned())
}
