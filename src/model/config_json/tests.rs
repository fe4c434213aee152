mod delta_net;

use super::*;
use crate::config::TargetModule;
use crate::model::lora::LoraSpec;
use crate::model::spec::{Mixer, Mlp, SharedExpertSpec};

fn load(config: &Value) -> Result<ModelSpec> {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    ModelSpec::from_folder(folder.path())
}

/// A copy of `config` with `key` set to `value`, or removed if `value` is the text "remove".
fn with(config: &Value, key: &str, value: Value) -> Value {
    let mut config = config.clone();
    match value {
        Value::String(text) if text == "remove" => _ = config.as_object_mut().unwrap().shift_remove(key),
        value => config[key] = value,
    }
    config
}

/// The golden file from scripts/golden_keys.py lists the keys of the supported families' configuration classes in transformers, and of its
/// `GenerationConfig`.
#[test]
fn every_key_of_transformers_configurations_is_known() {
    let golden: Value = serde_json::from_str(include_str!("../../../tests/golden/keys.json")).unwrap();
    for table in [&keys::CONFIG_KEYS, &keys::GENERATION_KEYS] {
        let theirs: Vec<String> = serde_json::from_value(golden[table.name].clone()).unwrap();
        let unknown: Vec<_> = theirs.iter().filter(|key| !table.knows(key)).collect();
        assert!(theirs.len() > 50 && unknown.is_empty(), "{}: {unknown:?}", table.name);
        assert_eq!(table.undocumented(), Vec::<&str>::new(), "{}", table.name);
    }
}

#[test]
fn unsupported_generation_config_keys_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, value: Value| std::fs::write(folder.path().join(name), value.to_string()).unwrap();
    write("config.json", ModelSpec::preset("micro").unwrap().to_config_json());
    let usual =
        json!({"do_sample": true, "temperature": 0.7, "num_beams": 1, "suppress_tokens": [], "stop_strings": null});
    write("generation_config.json", usual);
    ModelSpec::from_folder(folder.path()).unwrap();
    for (key, value) in [("suppress_tokens", json!([7])), ("no_repeat_ngram_size", json!(3)), ("num_beams", json!(4))] {
        write("generation_config.json", json!({key: value}));
        let error = ModelSpec::from_folder(folder.path()).unwrap_err().to_string();
        assert!(error.contains(&format!("generation_config.json: {key} is {value}: expected ")), "{error}");
    }
}

/// In transformers, Qwen2-MoE's class has no `max_window_layers`, and gated delta nets have no window.
#[test]
fn sliding_windows_apply_to_the_same_layers_as_in_transformers() {
    for (preset, window) in [("tiny-moe", Some(16)), ("tiny-hybrid", None)] {
        let mut config = ModelSpec::preset(preset).unwrap().to_config_json();
        for (key, value) in
            [("sliding_window", json!(16)), ("use_sliding_window", json!(true)), ("max_window_layers", json!(9))]
        {
            config = with(&config, key, value);
        }
        assert_eq!(load(&config).unwrap().windows(), [window], "{preset}");
    }
}

#[test]
fn every_preset_round_trips_through_config_json() {
    for name in crate::model::PRESETS {
        let spec = ModelSpec::preset(name).unwrap();
        let folder = tempfile::tempdir().unwrap();
        spec.write_config(folder.path(), None).unwrap();
        assert_eq!(ModelSpec::from_folder(folder.path()).unwrap(), spec, "{name}");
    }
    for family in [Family::Qwen2, Family::Mistral] {
        let spec = ModelSpec { family, ..ModelSpec::preset("tiny").unwrap() }.map_attention(|_, attention| {
            attention.window = Some(64);
            attention.qkv_bias = family == Family::Qwen2;
        });
        assert_eq!(load(&spec.to_config_json()).unwrap(), spec);
    }
}

#[test]
fn old_and_new_spellings_of_rope_and_dtype_are_read() {
    let spec = ModelSpec::preset("llama3.1-8b").unwrap();
    let both = spec.to_config_json();
    let mut old = both.clone();
    let mut new = both;
    for key in ["rope_parameters", "dtype"] {
        old = with(&old, key, json!("remove"));
    }
    old["rope_scaling"].as_object_mut().unwrap().shift_remove("rope_theta");
    for key in ["rope_theta", "rope_scaling", "torch_dtype"] {
        new = with(&new, key, json!("remove"));
    }
    assert_eq!(load(&old).unwrap(), spec);
    assert_eq!(load(&new).unwrap(), spec);
}

