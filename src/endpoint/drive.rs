//! The engine's loop. Every rank runs it; rank 0 alone has the clients' queue.

use std::collections::HashMap;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedSender;

use super::announce::{Announcement, RequestChange, announce};
use super::client::{EngineCommand, EngineQueue, RequestUpdate};
use super::counters::Counters;
use super::refusal::Refusal;
use crate::dist::World;
use crate::error::{Error, Result};
use crate::phase;
use crate::rollout::{Event, RequestId, RolloutEngine, Session};

/// How long an idle engine waits for a command before it shows that it is alive.
const TICK: Duration = Duration::from_millis(50);

/// A request that the engine has.
struct OpenRequest {
    ticket: u64,
    /// On rank 0.
    listener: Option<Listener>,
}

/// Who waits for a request.
struct Listener {
    first_choice: usize,
    updates: UnboundedSender<RequestUpdate>,
    at: Instant,
    has_begun: bool,
}

/// Serves the queue's clients with the engine until the process is asked to stop, or a client asks for it; requests under way are
/// answered first, as long as the grace lasts. Collective over the world, whose ranks share the engine.
///
/// # Errors
/// The errors of [`Session::step`] and of the collectives. Clients that wait are told that the engine is gone.
pub fn drive(engine: &mut RolloutEngine<'_>, world: &World, queue: Option<EngineQueue>) -> Result<()> {
    drive_beside(engine, Some(world), queue, |_| Ok(()))
}

/// Serves as [`drive`] does, and calls `beside` before each step with whether there is work. Without a world this process has the engine
/// to itself, and only a client ends it: that the process is to stop is for others to heed.
///
/// # Errors
/// The errors of [`drive`], and of `beside`.
pub fn drive_beside(
    engine: &mut RolloutEngine<'_>,
    world: Option<&World>,
    mut queue: Option<EngineQueue>,
    mut beside: impl FnMut(bool) -> Result<()>,
) -> Result<()> {
    let mut session = engine.session()?;
    let mut requests = Requests::default();
    for number in 0.. {
        phase::beat();
        beside(session.has_work())?;
        let announcement = match &mut queue {
            Some(queue) => requests.announcement(queue, &session, world.is_some()),
            None => Announcement::default(),
        };
        let announcement = announce(world, number, announcement)?;
        for change in announcement.changes {
            requests.apply(change, &mut session, queue.as_ref())?;
        }
        if announcement.ends {
            break;
        }
        if session.has_work() {
            for event in session.step()? {
                requests.report(event, &mut session, queue.as_ref())?;
            }
        }
        if let Some(queue) = &queue {
            queue.shared.counters.set_load(session.load());
        }
    }
    session.close()
}

/// Requests under way.
#[derive(Default)]
struct Requests {
    open: HashMap<RequestId, OpenRequest>,
    of_ticket: HashMap<u64, Vec<RequestId>>,
    /// Listeners of the requests that this announcement submits, on rank 0.
    coming: HashMap<u64, Vec<Listener>>,
    /// When the grace is over, once a stop was asked for.
    deadline: Option<Instant>,
}

impl Requests {
    /// Collects the clients' commands since the last call. Waits a moment if there is nothing else to do.
    fn announcement(&mut self, queue: &mut EngineQueue, session: &Session<'_>, heeds_stop: bool) -> Announcement {
        let mut announcement = Announcement::default();
        if !session.has_work() {
            match queue.commands.recv_timeout(TICK) {
                Ok(command) => self.take(command, &mut announcement),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => announcement.ends = true, // nobody is left to ask
            }
        }
        while let Ok(command) = queue.commands.try_recv() {
            self.take(command, &mut announcement);
        }
        if heeds_stop && phase::stop_requested() {
            queue.shared.is_stopping.store(true, std::sync::atomic::Ordering::SeqCst);
        }
        if queue.shared.is_stopping.load(std::sync::atomic::Ordering::SeqCst) {
            let deadline = *self.deadline.get_or_insert_with(|| Instant::now() + queue.shared.limits.grace);
            let is_idle = !session.has_work() && announcement.changes.is_empty() && self.open.is_empty();
            announcement.ends |= is_idle || Instant::now() >= deadline;
        }
        if announcement.ends {
            self.end(&mut announcement, queue);
        }
        announcement
    }

