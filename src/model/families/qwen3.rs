//! Qwen3: Qwen2 without biases, with a norm of every query and key head.

use super::{Traits, qwen2};
use crate::model::spec::QkNorm;

pub(super) const TRAITS: Traits = Traits {
    architecture: "Qwen3ForCausalLM",
    model_type: "qwen3",
    qkv_bias: false,
    qk_norm: Some(QkNorm::Head),
    head_dim: Some(128),
    ..qwen2::TRAITS
};
