//! A session of whole groups: of completions of one turn, or of trajectories of several, with tools or played by an agent. Who samples
//! batches does not care which.

use super::engine::RolloutEngine;
use super::request::{Event, Request, RequestId, refuse};
use super::session::Session;
use crate::error::Result;
use crate::types::{Prompt, RolloutGroup};

/// How the groups of a session come to trajectories of several turns. Every rank of the engine makes the same calls in the same order.
pub trait GroupTurns: std::fmt::Debug {
    /// Makes begun groups of an earlier session ready to be submitted again.
    fn restore(&mut self, groups: &mut [RolloutGroup]);

    /// Prepares for `session`, before the first group.
    ///
    /// # Errors
    /// Returns why no group can be begun.
    fn begin(&mut self, session: &mut Session<'_>) -> Result<()>;

    /// Begins a group, or goes on with one of an earlier session. `own` is its prompt, on the rank that brought it.
    ///
    /// # Errors
    /// The errors of [`Session::submit`] and of whoever takes turns with the model.
    fn submit(&mut self, session: &mut Session<'_>, request: Request, own: Option<&Prompt>) -> Result<()>;

    /// Whether groups are not complete though the engine may have nothing to decode.
    fn is_waiting(&self) -> bool;

    /// Takes in what the engine reports.
    ///
    /// # Errors
    /// The errors of the session and of whoever takes turns with the model.
    fn hear(&mut self, event: Event, session: &mut Session<'_>) -> Result<()>;

    /// Takes in what turns led to on any rank, submits what follows, and returns the groups that are complete with it. Waits a while where
    /// there is nothing to decode.
    ///
    /// # Errors
    /// The errors of the session, of the exchange between ranks and of whoever takes turns with the model.
    fn advance(&mut self, session: &mut Session<'_>) -> Result<Vec<usize>>;

    /// A group of this rank as it stands; no completions if nothing is sampled yet, no group if it is another rank's.
    fn group(&self, number: usize, session: &Session<'_>) -> Option<RolloutGroup>;

    /// A complete group of this rank, for good.
    fn take_complete(&mut self, number: usize) -> Option<RolloutGroup>;

    /// Leaves groups that were not taken to a later session.
    fn suspend(self: Box<Self>, session: &Session<'_>);
}

/// Groups under way on an engine that is awake, numbered from 0 in the order of submission. Every rank of the engine makes the same calls
/// in the same order.
pub struct GroupSession<'r, 't> {
    session: Session<'r>,
    turns: Option<Box<dyn GroupTurns + 't>>,
    /// The request and the first step of each group of one turn, and of an own one its prompt.
    single: Vec<(RequestId, u64, Option<Prompt>)>,
}

impl std::fmt::Debug for GroupSession<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GroupSession").field("session", &self.session).finish_non_exhaustive()
    }
}

impl<'r, 't> GroupSession<'r, 't> {
    /// Opens a session; with `turns` completions may have several of them.
    ///
    /// # Errors
    /// The errors of the device and of [`GroupTurns::begin`].
    pub fn open(engine: &'r mut RolloutEngine<'_>, mut turns: Option<Box<dyn GroupTurns + 't>>) -> Result<Self> {
        let mut session = engine.session()?;
        turns.iter_mut().try_for_each(|turns| turns.begin(&mut session))?;
        Ok(Self { session, turns, single: Vec::new() })
    }

    /// Begins a group, or goes on with one of an earlier session, and returns its number. `own` is the group's prompt, on the rank that
    /// brought it.
    ///
    /// # Errors
    /// The errors of [`Session::submit`], of the structure and of tools.
    pub fn submit(&mut self, request: Request, own: Option<&Prompt>) -> Result<usize> {
        let (number, first_step) = (self.single.len(), request.first_step);
        let id = match &mut self.turns {
            Some(turns) => {
                turns.submit(&mut self.session, request, own)?;
                RequestId(number)
            }
            None => self.session.submit(request)?,
        };
        self.single.push((id, first_step, own.cloned()));
        Ok(number)
    }

    /// Whether [`GroupSession::step`] has anything to do.
    pub fn has_work(&self) -> bool {
        self.session.has_work() || self.turns.as_ref().is_some_and(|turns| turns.is_waiting())
    }

    /// Whether nothing is left to decode, and tools are awaited.
    pub fn is_idle(&self) -> bool {
        !self.session.has_work()
    }

    /// Computes a step, takes in what tools have answered, and returns the groups that became complete. Waits a while for tools where
    /// there is nothing to compute.
    ///
    /// # Errors
    /// The errors of [`Session::step`] and of tools.
    pub fn step(&mut self) -> Result<Vec<usize>> {
        let events = if self.session.has_work() { self.session.step()? } else { Vec::new() };
        let mut complete = self.take(events)?;
        if let Some(turns) = &mut self.turns {
            complete.extend(turns.advance(&mut self.session)?);
        }
        Ok(complete)
    }

    /// Takes in what the engine reports, and returns the groups of one turn that are complete.
    fn take(&mut self, events: Vec<Event>) -> Result<Vec<usize>> {
        let mut complete = Vec::new();
        #[cfg(test)]
        tap::record(&events);
        for event in events {
            match (&mut self.turns, event) {
                (Some(turns), event) => turns.hear(event, &mut self.session)?,
                (None, Event::Complete { request }) => complete.push(request.0),
                (None, Event::Failed { message, .. }) => return refuse("a structure to follow".to_owned(), message),
                (None, _) => {}
            }
        }
        Ok(complete)
    }

    /// Reads the steps under way and launches no other. Groups that become complete with them are reported by the session that goes on
    /// with them.
    ///
    /// # Errors
    /// The errors of [`Session::drain`] and of tools.
    pub fn drain(&mut self) -> Result<()> {
        let events = self.session.drain()?;
        if self.turns.is_some() {
            self.take(events)?;
        }
        Ok(())
    }

    /// A group of this rank as it stands, with what its environment added to the prompt. No completions if nothing is sampled yet.
    ///
    /// # Errors
    /// The errors of the tokenizer.
    ///
    /// # Panics
    /// If the group is not this rank's.
    pub fn group(&self, number: usize) -> Result<RolloutGroup> {
        if let Some(turns) = &self.turns {
            return Ok(turns.group(number, &self.session).expect("an own group"));
        }
        let (request, first_step, prompt) = &self.single[number];
        let prompt = prompt.clone().expect("an own group");
        Ok(RolloutGroup { prompt, first_step: *first_step, completions: self.session.completions(*request)? })
    }

    /// A group of this rank that is complete, for good.
    ///
    /// # Errors
    /// The errors of the tokenizer.
    ///
    /// # Panics
    /// If the group is not this rank's, or was taken before.
    pub fn take_complete(&mut self, number: usize) -> Result<RolloutGroup> {
        match &mut self.turns {
            Some(turns) => Ok(turns.take_complete(number).expect("an own group")),
            None => self.group(number),
        }
    }

    /// Ends the session. Tools and environments of groups that were not taken live on for a later one.
    ///
    /// # Errors
    /// The errors of [`Session::close`].
    pub fn close(mut self) -> Result<()> {
        self.drain()?;
        if let Some(turns) = self.turns {
            turns.suspend(&self.session);
        }
        self.session.close()
    }
}

/// Tokens as the engine reports them, for tests that hold what is trained on to them.
#[cfg(test)]
pub(crate) mod tap {
    use std::cell::RefCell;
    use std::collections::BTreeMap;

    use super::{Event, RequestId};

    /// Ids and the bits of their log-probabilities, in the order of sampling.
    pub(crate) type SampledTurn = Vec<(u32, u32)>;

    thread_local! {
        static TURNS: RefCell<BTreeMap<(RequestId, usize), SampledTurn>> = const { RefCell::new(BTreeMap::new()) };
    }

    pub(super) fn record(events: &[Event]) {
        TURNS.with_borrow_mut(|turns| {
            for event in events {
                if let Event::Token { request, sample, token_id, logprob, .. } = event {
                    turns.entry((*request, *sample)).or_default().push((*token_id, logprob.to_bits()));
                }
            }
        });
    }

    /// The turns that sessions of this thread have sampled since the last call. Call after each session: numbers of requests come again.
    pub(crate) fn take() -> Vec<SampledTurn> {
        TURNS.take().into_values().collect()
    }
}
