//! Tools and environments that a model calls between its turns, in separate Python processes. Independent of tensors and engines.
//!
//! | file | what it is |
//! |---|---|
//! | `process`, `server.py` | the process that loads tools, and forks one for each turn whose tools run, or for each environment |
//! | `worker` | the connection to such a process, and its time limits |
//! | `conversations` | multi-turn trajectories: calls are parsed and executed, and results become context; some continue in a later rollout |
//! | `interpreters`, `python.py` | the tool `python`: an interpreter in a sandbox for each trajectory that calls it, in a process that holds them all |
//! | `agent` | episodes played by a user's function |
//! | `environments.py`, `rows` | environments from hubs: their rows, episodes, tools and scores |
//! | `stats` | statistics of trajectories and tools |

mod agent;
mod conversations;
mod interpreters;
mod process;
mod reply;
mod rows;
#[cfg(test)]
mod server_tests;
mod stats;
#[cfg(test)]
mod tests;
mod worker;

pub use agent::{Agent, EpisodeOutcome};
pub use conversations::{Conversations, EpisodeEnd, GroupKey, TrajectoryKey, TurnOutcome};
pub use interpreters::{COMMAND as PYTHON_COMMAND, serve as serve_python};
pub use process::ToolProcess;
pub use rows::MadeRows;
pub use stats::SessionCosts;
