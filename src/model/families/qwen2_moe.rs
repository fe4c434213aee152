//! Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention; in place of the MLP a router with experts, plus a shared expert.

use super::{Traits, Window, qwen2};

pub(super) const TRAITS: Traits = Traits {
    architecture: "Qwen2MoeForCausalLM",
    model_type: "qwen2_moe",
    window: Window::Refused,
    has_experts: true,
    has_shared_expert: true,
    ..qwen2::TRAITS
};
