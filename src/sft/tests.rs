use std::fs;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::Sft;
use crate::config::SftConfig;
use crate::ranks::World;

/// Loss and gradient norm of the first update, for two rows in separate micro-batches, and the loss of the same rows as held-out rows. The learning
/// rate is too low to change the weights.
fn first_update(router_aux_loss_coef: &str) -> [f64; 3] {
    let (folder, golden) =
        (tempfile::tempdir().unwrap(), Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/qwen3_moe"));
    for file in ["config.json", "model.safetensors"] {
        fs::copy(golden.join(file), folder.path().join(file)).unwrap();
    }
    let vocab: Map<_, _> = (0..96).map(|id| (format!("w{id:02}"), id.into())).collect();
    let model = json!({"type": "WordLevel", "vocab": vocab, "unk_token": "w00"});
    let tokenizer = json!({"version": "1.0", "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model});
    fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    fs::write(folder.path().join("tokenizer_config.json"), r#"{"eos_token": "w02"}"#).unwrap();
    let numbers: Value = serde_json::from_slice(&fs::read(golden.join("golden.json")).unwrap()).unwrap();
    let row = |(index, prompt_len): (usize, usize)| {
        let ids: Vec<u32> = serde_json::from_value(numbers["input_ids"][index].clone()).unwrap();
        let text = |ids: &[u32]| ids.iter().map(|id| format!("w{id:02}")).collect::<Vec<_>>().join(" ");
        json!({"prompt": text(&ids[..prompt_len]), "completion": text(&ids[prompt_len..])}).to_string()
    };
    fs::write(folder.path().join("rows.jsonl"), [(1, 4), (2, 9)].map(row).join("\n")).unwrap();
    let place = folder.path().display();
    let keys = format!(
        "model_name_or_path={place} train_file={place}/rows.jsonl eval_file={place}/rows.jsonl learning_rate=1e-12 output_dir={place}/out device=cpu dtype=float32 max_steps=1 \
         per_device_train_batch_size=2 max_tokens_per_micro_batch=24 max_grad_norm=1 {router_aux_loss_coef}"
    );
    let keys: Vec<String> = keys.split_whitespace().map(str::to_owned).collect();
    Sft::new(SftConfig::load(None, &keys).unwrap(), Arc::new(World::single())).unwrap().run().unwrap();
    let lines = fs::read_to_string(folder.path().join("out/metrics.jsonl")).unwrap();
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let number = |name: &str| lines.iter().find_map(|line| line[name].as_f64()).unwrap();
    ["loss", "grad_norm", "eval_loss"].map(number)
}

/// The expected values are from transformers in float64: the mean over both rows' 23 completion tokens, plus the coefficient times the mean
/// `aux_loss` of the rows, 2.4585843, weighted by their 14 and 22 tokens; and the gradient norm by torch's autograd.
#[test]
fn sft_losses_include_the_load_balancing_loss() {
    let cases = [
        ("router_aux_loss_coef=0", [5.934_378_761_41, 6.730_165_670_19]),
        ("router_aux_loss_coef=0.5", [7.163_670_915_72, 6.765_307_081_61]),
        ("", [5.936_837_345_72, 6.730_176_071_99]), // the model's own coefficient, 0.001
    ];
    for (coef, expected) in cases {
        let [loss, grad_norm] = expected;
        for (got, expected) in first_update(coef).into_iter().zip([loss, grad_norm, loss]) {
            assert!((got - expected).abs() < 1e-4, "{coef}: {got}, expected {expected}");
        }
    }
}
