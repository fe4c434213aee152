//! Granite 3: Llama with multipliers of the embedding, of attention scores, of sublayers' outputs, and of logits.

use serde_json::{Value, json};

use super::{Traits, llama};
use crate::error::Result;
use crate::model::json::JsonObject;
use crate::model::spec::ModelSpec;

pub(super) const TRAITS: Traits =
    Traits { architecture: "GraniteForCausalLM", model_type: "granite", read, write, ..llama::TRAITS };

/// Reads the multipliers; an absent one is 1, as in transformers.
fn read(config: &JsonObject, spec: ModelSpec) -> Result<ModelSpec> {
    let factor = |key| if config.has(key) { config.positive(key) } else { Ok(1.0) };
    let (scale, residual_scale) = (factor("attention_multiplier")?, factor("residual_multiplier")?);
    let spec = ModelSpec {
        embedding_multiplier: factor("embedding_multiplier")?,
        logits_scaling: factor("logits_scaling")?,
        ..spec
    };
    let spec = spec.map_attention(|_, attention| attention.scale = scale);
    Ok(spec.map_blocks(|_, block| block.residual_scale = residual_scale))
}

fn write(spec: &ModelSpec, config: &mut Value) {
    config["attention_multiplier"] = json!(spec.attention().scale);
    config["residual_multiplier"] = json!(spec.layers[0].residual_scale);
    config["embedding_multiplier"] = json!(spec.embedding_multiplier);
    config["logits_scaling"] = json!(spec.logits_scaling);
}
