//! The reader of what a reward's process answers.
#![no_main]

#[allow(dead_code)] // the other targets'
#[path = "../targets.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    targets::reply(data);
});
