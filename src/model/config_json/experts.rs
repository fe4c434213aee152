//! Keys of `config.json` that describe experts.

use serde_json::{Value, json};

use crate::error::Result;
use crate::model::families::Traits;
use crate::model::json::JsonObject;
use crate::model::spec::{BlockSpec, DenseSpec, ExpertsSpec, Mlp, ModelSpec, SharedExpertSpec};
use crate::ops::router::{RouterOptions, RouterScores};

/// Default of `router_aux_loss_coef`, as in transformers.
const USUAL_AUX_LOSS_COEF: f64 = 0.001;

/// Reads the experts that a `config.json` describes, for layers that have experts.
pub(super) fn read(config: &JsonObject, hidden: usize, traits: &Traits) -> Result<ExpertsSpec> {
    // transformers accepts both names.
    let count = if config.has("num_experts") { "num_experts" } else { "num_local_experts" };
    let num_experts = config.size(count, 1 << 12)?;
    let num_experts_per_tok = config.size("num_experts_per_tok", 1 << 12)?;
    if num_experts_per_tok > num_experts {
        return Err(config.wrong("num_experts_per_tok", format!("at most {count} = {num_experts}")));
    }
    let intermediate = config.size("moe_intermediate_size", 1 << 24)?;
    let shared = match traits.has_shared_expert {
        true => Some(config.size("shared_expert_intermediate_size", 1 << 24)?),
        false => None,
    };
    let norm_topk_prob = match traits.divides_by_choices {
        true if config.has("norm_topk_prob") && !config.flag("norm_topk_prob")? => {
            return Err(config.wrong("norm_topk_prob", "true, as transformers has it for this family"));
        }
        true => true,
        false if traits.has_delta_nets && !config.has("norm_topk_prob") => true, // as in transformers
        false => config.flag("norm_topk_prob")?,
    };
    Ok(ExpertsSpec {
        expert: DenseSpec::new(hidden, intermediate),
        num_experts,
        own: num_experts,
        is_parallel: false,
        router: RouterOptions { num_experts_per_tok, norm_topk_prob, scores: RouterScores::Softmax },
        gates_shared: true,
        has_biases: false,
        shared: shared.map(|intermediate| SharedExpertSpec(DenseSpec::new(hidden, intermediate))),
    })
}

/// Reads the weight of the auxiliary loss that balances experts.
pub(super) fn aux_loss_coef(config: &JsonObject) -> Result<f64> {
    match config.get("router_aux_loss_coef").map(Value::as_f64) {
        None => Ok(USUAL_AUX_LOSS_COEF),
        Some(Some(coef)) if coef >= 0.0 => Ok(coef),
        Some(_) => Err(config.wrong("router_aux_loss_coef", "a number of at least 0")),
    }
}

/// Replaces the MLPs of layers by experts, in the layers that `config.json` selects.
pub(super) fn place(config: &JsonObject, experts: ExpertsSpec, layers: &mut [BlockSpec]) -> Result<()> {
    let step = match config.get("decoder_sparse_step") {
        None => 1,
        Some(_) => config.size("decoder_sparse_step", 1 << 12)?,
    };
    let dense = mlp_only_layers(config, layers.len())?;
    let with_experts = |layer: &usize| (layer + 1).is_multiple_of(step) && !dense.contains(layer);
    for layer in (0..layers.len()).filter(with_experts) {
        layers[layer].mlp = Mlp::Experts(experts);
    }
    Ok(())
}

/// Adds the keys that describe experts to a `config.json`.
pub(super) fn write(spec: &ModelSpec, experts: ExpertsSpec, config: &mut Value) {
    config["num_experts"] = json!(experts.num_experts);
    config["num_experts_per_tok"] = json!(experts.router.num_experts_per_tok);
    config["moe_intermediate_size"] = json!(experts.expert.intermediate);
    if let Some(SharedExpertSpec(shared)) = experts.shared {
        config["shared_expert_intermediate_size"] = json!(shared.intermediate);
    }
    config["norm_topk_prob"] = json!(experts.router.norm_topk_prob);
    config["router_aux_loss_coef"] = json!(spec.router_aux_loss_coef);
    config["decoder_sparse_step"] = json!(1);
    let dense = spec.layers.iter().enumerate().filter(|(_, block)| !block.has_experts());
    config["mlp_only_layers"] = dense.map(|(layer, _)| layer).collect();
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
