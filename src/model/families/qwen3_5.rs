//! Qwen3.5 and 3.6: gated delta nets, and in every so many-th layer attention with an output gate whose heads are turned in part; norms
//! that scale by 1 + weight.

use super::{Names, Traits, Window, qwen3};

pub(super) const TRAITS: Traits = Traits {
    architecture: "Qwen3_5ForCausalLM",
    model_type: "qwen3_5_text",
    head_dim: Some(256),
    window: Window::Never,
    has_delta_nets: true,
    whole: Some(Names { architecture: "Qwen3_5ForConditionalGeneration", model_type: "qwen3_5" }),
    ..qwen3::TRAITS
};
