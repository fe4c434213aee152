//! Serving several adapters and their base model under their own names.

use std::io::Write;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;

use colo_grpo::internal::config::{Quantization, TargetModule};
use colo_grpo::internal::model::{AdapterBase, LoraSpec, ModelSpec, ParamTable, write_adapters};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};
use tempfile::TempDir;

use super::{QUESTION, Server, asked, generated};
use crate::program::{MODEL, command, end, run};

/// Writes adapters for the demo's model that change its answers.
fn write(folder: &Path, r: usize, factor: f64) {
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join(MODEL);
    let spec = Arc::new(ModelSpec::from_folder(&base).unwrap());
    let lora = LoraSpec { r, alpha: 8.0, dropout: 0.0, targets: TargetModule::ALL.to_vec() };
    let table = ParamTable::adapters(spec, &lora, 1);
    let unit = |len: usize| (Tensor::arange(len as i64, (Kind::Float, Device::Cpu)) * factor).sin() * 0.1;
    let mut units = table.units.iter().map(|layout| Ok(unit(layout.len)));
    write_adapters(
        folder,
        &table,
        &lora,
        AdapterBase { folder: &base, quantization: Quantization::None },
        Kind::Float,
        &mut units,
    )
    .unwrap();
}

/// Two folders with adapters, and the options that name them `one` and `two`.
fn two_adapters() -> ([TempDir; 2], String) {
    let folders = [(4, 1.3), (2, 2.9)].map(|(r, factor)| {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), r, factor);
        folder
    });
    let [one, two] = folders.each_ref().map(|folder| folder.path().display());
    let named = format!("--adapter one={one} --adapter two={two}");
    (folders, named)
}

/// Concurrent requests of both adapters and the base get the same answers as each model alone on the CPU.
fn compare(server: &Server, folders: &[TempDir; 2]) {
    let [one, two] = folders.each_ref().map(|folder| folder.path().display().to_string());
    let expected = [(MODEL, MODEL), ("one", &*one), ("two", &*two)].map(|(name, folder)| {
        (name, generated(folder, "--seed 7 -n 3")) // with the adapter alone, by one rank
    });
    assert!(expected[0].1 != expected[1].1 && expected[1].1 != expected[2].1, "{expected:?}");
    std::thread::scope(|scope| {
        for (name, lines) in expected.iter().cycle().take(6) {
            scope.spawn(move || {
                let choices = server.choices("/v1/completions", &asked(json!({"model": name, "seed": 7, "n": 3})));
                assert_eq!(choices.len(), lines.len());
                for (choice, line) in choices.iter().zip(lines) {
                    assert_eq!(choice["text"], line["completion"], "{name}");
                    let logprobs = choice["logprobs"]["token_logprobs"].as_array().unwrap();
                    let sum: f64 = logprobs.iter().map(|logprob| logprob.as_f64().unwrap()).sum();
                    assert!((sum - line["logprob"].as_f64().unwrap()).abs() < 1e-3, "{name}: {sum}, {line}");
                }
            });
        }
    });
}

