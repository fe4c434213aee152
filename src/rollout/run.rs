//! The loop of every session. A policy decides which groups begin before a step and when the session ends; turns submit requests and take
//! in the engine's events. Batches, replaced groups and served clients are policies; tools, agents and clients take turns.

use super::engine::RolloutEngine;
use super::request::Event;
use super::session::Session;
use super::turns::Turns;
use crate::error::Result;

/// Whether a session takes another step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// Take another step.
    Step,
    /// It ends. Groups that are not complete are left to a later one.
    End,
}

/// A session's beginnings and its end. Every rank of the engine must decide the same.
pub trait SamplingPolicy<T: ?Sized> {
    /// Gathers and checks requests before the session opens. A refusal here leaves the sequences that the engine keeps in place.
    ///
    /// # Errors
    /// Returns why they cannot be served.
    fn prepare(&mut self, _engine: &RolloutEngine<'_>, _turns: &mut T) -> Result<()> {
        Ok(())
    }

    /// Begins what is to be begun before the next step, exchanges what ranks must know of one another, and decides whether there is a
    /// next step.
    ///
    /// # Errors
    /// The errors of the turns and of the exchange.
    fn next(&mut self, turns: &mut T, session: &mut Session<'_>) -> Result<Flow>;

    /// Takes a group that is complete, or leaves it to a later session.
    ///
    /// # Errors
    /// The errors of the tokenizer.
    fn complete(&mut self, _number: usize, _turns: &mut T, _session: &Session<'_>) -> Result<()> {
        Ok(())
    }

    /// Takes the groups that are not complete as they stand, once no step is under way.
    ///
    /// # Errors
    /// The errors of the tokenizer.
    fn end(&mut self, _turns: &T, _session: &Session<'_>) -> Result<()> {
        Ok(())
    }
}

impl RolloutEngine<'_> {
    /// Runs a session to the end that `policy` gives it. Collective over the engine's ranks.
    ///
    /// # Errors
    /// The errors of the policy, the turns and the session, which cannot go on then.
    #[doc(hidden)]
    pub fn run<T: Turns + ?Sized>(&mut self, mut turns: Box<T>, policy: &mut impl SamplingPolicy<T>) -> Result<()> {
        policy.prepare(self, &mut turns)?;
        let mut session = self.session()?;
        turns.begin(&mut session)?;
        while policy.next(&mut turns, &mut session)? == Flow::Step {
            let events = if session.has_work() { session.step()? } else { Vec::new() };
            deliver(&mut *turns, events, &mut session)?;
            for number in turns.advance(&mut session)? {
                policy.complete(number, &mut turns, &session)?;
            }
        }
        let events = session.drain()?;
        deliver(&mut *turns, events, &mut session)?;
        policy.end(&turns, &session)?;
        turns.suspend(&session)?;
        session.close()
    }
}

/// Hands the events of a step to the turns.
fn deliver<T: Turns + ?Sized>(turns: &mut T, events: Vec<Event>, session: &mut Session<'_>) -> Result<()> {
    #[cfg(test)]
    tap::record(&events);
    events.into_iter().try_for_each(|event| turns.on_event(event, session))
}

/// Tokens as the engine reports them, for tests that hold what is trained on to them.
#[cfg(test)]
pub(crate) mod tap {
    use std::cell::RefCell;
    use std::collections::BTreeMap;

    use crate::rollout::{Event, RequestId};

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
