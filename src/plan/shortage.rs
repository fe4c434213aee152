//! The shortage of a plan that does not fit.

use super::MemoryPlan;
use crate::error::Error;

/// Why a run does not fit on a rank.
#[derive(Debug)]
pub(super) enum MemoryShortage {
    /// An invalid value, which more memory would not help.
    Value(Error),
    /// Not enough memory for this plan.
    Memory(Box<MemoryPlan>),
}

impl MemoryShortage {
    /// The smaller of this shortage and an earlier one: compared by device bytes, then host bytes, then the bytes held on the device.
    pub(super) fn closer(self, earlier: Option<Self>) -> Self {
        match (self, earlier) {
            (Self::Memory(own), Some(Self::Memory(other))) if other.shortage() < own.shortage() => Self::Memory(other),
            (own, _) => own,
        }
    }
}

impl MemoryPlan {
    /// Missing bytes on the device, and on the host.
    fn shortage(&self) -> (usize, usize) {
        let device = self.peak_bytes().saturating_sub(self.room.available_bytes);
        (device, self.swapped_bytes().saturating_sub(self.room.swap_bytes.unwrap_or(usize::MAX)))
    }
}