#[test]
fn adapters_are_served_by_name_with_their_base() {
    let (folders, named) = two_adapters();
    let server = Server::start(&format!("--nproc 2 {named}"));
    compare(&server, &folders);
    let (status, answer) = server.post("/v1/completions", &asked(json!({"model": "three"})));
    assert_eq!((status, &answer["error"]["param"]), (404, &json!("model")));
    assert_eq!(answer["error"]["code"], "model_not_found");
    assert!(answer["error"]["message"].as_str().unwrap().contains("'one', 'two'"), "{answer}");
    let (_, models) = server.call("GET", "/v1/models", "", b"");
    let models: Value = serde_json::from_str(&models).unwrap();
    let listed: Vec<_> =
        models["data"].as_array().unwrap().iter().map(|model| [&model["id"], &model["parent"]]).collect();
    assert_eq!(json!(listed), json!([[MODEL, null], ["one", MODEL], ["two", MODEL]]));
    for (place, name) in [MODEL, "one", "two"].into_iter().enumerate() {
        let (status, model) = server.call("GET", &format!("/v1/models/{name}"), "", b"");
        assert_eq!((status, serde_json::from_str::<Value>(&model).unwrap()), (200, models["data"][place].clone()));
    }
    assert_eq!(server.call("GET", "/v1/models/three", "", b"").0, 404);
    server.stop();

    let mut chat = command(&format!("chat --model {MODEL} {named} --temperature 0 --max_completion_length 20"));
    let mut chat = chat.stdin(Stdio::piped()).spawn().unwrap();
    let lines = format!("{QUESTION}\n/reset\n/adapter two\n{QUESTION}\n/reset\n/adapter\n{QUESTION}\n/adapter three\n");
    chat.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let ended = end(chat);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let [one, two] = folders.each_ref().map(|folder| folder.path().display().to_string());
    let alone = [&one, &two, MODEL].map(|model| generated(model, "--temperature 0 --chat")[0]["completion"].clone());
    assert_eq!(json!(ended.stdout.lines().collect::<Vec<_>>()), json!(alone));
    assert!(ended.stderr.contains("those given with --adapter: one, two"), "{}", ended.stderr);
}

#[test]
#[ignore = "needs a GPU"]
fn gpu_adapters_are_served_with_their_base() {
    let (folders, named) = two_adapters();
    let server = Server::start(&format!("--device cuda --dtype float32 {named}"));
    compare(&server, &folders);
    server.stop();
}

#[test]
fn invalid_adapters_are_reported_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), 2, 1.0);
    let run_folder = tempfile::tempdir().unwrap();
    let last = run_folder.path().join("final");
    std::fs::create_dir(&last).unwrap();
    write(&last, 2, 1.0);
    let (folder, run_folder) = (folder.path().display(), run_folder.path().display());
    let hint = format!("adapter_config.json; the adapters are in {}", last.display());
    for (arguments, code, expected) in [
        (format!("--model {MODEL} --adapter one={run_folder}"), 2, hint.as_str()),
        (format!("--model {MODEL} --adapter one"), 2, "expected NAME=FOLDER"),
        (format!("--model {MODEL} --adapter one={MODEL}"), 2, "a folder of LoRA adapters"),
        (
            format!("--model {MODEL} --adapter one={folder} --adapter one={folder}"),
            2,
            "a name that no other adapter has",
        ),
        (format!("--model {folder} --adapter one={folder}"), 2, "a base model as --model"),
    ] {
        run(&format!("serve --port 0 {arguments}")).assert_error(&arguments, code, &[expected]);
    }
}

/// Adapters without any tensor would be the same as their base, so they are an error.
#[test]
fn adapter_folders_without_tensors_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), 2, 1.0);
    let none: [(&str, TensorView); 0] = [];
    safetensors::serialize_to_file(none, None, &folder.path().join("adapter_model.safetensors")).unwrap();
    let expected = "no tensors: expected A and B of at least one projection";
    run(&format!("generate --model {} --prompt what", folder.path().display())).assert_error("empty", 3, &[expected]);
}

/// The error names a projection that PEFT adapts and this program does not support.
#[test]
fn an_adapter_of_an_unsupported_projection_is_named() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), 2, 1.0);
    let path = folder.path().join("adapter_model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let own = SafeTensors::deserialize(&bytes).unwrap();
    let other = "base_model.model.model.layers.0.linear_attn.in_proj_qkvz.lora_A.weight";
    let view = TensorView::new(Dtype::F32, vec![2], &[0; 8]).unwrap();
    safetensors::serialize_to_file(own.iter().chain([(other, view)]), None, &path).unwrap();
    let (folder, expected) =
        (folder.path().display(), format!("{other} is not supported: expected the matrices A and B of projections"));
    run(&format!("generate --model {folder} --prompt what")).assert_error("generate", 3, &[&expected]);
    run(&format!("serve --port 0 --model {MODEL} --adapter one={folder}")).assert_error("serve", 3, &[&expected]);
}
