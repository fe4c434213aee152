//! OLMo 2 (arXiv 2501.00656): norms of the sublayers' outputs, and norms over all heads of queries and keys together.

use super::{Traits, llama};
use crate::model::spec::{NormPlaces, QkNorm};

pub(super) const TRAITS: Traits = Traits {
    architecture: "Olmo2ForCausalLM",
    model_type: "olmo2",
    qk_norm: Some(QkNorm::All),
    norms: NormPlaces::POST,
    ..llama::TRAITS
};
