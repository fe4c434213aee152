//! Model folders: golden ones written by transformers, round trips, and malicious ones.

mod vision;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use colo_grpo::Error;
use colo_grpo::ExitCode;
use colo_grpo::internal::model::{Family, ModelSpec, ParamTable, WeightFiles, WeightWriter};
use serde_json::{Value, json};
use tch::Kind;

const GOLDEN: [(&str, Family); 29] = [
    ("qwen2_tied", Family::Qwen2),
    ("qwen2_untied", Family::Qwen2),
    ("qwen2_yarn", Family::Qwen2),
    ("qwen3", Family::Qwen3),
    ("llama3", Family::Llama),
    ("mistral", Family::Mistral),
    ("olmo2", Family::Olmo2),
    ("smollm3", Family::SmolLm3),
    ("smollm3_window", Family::SmolLm3),
    ("granite", Family::Granite),
    ("gemma3", Family::Gemma3),
    ("gemma3_vision", Family::Gemma3),
    ("qwen2_window", Family::Qwen2),
    ("glm", Family::Glm),
    ("glm4", Family::Glm4),
    ("glm4_moe", Family::Glm4Moe),
    ("gpt_oss", Family::GptOss),
    ("phi3", Family::Phi3),
    ("phi3_window", Family::Phi3),
    ("ministral", Family::Ministral),
    ("mistral3_vision", Family::Mistral),
    ("qwen2_moe", Family::Qwen2Moe),
    ("qwen2_moe_mixed", Family::Qwen2Moe),
    ("qwen3_moe", Family::Qwen3Moe),
    ("qwen3_moe_mixed", Family::Qwen3Moe),
    ("qwen3_5", Family::Qwen3_5),
    ("qwen3_5_vision", Family::Qwen3_5),
    ("qwen3_5_moe", Family::Qwen3_5Moe),
    ("qwen3_next", Family::Qwen3Next),
];

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn open(folder: &Path) -> Result<WeightFiles, Error> {
    WeightFiles::open(folder, Arc::new(ModelSpec::from_folder(folder)?))
}

#[test]
fn published_models_have_their_published_sizes() {
    let sizes = [
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-3b", 3_085_938_688),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3.5-9b", 8_953_803_264),
        ("qwen3.5-35b-a3b", 34_660_610_688),
        ("llama3.2-1b", 1_235_814_400),
        ("llama3.1-8b", 8_030_261_248),
        ("olmo2-1b", 1_484_916_736),
        ("olmo2-7b", 7_298_617_344),
        ("smollm3-3b", 3_075_098_624),
        ("granite3.1-8b", 8_170_848_256),
        ("gemma-3-1b", 999_885_952),
        ("gemma-3-4b", 3_880_263_168),
        ("gemma-3-12b", 11_766_034_176),
        ("gemma-3-27b", 27_009_346_304),
        ("glm-4-9b", 9_400_279_040),
        // Without the multi-token prediction layer. Each of the 5,760 corrections of scores is stored in three parts.
        ("glm-4.5-air", 106_852_251_264 + 2 * 5_760),
        ("phi-4", 14_659_507_200),
        ("ministral-8b", 8_019_808_256),
        ("mistral-small-24b", 23_572_403_200),
        ("gpt-oss-20b", 20_914_757_184),
        ("tiny", 796_800),
        ("micro", 27_936),
    ];
    for (name, num_params) in sizes {
        let spec = ModelSpec::preset(name).unwrap();
        assert_eq!(spec.num_params(), num_params, "{name}");
        let table = ParamTable::new(Arc::new(spec), 8);
        let laid_out: usize = table.units.iter().flat_map(|unit| &unit.params).map(|param| param.numel()).sum();
        assert_eq!(laid_out, num_params, "{name}");
        assert!(table.units.iter().all(|unit| unit.len.is_multiple_of(8 * 64)));
        assert_eq!(table.total, table.units.iter().map(|unit| unit.len).sum::<usize>());
    }
}

