//! Mistral: Llama with a sliding window.

use super::{Names, Traits, Whole, Window, llama};

pub(super) const TRAITS: Traits = Traits {
    architecture: "MistralForCausalLM",
    model_type: "mistral",
    window: Window::Always(4096),
    whole: Some(Whole {
        names: Names { architecture: "Mistral3ForConditionalGeneration", model_type: "mistral3" },
        decoder: "language_model.model",
        head: "language_model.lm_head.weight",
        kept: &["vision_tower.", "multi_modal_projector."],
    }),
    ..llama::TRAITS
};
