//! GLM-4.5 and GLM-4.6 (arXiv 2508.06471): experts chosen by sigmoid scores with an untrained correction, plus a shared expert; the first layers have
//! a dense MLP.

use serde_json::{Value, json};

use super::{Traits, llama};
use crate::error::Result;
use crate::model::json::JsonObject;
use crate::model::spec::{DenseSpec, ExpertsSpec, Mlp, ModelSpec, QkNorm, SharedExpertSpec};
use crate::ops::router::{RouterOptions, RouterScores};

pub(super) const TRAITS: Traits = Traits {
    architecture: "Glm4MoeForCausalLM",
    model_type: "glm4_moe",
    has_attention_bias: true,
    rotary_factor: Some(0.5),
    shared_expert: "shared_experts",
    keeps_further_layers: true,
    defaults: || {
        json!({"n_shared_experts": 1, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
            "norm_topk_prob": true})
    },
    read,
    write,
    ..llama::TRAITS
};

fn read(config: &JsonObject, spec: ModelSpec) -> Result<ModelSpec> {
    let size = |key| config.size(key, 1 << 12);
    let num_experts = size("n_routed_experts")?;
    let num_experts_per_tok = size("num_experts_per_tok")?;
    let (num_groups, groups_per_tok) = (size("n_group")?, size("topk_group")?);
    if !num_experts.is_multiple_of(num_groups) {
        return Err(config.wrong("n_group", format!("a divisor of n_routed_experts = {num_experts}")));
    }
    if groups_per_tok > num_groups {
        return Err(config.wrong("topk_group", format!("at most n_group = {num_groups}")));
    }
    let most = num_experts / num_groups * groups_per_tok;
    if num_experts_per_tok > most {
        return Err(config.wrong("num_experts_per_tok", format!("at most the {most} experts of topk_group groups")));
    }
    let intermediate = config.size("moe_intermediate_size", 1 << 24)?;
    let activation = spec.layers[0].mlp.activation();
    let expert = DenseSpec { hidden: spec.hidden_size, intermediate, activation };
    let shared = DenseSpec { intermediate: size("n_shared_experts")? * intermediate, ..expert };
    let scores = RouterScores::Sigmoid { num_groups, groups_per_tok, scale: config.positive("routed_scaling_factor")? };
    let experts = ExpertsSpec {
        expert,
        num_experts,
        own: num_experts,
        is_parallel: false,
        router: RouterOptions { num_experts_per_tok, norm_topk_prob: config.flag("norm_topk_prob")?, scores },
        shared: Some(SharedExpertSpec(shared)),
        gates_shared: false,
        has_biases: false,
    };
    let num_dense = config.count("first_k_dense_replace")?;
    let qk_norm = config.flag("use_qk_norm")?.then_some(QkNorm::Head);
    let spec = spec.map_attention(|_, attention| attention.qk_norm = qk_norm);
    Ok(spec.map_blocks(|layer, block| {
        if layer >= num_dense {
            block.mlp = Mlp::Experts(experts);
        }
    }))
}

fn write(spec: &ModelSpec, config: &mut Value) {
    let attention = spec.attention();
    config["attention_bias"] = json!(attention.qkv_bias);
    config["use_qk_norm"] = json!(attention.qk_norm.is_some());
    config["partial_rotary_factor"] = config["rope_parameters"]["partial_rotary_factor"].clone();
    config["first_k_dense_replace"] = json!(spec.num_layers() - spec.num_expert_layers());
    let Some(ExpertsSpec { num_experts, expert, router, shared, .. }) = spec.experts() else { return };
    config["n_routed_experts"] = json!(num_experts);
    let shared = shared.map_or(0, |SharedExpertSpec(shared)| shared.intermediate);
    config["n_shared_experts"] = json!(shared / expert.intermediate);
    if let RouterScores::Sigmoid { num_groups, groups_per_tok, scale } = router.scores {
        config["n_group"] = json!(num_groups);
        config["topk_group"] = json!(groups_per_tok);
        config["routed_scaling_factor"] = json!(scale);
    }
    // Names that other families use for the same settings.
    let others = [
        "num_experts",
        "decoder_sparse_step",
        "mlp_only_layers",
        "shared_expert_intermediate_size",
        "router_aux_loss_coef",
    ];
    if let Some(config) = config.as_object_mut() {
        others.iter().for_each(|key| _ = config.shift_remove(*key));
    }
}
