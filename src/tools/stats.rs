//! Statistics of trajectories with tools.

use std::ops::AddAssign;
use std::time::Duration;

/// Statistics of ended trajectories on one rank.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ToolStats {
    /// Number of trajectories.
    pub num_trajectories: usize,
    /// Number of their turns.
    pub num_turns: usize,
    /// Largest number of turns in a trajectory.
    pub max_turns: usize,
    /// Number of calls with a result, including calls that could not be parsed.
    pub num_calls: usize,
    /// Number of calls whose result was an error.
    pub num_failures: usize,
    /// Number of turns with text that looks like a call and cannot be parsed.
    pub num_unreadable: usize,
    /// Number of turns whose tools exceeded the time limit.
    pub num_timeouts: usize,
    /// Number of trajectories that ended because a tool result did not fit.
    pub num_overlong: usize,
    /// Number of tool results that were shortened.
    pub num_cut: usize,
    /// Number of masked trajectories: their environment, their interpreter or, during a call, the tools' process was lost.
    pub num_failed: usize,
    /// Number of turns whose tools ran.
    pub num_answers: usize,
    /// Total duration of these tool runs in seconds.
    pub seconds: f64,
    /// Longest duration of a turn's tool run in seconds.
    pub max_seconds: f64,
    /// Costs of the engine sessions.
    pub sessions: SessionCosts,
}

/// Costs of multi-turn trajectories in engine sessions.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SessionCosts {
    /// Tokens of earlier turns that were still in the KV cache when the next turn began, counted on the first of the ranks that share an
    /// engine.
    pub num_kept_tokens: usize,
    /// Tokens of earlier turns that were recomputed when the next turn began, counted on the first of the ranks that share an engine.
    pub num_recomputed_tokens: usize,
    /// Time in which nothing was decoded because every trajectory waited for tools, environments, agents or clients.
    pub idle: Duration,
    /// Duration of all sessions.
    pub total: Duration,
}

impl AddAssign for SessionCosts {
    fn add_assign(&mut self, more: Self) {
        self.num_kept_tokens += more.num_kept_tokens;
        self.num_recomputed_tokens += more.num_recomputed_tokens;
        self.idle += more.idle;
        self.total += more.total;
    }
}
