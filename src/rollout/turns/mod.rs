//! Turns: how requests of a session follow one another. A group of single turns is one request; tools answer turns, and an agent asks for
//! them.

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

/// A source of requests for a session, which takes in their events. Every rank of the engine makes the same calls in the same order.
pub trait Turns: std::fmt::Debug {
    /// Prepares for `session`, before the first request.
    ///
    /// # Errors
    /// Returns why no request can be submitted.
    fn begin(&mut self, _session: &mut Session<'_>) -> Result<()> {
        Ok(())
    }

    /// Takes in an event of the engine.
    ///
    /// # Errors
    /// The errors of the session and of whoever takes turns with the model.
    fn on_event(&mut self, event: Event, session: &mut Session<'_>) -> Result<()>;

    /// Takes in what turns led to on any rank, submits what follows, and returns the groups that are complete with it. Called after every
    /// step; waits a while where there is nothing to decode.
    ///
    /// # Errors
    /// The errors of the session, of the exchange between ranks and of whoever takes turns with the model.
    fn advance(&mut self, session: &mut Session<'_>) -> Result<Vec<usize>>;

    /// Leaves groups that were not taken to a later session.
    ///
    /// # Errors
    /// The errors of the tokenizer.
    fn suspend(self: Box<Self>, _session: &Session<'_>) -> Result<()> {
        Ok(())
    }
}

/// Turns that make up groups, which are numbered from 0 in the order of submission.
pub trait GroupTurns: Turns {
    /// Makes a group ready to be submitted again that an earlier session may have begun.
    fn restore(&mut self, _group: &mut RolloutGroup) {}

    /// Begins a group, or goes on with one of an earlier session, and returns its number. `own` is its prompt, on the rank that brought
    /// it.
    ///
    /// # Errors
    /// The errors of [`Session::submit`] and of whoever takes turns with the model.
    fn submit(&mut self, session: &mut Session<'_>, request: Request, own: Option<&Prompt>) -> Result<usize>;

    /// A group of this rank as it stands, with what its environment added to the prompt. No completions if nothing is sampled yet.
    ///
    /// # Errors
    /// The errors of the tokenizer.
    ///
    /// # Panics
    /// If the group is not this rank's.
    fn group(&self, number: usize, session: &Session<'_>) -> Result<RolloutGroup>;

    /// A group of this rank that is complete, for good.
    ///
    /// # Errors
    /// The errors of the tokenizer.
    ///
    /// # Panics
    /// If the group is not this rank's, or was taken before.
    fn take_complete(&mut self, number: usize, session: &Session<'_>) -> Result<RolloutGroup>;
}

/// How long an engine without work waits for turns before it shows that it is alive.
pub(crate) const BEAT: Duration = Duration::from_millis(50);
/// How long one of several ranks without work waits for its own turns before it hears of those of others.
const TICK: Duration = Duration::from_millis(2);

/// Costs of turns in a session, from its beginning.
#[derive(Debug, Clone, Copy)]
pub struct CostMeter {
    before: EngineStats,
    start: Instant,
    /// Time in which nothing was decoded.
    idle: Duration,
}

impl CostMeter {
    /// A meter of a session that is about to begin.
    pub fn new() -> Self {
        Self { before: EngineStats::default(), start: Instant::now(), idle: Duration::ZERO }
    }

    /// Has completions of `session` leave their keys and values to their next turns, which are counted from here on.
    pub fn begin(&mut self, session: &mut Session<'_>) {
        self.before = session.keep_turns();
    }

    /// Gives all ranks that share an engine the news of each, before a step. `own` returns this rank's, and may wait for some as long as
    /// it is told.
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

    /// The costs so far on a rank; the first of the ranks that share the engine counts tokens for all.
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

/// Groups whose completions have one turn: each is one request.
#[derive(Debug, Default)]
pub struct SingleTurns {
    /// The first step of each group, and of an own one its prompt.
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
