//! Qwen3-Next: Qwen3.5 with experts, but that some layers may have none, and that the projections of a gated delta net lie together in two
//! tensors.

use super::{Traits, qwen3_5_moe};

pub(super) const TRAITS: Traits = Traits {
    architecture: "Qwen3NextForCausalLM",
    model_type: "qwen3_next",
    divides_by_choices: false,
    interleaves_delta_nets: true,
    whole: None,
    ..qwen3_5_moe::TRAITS
};