#[test]
fn golden_folders_are_read_and_written_back_bit_by_bit() {
    for (name, family) in GOLDEN {
        let spec = Arc::new(ModelSpec::from_folder(golden(name)).unwrap());
        assert_eq!((spec.family, &spec.eos_token_ids[..], spec.bos_token_id), (family, &[2, 3][..], Some(1)));
        let has_window =
            name.ends_with("_window") || ["mistral", "ministral", "gemma3", "gemma3_vision", "gpt_oss"].contains(&name);
        assert_eq!(spec.windows().contains(&Some(8)), has_window, "{name}");
        let is_scaled = spec.rotations().into_iter().flatten().any(|rope| rope.scaling.is_some());
        assert_eq!(is_scaled, ["llama3", "qwen2_yarn", "gemma3", "gpt_oss"].contains(&name));
        let table = ParamTable::new(spec.clone(), 2);
        let files = open(&golden(name)).unwrap();
        let copy = tempfile::tempdir().unwrap();
        spec.write_config(copy.path(), Some(&golden(name))).unwrap();
        assert_eq!(ModelSpec::from_folder(copy.path()).unwrap(), *spec);
        let [ours, theirs] = [copy.path(), &golden(name)].map(|folder| read(&folder.join("config.json")));
        assert_eq!(ours.get("pad_token_id"), theirs.get("pad_token_id"), "{name}");
        // transformers refuses fractions where it expects integers.
        for (key, _) in theirs.as_object().unwrap().iter().filter(|(_, value)| value.is_u64()) {
            assert!(ours.get(key).is_none_or(|value| !value.is_f64()), "{name}: {key} = {}", ours[key]);
        }
        let mut writer = WeightWriter::create(copy.path(), spec.clone(), spec.dtype, Some(&golden(name))).unwrap();
        for layout in &table.units {
            writer.write_unit(layout, &files.read_unit(layout, spec.dtype).unwrap()).unwrap();
        }
        writer.finish().unwrap();
        let (theirs, ours) = (tensors(&golden(name)), tensors(copy.path()));
        assert_eq!(theirs.len(), ours.len(), "{name}");
        assert!(theirs == ours, "{name}: a tensor's name, type, shape or bytes differ");
    }
}

/// A checkpoint with experts in MXFP4 is loaded as their values, which are exact in bfloat16.
#[test]
fn experts_in_mxfp4_are_written_back_in_bfloat16() {
    let folder = golden("gpt_oss_mxfp4");
    let spec = Arc::new(ModelSpec::from_folder(&folder).unwrap());
    assert_eq!((spec.family, spec.dtype), (Family::GptOss, Kind::BFloat16));
    let (files, copy) = (open(&folder).unwrap(), tempfile::tempdir().unwrap());
    spec.write_config(copy.path(), Some(&folder)).unwrap();
    assert_eq!(ModelSpec::from_folder(copy.path()).unwrap(), *spec);
    let table = ParamTable::new(spec.clone(), 1);
    let mut writer = WeightWriter::create(copy.path(), spec, Kind::BFloat16, None).unwrap();
    for layout in &table.units {
        writer.write_unit(layout, &files.read_unit(layout, Kind::Float).unwrap()).unwrap();
    }
    writer.finish().unwrap();
    let written = open(copy.path()).unwrap();
    for layout in &table.units {
        let [theirs, ours] = [&files, &written].map(|files| files.read_unit(layout, Kind::Float).unwrap());
        assert!(theirs.equal(&ours), "{}", layout.unit);
    }
    assert!(tensors(copy.path()).iter().all(|(name, ..)| !name.ends_with("_blocks") && !name.ends_with("_scales")));
}

/// Name, data type, shape and bytes of every tensor in a folder, sorted.
fn tensors(folder: &Path) -> Vec<(String, String, Vec<usize>, Vec<u8>)> {
    let files = folder.read_dir().unwrap().map(|entry| entry.unwrap().path());
    let mut all = Vec::new();
    for file in files.filter(|file| file.extension().is_some_and(|end| end == "safetensors")) {
        let bytes = std::fs::read(file).unwrap();
        for (name, view) in safetensors::SafeTensors::deserialize(&bytes).unwrap().iter() {
            all.push((name.to_owned(), view.dtype().to_string(), view.shape().to_vec(), view.data().to_vec()));
        }
    }
    all.sort();
    all
}

