//! Scopes that all ranks enter and leave together, however they end on each of them.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use crate::dist::World;
use crate::error::{Error, Result, panic_message};
use crate::phase::{self, Phase};

/// What one rank has in such scopes.
pub(crate) trait Half {
    /// All processes.
    fn world(&self) -> &Arc<World>;

    /// Puts this rank in order after a failure of any.
    fn recover(&mut self) {}
}

/// Runs `work` on `half` and then, however that ended, `leave`, which needs no other rank; collective over the world. The order at
/// the end is that of who waits for whom:
///
/// 1. A failure is told at once: peers may wait for this rank in a collective, and leaving for a device that such a collective holds.
/// 2. This rank leaves: its copies run while others still work, and a failure of that is an outcome to agree on, too.
/// 3. All agree. A rank that has come so far has left.
/// 4. After a failure each rank recovers: what another held, it can have now. A panic goes on unwinding.
///
/// # Errors
/// The first failure of any rank: the failing rank gets its own error, its peers [`Error::PeerFailed`]; none is left waiting in a
/// collective, and the next scope can be entered.
pub(crate) fn together<H: Half, T>(
    half: &mut H,
    place: &'static str,
    work: impl FnOnce(&mut H) -> Result<T>,
    leave: impl FnOnce(&mut H) -> Result<()>,
) -> Result<T> {
    let (world, mut panic) = (half.world().clone(), None);
    let outcome = caught(place, &mut panic, || work(half)).inspect_err(|error| world.post_failure(error));
    let left = caught(place, &mut panic, || leave(half));
    let outcome = outcome.and_then(|value| left.map(|()| value));
    let agreed = phase::scope(Phase::Idle, || world.agree(outcome)).inspect_err(|_| half.recover());
    panic.map_or(agreed, |payload| resume_unwind(payload))
}

/// Runs `work`; a panic becomes an error, and its payload is kept if it is the first.
fn caught<T>(
    place: &'static str,
    panic: &mut Option<Box<dyn Any + Send>>,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|payload| {
        let message = panic_message(&*payload);
        panic.get_or_insert(payload);
        Err(Error::of_panic(place, message))
    })
}
