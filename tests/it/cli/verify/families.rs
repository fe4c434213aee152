//! `verify` passes on a tiny model of each family that transformers saved, and fails if one of its matrices is changed.

use super::{damage, verify_golden};

/// Golden folders, with a layer and the tensor that is changed.
const FAMILIES: [(&str, usize, &str); 11] = [
    ("gemma3", 5, "model.layers.5.mlp.down_proj.weight"),
    ("gpt_oss", 1, "model.layers.1.mlp.experts.gate_up_proj"),
    ("gpt_oss", 2, "model.layers.2.self_attn.sinks"),
    ("glm4", 1, "model.layers.1.mlp.gate_up_proj.weight"),
    ("glm4_moe", 0, "model.layers.0.self_attn.o_proj.weight"),
    ("glm4_moe", 2, "model.layers.2.mlp.shared_experts.up_proj.weight"),
    ("phi3", 0, "model.layers.0.self_attn.qkv_proj.weight"),
    ("mistral", 1, "model.layers.1.self_attn.k_proj.weight"),
    ("mistral3_vision", 0, "language_model.model.layers.0.mlp.up_proj.weight"),
    ("ministral", 2, "model.layers.2.self_attn.v_proj.weight"),
    ("qwen2_window", 1, "model.layers.1.self_attn.q_proj.weight"),
];

#[test]
fn verify_passes_every_family_and_finds_a_changed_matrix() {
    for (name, layer, tensor) in FAMILIES {
        let ended = verify_golden(name, &|_| (), ("", ""), &[]);
        assert_eq!(ended.code, Some(0), "{name}: {}{}", ended.stdout, ended.stderr);
        assert!(ended.stdout.ends_with("verdict: the same model up to rounding\n"), "{name}: {}", ended.stdout);
        let change = |values: &mut Vec<f32>| values.iter_mut().for_each(|value| *value *= 1.05);
        let ended = verify_golden(name, &|model| damage(model, tensor, change), ("", ""), &[]);
        ended.assert_error(tensor, 13, &[&format!("error of layer {layer}, the worst, by itself")]);
    }
}
