//! Processes: the launcher that starts one worker a rank, passes their output and signals on, and ends them all when one
//! fails; and what a worker tells its launcher.
//!
//! A worker that fails leaves its error in a file ([`report_error`]); the launcher prints the one that came first and takes
//! its exit code.

mod exit;
mod output;
mod report;
mod signals;
mod supervise;
mod worker;

pub use exit::exit_now;
pub use report::{ERROR_FILE_VARIABLE, report_error};
pub use signals::stop_on_signals;
pub use supervise::run;
pub use worker::{LOOPBACK, LaunchOptions, Rendezvous, worker_command};
