//! Mistral: Llama with a sliding window.

use super::{Traits, Window, llama};

pub(super) const TRAITS: Traits =
    Traits { architecture: "MistralForCausalLM", model_type: "mistral", window: Window::Always(4096), ..llama::TRAITS };
