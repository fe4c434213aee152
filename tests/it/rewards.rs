//! Rewards in processes of their own: what they may be, how they fail, and that model-written code stays in its sandbox.

#[path = "rewards/processes.rs"]
mod processes;
#[path = "rewards/runs.rs"]
mod runs;
#[path = "rewards/sandbox.rs"]
mod sandbox;
