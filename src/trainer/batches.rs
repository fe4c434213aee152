//! Generation batches: drawn, sampled, and the place in the data where each was drawn.

use super::carry::Carry;
use super::verdict::Tally;
use crate::checkpoint::CarriedGroup;
use crate::data::SamplerState;
use crate::reward::RewardTicket;
use crate::types::RolloutGroup;

/// A generation batch to be sampled.
#[derive(Debug)]
pub(super) struct GenerationBatch {
    /// Groups that this rank begins or goes on with.
    pub begun: Vec<CarriedGroup>,
    /// The groups in the form that the engine takes.
    pub groups: Vec<RolloutGroup>,
    pub before: DataPosition,
}

/// The place in the data before a batch was drawn.
#[derive(Debug, Clone)]
pub(super) struct DataPosition {
    pub sampler: SamplerState,
    pub carried: Vec<CarriedGroup>,
}

/// Groups of which nothing is sampled yet, of the same rows.
pub(super) fn begun_anew(groups: &[CarriedGroup]) -> Vec<CarriedGroup> {
    groups.iter().map(|group| CarriedGroup::new(group.row)).collect()
}

/// A group of this rank, with its place among the groups of all ranks in the order of the data.
#[derive(Debug)]
pub(super) struct PlacedGroup {
    pub place: u32,
    pub group: RolloutGroup,
}

/// A batch that is not trained on yet; it may have been sampled while the one before it was, with the weights from before that.
#[derive(Debug)]
pub(super) struct SampledBatch {
    /// This rank's groups.
    pub groups: Vec<RolloutGroup>,
    /// The place of each in the order of the data; none where the order of ranks is that.
    pub places: Vec<u32>,
    /// This rank's groups that are left out.
    pub dropped: Vec<PlacedGroup>,
    /// Groups of all ranks, where some may be left out.
    pub tally: Option<Tally>,
    /// Tickets of the rewards that are still to be awaited, one a group; none where they are there.
    pub tickets: Option<Vec<RewardTicket>>,
    pub before: DataPosition,
    pub carry: Carry,
}

impl SampledBatch {
    /// A batch that takes all of its groups.
    pub fn of_groups(groups: Vec<RolloutGroup>, tickets: Vec<RewardTicket>, before: DataPosition) -> Self {
        let (places, dropped, carry) = (Vec::new(), Vec::new(), Carry::default());
        Self { groups, places, dropped, tally: None, tickets: Some(tickets), before, carry }
    }
}