/// A safetensors file with this header and `data_bytes` bytes of data.
fn file(header: &str, data_bytes: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0; data_bytes]].concat()
}

/// A copy of a golden folder.
fn copy_of(name: &str) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    let entries = golden(name).read_dir().unwrap().map(|entry| entry.unwrap());
    // Numbers of other tests lie beside a model.
    for entry in entries.filter(|entry| !entry.file_name().to_string_lossy().starts_with("verify_")) {
        std::fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    copy
}

/// Asserts that loading the folder fails with exit code 3 and `message`.
fn refused(folder: &Path, message: &str) {
    let error = open(folder).expect_err(message);
    assert_eq!(error.exit_code(), ExitCode::Files, "{error}");
    assert!(error.to_string().contains(message), "expected '{message}' in: {error}");
}

#[test]
fn hostile_headers_are_refused_before_anything_is_allocated() {
    let tensor = |offsets: [u64; 2], shape: Value| {
        json!({"model.norm.weight": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).to_string()
    };
    let info = |start: u64, end: u64| json!({"dtype": "F32", "shape": [2], "data_offsets": [start, end]});
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (Vec::new(), "truncated: it has 0 bytes, expected at least 8"),
        (vec![0; 7], "truncated: it has 7 bytes, expected at least 8"),
        (u64::MAX.to_le_bytes().to_vec(), "the header has 18446744073709551615 bytes: expected at most 100000000"),
        (100u64.to_le_bytes().to_vec(), "the file is truncated: it has 8 bytes, but its header alone needs 108"),
        (file("", 0), "bad header"),
        (file("[]", 0), "bad header"),
        (file("{\"a\": ", 0), "bad header"),
        (file("\u{0}\u{0}", 0), "bad header"),
        (file(&"[".repeat(100_000), 0), "bad header"),
        (file("{\"a\": {\"dtype\": \"F99\", \"shape\": [], \"data_offsets\": [0, 4]}}", 4), "bad header"),
        (file("{\"a\": {\"dtype\": \"F32\", \"shape\": [-1], \"data_offsets\": [0, 4]}}", 4), "bad header"),
        (file("{\"a\": {\"dtype\": \"F32\", \"data_offsets\": [0, 4]}}", 4), "bad header"),
        (file(&tensor([0, 4], json!([2])), 4), "bad header"),
        (file(&tensor([8, 0], json!([2])), 8), "bad header"),
        (file(&tensor([4, 12], json!([2])), 12), "bad header"),
        (file(&tensor([0, u64::MAX], json!([2])), 8), "bad header"),
        (file(&tensor([0, 8], json!([1u64 << 62, 1u64 << 62])), 8), "bad header"),
        (file(&tensor([0, 8], json!([u64::MAX, 2])), 8), "bad header"),
        (
            file(&tensor([0, 4], json!([2])), 4),
            "model.norm.weight is stored in bytes 0 to 4, but F32 [2] needs 8 bytes",
        ),
        (file(&tensor([0, 8], json!([u64::MAX, 2])), 8), "needs more than 2^64 bytes"),
        (
            file(&json!({"a": info(0, 8), "b": info(4, 12)}).to_string(), 12),
            "bad header: b begins at byte 4, before the end of a at 8",
        ),
        (
            file(&json!({"a": info(0, 8), "b": info(0, 8)}).to_string(), 8),
            "bad header: b begins at byte 0, before the end",
        ),
        (
            file(&json!({"a": info(0, 8), "b": info(16, 24)}).to_string(), 24),
            "bad header: bytes 8 to 16, between a and b, belong to no tensor",
        ),
        (file(&tensor([0, 1 << 40], json!([1u64 << 38])), 8), "expected 1099511627"),
        (file(&tensor([0, 8], json!([2])), 9), "but its header describes"),
        (file(&tensor([0, 8], json!([2])), 8), "missing model.embed_tokens.weight [96, 32]"),
        (file("{}", 0), "and 18 more"),
    ];
    for (bytes, message) in cases {
        let folder = copy_of("qwen2_tied");
        std::fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
        refused(folder.path(), message);
    }
}

