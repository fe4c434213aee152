//! OLMo 2: norms behind the sublayers, and over all heads of queries and keys (arXiv 2501.00656).

use super::{Traits, llama};
use crate::model::spec::{NormPlaces, QkNorm};

pub(super) const TRAITS: Traits = Traits {
    architecture: "Olmo2ForCausalLM",
    model_type: "olmo2",
    qk_norm: Some(QkNorm::All),
    norms: NormPlaces::POST,
    ..llama::TRAITS
};
