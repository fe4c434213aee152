//! Episodes played by a user's function, each in its own process, against a server that samples from the policy.

use std::time::Duration;

use serde_json::{Map, Value};

use super::process::ToolProcess;
use crate::error::Result;
use crate::types::EnvironmentEnd;

/// The user's function that plays episodes.
#[derive(Debug)]
pub struct Agent {
    process: ToolProcess,
    name: String,
}

/// Result of an episode.
#[derive(Debug)]
pub struct EpisodeOutcome {
    /// The episode's number, which [`Agent::play`] returned.
    pub id: u64,
    /// The reward and what the function returned; or the failure: an exception, the time limit, or the end of the process.
    pub end: Result<EnvironmentEnd, String>,
    /// Whether the episode exceeded its time limit.
    pub is_late: bool,
    /// Duration of the episode in seconds.
    pub seconds: f64,
}

impl Agent {
    /// The agent loaded by `process`.
    pub fn new(process: ToolProcess) -> Self {
        let name = process.agent.clone().unwrap_or_default();
        Self { process, name }
    }

    /// Begins an episode with a row's columns, against the server at `base_url`. Returns the episode's number.
    pub fn play(&mut self, row: &Map<String, Value>, base_url: &str) -> u64 {
        self.process.play(row, base_url)
    }

    /// Cancels an episode whose result is not needed any more.
    pub fn give_up(&mut self, id: u64) {
        self.process.give_up(id);
    }

    /// The episodes that have ended since the last call.
    ///
    /// # Errors
    /// [`Error::ToolService`](crate::Error::ToolService) if the agent's process has ended repeatedly.
    pub fn ended(&mut self) -> Result<Vec<EpisodeOutcome>> {
        let replies = self.process.replies(Duration::ZERO)?;
        let outcome = |mut reply: super::reply::ToolReply| {
            let (id, is_late, seconds) = (reply.id, reply.is_late(), reply.seconds);
            let end = match reply.error.take() {
                Some(error) => Err(format!("agent: {error}")),
                None => {
                    let reward = reply.reward();
                    // Of no class where it gave no reward, which then does not apply.
                    let class = reward.as_ref().map(|_| self.name.clone()).unwrap_or_default();
                    Ok(EnvironmentEnd { class, folder: String::new(), reward, state: reply.state.take() })
                }
            };
            EpisodeOutcome { id, end, is_late, seconds }
        };
        Ok(replies.into_iter().map(outcome).collect())
    }
}
