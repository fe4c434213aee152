//! Phi-3 and Phi-4 (arXiv 2404.14219, 2412.08905): Llama with queries, keys and values in one tensor and gate and up in another; only part of each
//! head may be rotated.

use serde_json::{Value, json};

use super::{FusedTensor, Traits, Window, llama};
use crate::config::TargetModule::{GateProj, KProj, QProj, UpProj, VProj};
use crate::error::Result;
use crate::model::json::JsonObject;
use crate::model::spec::ModelSpec;

pub(super) const TRAITS: Traits = Traits {
    architecture: "Phi3ForCausalLM",
    model_type: "phi3",
    window: Window::Always(WINDOW_OF_PHI_3_MINI),
    rotary_factor: Some(1.0),
    fused_tensors: &[
        FusedTensor { name: "self_attn.qkv_proj", modules: &[QProj, KProj, VProj] },
        FusedTensor { name: "mlp.gate_up_proj", modules: &[GateProj, UpProj] },
    ],
    defaults: || json!({"sliding_window": null}),
    read,
    write,
    ..llama::TRAITS
};

const WINDOW_OF_PHI_3_MINI: usize = 2047;

/// Refuses scaled rotary frequencies. They are LongRoPE's under any name; LongRoPE changes the frequencies of all tokens once a sequence is long.
fn read(config: &JsonObject, spec: ModelSpec) -> Result<ModelSpec> {
    match spec.attention().rope.is_some_and(|rope| rope.scaling.is_some()) {
        false => Ok(spec),
        true => Err(config
            .wrong("rope_scaling", "null: LongRoPE is not supported (its frequencies depend on the longest sequence)")),
    }
}

/// Writes the key of the partial rotary embedding where transformers 4 reads it.
fn write(_spec: &ModelSpec, config: &mut Value) {
    config["partial_rotary_factor"] = config["rope_parameters"]["partial_rotary_factor"].clone();
}
