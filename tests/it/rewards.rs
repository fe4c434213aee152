//! Rewards in processes of their own: what they may be, how they fail, and that model-written code stays in its sandbox.

mod endpoint;
mod math;
mod processes;
mod readable;
mod runs;
pub mod sandbox;
