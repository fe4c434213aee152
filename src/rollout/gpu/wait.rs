//! How the host waits for the device.

use crate::error::Result;
use crate::ranks::Collective;

/// Between two looks at whether a copy is done. Gives up when a peer has failed: what is recorded would wait for it.
pub(super) fn wait(all: &dyn Collective) -> Result<()> {
    std::thread::yield_now();
    all.epoch().map(|_| ())
}
