//! Generation batches, with the place in the data before each was drawn.

use super::carry::Carry;
use super::verdict::Tally;
use crate::checkpoint::CarriedGroup;
use crate::data::SamplerState;
use crate::reward::RewardTicket;
use crate::types::RolloutGroup;

/// A generation batch to sample.
#[derive(Debug)]
pub(super) struct GenerationBatch {
    /// Groups that this rank begins or continues.
    pub begun: Vec<CarriedGroup>,
    /// These groups in the engine's format.
    pub groups: Vec<RolloutGroup>,
    pub before: DataPosition,
}

/// The place in the data before a batch was drawn.
#[derive(Debug, Clone)]
pub(super) struct DataPosition {
    pub sampler: SamplerState,
    pub carried: Vec<CarriedGroup>,
}

/// New groups of the same rows, without sampled tokens.
pub(super) fn begun_anew(groups: &[CarriedGroup]) -> Vec<CarriedGroup> {
    groups.iter().map(|group| CarriedGroup::new(group.row)).collect()
}

/// A group of this rank, with its place among the groups of all ranks in the order of the data.
#[derive(Debug)]
pub(super) struct PlacedGroup {
    pub place: u32,
    pub group: RolloutGroup,
}

/// A sampled batch before its training. It may have been sampled during the previous batch's update, with the weights from before that.
#[derive(Debug)]
pub(super) struct SampledBatch {
    /// This rank's groups.
    pub groups: Vec<RolloutGroup>,
    /// The place of each group in the order of the data; empty if that is the order of ranks.
    pub places: Vec<u32>,
    /// This rank's groups that are left out of training.
    pub dropped: Vec<PlacedGroup>,
    /// Counts over the groups of all ranks, if some may be left out.
    pub tally: Option<Tally>,
    /// Tickets of the rewards that are still awaited, one per group; `None` if the rewards are there.
    pub tickets: Option<Vec<RewardTicket>>,
    pub before: DataPosition,
    pub carry: Carry,
}

impl SampledBatch {
    /// A batch in which no group is left out.
    pub fn of_groups(groups: Vec<RolloutGroup>, tickets: Vec<RewardTicket>, before: DataPosition) -> Self {
        let (places, dropped, carry) = (Vec::new(), Vec::new(), Carry::default());
        Self { groups, places, dropped, tally: None, tickets: Some(tickets), before, carry }
    }
}
