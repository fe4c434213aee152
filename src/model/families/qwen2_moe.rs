//! Qwen1.5 and Qwen2 with experts: Qwen2's attention, and in its layers a router with experts in place of the MLP, beside one expert that
//! every token goes to.

use super::{Traits, Window, qwen2};

pub(super) const TRAITS: Traits = Traits {
    architecture: "Qwen2MoeForCausalLM",
    model_type: "qwen2_moe",
    window: Window::Refused,
    has_experts: true,
    has_shared_expert: true,
    ..qwen2::TRAITS
};
