//! gpt-oss (arXiv 2508.10925): an attention sink for every query head, sliding windows in every second layer, and in all layers experts with biases
//! and a SwiGLU with clamped gate and up. Published files have the experts in MXFP4.

use serde_json::{Value, json};

use super::{Traits, Window, llama};
use crate::cuda::kernels::{SWISH_LIMIT, SWISH_SLOPE};
use crate::error::Result;
use crate::model::json::JsonObject;
use crate::model::spec::{DenseSpec, ExpertsSpec, Mlp, ModelSpec, ParamName};
use crate::ops::router::{RouterOptions, RouterScores};
use crate::ops::swiglu::Activation;

pub(super) const TRAITS: Traits = Traits {
    architecture: "GptOssForCausalLM",
    model_type: "gpt_oss",
    qkv_bias: true,
    has_attention_bias: true,
    head_dim: Some(64),
    window: Window::Patterned(2),
    stacks_experts: true,
    reads_mxfp4: true,
    tensor_names: &[(ParamName::Router, "mlp.router.weight")],
    defaults,
    read,
    write,
    ..llama::TRAITS
};

/// Default values of transformers' `GptOssConfig` that files may leave out.
fn defaults() -> Value {
    json!({
        "sliding_window": 128, "swiglu_alpha": SWISH_SLOPE, "swiglu_limit": SWISH_LIMIT, "num_experts_per_tok": 4,
        "router_aux_loss_coef": 0.001, "tie_word_embeddings": false, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0,
        "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
            "original_max_position_embeddings": 4096},
    })
}

fn read(config: &JsonObject, spec: ModelSpec) -> Result<ModelSpec> {
    for (key, served) in [("swiglu_alpha", SWISH_SLOPE), ("swiglu_limit", SWISH_LIMIT)] {
        if config.positive(key)? != served {
            return Err(config.wrong(key, served.to_string()));
        }
    }
    let count = if config.has("num_experts") { "num_experts" } else { "num_local_experts" };
    let num_experts = config.size(count, 1 << 12)?;
    let num_experts_per_tok = config.size("num_experts_per_tok", num_experts)?;
    let expert = DenseSpec {
        hidden: spec.hidden_size,
        intermediate: config.size("intermediate_size", 1 << 24)?,
        activation: Activation::ClampedSwiglu,
    };
    let experts = ExpertsSpec {
        expert,
        num_experts,
        own: num_experts,
        is_parallel: false,
        router: RouterOptions { num_experts_per_tok, norm_topk_prob: true, scores: RouterScores::Softmax },
        shared: None,
        gates_shared: false,
        has_biases: true,
    };
    // Published files contain a coefficient that transformers ignores unless `output_router_logits` is set.
    let is_balanced = config.flag("output_router_logits")?;
    let coef = config.get("router_aux_loss_coef").and_then(Value::as_f64).filter(|coef| *coef >= 0.0);
    let coef = coef.ok_or_else(|| config.wrong("router_aux_loss_coef", "a number of at least 0"))?;
    let spec = spec.map_attention(|_, attention| (attention.sinks, attention.o_bias) = (true, attention.qkv_bias));
    let spec = spec.map_blocks(|_, block| block.mlp = Mlp::Experts(experts));
    Ok(ModelSpec { router_aux_loss_coef: if is_balanced { coef } else { 0.0 }, ..spec })
}

fn write(spec: &ModelSpec, config: &mut Value) {
    let experts = spec.experts().expect("every layer has experts");
    config["attention_bias"] = json!(spec.attention().qkv_bias);
    config["num_local_experts"] = json!(experts.num_experts);
    config["swiglu_alpha"] = json!(SWISH_SLOPE);
    config["swiglu_limit"] = json!(SWISH_LIMIT);
    config["output_router_logits"] = json!(spec.router_aux_loss_coef > 0.0);
    // Names that other families use for the same settings.
    let others = ["num_experts", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"];
    if let Some(config) = config.as_object_mut() {
        others.iter().for_each(|key| _ = config.shift_remove(*key));
    }
}
