//! Qwen2 and Qwen2.5: Llama with biases on query, key and value.

use super::{Traits, Window, llama};

pub(super) const TRAITS: Traits = Traits {
    architecture: "Qwen2ForCausalLM",
    model_type: "qwen2",
    qkv_bias: true,
    window: Window::Switched,
    ..llama::TRAITS
};
