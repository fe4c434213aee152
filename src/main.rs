//! colo-grpo
fn main() {}
