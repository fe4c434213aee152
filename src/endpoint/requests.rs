//! Requests that an engine is processing, and the receivers of their updates. Every rank of the engine applies the same changes before the same
//! step. Only the rank at which a request arrived has a receiver for it.

use std::collections::HashMap;
use std::sync::Arc;

use super::announce::RequestChange;
use super::client::{ClientShared, EngineCommand, Listener, RequestUpdate};
use super::counters::Counters;
use super::refusal::Refusal;
use crate::error::{Error, Result};
use crate::rollout::{Event, Request, RequestId, Session};

/// The open requests of a session.
#[derive(Debug)]
pub(super) struct Requests {
    /// Index of this rank in the engine.
    rank: usize,
    /// State shared with this rank's clients; `None` on ranks without clients.
    shared: Option<Arc<ClientShared>>,
    /// Whether the original requests are kept, so that a later session can continue them.
    are_kept: bool,
    open: HashMap<RequestId, OpenRequest>,
    of_ticket: HashMap<(usize, u64), Vec<RequestId>>, // by rank and ticket
    /// Receivers of this rank's requests that were announced but not submitted yet.
    coming: HashMap<u64, Vec<Listener>>,
}

/// A request that the engine is processing.
#[derive(Debug)]
struct OpenRequest {
    owner: usize, // the rank that it came to
    ticket: u64,
    /// Receiver of updates; only on the rank at which the request arrived.
    listener: Option<Listener>,
}

impl Requests {
    /// An empty set of requests, on rank `rank` of the engine.
    pub fn new(rank: usize, shared: Option<Arc<ClientShared>>, are_kept: bool) -> Self {
        let (open, of_ticket, coming) = Default::default();
        Self { rank, shared, are_kept, open, of_ticket, coming }
    }

    /// Whether no request is open.
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// The change that a client's command requires. All ranks must then [`apply`](Requests::apply) it.
    pub fn take(&mut self, command: EngineCommand) -> RequestChange {
        match command {
            EngineCommand::Submit { ticket, wanted, mut listener } => {
                listener.wanted = self.are_kept.then(|| wanted.clone());
                self.coming.entry(ticket).or_default().push(listener);
                RequestChange::Submit(ticket, wanted)
            }
            EngineCommand::Cancel { ticket } => RequestChange::Cancel(ticket),
        }
    }

    /// Sends an error to all waiting clients, and returns the changes that cancel all open requests.
    pub fn end(&mut self) -> Vec<RequestChange> {
        let open = self.open.values().filter_map(|open| open.listener.as_ref());
        for listener in open.chain(self.coming.values().flatten()) {
            let refusal = Refusal::new(503, "the server stopped before the completion ended");
            let _ = listener.updates.send(RequestUpdate::Refused(refusal));
            self.count(|counters| Counters::add(&counters.failed, 1));
        }
        self.coming.clear();
        self.of_ticket.keys().map(|&(_, ticket)| RequestChange::Cancel(ticket)).collect()
    }

    /// Applies a change that rank `owner` has announced.
    ///
    /// # Errors
    /// The errors of the session. A request that the session rejects is not an error here; its client gets the reason.
    pub fn apply(&mut self, change: RequestChange, owner: usize, session: &mut Session<'_>) -> Result<()> {
        match change {
            RequestChange::Submit(ticket, wanted) => {
                let listener = self.next_listener(owner, ticket);
                let num_tokens = wanted.token_ids.len();
                let has_unknown_ids = wanted.token_ids.iter().any(|&id| !session.knows(id));
                match session.submit(*wanted) {
                    Ok(request) => {
                        self.count(|counters| Counters::add(&counters.prompt_tokens, num_tokens));
                        self.open.insert(request, OpenRequest { owner, ticket, listener });
                        self.of_ticket.entry((owner, ticket)).or_default().push(request);
                    }
                    Err(Error::InvalidArgument { expected, got, .. }) => {
                        if let Some(listener) = listener {
                            let message = format!("expected {expected}, got {got}");
                            let refusal = match has_unknown_ids {
                                true => Refusal::of("prompt", message),
                                false => Refusal::new(400, message),
                            };
                            let _ = listener.updates.send(RequestUpdate::Refused(refusal));
                        }
                    }
                    Err(error) => return Err(error),
                }
            }
            RequestChange::Cancel(ticket) => {
                for request in self.of_ticket.remove(&(owner, ticket)).unwrap_or_default() {
                    self.open.remove(&request);
                    session.remove(request)?;
                    self.count(|counters| Counters::add(&counters.cancelled, 1));
                }
            }
        }
        Ok(())
    }

