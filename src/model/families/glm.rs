//! GLM-4 of 2024: Llama with biases on query, key and value, a rotary embedding on half of each head's columns in adjacent pairs, and gate and up in
//! one tensor.

use serde_json::{Value, json};

use super::{FusedTensor, Traits, llama};
use crate::config::TargetModule::{GateProj, UpProj};
use crate::model::spec::ModelSpec;

pub(super) const TRAITS: Traits = Traits {
    architecture: "GlmForCausalLM",
    model_type: "glm",
    qkv_bias: true,
    has_attention_bias: true,
    head_dim: Some(128),
    rotary_factor: Some(0.5),
    turns_pairs: true,
    fused_tensors: &[FusedTensor { name: "mlp.gate_up_proj", modules: &[GateProj, UpProj] }],
    write,
    ..llama::TRAITS
};

/// Writes the keys of biases and of the partial rotary embedding where transformers 4 reads them.
fn write(spec: &ModelSpec, config: &mut Value) {
    config["attention_bias"] = json!(spec.attention().qkv_bias);
    config["partial_rotary_factor"] = config["rope_parameters"]["partial_rotary_factor"].clone();
}
