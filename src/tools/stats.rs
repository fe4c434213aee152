//! Counts of trajectories with tools.

use std::ops::AddAssign;
use std::time::Duration;

/// Counts over trajectories that have ended, on one rank.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ToolStats {
    /// Trajectories.
    pub num_trajectories: usize,
    /// Turns of all of them.
    pub num_turns: usize,
    /// Turns of the one with the most.
    pub max_turns: usize,
    /// Calls that were answered; one that cannot be read counts, too.
    pub num_calls: usize,
    /// Calls that were answered with an error.
    pub num_failures: usize,
    /// Turns with what looks like a call and cannot be read.
    pub num_unreadable: usize,
    /// Turns whose tools ran out of time.
    pub num_timeouts: usize,
    /// Trajectories that ended as an answer did not fit.
    pub num_overlong: usize,
    /// Answers that had a part cut out.
    pub num_cut: usize,
    /// Trajectories whose environment or interpreter was lost, or the process of all tools during a call: they are masked.
    pub num_failed: usize,
    /// Turns whose tools ran.
    pub num_answers: usize,
    /// Seconds that their tools took, added up.
    pub seconds: f64,
    /// Seconds of the slowest.
    pub max_seconds: f64,
    /// Counts of the sessions.
    pub sessions: SessionCosts,
}

/// Costs of turns in the engine's sessions.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SessionCosts {
    /// Tokens of earlier turns that the engine still had keys and values of when the next turn began, on the first of the ranks that share
    /// it.
    pub num_kept_tokens: usize,
    /// Tokens of earlier turns that were computed again when the next turn began, on the first of the ranks that share an engine.
    pub num_recomputed_tokens: usize,
    /// Time in which nothing was decoded, as every trajectory waited for whoever takes turns with the model.
    pub idle: Duration,
    /// Time of all sessions.
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