    fn take(&mut self, command: EngineCommand, announcement: &mut Announcement) {
        match command {
            EngineCommand::Submit { ticket, first_choice, wanted, updates, at } => {
                let listener = Listener { first_choice, updates, at, has_begun: false };
                self.coming.entry(ticket).or_default().push(listener);
                announcement.changes.push(RequestChange::Submit(ticket, wanted));
            }
            EngineCommand::Cancel { ticket } => announcement.changes.push(RequestChange::Cancel(ticket)),
        }
    }

    /// Tells those who wait that they will not be answered, and ends what is under way on every rank.
    fn end(&mut self, announcement: &mut Announcement, queue: &EngineQueue) {
        let open = self.open.values().filter_map(|open| open.listener.as_ref());
        for listener in open.chain(self.coming.values().flatten()) {
            let refusal = Refusal::new(503, "the server stopped before the completion ended");
            let _ = listener.updates.send(RequestUpdate::Refused(refusal));
            Counters::add(&queue.shared.counters.failed, 1);
        }
        self.coming.clear();
        announcement.changes = self.of_ticket.keys().map(|&ticket| RequestChange::Cancel(ticket)).collect();
    }

    fn apply(&mut self, change: RequestChange, session: &mut Session<'_>, queue: Option<&EngineQueue>) -> Result<()> {
        match change {
            RequestChange::Submit(ticket, wanted) => {
                let mut coming = self.coming.remove(&ticket).unwrap_or_default();
                let listener = (!coming.is_empty()).then(|| coming.remove(0));
                if !coming.is_empty() {
                    self.coming.insert(ticket, coming);
                }
                let num_tokens = wanted.token_ids.len();
                match session.submit(wanted.request()) {
                    Ok(request) => {
                        if let Some(queue) = queue {
                            Counters::add(&queue.shared.counters.prompt_tokens, num_tokens);
                        }
                        self.open.insert(request, OpenRequest { ticket, listener });
                        self.of_ticket.entry(ticket).or_default().push(request);
                    }
                    Err(Error::InvalidArgument { expected, got, .. }) => {
                        if let Some(listener) = listener {
                            let refusal = Refusal::new(400, format!("expected {expected}, got {got}"));
                            let _ = listener.updates.send(RequestUpdate::Refused(refusal));
                        }
                    }
                    Err(error) => return Err(error),
                }
            }
            RequestChange::Cancel(ticket) => {
                for request in self.of_ticket.remove(&ticket).unwrap_or_default() {
                    self.open.remove(&request);
                    session.remove(request)?;
                    if let Some(queue) = queue {
                        Counters::add(&queue.shared.counters.cancelled, 1);
                    }
                }
            }
        }
        Ok(())
    }

    fn report(&mut self, event: Event, session: &mut Session<'_>, queue: Option<&EngineQueue>) -> Result<()> {
        let request = event.request();
        let Some(open) = self.open.get_mut(&request) else { return Ok(()) };
        let ends = matches!(event, Event::Complete { .. } | Event::Failed { .. });
        let is_removed = matches!(event, Event::Failed { .. });
        if let (Some(queue), Some(listener)) = (queue, &mut open.listener) {
            listener.hear(event, session, &queue.shared.counters);
        }
        if ends {
            let ticket = open.ticket;
            self.open.remove(&request);
            if let Some(of_ticket) = self.of_ticket.get_mut(&ticket) {
                of_ticket.retain(|other| *other != request);
                if of_ticket.is_empty() {
                    self.of_ticket.remove(&ticket);
                }
            }
            if !is_removed {
                session.remove(request)?;
            }
        }
        Ok(())
    }
}

impl Listener {
    /// A listener that is gone has cancelled, which comes with the next turn.
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
