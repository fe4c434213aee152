//! SmolLM3 (arXiv 2501.18795): Llama without a rotary embedding in some layers, which may have a sliding window instead.

use serde_json::{Value, json};

use super::{Traits, Window, llama};
use crate::error::Result;
use crate::model::json::JsonObject;
use crate::model::spec::{BlockSpec, Mixer, ModelSpec};

pub(super) const TRAITS: Traits = Traits {
    architecture: "SmolLM3ForCausalLM",
    model_type: "smollm3",
    window: Window::Listed,
    defaults: || json!({"rope_theta": 2e6}),
    read,
    write,
    ..llama::TRAITS
};

/// Key: for every layer 1 if it has a rotary embedding, else 0.
const KEY: &str = "no_rope_layers";
/// Key: without the list, every n-th layer has no rotary embedding.
const INTERVAL: &str = "no_rope_layer_interval";
const USUAL_INTERVAL: usize = 4;

/// Reads the family's keys. Defaults are transformers': the head is tied and, without `layer_types`, the layers without a rotary embedding have the
/// window.
fn read(config: &JsonObject, spec: ModelSpec) -> Result<ModelSpec> {
    let turns = turns(config, spec.num_layers())?;
    let lists_windows = config.has("layer_types");
    let tie_word_embeddings = spec.tie_word_embeddings || !config.has("tie_word_embeddings");
    let spec = spec.map_attention(|layer, attention| match turns[layer] {
        true if !lists_windows => attention.window = None,
        true => {}
        false => attention.rope = None,
    });
    Ok(ModelSpec { tie_word_embeddings, ..spec })
}

fn turns(config: &JsonObject, num_layers: usize) -> Result<Vec<bool>> {
    let Some(list) = config.get(KEY) else {
        let interval = if config.has(INTERVAL) { config.size(INTERVAL, 1 << 12)? } else { USUAL_INTERVAL };
        return Ok((1..=num_layers).map(|layer| !layer.is_multiple_of(interval)).collect());
    };
    let turns = list.as_array().and_then(|list| list.iter().map(|turns| Some(turns.as_u64()? != 0)).collect());
    let turns: Option<Vec<bool>> = turns.filter(|turns: &Vec<bool>| turns.len() == num_layers);
    turns.ok_or_else(|| {
        config.wrong(KEY, format!("a list of 1 (with RoPE) and 0 (without), one for each of {num_layers} layers"))
    })
}

fn write(spec: &ModelSpec, config: &mut Value) {
    let turns = |block: &BlockSpec| matches!(block.mixer, Mixer::Attention(attention) if attention.rope.is_some());
    config[KEY] = spec.layers.iter().map(|block| json!(i32::from(turns(block)))).collect();
}
