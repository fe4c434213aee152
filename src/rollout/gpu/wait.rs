//! Waiting of the host for the device.

use crate::error::Result;
use crate::ranks::Collective;

/// Yields between two checks whether a copy is done. Returns an error if a peer has failed, because queued collectives would then wait for it
/// forever.
pub(super) fn wait(all: &dyn Collective) -> Result<()> {
    std::thread::yield_now();
    all.epoch().map(|_| ())
}
