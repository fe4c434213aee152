//! Processes: the launcher that starts one worker a rank, passes their output and signals on, ends them all when one fails
//! or stands still, and starts them again; and what a worker tells its launcher.
//!
//! A worker that fails leaves its error in memory that the launcher gave it ([`report_failure`]); the launcher prints the one that came first and takes
//! its exit code. What a worker is doing it says on a page that the launcher shares ([`crate::phase::SharedPage`]).
//!
//! | file | what it does |
//! |---|---|
//! | `supervise` | a run: attempts and restarts |
//! | `group` | the workers of one attempt |
//! | `worker` | how one worker is started |
//! | `signals` | signals and ends of processes |
//! | `report`, `output` | what a worker leaves and says |
//! | `threads` | how workers' threads share the processors |
//! | `watchdog` | a worker without a launcher of ours watches itself |
//! | `way_on` | what a person is told who stops a run |
//! | `program` | the beginning and the end of a process, and a program's `main` |
//! | `exit` | the end of a process with a GPU's libraries |

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
