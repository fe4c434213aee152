//! Processes: the launcher starts one worker per rank, forwards their output and signals, ends all of them when one fails or hangs, and restarts
//! them. Also what a worker reports to its launcher.
//!
//! A failing worker writes its error to memory provided by the launcher ([`report_failure`]); the launcher prints the earliest error and exits with
//! its code. A worker reports its current activity on a page shared with the launcher ([`crate::phase::SharedPage`]).
//!
//! | file | what it does |
//! |---|---|
//! | `supervise` | a run with its attempts and restarts |
//! | `group` | the workers of one attempt |
//! | `worker` | how one worker is started |
//! | `signals` | signals, and notification when processes end |
//! | `report`, `output` | a worker's error, and its output |
//! | `threads` | distributes the processors among the workers' threads |
//! | `watchdog` | lets a worker without this crate's launcher watch itself |
//! | `way_on` | messages to a user who stops a run |
//! | `program` | start and end of a process, and a program's `main` |
//! | `exit` | ends a process with loaded GPU libraries |

mod exit;
mod group;
mod output;
mod program;
mod report;
mod signals;
mod supervise;
mod threads;
mod watchdog;
mod way_on;
mod worker;

pub use exit::exit_now;
pub use program::{begin_process, main, report_failure};
pub use signals::{hold_signals, receive_signals, stop_on_signals};
pub use supervise::run;
pub use threads::{load_again_with_settings, name_process};
pub use watchdog::watch_self;
pub use way_on::{OnStop, quoted};
pub use worker::{Inherited, LOOPBACK, LaunchOptions, Rendezvous, worker_command};
