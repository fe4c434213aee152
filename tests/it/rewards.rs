//! Rewards in separate processes: their kinds, their failures, and the sandbox of model-written code.

mod endpoint;
mod math;
mod processes;
mod readable;
mod runs;
pub mod sandbox;