#[test]
fn a_missing_expert_tensor_is_named() {
    let folder = copy_of("qwen3_moe");
    let path = folder.path().join("model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    let header_bytes = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&whole[8..8 + header_bytes]).unwrap();
    header.as_object_mut().unwrap().remove("model.layers.1.mlp.experts.3.up_proj.weight").unwrap();
    std::fs::write(&path, [&file(&header.to_string(), 0), &whole[8 + header_bytes..]].concat()).unwrap();
    refused(folder.path(), "belong to no tensor; missing model.layers.1.mlp.experts.3.up_proj.weight [16, 32]");
}

#[test]
fn a_truncated_file_names_expected_and_actual_bytes() {
    let folder = copy_of("qwen3");
    let path = folder.path().join("model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    std::fs::write(&path, &whole[..whole.len() - 100]).unwrap();
    refused(folder.path(), &format!("truncated: it has {} bytes, expected {}", whole.len() - 100, whole.len()));
}

#[test]
fn tensors_that_do_not_fit_the_model_are_named() {
    let edit = |folder: &str, from: &str, to: &str, message: &str| {
        let folder = copy_of(folder);
        let path = folder.path().join("model.safetensors");
        let whole = std::fs::read(&path).unwrap();
        let header_bytes = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
        let header = String::from_utf8(whole[8..8 + header_bytes].to_vec()).unwrap();
        assert!(header.contains(from), "{header}");
        let bytes = file(&header.replacen(from, to, 1), 0);
        std::fs::write(&path, [&bytes, &whole[8 + header_bytes..]].concat()).unwrap();
        match message {
            "" => _ = open(folder.path()).unwrap(),
            message => refused(folder.path(), message),
        }
    };
    edit(
        "mistral",
        "model.norm.weight",
        "model.norm.bias",
        "missing model.norm.weight [32]; unexpected model.norm.bias [32]",
    );
    edit("mistral", "[96,32]", "[32,96]", "has shape [32, 96], expected [96, 32]");
    edit("qwen2_untied", "\"BF16\"", "\"U16\"", "has type U16, expected F32, BF16 or F16");
    edit("qwen2_untied", "\"BF16\"", "\"F16\"", "");
    edit(
        "qwen3_moe",
        "layers.1.mlp.experts.3.up_proj.weight",
        "layers.1.mlp.experts.9.up_proj.weight",
        "missing model.layers.1.mlp.experts.3.up_proj.weight [16, 32]; unexpected model.layers.1.mlp.experts.9.up_proj",
    );
    edit(
        "qwen3_moe",
        "experts.0.down_proj.weight\":{\"dtype\":\"F32\",\"shape\":[32,16]",
        "experts.0.down_proj.weight\":{\"dtype\":\"F32\",\"shape\":[16,32]",
        "model.layers.0.mlp.experts.0.down_proj.weight has shape [16, 32], expected [32, 16]",
    );
    let swap = |key: &str, value: Value, message: &str| {
        let folder = copy_of("qwen2_tied");
        let path = folder.path().join("config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        config[key] = value;
        std::fs::write(&path, config.to_string()).unwrap();
        refused(folder.path(), message);
    };
    swap("num_hidden_layers", json!(1), "unexpected model.layers.1.input_layernorm.weight [32]");
    swap("intermediate_size", json!(65), "mlp.gate_proj.weight has shape [64, 32], expected [65, 32]");
    swap("tie_word_embeddings", json!(false), "missing lm_head.weight [96, 32]");
}

/// As in transformers: if the files contradict `tie_word_embeddings`, both tensors are kept; if they are equal, they are tied.
#[test]
fn an_untied_head_is_read_from_the_files() {
    for name in ["mistral", "llama3", "qwen2_untied"] {
        let folder = copy_of(name);
        let path = folder.path().join("config.json");
        let mut config = read(&path);
        config["tie_word_embeddings"] = json!(true);
        std::fs::write(&path, config.to_string()).unwrap();
        let spec = ModelSpec::from_folder(folder.path()).unwrap();
        assert!(!spec.tie_word_embeddings && spec == ModelSpec::from_folder(golden(name)).unwrap(), "{name}");
        open(folder.path()).unwrap();
        spec.write_config(folder.path(), Some(folder.path())).unwrap();
        assert_eq!(read(&folder.path().join("config.json"))["tie_word_embeddings"], false, "{name}");
    }
    let folder = copy_of("qwen2_tied");
    let path = folder.path().join("model.safetensors");
    let with_head = |scale: u8| {
        let whole = std::fs::read(golden("qwen2_tied").join("model.safetensors")).unwrap();
        let file = safetensors::SafeTensors::deserialize(&whole).unwrap();
        let table = file.tensor("model.embed_tokens.weight").unwrap();
        let data: Vec<u8> = table.data().iter().map(|byte| byte.wrapping_mul(scale)).collect();
        let head = safetensors::tensor::TensorView::new(table.dtype(), table.shape().to_vec(), &data).unwrap();
        let all = file.tensors().into_iter().chain([("lm_head.weight".to_owned(), head)]);
        std::fs::write(&path, safetensors::serialize(all, None).unwrap()).unwrap();
        open(folder.path()).unwrap();
        ModelSpec::from_folder(folder.path()).unwrap().tie_word_embeddings
    };
    assert!(with_head(1), "an equal head is the table");
    assert!(!with_head(3), "another head is the model's own");
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[test]
fn a_hostile_index_is_refused() {
    let shard = "model-00001-of-00003.safetensors";
    let edit = |edit: &dyn Fn(&mut Value, &Path), message: &str| {
        let folder = copy_of("llama3");
        let path = folder.path().join("model.safetensors.index.json");
        let mut index: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        edit(&mut index, folder.path());
        std::fs::write(&path, index.to_string()).unwrap();
        refused(folder.path(), message);
    };
    let name = "model.norm.weight";
    for path in ["../model.safetensors", "/etc/passwd", "a/../b.safetensors", "./a.safetensors", "..", "", "a.bin"] {
        let message = "expected the name of a .safetensors file of this folder";
        edit(&|index, _| index["weight_map"][name] = json!(path), message);
    }
    edit(&|index, _| index["weight_map"][name] = json!(7), "expected the name of a .safetensors file");
    edit(&|index, _| index["weight_map"] = json!([]), "expected an object under weight_map");
    edit(&|index, _| *index = json!([]), "expected a JSON object");
    edit(&|index, _| index["weight_map"][name] = json!("absent.safetensors"), "absent.safetensors: missing");
    edit(&|index, _| index["weight_map"]["extra"] = json!(shard), "extra is not in model-00001");
    edit(&|_, folder| std::fs::remove_file(folder.join(shard)).unwrap(), "00001-of-00003.safetensors: missing");
    let twice = |index: &mut Value, folder: &Path| {
        std::fs::copy(folder.join(shard), folder.join("twin.safetensors")).unwrap();
        index["weight_map"]["extra"] = json!("twin.safetensors");
    };
    edit(&twice, "also in");
}

#[test]
fn pickled_weights_are_refused_with_the_command_that_converts() {
    for name in ["pytorch_model.bin", "pytorch_model.bin.index.json", "weights.pt"] {
        let folder = copy_of("qwen2_tied");
        std::fs::rename(folder.path().join("model.safetensors"), folder.path().join(name)).unwrap();
        refused(folder.path(), "save_pretrained");
    }
    let folder = copy_of("qwen2_tied");
    std::fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    refused(folder.path(), "no weights: expected model.safetensors or model.safetensors.index.json");
}

#[test]
fn bfloat16_on_disk_is_exact_in_float32() {
    let folder = golden("qwen2_untied");
    let spec = Arc::new(ModelSpec::from_folder(&folder).unwrap());
    assert_eq!(spec.dtype, Kind::BFloat16);
    let files = open(&folder).unwrap();
    for layout in &ParamTable::new(spec, 1).units {
        let wide = files.read_unit(layout, Kind::Float).unwrap();
        assert!(wide.to_kind(Kind::BFloat16).to_kind(Kind::Float).equal(&wide));
        assert!(files.read_unit(layout, Kind::BFloat16).unwrap().to_kind(Kind::Float).equal(&wide));
    }
}
