//! Runs with the faults of docs/faults.md: no process is left running, and no saved data is lost.

mod faults;
mod joining;
mod kills;
mod matrix;
mod memory;
mod outside;
