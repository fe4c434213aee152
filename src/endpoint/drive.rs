//! The engine's loop. Every rank runs it; rank 0 alone has the clients' queue.

use std::sync::atomic::Ordering;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use super::announce::{Announcement, announce};
use super::client::EngineQueue;
use super::requests::Requests;
use crate::dist::World;
use crate::error::Result;
use crate::phase;
use crate::rollout::{RolloutEngine, Session};

/// How long an idle engine waits for a command before it shows that it is alive.
const TICK: Duration = Duration::from_millis(50);

/// Serves the queue's clients with the engine until the process is asked to stop, or a client asks for it; requests under way are
/// answered first, as long as the grace lasts. Collective over the world, whose ranks share the engine.
///
/// # Errors
/// The errors of [`Session::step`] and of the collectives. Clients that wait are told that the engine is gone.
pub fn drive(engine: &mut RolloutEngine<'_>, world: &World, queue: Option<EngineQueue>) -> Result<()> {
    let mut session = engine.session()?;
    let mut requests = Requests::new(world.rank(), queue.as_ref().map(EngineQueue::shared), false);
    let mut deadline = None;
    for number in 0.. {
        phase::beat();
        let announcement = match &queue {
            Some(queue) => announcement(queue, &mut requests, &session, &mut deadline),
            None => Announcement::default(),
        };
        let announcement = announce(world, number, announcement)?;
        for change in announcement.changes {
            requests.apply(change, 0, &mut session)?;
        }
        if announcement.ends {
            break;
        }
        if session.has_work() {
            for event in session.step()? {
                requests.report(event, &mut session)?;
            }
        }
        if let Some(queue) = &queue {
            queue.shared.counters.set_load(session.load());
        }
    }
    session.close()
}

/// Collects the clients' commands since the last call. Waits a moment if there is nothing else to do. `deadline` is when the grace is
/// over, once a stop was asked for.
fn announcement(
    queue: &EngineQueue,
    requests: &mut Requests,
    session: &Session<'_>,
    deadline: &mut Option<Instant>,
) -> Announcement {
    let mut announcement = Announcement::default();
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
