//! Views of the head's flat unit, as weights or as gradients.

use tch::Tensor;

use crate::model::{EmbeddingParams, HeadParams, ParamTable, Unit};

/// Weights or gradients of the head, with the output embedding: its own, or the input embedding's if tied.
pub(super) struct Head {
    pub(super) params: HeadParams,
    pub(super) table: Tensor, // [V, D]
}

impl Head {
    /// Views the head's flat unit and, if tied, the embedding's.
    pub(super) fn view(units: &ParamTable, flat: &Tensor, embedding: Option<&Tensor>) -> Self {
        let params = HeadParams::view(units.unit(Unit::Head), flat);
        let own = params.lm_head.as_ref().map(Tensor::shallow_clone);
        let tied = || Some(EmbeddingParams::view(units.unit(Unit::Embedding), embedding?).table);
        let table = own.or_else(tied).expect("a head without a table is tied, and the embedding was given");
        Self { params, table }
    }
}
