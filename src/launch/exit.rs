//! The end of a process that had libraries of a GPU open.
#![allow(unsafe_code)]

use crate::console;

/// Ends this process with `code` and without the static destructors of its libraries: NCCL takes aborted communicators apart
/// in threads of its own, which must not find those libraries half gone.
pub fn exit_now(code: i32) -> ! {
    console::flush();
    // SAFETY: ends the process; nothing of it is used afterwards.
    unsafe { libc::_exit(code) }
}
