//! Gemma 3 (arXiv 2503.19786): five layers with a sliding window and their own rope base for each layer with full attention; norms before and after
//! each sublayer that multiply by 1 + weight; embeddings multiplied by sqrt(D); GELU.

use serde_json::{Value, json};

use super::{Names, Traits, Whole, Window, llama};
use crate::error::Result;
use crate::model::config_json::rope;
use crate::model::json::JsonObject;
use crate::model::spec::{ModelSpec, NormPlaces, ParamName, QkNorm, RopeSpec};

pub(super) const TRAITS: Traits = Traits {
    architecture: "Gemma3ForCausalLM",
    model_type: "gemma3_text",
    qk_norm: Some(QkNorm::Head),
    norms: NormPlaces::BOTH,
    window: Window::Patterned(6),
    zero_centred_norms: true,
    tensor_names: &[(ParamName::PostNorm, "pre_feedforward_layernorm.weight")],
    defaults,
    read,
    write,
    whole: Some(Whole {
        names: Names { architecture: "Gemma3ForConditionalGeneration", model_type: "gemma3" },
        decoder: "language_model.model",
        head: "language_model.lm_head.weight",
        kept: &["vision_tower.", "multi_modal_projector."],
    }),
    ..llama::TRAITS
};

/// Key: attention scores are divided by the square root of this value.
const SCALAR: &str = "query_pre_attn_scalar";
/// Key: base of the rotary frequencies in layers with a window.
const LOCAL_THETA: &str = "rope_local_base_freq";
const USUAL_LOCAL_THETA: f64 = 10_000.0;

/// Default values of transformers' `Gemma3TextConfig`; published files leave out many of these keys.
fn defaults() -> Value {
    json!({
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "sliding_window": 4096, "tie_word_embeddings": true, "bos_token_id": 2,
        "eos_token_id": 1, SCALAR: 256,
    })
}

fn read(config: &JsonObject, spec: ModelSpec) -> Result<ModelSpec> {
    let scale = config.positive(SCALAR)?.powf(-0.5);
    let local = if config.has(LOCAL_THETA) { config.positive(LOCAL_THETA)? } else { USUAL_LOCAL_THETA };
    let own = config.object("rope_parameters")?.map_or(Ok(None), |rope| rope.object("sliding_attention"))?;
    let local = own.as_ref().is_none_or(|own| !own.has("rope_theta")).then_some(local);
    let embedding_multiplier = (spec.hidden_size as f64).sqrt();
    let spec = spec.map_attention(|_, attention| {
        attention.scale = scale;
        if let Some((theta, rope)) = local.zip(attention.rope.as_mut()).filter(|_| attention.window.is_some()) {
            let scaling = rope.scaling.filter(|_| own.is_some());
            *rope = RopeSpec { theta, scaling, ..*rope };
        }
    });
    Ok(ModelSpec { embedding_multiplier, rounds_embedding_multiplier: true, ..spec })
}

/// Writes the rotary embeddings as transformers 5 reads them, by layer type, and as version 4 reads them.
fn write(spec: &ModelSpec, config: &mut Value) {
    config[SCALAR] = json!(spec.attention().scale.powi(-2).round() as u64); // transformers 5 refuses a fraction
    config["hidden_activation"] = config["hidden_act"].take();
    let rotation = |has_window: bool| {
        let attention = spec.attention_specs().find(|attention| attention.window.is_some() == has_window);
        attention.and_then(|attention| attention.rope).map(|rope| rope::write(rope.theta, rope.scaling.as_ref()))
    };
    let [full, sliding] = [false, true].map(|has_window| rotation(has_window).unwrap_or_default());
    config[LOCAL_THETA] = sliding["rope_theta"].clone();
    config["rope_theta"] = full["rope_theta"].clone();
    config["rope_scaling"] = if full["rope_type"] == "default" { Value::Null } else { full.clone() };
    config["rope_parameters"] = json!({"full_attention": full, "sliding_attention": sliding});
}
