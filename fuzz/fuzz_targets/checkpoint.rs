//! The readers of a checkpoint's manifest and of its trainer's state.
#![no_main]

#[allow(dead_code)] // the other targets'
#[path = "../targets.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    targets::checkpoint(data);
});
