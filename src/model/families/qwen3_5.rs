//! Qwen3.5 and Qwen3.6: gated delta nets, and in every n-th layer attention with an output gate and a partial rotary embedding; norms multiply by 1 +
//! weight.

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

/// Names in files that also contain the vision tower.
pub(super) const WHOLE: Whole = Whole {
    names: Names { architecture: "Qwen3_5ForConditionalGeneration", model_type: "qwen3_5" },
    decoder: "model.language_model",
    head: "lm_head.weight",
    kept: &["model.visual."],
};