    /// Passes an event of the engine to the receiver of the request.
    ///
    /// # Errors
    /// The errors of [`Session::remove`].
    pub fn report(&mut self, event: Event, session: &mut Session<'_>) -> Result<()> {
        let request = event.request();
        let Some(open) = self.open.get_mut(&request) else { return Ok(()) };
        let ends = matches!(event, Event::Complete { .. } | Event::Failed { .. });
        let is_removed = matches!(event, Event::Failed { .. });
        if let (Some(shared), Some(listener)) = (&self.shared, &mut open.listener) {
            listener.hear(event, session, &shared.counters);
        }
        if ends {
            let place = (open.owner, open.ticket);
            self.open.remove(&request);
            if let Some(of_ticket) = self.of_ticket.get_mut(&place) {
                of_ticket.retain(|other| *other != request);
                if of_ticket.is_empty() {
                    self.of_ticket.remove(&place);
                }
            }
            if !is_removed {
                session.remove(request)?;
            }
        }
        Ok(())
    }

    /// This rank's open requests: engine id, ticket and original request.
    pub(super) fn under_way(&self) -> impl Iterator<Item = (RequestId, u64, &Request)> {
        self.open.iter().filter_map(|(id, open)| Some((*id, open.ticket, open.listener.as_ref()?.wanted.as_deref()?)))
    }

    /// The commands with which a later session continues this rank's single-completion requests, in order of arrival.
    pub fn suspend(self, session: &Session<'_>) -> Vec<EngineCommand> {
        let mut open: Vec<(RequestId, OpenRequest)> = self.open.into_iter().collect();
        open.sort_by_key(|(_, open)| open.ticket);
        let command = |(request, OpenRequest { ticket, listener, .. })| {
            let mut listener = Listener { has_begun: false, ..listener? };
            let mut wanted = listener.wanted.take()?;
            let completion = session.trajectory(request, 0);
            if !completion.token_ids.is_empty() {
                wanted.begun = vec![completion];
            }
            Some(EngineCommand::Submit { ticket, wanted, listener })
        };
        open.into_iter().filter_map(command).collect()
    }

    fn next_listener(&mut self, owner: usize, ticket: u64) -> Option<Listener> {
        if owner != self.rank {
            return None;
        }
        let mut coming = self.coming.remove(&ticket)?;
        let listener = coming.remove(0);
        if !coming.is_empty() {
            self.coming.insert(ticket, coming);
        }
        Some(listener)
    }

    fn count(&self, count: impl Fn(&Counters)) {
        self.shared.iter().for_each(|shared| count(&shared.counters));
    }
}

impl Listener {
    /// Sends an update for an event. If the receiver is gone the update is dropped, because its cancel command arrives in the next iteration.
    fn hear(&mut self, event: Event, session: &Session<'_>, counters: &Counters) {
        let first_choice = self.first_choice;
        match event {
            Event::Token { sample, token_id, logprob, top_logprobs, .. } => {
                Counters::add(&counters.generation_tokens, 1);
                if !std::mem::replace(&mut self.has_begun, true) {
                    counters.first_token(self.at.elapsed());
                }
                let choice = first_choice + sample;
                let _ = self.updates.send(RequestUpdate::Token { choice, token_id, logprob, top_logprobs });
            }
            Event::Finished { request, sample, reason } => {
                let (choice, trajectory) = (first_choice + sample, Box::new(session.trajectory(request, sample)));
                let _ = self.updates.send(RequestUpdate::Finished { choice, reason, trajectory });
            }
            Event::Complete { .. } => Counters::add(&counters.completed, 1),
            Event::Preempted { .. } => {}
            Event::Failed { message, .. } => {
                Counters::add(&counters.failed, 1);
                let _ = self.updates.send(RequestUpdate::Refused(Refusal::new(400, message)));
            }
        }
    }
}
