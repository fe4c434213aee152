//! Runs an engine session that serves HTTP clients. Every rank runs it; only rank 0 has the clients' queue.

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

/// How long an idle engine waits for a command before it sends a heartbeat.
const TICK: Duration = Duration::from_millis(50);

/// Serves the queue's clients until the process or a client requests a stop. Open requests are then completed,
/// within the grace period. Collective over the world, whose ranks share the engine.
///
/// # Errors
/// The errors of [`RolloutEngine::run`] and of the collectives. Waiting clients get an error, too.
pub fn drive(engine: &mut RolloutEngine<'_>, world: &World, queue: Option<EngineQueue>) -> Result<()> {
    let requests = Requests::new(world.rank(), queue.as_ref().map(EngineQueue::shared), false);
    let clients = ClientTurns { world, queue, requests, num_announced: 0, deadline: None, has_ended: false };
    engine.run(Box::new(clients), &mut UntilClosed)
}

/// Session policy: the session lasts until serving ends.
struct UntilClosed;

impl SamplingPolicy<ClientTurns<'_>> for UntilClosed {
    fn next(&mut self, turns: &mut ClientTurns<'_>, _: &mut Session<'_>) -> Result<Flow> {
        Ok(if turns.has_ended { Flow::End } else { Flow::Step })
    }
}

/// Passes clients' requests to the session and updates back to the clients.
#[derive(Debug)]
struct ClientTurns<'w> {
    world: &'w World,
    /// The clients' queue; only on rank 0.
    queue: Option<EngineQueue>,
    requests: Requests,
    num_announced: u64,
    /// End of the grace period, once a stop was requested.
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
    /// Collects the clients' commands since the last call; empty on ranks without clients. Waits briefly if the engine is idle.
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
