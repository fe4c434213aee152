//! Tests `config.json` of published models, as copied from their pages, against the presets.

use serde_json::{Value, json};

use crate::model::spec::ModelSpec;

fn read(config: &Value) -> ModelSpec {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    ModelSpec::from_config_json(folder.path().join("config.json")).unwrap()
}

/// Keys that files omit have transformers' defaults. Some models have their end-of-sequence ids only in `generation_config.json`.
#[test]
fn published_config_json_files_match_the_presets() {
    let gemma_1b = json!({"architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "attn_logit_softcapping": null, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
        "final_logit_softcapping": null, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
        "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
        "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": 512,
        "sliding_window_pattern": 6, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 262144});
    let gemma_4b = json!({"architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
        "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256, "model_type": "gemma3",
        "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
        "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"}});
    let layer_types: Vec<_> =
        (0..24).map(|layer| if layer % 2 == 0 { "sliding_attention" } else { "full_attention" }).collect();
    let gpt_oss = json!({"architectures": ["GptOssForCausalLM"], "attention_bias": true, "attention_dropout": 0.0, "eos_token_id": 200002,
        "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
        "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": layer_types, "max_position_embeddings": 131072,
        "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
        "num_local_experts": 32, "output_router_logits": false, "pad_token_id": 199999,
        "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
            "lm_head"], "quant_method": "mxfp4"},
        "rms_norm_eps": 1e-05, "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
            "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": false},
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": false,
        "use_cache": true, "vocab_size": 201088});
    let glm = json!({"architectures": ["Glm4ForCausalLM"], "attention_bias": true, "attention_dropout": 0.0,
        "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 13696, "max_position_embeddings": 32768, "model_type": "glm4", "num_attention_heads": 32,
        "num_hidden_layers": 40, "num_key_value_heads": 2, "pad_token_id": 151329, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 151552});
    let air = json!({"architectures": ["Glm4MoeForCausalLM"], "attention_bias": true, "attention_dropout": 0.0, "pad_token_id": 151329,
        "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "partial_rotary_factor": 0.5,
        "initializer_range": 0.02, "intermediate_size": 10944, "max_position_embeddings": 131072, "model_type": "glm4_moe",
        "moe_intermediate_size": 1408, "norm_topk_prob": true, "num_attention_heads": 96, "n_group": 1, "topk_group": 1,
        "n_routed_experts": 128, "n_shared_experts": 1, "routed_scaling_factor": 1.0, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
        "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-05, "rope_scaling": null,
        "rope_theta": 1000000, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true, "use_qk_norm": false,
        "vocab_size": 151552});
    let phi = json!({"architectures": ["Phi3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 100257,
        "embd_pdrop": 0.0, "eos_token_id": 100265, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
        "intermediate_size": 17920, "max_position_embeddings": 16384, "model_type": "phi3", "num_attention_heads": 40,
        "num_hidden_layers": 40, "num_key_value_heads": 10, "original_max_position_embeddings": 16384, "pad_token_id": 100349,
        "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 250000, "sliding_window": null,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 100352});
    let mistral = json!({"architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 32768,
        "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 40,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 100000000.0, "sliding_window": null, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 131072});
    let ministral = json!({"architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12288,
        "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 100000000.0, "sliding_window": 32768, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 131072});
    for (name, config) in [
        ("gemma-3-1b", gemma_1b),
        ("gemma-3-4b", gemma_4b),
        ("glm-4-9b", glm),
        ("gpt-oss-20b", gpt_oss),
        ("glm-4.5-air", air),
        ("phi-4", phi),
        ("mistral-small-24b", mistral),
        ("ministral-8b", ministral),
    ] {
        let (preset, found) = (ModelSpec::preset(name).unwrap(), read(&config));
        let eos_token_ids = preset.eos_token_ids.clone();
        assert_eq!(ModelSpec { eos_token_ids, is_text_part: false, ..found.clone() }, preset, "{name}");
        assert_eq!(read(&preset.to_config_json()), preset, "{name}");
    }
}

#[test]
fn unsupported_features_of_known_families_are_refused_by_key() {
    let [gemma, phi, glm, gpt_oss, ministral] = ["gemma-3-1b", "phi-4", "glm-4-9b", "gpt-oss-20b", "ministral-8b"]
        .map(|name| ModelSpec::preset(name).unwrap().to_config_json());
    let ministral_3 = json!({"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1});
    let longrope = json!({"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]});
    for (config, key, value, message) in [
        (
            &gemma,
            "final_logit_softcapping",
            json!(30.0),
            "final_logit_softcapping is 30.0: expected no such key, or null",
        ),
        (&gemma, "attn_logit_softcapping", json!(50.0), "soft-capping of attention scores is not supported"),
        (&gemma, "use_bidirectional_attention", json!(true), "use_bidirectional_attention is true"),
        (
            &gemma,
            "hidden_activation",
            json!("gelu"),
            "hidden_activation is \"gelu\": expected \"silu\" or \"gelu_pytorch_tanh\"",
        ),
        (&phi, "rope_scaling", longrope, "LongRoPE"),
        (&ministral, "rope_parameters", ministral_3, "llama_4_scaling_beta is 0.1: expected no such key, or null"),
        (&phi, "resid_pdrop", json!(0.1), "dropout of sublayer outputs is not supported"),
        (
            &glm,
            "partial_rotary_factor",
            json!(0.75),
            "a fraction whose number of rotated columns divides the head width 128",
        ),
        (&gpt_oss, "swiglu_limit", json!(10.0), "swiglu_limit is 10.0: expected 7"),
        (&gpt_oss, "swiglu_alpha", json!(1.0), "swiglu_alpha is 1.0: expected 1.702"),
        (&gpt_oss, "num_experts_per_tok", json!(33), "num_experts_per_tok is 33: expected a whole number from 1 to 32"),
        (
            &gpt_oss,
            "quantization_config",
            json!({"quant_method": "fp8"}),
            "quantization_config.quant_method is \"fp8\": expected \"mxfp4\"",
        ),
        (&glm, "quantization_config", json!({"quant_method": "mxfp4"}), "other quantized weights are not supported"),
        (&glm, "attention_bias", json!(3), "attention_bias is 3: expected true or false"),
    ] {
        let mut config = config.clone();
        config[key] = value;
        if key == "partial_rotary_factor" {
            config["rope_parameters"] = Value::Null;
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        std::fs::write(&path, config.to_string()).unwrap();
        let error = ModelSpec::from_config_json(path).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
}

/// transformers' own values of keys that hand-made or stripped files leave out.
#[test]
fn families_without_rope_keys_or_head_widths_have_transformers_defaults() {
    let bare = |preset: &str, keys: &[&str]| {
        let mut config = ModelSpec::preset(preset).unwrap().to_config_json();
        config.as_object_mut().unwrap().retain(|key, _| !keys.contains(&key.as_str()));
        read(&config)
    };
    let ropes = ["rope_theta", "rope_scaling", "rope_parameters"];
    let rope = bare("smollm3-3b", &ropes).rotations()[0].unwrap();
    assert!(rope.theta == 2e6 && rope.scaling.is_none(), "{rope:?}");
    assert_eq!(bare("gpt-oss-20b", &ropes).rotations(), ModelSpec::preset("gpt-oss-20b").unwrap().rotations());
    assert_eq!(bare("qwen3-30b-a3b", &["head_dim"]).attention().head_dim, 2048 / 32);
}
