//! Tools and environments that a model calls between its turns, in Python processes of their own. Knows nothing of tensors and engines.
//!
//! | file | what it is |
//! |---|---|
//! | `process`, `server.py` | the process that loads tools, and forks one for each turn whose tools run, or for each environment |
//! | `conversations` | trajectories of several turns: calls are read, answered and become context |
//! | `stats` | what is counted of them |

mod conversations;
mod process;
mod stats;
#[cfg(test)]
mod tests;

pub use conversations::{Conversations, EpisodeEnd, TrajectoryKey, TurnOutcome};
pub use process::ToolProcess;
pub use stats::ToolStats;
