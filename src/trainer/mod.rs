//! The GRPO trainer: one step on one screen.
