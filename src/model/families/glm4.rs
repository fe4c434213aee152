//! GLM-4 of 2025: GLM-4 of 2024 plus norms of the sublayers' outputs.

use super::{Traits, glm};
use crate::model::spec::{NormPlaces, ParamName};

pub(super) const TRAITS: Traits = Traits {
    architecture: "Glm4ForCausalLM",
    model_type: "glm4",
    norms: NormPlaces::BOTH,
    tensor_names: &[
        (ParamName::MixerPostNorm, "post_self_attn_layernorm.weight"),
        (ParamName::MlpPostNorm, "post_mlp_layernorm.weight"),
    ],
    ..glm::TRAITS
};
