//! Qwen3.5 and 3.6: gated delta nets, and in every so many-th layer attention with an output gate whose heads are turned in part; norms
//! that scale by 1 + weight.

use super::{Names, Traits, Whole, Window, qwen3};

pub(super) const TRAITS: Traits = Traits {
    architecture: "Qwen3_5ForCausalLM",
    model_type: "qwen3_5_text",
    head_dim: Some(256),
    window: Window::Never,
    has_delta_nets: true,
    zero_centred_norms: true,
    rotary_factor: Some(0.25),
    whole: Some(WHOLE),
    ..qwen3::TRAITS
};

/// With a vision tower.
pub(super) const WHOLE: Whole = Whole {
    names: Names { architecture: "Qwen3_5ForConditionalGeneration", model_type: "qwen3_5" },
    decoder: "model.language_model",
    head: "lm_head.weight",
    kept: &["model.visual."],
};
