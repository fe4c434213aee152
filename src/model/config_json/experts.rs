//! The keys that describe experts.

use serde_json::{Value, json};

use crate::error::Result;
use crate::model::families::Traits;
use crate::model::json::JsonObject;
use crate::model::spec::ExpertLayers;

/// Coefficient where `router_aux_loss_coef` is absent, as in transformers.
const USUAL_AUX_LOSS_COEF: f64 = 0.001;

/// The experts that a `config.json` describes; `None` where no layer has any.
pub(super) fn read(config: &JsonObject, num_layers: usize, traits: &Traits) -> Result<Option<ExpertLayers>> {
    // transformers reads both names.
    let count = if config.has("num_experts") { "num_experts" } else { "num_local_experts" };
    let num_experts = config.size(count, 1 << 12)?;
    let num_experts_per_tok = config.size("num_experts_per_tok", 1 << 12)?;
    if num_experts_per_tok > num_experts {
        return Err(config.wrong("num_experts_per_tok", format!("at most {count} = {num_experts}")));
    }
    let router_aux_loss_coef = match config.get("router_aux_loss_coef").map(Value::as_f64) {
        None => USUAL_AUX_LOSS_COEF,
        Some(Some(coef)) if coef >= 0.0 => coef,
        Some(_) => return Err(config.wrong("router_aux_loss_coef", "a number of at least 0")),
    };
    let experts = ExpertLayers {
        num_experts,
        num_experts_per_tok,
        moe_intermediate_size: config.size("moe_intermediate_size", 1 << 24)?,
        shared_expert_intermediate_size: match traits.has_shared_expert {
            true => Some(config.size("shared_expert_intermediate_size", 1 << 24)?),
            false => None,
        },
        norm_topk_prob: match traits.divides_by_choices {
            true if config.has("norm_topk_prob") && !config.flag("norm_topk_prob")? => {
                return Err(config.wrong("norm_topk_prob", "true, as transformers computes this family"));
            }
            true => true,
            false if traits.has_delta_nets && !config.has("norm_topk_prob") => true, // as in transformers
            false => config.flag("norm_topk_prob")?,
        },
        router_aux_loss_coef,
        decoder_sparse_step: match config.get("decoder_sparse_step") {
            None => 1,
            Some(_) => config.size("decoder_sparse_step", 1 << 12)?,
        },
        mlp_only_layers: mlp_only_layers(config, num_layers)?,
        is_parallel: false,
    };
    Ok((0..num_layers).any(|layer| experts.are_in(layer)).then_some(experts))
}

/// Adds the keys to a `config.json`.
pub(super) fn write(experts: &ExpertLayers, config: &mut Value) {
    config["num_experts"] = json!(experts.num_experts);
    config["num_experts_per_tok"] = json!(experts.num_experts_per_tok);
    config["moe_intermediate_size"] = json!(experts.moe_intermediate_size);
    if let Some(width) = experts.shared_expert_intermediate_size {
        config["shared_expert_intermediate_size"] = json!(width);
    }
    config["norm_topk_prob"] = json!(experts.norm_topk_prob);
    config["router_aux_loss_coef"] = json!(experts.router_aux_loss_coef);
    config["decoder_sparse_step"] = json!(experts.decoder_sparse_step);
    config["mlp_only_layers"] = json!(experts.mlp_only_layers);
    config["output_router_logits"] = json!(false);
}

fn mlp_only_layers(config: &JsonObject, num_layers: usize) -> Result<Vec<usize>> {
    let layers = match config.get("mlp_only_layers") {
        None => return Ok(Vec::new()),
        Some(Value::Array(layers)) => layers.iter().map(Value::as_u64).collect::<Option<Vec<_>>>(),
        Some(_) => None,
    };
    let known = layers.filter(|layers| layers.iter().all(|&layer| layer < num_layers as u64));
    let layers = known.ok_or_else(|| {
        config.wrong("mlp_only_layers", format!("a list of layers, from 0 to {}", num_layers.saturating_sub(1)))
    })?;
    Ok(layers.into_iter().map(|layer| layer as usize).collect())
}
