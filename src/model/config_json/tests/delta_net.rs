//! Configurations of models with gated delta nets.

use super::*;

#[test]
fn gated_delta_net_settings_are_read_as_in_transformers_or_refused() {
    let spec = ModelSpec::preset("tiny-hybrid").unwrap();
    let good = spec.to_config_json();
    assert_eq!(load(&good).unwrap(), spec);
    let usual = with(&good, "layer_types", json!("remove"));
    assert_eq!(load(&usual).unwrap(), spec, "every fourth layer");
    let every_second = load(&with(&usual, "full_attention_interval", json!(2))).unwrap();
    assert_eq!(every_second.attention_layers().collect::<Vec<_>>(), [1, 3]);
    // One layer has keys and values of 2 heads of width 32; three layers have states of 4 heads of 32 x 32.
    assert_eq!((spec.cached_elements(1), spec.cached_elements(2)), (128, 64));
    assert_eq!(spec.ropes().columns(), 8);
    let cases = [
        ("layer_types", json!(["linear_attention"]), "one for each of 4 layers"),
        (
            "layer_types",
            json!(["full_attention", "linear_attention", "mamba", "full_attention"]),
            "layer 2 is \"mamba\"",
        ),
        (
            "layer_types",
            json!(vec!["full_attention"; 4]),
            "at least one layer of each type, but 4 of 4 have full_attention",
        ),
        (
            "layer_types",
            json!(vec!["linear_attention"; 4]),
            "at least one layer of each type, but 0 of 4 have full_attention",
        ),
        (
            "linear_num_value_heads",
            json!(3),
            "linear_num_value_heads is 3: expected a multiple of linear_num_key_heads = 2",
        ),
        ("linear_key_head_dim", json!(0), "linear_key_head_dim is 0"),
        ("linear_conv_kernel_dim", json!(1), "linear_conv_kernel_dim is 1: expected at least 2"),
        ("attn_output_gate", json!(false), "attn_output_gate is false: expected true"),
        ("rope_parameters", json!({"partial_rotary_factor": 1.5}), "partial_rotary_factor is 1.5: expected at most 1"),
        ("rope_parameters", json!({"partial_rotary_factor": 0.1}), "an even number of the 32 columns of a head"),
    ];
    for (key, value, message) in cases {
        let error = load(&with(&good, key, value)).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
    spec.validate_gpu(Kind::BFloat16, Some(2), Path::new("m")).unwrap();
    let wide = spec.clone().map_blocks(|_, block| {
        if let Mixer::DeltaNet(delta_net) = &mut block.mixer {
            delta_net.heads.key_dim = 256;
        }
    });
    wide.validate_gpu(Kind::BFloat16, None, Path::new("m")).unwrap();
    let error = wide.validate_gpu(Kind::BFloat16, Some(2), Path::new("m")).unwrap_err().to_string();
    assert!(error.contains("key_dim: 256") && error.contains("linear_key_head_dim at most 128"), "{error}");
    let error = spec.validate_tp(4).unwrap_err().to_string();
    assert!(error.contains("2 key heads and 4 value heads of gated delta nets"), "{error}");
    let adapted = |targets: &[TargetModule]| LoraSpec { r: 4, alpha: 4.0, dropout: 0.0, targets: targets.to_vec() };
    adapted(TargetModule::ALL).check(&spec).unwrap();
    assert_eq!(adapted(TargetModule::ALL).modules(&spec), TargetModule::ALL);
    let dense = ModelSpec::preset("tiny").unwrap();
    assert_eq!(adapted(TargetModule::ALL).modules(&dense), TargetModule::ALL[..7]);
    let error = adapted(&[TargetModule::QProj, TargetModule::InProjZ]).check(&dense).unwrap_err().to_string();
    assert!(
        error.starts_with("lora.target_modules = q_proj, in_proj_z: expected modules among q_proj, k_proj"),
        "{error}"
    );
    assert!(error.ends_with("down_proj: this model has no in_proj_z"), "{error}");
    let muon = || [("optim", "muon".into())];
    spec.check_with(muon()).unwrap();
    let fused = ModelSpec { family: Family::Qwen3Next, ..spec };
    assert!(fused.check_with(muon()).unwrap_err().to_string().contains("in_proj_qkvz and in_proj_ba"));
}

#[test]
fn gated_delta_nets_with_experts_are_read_as_in_transformers_or_refused() {
    let spec = ModelSpec::preset("qwen3.5-35b-a3b").unwrap();
    let good = spec.to_config_json();
    let mut usual = with(&with(&good, "norm_topk_prob", json!("remove")), "intermediate_size", json!("remove"));
    usual = with(&with(&usual, "decoder_sparse_step", json!("remove")), "mlp_only_layers", json!("remove"));
    assert_eq!(load(&usual).unwrap(), spec);
    // The text part of a model with a vision tower; whether the head is tied is stated outside `text_config`.
    let whole = json!({
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": with(&usual, "architectures", json!("remove")),
        "tie_word_embeddings": true,
    });
    assert_eq!(load(&whole).unwrap(), ModelSpec { is_text_part: true, tie_word_embeddings: true, ..spec.clone() });
    // In each of 40 layers a token uses 8 experts and the shared one.
    let idle = 40 * 248 * 3 * 512 * 2048;
    assert_eq!(spec.num_params() - spec.num_active_params(), idle);
    for (key, value, message) in [
        (
            "norm_topk_prob",
            json!(false),
            "norm_topk_prob is false: expected true, as transformers has it for this family",
        ),
        ("shared_expert_intermediate_size", json!("remove"), "shared_expert_intermediate_size is absent"),
        ("num_experts", json!(4), "num_experts_per_tok is 8: expected at most num_experts = 4"),
    ] {
        let error = load(&with(&good, key, value)).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
    spec.validate_gpu(Kind::BFloat16, Some(2), Path::new("m")).unwrap();
}

#[test]
fn qwen3_next_normalizes_routing_by_default_and_rejects_fused_adapters() {
    let spec = ModelSpec { family: Family::Qwen3Next, ..ModelSpec::preset("qwen3.5-35b-a3b").unwrap() };
    let good = spec.to_config_json();
    assert_eq!(load(&with(&good, "norm_topk_prob", json!("remove"))).unwrap(), spec);
    let raw = load(&with(&good, "norm_topk_prob", json!(false))).unwrap();
    assert!(!raw.experts().unwrap().router.norm_topk_prob);
    let some = load(&with(&good, "mlp_only_layers", json!([0]))).unwrap();
    assert!(matches!((some.layers[0].mlp, some.layers[1].mlp), (Mlp::Dense(_), Mlp::Experts(_))));
    let adapted = |targets: &[TargetModule]| LoraSpec { r: 8, alpha: 8.0, dropout: 0.0, targets: targets.to_vec() };
    adapted(&[TargetModule::QProj, TargetModule::OutProj]).check(&spec).unwrap();
    for targets in [TargetModule::ALL, &[TargetModule::InProjZ]] {
        let error = adapted(targets).check(&spec).unwrap_err().to_string();
        assert!(error.contains("PEFT adapts in_proj_qkvz and in_proj_ba, which is not supported"), "{error}");
    }
}
