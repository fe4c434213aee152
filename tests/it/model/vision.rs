//! Model files with a vision tower: the text part is trained and sampled, and everything else is saved unchanged.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};

use super::{copy_of, refused, tensors};
use crate::program::{MODEL, json_lines, run, stdout_of};

const NAME: &str = "qwen3_5_vision";

fn read(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// The golden folder with a tokenizer, a processor's settings, and a multi-token prediction layer in float32.
fn model() -> tempfile::TempDir {
    let folder = copy_of(NAME);
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join(MODEL).join(file), folder.path().join(file)).unwrap();
    }
    fs::write(folder.path().join("preprocessor_config.json"), r#"{"patch_size": 4}"#).unwrap();
    let values: Vec<u8> = (0..15).flat_map(|number| (number as f32 * 0.1).to_le_bytes()).collect();
    let view = TensorView::new(Dtype::F32, vec![3, 5], &values).unwrap();
    let bytes = safetensors::serialize([("mtp.fc.weight", view)], None).unwrap();
    fs::write(folder.path().join("more.safetensors"), bytes).unwrap();
    let path = folder.path().join("model.safetensors.index.json");
    let mut index = read(&path);
    index["weight_map"]["mtp.fc.weight"] = json!("more.safetensors");
    fs::write(path, index.to_string()).unwrap();
    folder
}

type Bytes = (String, Vec<usize>, Vec<u8>);

/// The tensors of the text model, and all others.
fn parts(folder: &Path) -> [BTreeMap<String, Bytes>; 2] {
    let all = tensors(folder).into_iter().map(|(name, dtype, shape, bytes)| (name, (dtype, shape, bytes)));
    let is_text = |name: &str| name.starts_with("model.language_model.") || name == "lm_head.weight";
    let (text, others) = all.partition(|(name, _)| is_text(name));
    [text, others]
}

#[test]
fn the_text_part_of_a_vision_model_trains_and_the_rest_is_kept() {
    let (model, out) = (model(), tempfile::tempdir().unwrap());
    let (model, out) = (model.path(), out.path());
    let row = r#"{"prompt": "what is one plus one ?", "completion": "the answer is 2"}"#;
    fs::write(out.join("rows.jsonl"), format!("{row}\n").repeat(4)).unwrap();
    let (from, to) = (model.display(), out.display());
    stdout_of(&format!(
        "sft --nproc 2 --config configs/arithmetic/warmup.toml model_name_or_path={from} train_file={to}/rows.jsonl \
         output_dir={to}/run per_device_train_batch_size=2 max_steps=1 warmup_steps=0 dtype=bfloat16 zero.stage=3"
    ));
    stdout_of(&format!("export --model {to}/run/final --output {to}/exported"));
    let [text, others] = parts(model);
    assert!(others.contains_key("mtp.fc.weight") && others.len() > 20, "{:?}", others.keys());
    for folder in ["run/final", "exported"].map(|folder| out.join(folder)) {
        let [trained, kept] = parts(&folder);
        assert!(kept == others, "{}: what is no text has changed", folder.display());
        assert!(trained.keys().eq(text.keys()));
        let moved = trained.iter().filter(|(name, tensor)| text[*name] != **tensor).count();
        assert!(moved > text.len() / 2, "{moved} of {} tensors have moved", text.len());
        assert_eq!(read(&folder.join("config.json")), read(&model.join("config.json")));
        assert_eq!(read(&folder.join("preprocessor_config.json")), json!({"patch_size": 4}));
        let line = stdout_of(&format!("generate --model {} --prompt what --max_completion_length 3", folder.display()));
        assert_eq!(json_lines(&line).len(), 1);
    }
    // In float32 the description says so, of the whole and of the text.
    stdout_of(&format!(
        "sft --config configs/arithmetic/warmup.toml model_name_or_path={from} train_file={to}/rows.jsonl \
         output_dir={to}/wide per_device_train_batch_size=2 max_steps=1 warmup_steps=0"
    ));
    let config = read(&out.join("wide/final/config.json"));
    assert_eq!(config["dtype"], "float32");
    let [trained, kept] = parts(&out.join("wide/final"));
    assert!(kept == others && trained.values().all(|(dtype, ..)| dtype == "F32"));
}

#[test]
fn faults_in_the_text_config_of_a_vision_model_are_named() {
    let edit = |edit: &dyn Fn(&mut Value), message: &str| {
        let folder = copy_of(NAME);
        let path = folder.path().join("config.json");
        let mut config = read(&path);
        edit(&mut config);
        fs::write(path, config.to_string()).unwrap();
        refused(folder.path(), message);
    };
    let remove = |config: &mut Value, key: &str| _ = config.as_object_mut().unwrap().remove(key);
    edit(&|config| remove(config, "text_config"), "text_config is absent: expected an object that describes the text");
    edit(&|config| config["text_config"] = json!([]), "text_config is []: expected an object");
    edit(&|config| config["text_config"]["hidden_size"] = json!(0), "text_config.hidden_size is 0");
    edit(&|config| config["text_config"]["layer_types"][1] = json!("mamba"), "text_config.layer_types is");
    edit(&|config| config["quantization_config"] = json!({"bits": 4}), "quantization_config");
    edit(&|config| config["tie_word_embeddings"] = json!(false), "missing lm_head.weight [96, 32]");
    // The same tensors are not those of a text model.
    edit(
        &|config| {
            *config = config["text_config"].take();
            config["architectures"] = json!(["Qwen3_5ForCausalLM"]);
        },
        "unexpected model.language_model.embed_tokens.weight [96, 32]",
    );
    let folder = tempfile::tempdir().unwrap();
    let config = copy_of(NAME);
    let line = format!(
        "init --config_json {0}/config.json --output {1}/new",
        config.path().display(),
        folder.path().display()
    );
    run(&line).assert_error(&line, 3, &["this describes a vision-language model", "config.json"]);
}
