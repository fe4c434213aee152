//! Long work on some ranks while the others wait.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::Duration;

use crate::error::Result;
use crate::phase;
use crate::ranks::{World, any_rank};

/// Interval at which working ranks synchronise with the waiting ones.
const MEET: Duration = Duration::from_millis(20);

/// Runs `work` in a thread on the ranks that pass it. The others wait while it reports progress, and return the default. Needed because reading a
/// whole checkpoint may take longer than a collective's time limit. Collective over the world.
pub fn while_others_wait<T: Send + Default>(
    world: &World,
    work: Option<impl FnOnce(&mut dyn FnMut()) -> Result<T> + Send>,
) -> Result<T> {
    let (group, moves) = (world.group(), AtomicU64::new(0));
    let moved = || {
        phase::beat();
        moves.fetch_add(1, Ordering::Relaxed);
    };
    std::thread::scope(|scope| {
        let working = work.map(|work| scope.spawn(|| work(&mut { moved })));
        let is_done = || working.as_ref().is_none_or(ScopedJoinHandle::is_finished);
        let mut seen = 0;
        loop {
            // Synchronise only after progress, so that the others' time limit applies if the disk hangs.
            while !is_done() && moves.load(Ordering::Relaxed) == seen {
                std::thread::sleep(MEET);
            }
            seen = moves.load(Ordering::Relaxed);
            if !any_rank(&*group, !is_done())? {
                break;
            }
        }
        working.map_or_else(|| Ok(T::default()), |done| done.join().unwrap_or_else(|panic| resume_unwind(panic)))
    })
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::error::Error;
    use crate::ranks::testing;

    #[test]
    fn a_rank_that_makes_progress_may_exceed_the_collective_timeout() {
        let timeout = Duration::from_secs(1);
        let made = testing::worlds_with(3, 4096, timeout, |world| {
            let rank = world.rank();
            let work = move |moved: &mut dyn FnMut()| {
                let start = Instant::now();
                while start.elapsed() < 2 * timeout {
                    std::thread::sleep(Duration::from_millis(10));
                    moved();
                }
                Ok(Some(rank))
            };
            while_others_wait(&world, (rank == 0).then_some(work)).unwrap()
        });
        assert_eq!(made, [Some(0), None, None]);
    }

    #[test]
    fn an_error_of_rank_0_reaches_the_waiting_ranks() {
        let errors = testing::worlds(2, |world| {
            let fail = |_: &mut dyn FnMut()| Err::<(), _>(Error::NonFinite { message: "a test".to_owned() });
            world.agree(while_others_wait(&world, (world.rank() == 0).then_some(fail))).unwrap_err()
        });
        assert!(matches!(errors[0], Error::NonFinite { .. }), "{}", errors[0]);
        assert!(matches!(errors[1], Error::PeerFailed { rank: 0, .. }), "{}", errors[1]);
    }
}
