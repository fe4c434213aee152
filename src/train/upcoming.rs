//! The order in which passes need the units of a model.

use crate::model::{ModelSpec, Unit};

/// The units to gather while a pass uses `unit`: those that it needs next.
pub(super) fn upcoming(spec: &ModelSpec, unit: Unit, is_backward: bool) -> Vec<Unit> {
    match (unit, is_backward) {
        (Unit::Embedding, false) => vec![Unit::Block(0)],
        (Unit::Block(layer), false) if layer + 1 < spec.num_layers() => vec![Unit::Block(layer + 1)],
        (Unit::Block(_), false) => head_units(spec),
        (Unit::Head, true) => spec.num_layers().checked_sub(1).map(Unit::Block).into_iter().collect(),
        (Unit::Block(layer), true) => layer.checked_sub(1).map(Unit::Block).into_iter().collect(),
        (Unit::Head, false) | (Unit::Embedding, true) | (Unit::DraftHead, _) => Vec::new(),
    }
}

/// The units that the head's logits need.
pub(super) fn head_units(spec: &ModelSpec) -> Vec<Unit> {
    if spec.tie_word_embeddings { vec![Unit::Embedding, Unit::Head] } else { vec![Unit::Head] }
}
