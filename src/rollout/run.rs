//! The sampling loop of every session. A policy decides which groups begin before each step and when the session ends. Turns submit requests and
//! handle the engine's events. There are policies for batches, replacement groups and HTTP clients, and turns for single completions, tools, agents
//! and clients.

use super::engine::RolloutEngine;
use super::request::Event;
use super::session::Session;
use super::turns::Turns;
use crate::error::Result;

/// Whether a session runs another step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// Run another step.
    Step,
    /// End the session. A later session may continue incomplete groups.
    End,
}

/// Decides what a session begins and when it ends. Every rank of the engine must decide the same.
pub trait SamplingPolicy<T: ?Sized> {
    /// Gathers and checks requests before the session opens. If it refuses, the engine keeps its unfinished sequences.
    ///
    /// # Errors
    /// Returns why the requests cannot be run.
    fn prepare(&mut self, _engine: &RolloutEngine<'_>, _turns: &mut T) -> Result<()> {
        Ok(())
    }

    /// Begins new groups before the next step, exchanges what the ranks need from each other, and decides whether there is a next step.
    ///
    /// # Errors
    /// The errors of the turns and of the exchange.
    fn next(&mut self, turns: &mut T, session: &mut Session<'_>) -> Result<Flow>;

    /// Takes over a group that is complete, or leaves it to a later session.
    ///
    /// # Errors
    /// The errors of the tokenizer.
    fn complete(&mut self, _number: usize, _turns: &mut T, _session: &Session<'_>) -> Result<()> {
        Ok(())
    }

    /// Takes over the unfinished groups in their current state, once no step is under way.
    ///
    /// # Errors
    /// The errors of the tokenizer.
    fn end(&mut self, _turns: &T, _session: &Session<'_>) -> Result<()> {
        Ok(())
    }
}

impl RolloutEngine<'_> {
    /// Runs a session until `policy` ends it. Collective over the engine's ranks.
    ///
    /// # Errors
    /// The errors of the policy, the turns and the session. The session cannot continue after an error.
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

/// Passes the events of a step to the turns.
fn deliver<T: Turns + ?Sized>(turns: &mut T, events: Vec<Event>, session: &mut Session<'_>) -> Result<()> {
    #[cfg(test)]
    tap::record(&events);
    events.into_iter().try_for_each(|event| turns.on_event(event, session))
}

/// Records tokens as the engine reports them. Tests compare them with the tokens that are trained on.
#[cfg(test)]
pub(crate) mod tap {
    use std::cell::RefCell;
    use std::collections::BTreeMap;

    use crate::rollout::{Event, RequestId};

    /// Token ids and the bits of their log-probabilities, in the order of sampling.
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

    /// The turns that sessions of this thread have sampled since the last call. Call it after each session, because request numbers are reused.
    pub(crate) fn take() -> Vec<SampledTurn> {
        TURNS.take().into_values().collect()
    }
}
