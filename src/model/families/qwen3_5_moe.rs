//! Qwen3.5 and Qwen3.6 MoE: Qwen3.5's layers with a router, experts and a shared expert in place of the MLP.

use super::{Names, Traits, Whole, qwen3_5};

pub(super) const TRAITS: Traits = Traits {
    architecture: "Qwen3_5MoeForCausalLM",
    model_type: "qwen3_5_moe_text",
    has_experts: true,
    has_shared_expert: true,
    divides_by_choices: true,
    whole: Some(Whole {
        names: Names { architecture: "Qwen3_5MoeForConditionalGeneration", model_type: "qwen3_5_moe" },
        ..qwen3_5::WHOLE
    }),
    ..qwen3_5::TRAITS
};
