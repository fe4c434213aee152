//! Tools and environments that a model calls between its turns, in Python processes of their own. Knows nothing of tensors and engines.
//!
//! | file | what it is |
//! |---|---|
//! | `process`, `server.py` | the process that loads tools, and forks one for each turn whose tools run, or for each environment |
//! | `worker` | such a process from this side, and how long it may be silent |
//! | `conversations` | trajectories of several turns: calls are read, answered and become context; some go on in a later rollout |
//! | `interpreters`, `python.py` | the tool `python`: an interpreter in a sandbox for each trajectory that calls it, in a process that holds them all |
//! | `agent` | episodes that a function of the user's plays |
//! | `environments.py`, `rows` | environments of hubs: their rows, episodes, tools and scores |
//! | `stats` | what is counted of them |

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