/// The golden file from scripts/golden.py has transformers' float32 frequencies and attention factors. At position 1 the angle of a rotation is its
/// frequency.
#[test]
fn rope_scaling_matches_transformers() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("../../../tests/golden/rope.json")).unwrap();
    assert!(cases.len() >= 8);
    for case in cases {
        let mut config =
            ModelSpec::preset("micro").unwrap().map_attention(|_, own| own.head_dim = 128).to_config_json();
        for key in ["rope_parameters", "rope_scaling", "rope_theta"] {
            config = with(&config, key, json!("remove"));
        }
        for (key, value) in case["config"].as_object().unwrap() {
            config[key] = value.clone();
        }
        let spec = load(&config).unwrap();
        assert_eq!(spec.max_position_embeddings as u64, case["context"].as_u64().unwrap(), "{case}");
        let turns = |spec: &ModelSpec| {
            spec.ropes().iter().next().unwrap().table(2, tch::Device::Cpu).unwrap().get(1).to_kind(Kind::Double)
        };
        let written_back = load(&spec.to_config_json()).unwrap();
        assert!(turns(&written_back).allclose(&turns(&spec), 1e-7, 0.0, false), "{case}: {written_back:?}");
        assert_eq!(written_back.max_position_embeddings, spec.max_position_embeddings, "{case}");
        let turns = turns(&spec);
        let turns = Vec::<f64>::try_from(turns).unwrap();
        let expected: Vec<f64> = serde_json::from_value(case["inv_freq"].clone()).unwrap();
        let factor = case["attention_factor"].as_f64().unwrap();
        assert_eq!(turns.len(), 2 * expected.len());
        for ((cos, sin), expected) in turns.iter().zip(&turns[expected.len()..]).zip(&expected) {
            assert!((sin.atan2(*cos) / expected - 1.0).abs() < 1e-6, "{case}: {}, not {expected}", sin.atan2(*cos));
            assert!((sin.hypot(*cos) / factor - 1.0).abs() < 1e-6, "{case}: {}, not {factor}", sin.hypot(*cos));
        }
    }
}

#[test]
fn absent_config_keys_have_transformers_defaults() {
    let qwen2 = ModelSpec::preset("micro").unwrap().to_config_json();
    assert_eq!(load(&with(&qwen2, "head_dim", Value::Null)).unwrap().attention().head_dim, 8);
    assert_eq!(load(&with(&qwen2, "architectures", json!("remove"))).unwrap().family, Family::Qwen2);
    let windowed = with(&qwen2, "sliding_window", json!(16));
    assert_eq!(load(&windowed).unwrap().windows(), [None]);
    let used = with(&windowed, "use_sliding_window", json!(true));
    assert_eq!(load(&used).unwrap().windows(), [None]);
    let all = with(&used, "max_window_layers", json!(0));
    assert_eq!(load(&all).unwrap().windows(), [Some(16)]);
    let mistral = with(&with(&qwen2, "architectures", json!(["MistralForCausalLM"])), "model_type", json!("mistral"));
    assert_eq!(load(&mistral).unwrap().windows(), [None]);
    assert_eq!(load(&with(&mistral, "sliding_window", json!("remove"))).unwrap().windows(), [Some(4096)]);
}

