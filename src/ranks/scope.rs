//! Scopes that all ranks enter and leave together, whatever the outcome on each.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use super::World;
use crate::error::{Error, Result, panic_message};
use crate::phase::{self, Phase};

impl World {
    /// Runs `work` on `state` and then, whatever the outcome, `leave`, which must not need other ranks. Collective over the world. Because ranks wait
    /// for each other, the steps at the end have this order:
    ///
    /// 1. Post a failure at once, because peers may wait for this rank in a collective, and `leave` may wait for a device that this collective
    ///    blocks.
    /// 2. Leave. This rank's copies run while others still work, and a failure of `leave` is part of the agreement, too.
    /// 3. Agree with all ranks. A rank that reaches this point has left.
    /// 4. After a failure run `recover`: other ranks have released their resources by now. A panic continues to unwind.
    ///
    /// # Errors
    /// The first failure of any rank: the failing rank gets its own error, its peers [`Error::PeerFailed`]. No rank is left waiting in a collective,
    /// and the next scope can be entered.
    pub(crate) fn scope<S, T>(
        &self,
        place: &'static str,
        state: &mut S,
        work: impl FnOnce(&mut S) -> Result<T>,
        leave: impl FnOnce(&mut S) -> Result<()>,
        recover: impl FnOnce(&mut S),
    ) -> Result<T> {
        let mut panic = None;
        let outcome = caught(place, &mut panic, || work(state)).inspect_err(|error| self.post_failure(error));
        let left = caught(place, &mut panic, || leave(state));
        let outcome = outcome.and_then(|value| left.map(|()| value));
        let agreed = phase::scope(Phase::Idle, || self.agree(outcome)).inspect_err(|_| recover(state));
        panic.map_or(agreed, |payload| resume_unwind(payload))
    }
}

/// Runs `work` and converts a panic to an error; keeps the payload of the first panic.
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
