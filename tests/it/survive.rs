//! Runs that meet the faults of docs/faults.md: nothing is left running, nothing that was saved is lost.

mod faults;
mod joining;
mod kills;
mod matrix;
mod memory;
mod outside;
