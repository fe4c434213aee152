//! The session of an engine that is served. Every rank runs it; rank 0 alone has the clients' queue.

use std::sync::atomic::Ordering;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use super::announce::{Announcement, announce};
use super::client::EngineQueue;
use super::requests::Requests;
use crate::error::Result;
use crate::phase;
use crate::ranks::World;
use crate::rollout::{Event, Flow, RolloutEngine, SamplingPolicy, Session, Turns};

/// How long an idle engine waits for a command before it shows that it is alive.
const TICK: Duration = Duration::from_millis(50);

/// Serves the queue's clients with the engine until the process is asked to stop, or a client asks for it; requests under way are
/// answered first, as long as the grace lasts. Collective over the world, whose ranks share the engine.
///
/// # Errors
/// The errors of [`RolloutEngine::run`] and of the collectives. Clients that wait are told that the engine is gone.
pub fn drive(engine: &mut RolloutEngine<'_>, world: &World, queue: Option<EngineQueue>) -> Result<()> {
    let requests = Requests::new(world.rank(), queue.as_ref().map(EngineQueue::shared), false);
    let clients = ClientTurns { world, queue, requests, num_announced: 0, deadline: None, has_ended: false };
    engine.run(Box::new(clients), &mut UntilClosed)
}

/// The policy of a session that lasts as long as clients are served.
struct UntilClosed;

impl SamplingPolicy<ClientTurns<'_>> for UntilClosed {
    fn next(&mut self, turns: &mut ClientTurns<'_>, _: &mut Session<'_>) -> Result<Flow> {
        Ok(if turns.has_ended { Flow::End } else { Flow::Step })
    }
}

/// Clients that take turns with the model.
#[derive(Debug)]
struct ClientTurns<'w> {
    world: &'w World,
    /// The clients' queue, on rank 0.
    queue: Option<EngineQueue>,
    requests: Requests,
    num_announced: u64,
    /// When the grace is over, once a stop was asked for.
    deadline: Option<Instant>,
    has_ended: bool,
}

impl Turns for ClientTurns<'_> {
    fn on_event(&mut self, event: Event, session: &mut Session<'_>) -> Result<()> {
        self.requests.report(event, session)
    }

    fn advance(&mut self, session: &mut Session<'_>) -> Result<Vec<usize>> {
        phase::beat();
        let announcement = self.announcement(session);
        let announcement = announce(self.world, self.num_announced, announcement)?;
        self.num_announced += 1;
        for change in announcement.changes {
            self.requests.apply(change, 0, session)?;
        }
        self.has_ended = announcement.ends;
        Ok(Vec::new())
    }
}

impl ClientTurns<'_> {
    /// Collects the clients' commands since the last call; none on ranks without clients. Waits a moment if there is nothing else to do.
    fn announcement(&mut self, session: &Session<'_>) -> Announcement {
        let Self { queue, requests, deadline, .. } = self;
        let mut announcement = Announcement::default();
        let Some(queue) = queue else { return announcement };
        queue.shared.counters.set_load(session.load());
        if !session.has_work() {
            match queue.commands.recv_timeout(TICK) {
                Ok(command) => announcement.changes.push(requests.take(command)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => announcement.ends = true, // nobody is left to ask
            }
        }
        while let Ok(command) = queue.commands.try_recv() {
            announcement.changes.push(requests.take(command));
        }
        if phase::stop_requested() {
            queue.shared.is_stopping.store(true, Ordering::SeqCst);
        }
        if queue.shared.is_stopping.load(Ordering::SeqCst) {
            let deadline = *deadline.get_or_insert_with(|| Instant::now() + queue.shared.limits.grace);
            let is_idle = !session.has_work() && announcement.changes.is_empty() && requests.is_empty();
            announcement.ends |= is_idle || Instant::now() >= deadline;
        }
        if announcement.ends {
            announcement.changes = requests.end();
        }
        announcement
    }
}
