//! Clients of an engine on other threads: they submit requests, receive updates, and cancel a request by dropping its handle.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::counters::Counters;
use super::refusal::Refusal;
use crate::rollout::Request;
use crate::tools::GroupKey;
use crate::types::{FinishReason, TokenLogprob, Trajectory};

/// Limits on open requests.
#[derive(Debug, Clone, Copy)]
pub struct ClientLimits {
    /// Largest number of waiting or running completions. Further requests are rejected.
    pub max_queue: usize,
    /// How long open requests may continue after the engine is asked to stop.
    pub grace: Duration,
}

/// An update about a request. Choices are numbered over all prompts of the request.
#[derive(Debug, Clone, PartialEq)]
pub enum RequestUpdate {
    /// A choice got a new token.
    Token {
        /// Index of the choice.
        choice: usize,
        /// Id of the sampled token.
        token_id: u32,
        /// Log-probability of the token in nats.
        logprob: f32,
        /// The most probable tokens; their number was requested.
        top_logprobs: Vec<TokenLogprob>,
    },
    /// A choice of the request ended.
    Finished {
        /// Index of the choice.
        choice: usize,
        /// Why the choice ended.
        reason: FinishReason,
        /// All tokens after the prompt, with log-probabilities and other recorded data.
        trajectory: Box<Trajectory>,
    },
    /// The request is invalid, or will not be completed.
    Refused(Refusal),
}

/// A command to the engine's loop.
#[derive(Debug)]
pub(super) enum EngineCommand {
    Submit { ticket: u64, wanted: Box<Request>, listener: Listener },
    Cancel { ticket: u64 },
}

/// The receiver of a request's updates.
#[derive(Debug)]
pub(super) struct Listener {
    pub first_choice: usize,
    pub updates: UnboundedSender<RequestUpdate>,
    /// Time of the submission.
    pub at: Instant,
    pub has_begun: bool,
    /// The request, if it is kept for a later session.
    pub wanted: Option<Box<Request>>,
}

impl EngineCommand {
    /// The group of the submitted request; `None` for other commands.
    pub(super) fn group(&self) -> Option<GroupKey> {
        match self {
            Self::Submit { wanted, .. } => Some(wanted.group()),
            Self::Cancel { .. } => None,
        }
    }
}

/// State shared by clients and the engine's loop.
#[derive(Debug)]
pub(super) struct ClientShared {
    pub limits: ClientLimits,
    pub counters: Counters,
    pub is_stopping: AtomicBool,
    /// Number of open completions, including those of cancelled requests that the engine has not removed yet.
    num_open: AtomicUsize,
    next_ticket: AtomicU64,
}

/// Submits requests to an engine. There may be any number of clients.
#[derive(Debug, Clone)]
pub struct EngineClient {
    commands: Sender<EngineCommand>,
    pub(super) shared: Arc<ClientShared>,
}

/// The engine's end of the channel: receives the clients' commands.
#[derive(Debug)]
pub struct EngineQueue {
    pub(super) commands: Receiver<EngineCommand>,
    pub(super) shared: Arc<ClientShared>,
}

impl EngineQueue {
    /// The state that the engine shares with its clients.
    pub(super) fn shared(&self) -> Arc<ClientShared> {
        Arc::clone(&self.shared)
    }
}

/// Handle of an open request. Dropping it cancels the request.
#[derive(Debug)]
pub struct RequestHandle {
    id: u64,
    num_choices: usize,
    updates: UnboundedReceiver<RequestUpdate>,
    client: EngineClient,
}

/// Both ends of a channel between clients and an engine.
#[derive(Debug)]
pub struct EngineChannel {
    /// The clients' end, which submits requests.
    pub client: EngineClient,
    /// The engine's end, which receives commands.
    pub queue: EngineQueue,
}

/// Creates a channel between clients and an engine.
pub fn engine_channel(limits: ClientLimits) -> EngineChannel {
    let (commands, received) = channel();
    let shared = Arc::new(ClientShared {
        limits,
        counters: Counters::default(),
        is_stopping: AtomicBool::new(false),
        num_open: AtomicUsize::new(0),
        next_ticket: AtomicU64::new(0),
    });
    let client = EngineClient { commands, shared: shared.clone() };
    EngineChannel { client, queue: EngineQueue { commands: received, shared } }
}

impl EngineClient {
    /// Submits requests as one; their choices are numbered consecutively.
    ///
    /// # Errors
    /// A [`Refusal`] if too many completions are open (429), or the engine is stopping (503).
    pub fn submit(&self, requests: &[Request]) -> Result<RequestHandle, Refusal> {
        let shared = &self.shared;
        if shared.is_stopping.load(Ordering::SeqCst) {
            return Err(stopping());
        }
        let num_choices: usize = requests.iter().map(|request| request.params.num_generations).sum();
        let max_queue = shared.limits.max_queue;
        let fits = |open: usize| open.checked_add(num_choices).filter(|open| *open <= max_queue);
        shared.num_open.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fits).map_err(|open| {
            let message = format!("{open} completions are waiting or running, and {num_choices} more are over --max_queue {max_queue}; try again later");
            Refusal::new(429, message)
        })?;
        let (sender, updates) = unbounded_channel();
        let id = shared.next_ticket.fetch_add(1, Ordering::Relaxed);
        let ticket = RequestHandle { id, num_choices, updates, client: self.clone() };
        let mut first_choice = 0;
        for request in requests {
            let (updates, at) = (sender.clone(), Instant::now());
            let listener = Listener { first_choice, updates, at, has_begun: false, wanted: None };
            let submit = EngineCommand::Submit { ticket: id, wanted: Box::new(request.clone()), listener };
            self.commands.send(submit).map_err(|_| stopping())?;
            first_choice += request.params.num_generations;
        }
        Ok(ticket)
    }

    /// Rejects further requests, and ends the engine's loop after open requests are answered.
    pub fn stop(&self) {
        self.shared.is_stopping.store(true, Ordering::SeqCst);
    }

    /// Whether further requests are rejected.
    pub fn is_stopping(&self) -> bool {
        self.shared.is_stopping.load(Ordering::SeqCst)
    }
}

fn stopping() -> Refusal {
    Refusal::new(503, "the server is stopping and accepts no more requests")
}

impl RequestHandle {
    /// The next update; `None` once the engine has ended, or all choices have.
    pub async fn next(&mut self) -> Option<RequestUpdate> {
        self.updates.recv().await
    }

    /// Like [`RequestHandle::next`], but blocks the calling thread.
    pub fn wait(&mut self) -> Option<RequestUpdate> {
        self.updates.blocking_recv()
    }

    pub(super) fn poll(&mut self, cx: &mut std::task::Context<'_>) -> std::task::Poll<Option<RequestUpdate>> {
        self.updates.poll_recv(cx)
    }

    /// An update that has already arrived; does not wait.
    pub(super) fn ready(&mut self) -> Option<RequestUpdate> {
        self.updates.try_recv().ok()
    }
}

impl Drop for RequestHandle {
    fn drop(&mut self) {
        self.client.shared.num_open.fetch_sub(self.num_choices, Ordering::SeqCst);
        let _ = self.client.commands.send(EngineCommand::Cancel { ticket: self.id }); // an engine that is gone has ended it
    }
}