#[test]
fn unsupported_model_features_are_refused_by_key() {
    let good = ModelSpec::preset("micro").unwrap().to_config_json();
    load(&good).unwrap();
    let cases = [
        ("architectures", json!(["GPT2LMHeadModel"]), "architectures is [\"GPT2LMHeadModel\"]: expected one of Qwen2"),
        ("hidden_act", json!("gelu"), "hidden_act is \"gelu\": expected \"silu\" or \"gelu_pytorch_tanh\""),
        (
            "model_type",
            json!("llama"),
            "model_type is \"llama\": expected \"qwen2\", the model_type of Qwen2ForCausalLM",
        ),
        ("attention_bias", json!(true), "attention_bias is true: expected false; biases of all four"),
        ("mlp_bias", json!(true), "mlp_bias is true"),
        ("attention_dropout", json!(0.1), "attention_dropout is 0.1: expected 0"),
        ("is_causal", json!(false), "is_causal is false: expected true"),
        ("rope_parameters", json!({"partial_rotary_factor": 0.5}), "rope_parameters.partial_rotary_factor is 0.5"),
        (
            "rope_parameters",
            json!({"full_attention": {"rope_theta": 1e6}}),
            "rope_parameters.full_attention is {\"rope_theta\":1000000.0}: expected no such key",
        ),
        ("quantization_config", json!({"bits": 4}), "quantization_config.quant_method is absent"),
        ("quantization_config", json!({"quant_method": "gptq"}), "quant_method is \"gptq\": expected fp8 or"),
        (
            "quantization_config",
            json!({"quant_method": "fp8", "weight_block_size": [64, 128]}),
            "weight_block_size is [64,128]: expected [128, 128]",
        ),
        (
            "quantization_config",
            json!({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float"}}}}),
            "config_groups.group_0.weights.num_bits is 4: expected 8",
        ),
        (
            "quantization_config",
            json!({"quant_method": "compressed-tensors", "format": "pack-quantized"}),
            "format is \"pack-quantized\": expected float-quantized",
        ),
        ("partial_rotary_factor", json!(0.5), "partial_rotary_factor is 0.5"),
        (
            "rope_scaling",
            json!({"rope_type": "longrope"}),
            "rope_scaling.rope_type is \"longrope\": expected another type: LongRoPE",
        ),
        ("rope_scaling", json!({"type": "yarn", "factor": 0}), "rope_scaling.factor is 0: expected a number above 0"),
        (
            "rope_scaling",
            json!({"type": "yarn", "factor": 2, "beta_fast": 1}),
            "beta_fast is 1: expected more than beta_slow",
        ),
        ("rope_scaling", json!({"type": "dynamic"}), "rope_scaling.type is \"dynamic\""),
        ("rope_scaling", json!({"rope_type": "llama3"}), "rope_scaling.factor is absent"),
        ("rope_parameters", json!({"rope_theta": 0}), "rope_parameters.rope_theta is 0"),
        ("num_key_value_heads", json!(3), "num_key_value_heads is 3: expected a divisor of num_attention_heads = 4"),
        ("num_attention_heads", json!(0), "num_attention_heads is 0"),
        ("head_dim", json!(7), "head_dim is 7: expected an even number"),
        ("head_dim", json!(1u64 << 40), "head_dim is 1099511627776: expected a whole number"),
        ("hidden_size", json!(-1), "hidden_size is -1"),
        ("vocab_size", json!("remove"), "vocab_size is absent"),
        ("rms_norm_eps", json!("remove"), "rms_norm_eps is absent"),
        ("torch_dtype", json!("int8"), "torch_dtype is \"int8\""),
        ("eos_token_id", json!([1, 96]), "eos_token_id is [1,96]: expected token ids below vocab_size = 96"),
        ("tie_word_embeddings", json!("yes"), "tie_word_embeddings is \"yes\": expected true or false"),
        ("layer_types", json!(["sliding_attention"]), "one for each of 2 layers"),
        ("layer_types", json!(["full_attention", "linear_attention"]), "layer 1 is \"linear_attention\""),
        ("layer_types", json!("full_attention"), "expected a list of"),
    ];
    for (key, value, message) in cases {
        let mut config = with(&good, key, value);
        if key == "torch_dtype" {
            config = with(&config, "dtype", json!("remove"));
        }
        if key == "layer_types" {
            config = with(&with(&config, "sliding_window", json!(8)), "use_sliding_window", json!(true));
        }
        let error = load(&config).expect_err(message);
        assert!(matches!(error, Error::BadFile { .. }) && error.to_string().contains(message), "{error}");
    }
    let error = ModelSpec::from_folder("/nonexistent").unwrap_err();
    assert!(matches!(error, Error::BadFile { .. }), "{error}");
}

#[test]
fn expert_settings_are_read_as_in_transformers_or_refused() {
    let spec = ModelSpec::preset("tiny-moe").unwrap();
    let good = spec.to_config_json();
    assert_eq!(load(&good).unwrap(), spec);
    let mut usual = with(&with(&good, "router_aux_loss_coef", json!("remove")), "mlp_only_layers", json!("remove"));
    usual = with(&with(&usual, "decoder_sparse_step", json!("remove")), "num_experts", json!("remove"));
    assert_eq!(load(&with(&usual, "num_local_experts", json!(8))).unwrap(), spec);
    let some = load(&with(&with(&good, "decoder_sparse_step", json!(2)), "mlp_only_layers", json!([3]))).unwrap();
    assert_eq!(
        (0..4).map(|layer| matches!(some.layers[layer].mlp, Mlp::Experts(_))).collect::<Vec<_>>(),
        [false, true, false, false]
    );
    assert_eq!(load(&some.to_config_json()).unwrap(), some);
    let none = load(&with(&good, "mlp_only_layers", json!([0, 1, 2, 3]))).unwrap();
    assert_eq!((none.experts(), some.num_expert_layers()), (None, 1));
    let one = 3 * 192 * 128;
    assert_eq!(
        (some.num_params() - some.num_active_params(), spec.num_params() - spec.num_active_params()),
        (6 * one, 24 * one)
    );
    let cases = [
        ("num_experts", json!(0), "num_experts is 0: expected"),
        ("num_experts", json!("remove"), "num_local_experts is absent"),
        ("num_experts_per_tok", json!(9), "num_experts_per_tok is 9: expected at most num_experts = 8"),
        ("moe_intermediate_size", json!("remove"), "moe_intermediate_size is absent"),
        ("norm_topk_prob", json!(1), "norm_topk_prob is 1"),
        ("router_aux_loss_coef", json!(-1), "router_aux_loss_coef is -1: expected a number of at least 0"),
        ("decoder_sparse_step", json!(0), "decoder_sparse_step is 0"),
        ("mlp_only_layers", json!([4]), "mlp_only_layers is [4]: expected a list of layers, from 0 to 3"),
    ];
    for (key, value, message) in cases {
        let error = load(&with(&good, key, value)).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
    for (tp_size, served) in [(1, true), (2, true), (24, true), (48, false)] {
        let outcome = spec.validate_gpu(Kind::BFloat16, Some(tp_size), Path::new("m"));
        assert_eq!(outcome.is_ok(), served, "{tp_size} ranks: {outcome:?}");
    }
    let error = spec.validate_gpu(Kind::BFloat16, Some(48), Path::new("m")).unwrap_err().to_string();
    assert!(error.contains("moe_intermediate_size = 192") && error.contains("a multiple of 384"), "{error}");
    assert!(spec.validate_tp(3).unwrap_err().to_string().contains("experts of intermediate size 192"));
    let parallel = spec.clone().with_expert_parallel(true).unwrap();
    parallel.validate_tp(2).unwrap();
    let six = parallel.clone().map_experts(|experts| experts.num_experts = 6);
    let error = six.validate_tp(4).unwrap_err().to_string();
    assert!(error.starts_with("tensor_parallel_size = 4: expected one of 1, 2 ("), "{error}");
    assert!(error.contains("2 key/value heads, 6 experts)"), "{error}");
    assert_eq!((spec.router_aux_loss_coef(None).unwrap(), spec.router_aux_loss_coef(Some(0.5)).unwrap()), (0.001, 0.5));
    let dense = ModelSpec::preset("tiny").unwrap();
    assert_eq!(dense.router_aux_loss_coef(None).unwrap(), 0.0);
    assert!(dense.router_aux_loss_coef(Some(0.5)).unwrap_err().to_string().contains("a model with experts"));
}

#[test]
fn shared_expert_settings_are_read_or_refused() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/qwen2_moe");
    let spec = ModelSpec::from_folder(golden).unwrap();
    let experts = spec.experts().unwrap();
    let shared = experts.shared.map(|SharedExpertSpec(shared)| shared.intermediate);
    assert_eq!((spec.family, spec.attention().qkv_bias, shared), (Family::Qwen2Moe, true, Some(24)));
    assert!(!experts.router.norm_topk_prob, "transformers' default");
    let good = spec.to_config_json();
    let own_eos = |spec: ModelSpec| ModelSpec { eos_token_ids: Vec::new(), ..spec };
    assert_eq!(own_eos(load(&good).unwrap()), own_eos(spec.clone()));
    // Each token uses the shared expert and two of five experts, so three are idle.
    assert_eq!(spec.num_params() - spec.num_active_params(), 2 * 3 * 3 * 16 * 32);
    for (key, value, message) in [
        ("shared_expert_intermediate_size", json!("remove"), "shared_expert_intermediate_size is absent"),
        ("shared_expert_intermediate_size", json!(0), "shared_expert_intermediate_size is 0: expected"),
        ("use_sliding_window", json!(true), "use_sliding_window is true: expected false"),
        ("qkv_bias", json!(false), "qkv_bias is false: expected true"),
        ("num_experts", json!("remove"), "num_local_experts is absent"),
    ] {
        let error = load(&with(&good, key, value)).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
    spec.validate_tp(4).unwrap();
    let odd = spec.map_experts(|experts| experts.shared.as_mut().unwrap().0.intermediate = 22);
    let error = odd.validate_tp(4).unwrap_err().to_string();
    assert!(error.starts_with("tensor_parallel_size = 4: expected one of 1, 2 ("), "{error}");
    assert!(error.contains("experts of intermediate size 16, a shared expert of intermediate size 22)"), "{error}");
}

/// Follows transformers' `SmolLM3Config`: layers without rope are given by a list or by an interval, and have the window unless a list of types
/// decides.
#[test]
fn smollm3_layers_use_rope_as_in_transformers() {
    let shape = |spec: &ModelSpec| -> Vec<(bool, Option<usize>)> {
        let of = |block: &BlockSpec| match block.mixer {
            Mixer::Attention(attention) => (attention.rope.is_some(), attention.window),
            Mixer::DeltaNet(_) => unreachable!(),
        };
        spec.layers.iter().map(of).collect()
    };
    let spec = ModelSpec::preset("smollm3-3b").unwrap().with_num_layers(4);
    let good = spec.to_config_json();
    assert_eq!(load(&with(&good, "no_rope_layers", json!("remove"))).unwrap(), spec, "every fourth layer");
    assert_eq!(load(&with(&good, "tie_word_embeddings", json!("remove"))).unwrap(), spec, "tied");
    assert!(!load(&with(&good, "tie_word_embeddings", json!(false))).unwrap().tie_word_embeddings);
    let every_second = with(&with(&good, "no_rope_layers", Value::Null), "no_rope_layer_interval", json!(2));
    assert_eq!(shape(&load(&every_second).unwrap()), [(true, None), (false, None), (true, None), (false, None)]);
    let windowed = with(&with(&every_second, "use_sliding_window", json!(true)), "sliding_window", json!(16));
    let expected = [(true, None), (false, Some(16)), (true, None), (false, Some(16))];
    assert_eq!(shape(&load(&windowed).unwrap()), expected);
    let types = json!(["sliding_attention", "sliding_attention", "full_attention", "full_attention"]);
    let listed = load(&with(&windowed, "layer_types", types)).unwrap();
    assert_eq!(shape(&listed), [(true, Some(16)), (false, Some(16)), (true, None), (false, None)]);
    assert_eq!(load(&listed.to_config_json()).unwrap(), listed);
    for value in [json!([1, 0]), json!("none"), json!([1, 0, -1, 1])] {
        let error = load(&with(&good, "no_rope_layers", value)).unwrap_err().to_string();
        assert!(
            error.contains("expected a list of 1 (with RoPE) and 0 (without), one for each of 4 layers"),
            "{error}"
        );
    }
}

/// Layers of one model may have different windows: in Qwen2 from `max_window_layers` on, or as a list of types states.
#[test]
fn sliding_windows_may_differ_by_layer() {
    let good = ModelSpec::preset("micro").unwrap().to_config_json();
    let windowed = with(&with(&good, "use_sliding_window", json!(true)), "sliding_window", json!(8));
    let last = load(&with(&windowed, "max_window_layers", json!(1))).unwrap();
    assert_eq!(last.windows(), [None, Some(8)]);
    assert_eq!(load(&last.to_config_json()).unwrap(), last);
    let first = load(&with(&windowed, "layer_types", json!(["sliding_attention", "full_attention"]))).unwrap();
    assert_eq!(first.windows(), [Some(8), None]);
    assert_eq!(load(&first.to_config_json()).unwrap(), first);
}

/// Follows transformers' `GraniteConfig`: an absent multiplier is 1, including that of scores.
#[test]
fn granite_multipliers_are_read_as_in_transformers() {
    let mut config = ModelSpec::preset("granite3.1-8b").unwrap().with_num_layers(2).to_config_json();
    for key in ["attention_multiplier", "residual_multiplier", "embedding_multiplier", "logits_scaling"] {
        let error = load(&with(&config, key, json!(0))).unwrap_err().to_string();
        assert!(error.contains(&format!("{key} is 0: expected a number above 0")), "{error}");
        config = with(&config, key, json!("remove"));
    }
    let spec = load(&config).unwrap();
    assert_eq!((spec.attention().scale, spec.layers[1].residual_scale), (1.0, 1.0));
    assert_eq!((spec.embedding_multiplier, spec.logits_scaling), (1.0, 1.0));
}

/// Configurations of FP8 weights as DeepSeek, Qwen, Mistral and compressed-tensors publish them. A configuration that is written again does not
/// mention FP8.
#[test]
fn fp8_models_have_the_spec_of_unquantized_ones() {
    let good = ModelSpec::preset("micro").unwrap();
    let groups = |strategy: &str| json!({"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": strategy}}});
    let compressed = |strategy| json!({"quant_method": "compressed-tensors", "format": "float-quantized", "kv_cache_scheme": null, "config_groups": groups(strategy)});
    for of in [
        json!({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}),
        json!({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": null}),
        compressed("channel"),
        compressed("tensor"),
        compressed("block"),
    ] {
        let spec = load(&with(&good.to_config_json(), "quantization_config", of)).unwrap();
        assert_eq!(spec, good);
        assert!(spec.to_config_json().get("quantization_config").is_none());
    }
}
