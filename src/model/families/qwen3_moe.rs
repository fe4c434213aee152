//! Qwen3 MoE: Qwen3's attention, with a router and experts in place of the MLP.

use super::{Traits, Window, qwen3};

pub(super) const TRAITS: Traits = Traits {
    architecture: "Qwen3MoeForCausalLM",
    model_type: "qwen3_moe",
    window: Window::SwitchedForAll,
    has_experts: true,
    head_dim: None,
    ..qwen3::TRAITS
};
