//! Processing that the draws of a step need beside the temperature.

use super::inputs::Packing;
use crate::rollout::filters;

/// The processing of logits, beside the temperature, that some draw of a step needs. Other draws pass through it unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Processing {
    /// min-p, top-k or top-p are on.
    pub(super) filters: bool,
    /// There is a repetition penalty.
    pub(super) penalises: bool,
    /// A structure allows some tokens alone.
    pub(super) masks: bool,
}

impl Processing {
    /// For the runs of a step, those included that draw nothing yet: a penalty needs their tokens later.
    pub(super) fn of(packing: &Packing) -> Self {
        let params = || packing.step.runs.iter().map(|run| &packing.sequences[run.sequence].params);
        Self {
            filters: params().any(|params| filters::is_active(params) && params.temperature > 0.0),
            penalises: params().any(|params| params.repetition_penalty != 1.0),
            masks: packing.draws.iter().any(|draw| draw.allowed.is_some()),
        }
    }
}
