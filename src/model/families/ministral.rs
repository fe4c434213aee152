//! Ministral: Mistral with a sliding window in the layers that `layer_types` lists, or in all.

use serde_json::json;

use super::{Traits, Window, mistral};

pub(super) const TRAITS: Traits = Traits {
    architecture: "MinistralForCausalLM",
    model_type: "ministral",
    window: Window::Patterned(usize::MAX),
    defaults: || json!({"sliding_window": 4096}),
    whole: None,
    ..mistral::TRAITS
};
