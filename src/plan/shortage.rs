//! The shortage of a plan that does not fit.

use super::MemoryPlan;
use crate::error::Error;

/// Why a rank cannot hold a run.
#[derive(Debug)]
pub(super) enum MemoryShortage {
    /// A value that no memory would mend.
    Value(Error),
    /// Memory, which this plan lacks.
    Memory(Box<MemoryPlan>),
}

impl MemoryShortage {
    /// The closer of this shortage and an earlier one: on the device, then on the host, then in what the device holds.
    pub(super) fn closer(self, earlier: Option<Self>) -> Self {
        match (self, earlier) {
            (Self::Memory(own), Some(Self::Memory(other))) if other.shortage() < own.shortage() => Self::Memory(other),
            (own, _) => own,
        }
    }
}

impl MemoryPlan {
    /// Bytes that lack on the device, else on the host.
    fn shortage(&self) -> (usize, usize) {
        let device = self.peak_bytes().saturating_sub(self.room.available_bytes);
        (device, self.swapped_bytes().saturating_sub(self.room.swap_bytes.unwrap_or(usize::MAX)))
    }
}
