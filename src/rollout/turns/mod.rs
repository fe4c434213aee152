//! Turns: how the requests of a session follow each other. A group of single-turn completions is one request. With tools or agents, further turns
//! follow.

mod news;
mod tools;

pub use news::TurnTools;

use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::request::{Event, Request, RequestId, refuse};
use super::session::Session;
use super::stats::EngineStats;
use crate::error::Result;
use crate::phase;
use crate::ranks::HostGroup;
use crate::tools::SessionCosts;
use crate::types::{Prompt, RolloutGroup};

/// A source of requests for a session, which also receives their events. Every rank of the engine makes the same calls in the same order.
pub trait Turns: std::fmt::Debug {
    /// Prepares for `session` before the first request.
    ///
    /// # Errors
    /// Returns why no request can be submitted.
    fn begin(&mut self, _session: &mut Session<'_>) -> Result<()> {
        Ok(())
    }

    /// Handles an event of the engine.
    ///
    /// # Errors
    /// The errors of the session and of the tools, agents or clients.
    fn on_event(&mut self, event: Event, session: &mut Session<'_>) -> Result<()>;

    /// Exchanges the outcomes of turns between the ranks, submits the requests that follow, and returns the groups that became complete. Called after
    /// every step; waits a moment if there is nothing to decode.
    ///
    /// # Errors
    /// The errors of the session, of the exchange between ranks and of the tools, agents or clients.
    fn advance(&mut self, session: &mut Session<'_>) -> Result<Vec<usize>>;

    /// Hands groups that were not taken to a later session.
    ///
    /// # Errors
    /// The errors of the tokenizer.
    fn suspend(self: Box<Self>, _session: &Session<'_>) -> Result<()> {
        Ok(())
    }
}

/// Turns whose trajectories form groups, numbered from 0 in the order of submission.
pub trait GroupTurns: Turns {
    /// Prepares a group, which an earlier session may have begun, to be submitted again.
    fn restore(&mut self, _group: &mut RolloutGroup) {}

    /// Submits a new group, or one that an earlier session began, and returns its number. `own` is the group's prompt on the rank that owns it, else
    /// `None`.
    ///
    /// # Errors
    /// The errors of [`Session::submit`] and of the tools, agents or clients.
    fn submit(&mut self, session: &mut Session<'_>, request: Request, own: Option<&Prompt>) -> Result<usize>;

    /// A group of this rank in its current state, with the text that its environment added to the prompt. It has no completions if nothing has been
    /// sampled yet.
    ///
    /// # Errors
    /// The errors of the tokenizer.
    ///
    /// # Panics
    /// If the group is not this rank's.
    fn group(&self, number: usize, session: &Session<'_>) -> Result<RolloutGroup>;

    /// Removes and returns a complete group of this rank.
    ///
    /// # Errors
    /// The errors of the tokenizer.
    ///
    /// # Panics
    /// If the group is not this rank's, or was taken before.
    fn take_complete(&mut self, number: usize, session: &Session<'_>) -> Result<RolloutGroup>;
}

/// How long an engine without work waits for turns before it reports a heartbeat.
pub(crate) const BEAT: Duration = Duration::from_millis(50);
/// How long a rank without work waits for its own turns before it exchanges with other ranks.
const TICK: Duration = Duration::from_millis(2);

/// Measures the costs of turns in a session, from its beginning.
#[derive(Debug, Clone, Copy)]
pub struct CostMeter {
    before: EngineStats,
    start: Instant,
    /// Time in which nothing was decoded.
    idle: Duration,
}

impl CostMeter {
    /// Creates the meter of a session that is about to begin.
    pub fn new() -> Self {
        Self { before: EngineStats::default(), start: Instant::now(), idle: Duration::ZERO }
    }

    /// Lets completions of `session` leave their keys and values to their next turns, and starts counting them.
    pub fn begin(&mut self, session: &mut Session<'_>) {
        self.before = session.keep_turns();
    }

    /// Exchanges outcomes between all ranks that share an engine, before a step. `own` returns this rank's outcomes, and may wait for them as long as
    /// its argument says.
    ///
    /// # Errors
    /// The errors of `own` and of the exchange.
    pub fn exchange<N: Serialize + DeserializeOwned>(
        &mut self,
        engine_ranks: &HostGroup,
        what: &'static str,
        session: &Session<'_>,
        own: impl FnOnce(Duration) -> Result<N>,
    ) -> Result<Vec<N>> {
        phase::beat();
        let (before, is_idle) = (Instant::now(), !session.has_work());
        let wait = match (is_idle, engine_ranks.size()) {
            (false, _) => Duration::ZERO,
            (true, 1) => BEAT,
            (true, _) => TICK,
        };
        let all = engine_ranks.all_gather_json(what, own(wait)?)?;
        if is_idle {
            self.idle += before.elapsed();
        }
        Ok(all)
    }

    /// The costs so far on a rank. Rank 0 of the engine counts the tokens for all of its ranks.
    pub fn costs(&self, session: &Session<'_>, rank: usize) -> SessionCosts {
        let of_first = |count: usize| if rank == 0 { count } else { 0 };
        let stats = session.stats();
        SessionCosts {
            num_kept_tokens: of_first(stats.num_turn_tokens - self.before.num_turn_tokens),
            num_recomputed_tokens: of_first(stats.num_lost_turn_tokens - self.before.num_lost_turn_tokens),
            idle: self.idle,
            total: self.start.elapsed(),
        }
    }
}

/// Groups whose completions have a single turn: each group is one request.
#[derive(Debug, Default)]
pub struct SingleTurns {
    /// The first step of each group, and the prompt if the group is this rank's.
    groups: Vec<(u64, Option<Prompt>)>,
    complete: Vec<usize>,
}

impl Turns for SingleTurns {
    fn on_event(&mut self, event: Event, _: &mut Session<'_>) -> Result<()> {
        match event {
            Event::Complete { request } => self.complete.push(request.0),
            Event::Failed { message, .. } => return refuse("a structure to follow".to_owned(), message),
            Event::Token { .. } | Event::Finished { .. } | Event::Preempted { .. } => {}
        }
        Ok(())
    }

    fn advance(&mut self, _: &mut Session<'_>) -> Result<Vec<usize>> {
        Ok(std::mem::take(&mut self.complete))
    }
}

impl GroupTurns for SingleTurns {
    fn submit(&mut self, session: &mut Session<'_>, request: Request, own: Option<&Prompt>) -> Result<usize> {
        self.groups.push((request.first_step, own.cloned()));
        let RequestId(number) = session.submit(request)?;
        Ok(number)
    }

    fn group(&self, number: usize, session: &Session<'_>) -> Result<RolloutGroup> {
        let (first_step, prompt) = self.groups[number].clone();
        let completions = session.completions(RequestId(number))?;
        Ok(RolloutGroup { prompt: prompt.expect("an own group"), first_step, completions })
    }

    fn take_complete(&mut self, number: usize, session: &Session<'_>) -> Result<RolloutGroup> {
        self.group(number, session)
    }
}
