//! Logits processing that the draws of a step need besides temperature.

use super::inputs::Packing;
use crate::rollout::filters;

/// Which logits processing, besides temperature, any draw of a step needs. Draws that do not need it pass through unchanged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(super) struct Processing {
    /// Whether min-p, top-k or top-p are on.
    pub(super) filters: bool,
    /// Whether there is a repetition penalty.
    pub(super) penalises: bool,
    /// Whether structured output allows only some tokens.
    pub(super) masks: bool,
}

impl Processing {
    /// The processing for the runs of a step, including runs that do not sample yet, because a penalty needs their tokens later.
    pub(super) fn of(packing: &Packing) -> Self {
        let params = || packing.step.runs.iter().map(|run| &packing.sequences[run.sequence].params);
        Self {
            filters: params().any(|params| filters::is_active(params) && params.temperature > 0.0),
            penalises: params().any(|params| params.repetition_penalty != 1.0),
            masks: packing.draws.iter().any(|draw| draw.allowed.is_some()),
        }
    }
}
