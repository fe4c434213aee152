//! Keys of `config.json` that describe gated delta nets, and other keys of these families.

use serde_json::{Value, json};

use super::layer_types;
use crate::error::Result;
use crate::model::json::JsonObject;
use crate::model::spec::{BlockSpec, DeltaNetSpec, Mixer, ModelSpec};
use crate::ops::delta_net::DeltaHeads;

/// If neither `layer_types` nor `full_attention_interval` is given, every n-th layer has attention, with this n, as in transformers.
const USUAL_INTERVAL: usize = 4;

/// Replaces the mixers of layers by gated delta nets, as a `config.json` describes them.
pub(super) fn read(config: &JsonObject, hidden: usize, layers: &mut [BlockSpec]) -> Result<()> {
    if config.has("attn_output_gate") && !config.flag("attn_output_gate")? {
        return Err(config.wrong("attn_output_gate", "true, as transformers has it for this family"));
    }
    let size = |key, usual| if config.has(key) { config.size(key, 1 << 16) } else { Ok(usual) };
    let heads = DeltaHeads {
        num_key_heads: size("linear_num_key_heads", 16)?,
        num_value_heads: size("linear_num_value_heads", 32)?,
        key_dim: size("linear_key_head_dim", 128)?,
        value_dim: size("linear_value_head_dim", 128)?,
        conv_width: size("linear_conv_kernel_dim", 4)?,
    };
    if !heads.num_value_heads.is_multiple_of(heads.num_key_heads) {
        let expected = format!("a multiple of linear_num_key_heads = {}", heads.num_key_heads);
        return Err(config.wrong("linear_num_value_heads", expected));
    }
    if heads.conv_width < 2 {
        return Err(config.wrong("linear_conv_kernel_dim", "at least 2"));
    }
    let num_layers = layers.len();
    let full_attention = full_attention(config, num_layers)?;
    if full_attention.is_empty() || full_attention.len() == num_layers {
        let all = full_attention.len();
        let expected = format!("at least one layer of each type, but {all} of {num_layers} have full_attention");
        return Err(config.wrong(layer_types::KEY, expected));
    }
    for layer in (0..num_layers).filter(|layer| !full_attention.contains(layer)) {
        layers[layer].mixer = Mixer::DeltaNet(DeltaNetSpec { hidden, heads });
    }
    Ok(())
}

/// Indices of the layers with attention.
fn full_attention(config: &JsonObject, num_layers: usize) -> Result<Vec<usize>> {
    if let Some(types) = layer_types::read_all(config, [layer_types::LINEAR, layer_types::FULL], num_layers)? {
        let full = types.iter().enumerate().filter(|(_, kind)| **kind == layer_types::FULL);
        return Ok(full.map(|(layer, _)| layer).collect());
    }
    let key = "full_attention_interval";
    let interval = if config.has(key) { config.size(key, 1 << 12)? } else { USUAL_INTERVAL };
    Ok((0..num_layers).filter(|layer| (layer + 1).is_multiple_of(interval)).collect())
}

/// Adds the keys that describe gated delta nets to a `config.json`.
pub(super) fn write(spec: &ModelSpec, heads: DeltaHeads, config: &mut Value) {
    let name = |block: &BlockSpec| match block.mixer {
        Mixer::Attention(_) => layer_types::FULL,
        Mixer::DeltaNet(_) => layer_types::LINEAR,
    };
    config["layer_types"] = spec.layers.iter().map(name).collect();
    config["attn_output_gate"] = json!(true);
    config["attention_bias"] = json!(false);
    config["linear_num_key_heads"] = json!(heads.num_key_heads);
    config["linear_num_value_heads"] = json!(heads.num_value_heads);
    config["linear_key_head_dim"] = json!(heads.key_dim);
    config["linear_value_head_dim"] = json!(heads.value_dim);
    config["linear_conv_kernel_dim"] = json!(heads.conv_width);
    if spec.draft_head.is_some() {
        config["mtp_num_hidden_layers"] = json!(1);
    }
}
