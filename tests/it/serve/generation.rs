//! Sampling parameters in a model's `generation_config.json`.

use std::fs;

use serde_json::json;

use super::{QUESTION, Server};
use crate::program::{copy_of_model, json_lines, run};

/// With the model's `top_k` of 1 only one token can be sampled: completions are equal with it and differ without.
#[test]
fn generation_config_values_are_used_reported_and_optional() {
    let folder = tempfile::tempdir().unwrap();
    let model = copy_of_model(&folder.path().join("model"));
    fs::write(
        model.join("generation_config.json"),
        r#"{"eos_token_id": 1, "top_k": 1, "temperature": 1.5, "do_sample": true}"#,
    )
    .unwrap();
    let model = model.display().to_string();
    let sampled = |more: &str| {
        let line = format!("generate --model {model} --prompt what -n 12 --max_completion_length 8 {more}");
        let ended = run(&line);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        let mut texts: Vec<String> =
            json_lines(&ended.stdout).iter().map(|line| line["completion"].to_string()).collect();
        texts.sort();
        texts.dedup();
        (texts.len(), ended.stderr)
    };
    let (num, said) = sampled("");
    assert_eq!(num, 1);
    assert!(said.contains("sampling with temperature 1.5, top_k 1 by default"), "{said}");
    let (num, said) = sampled("--generation_config none");
    assert!(num > 1 && !said.contains("sampling with"), "{num}: {said}");
    assert!(sampled("--top_k 0").0 > 1, "an option counts over the model's value");

    let distinct = |server: &Server, more: serde_json::Value| {
        let mut body = json!({"prompt": QUESTION, "n": 12, "max_tokens": 8, "seed": 3});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let mut texts: Vec<String> =
            server.choices("/v1/completions", &body).iter().map(|choice| choice["text"].to_string()).collect();
        texts.sort();
        texts.dedup();
        texts.len()
    };
    let server = Server::of(&model, "");
    assert_eq!(distinct(&server, json!({})), 1);
    assert!(distinct(&server, json!({"top_k": -1, "temperature": 3})) > 1, "a field counts over the model's value");
    server.stop();
    let plain = Server::of(&model, "--generation_config none");
    assert!(distinct(&plain, json!({"temperature": 3})) > 1);
    plain.stop();

    fs::write(folder.path().join("model/generation_config.json"), r#"{"eos_token_id": 1, "top_p": 2}"#).unwrap();
    run(&format!("generate --model {model} --prompt what")).assert_error(
        "no mass",
        3,
        &["generation_config.json", "top_p"],
    );
}

/// A repetition penalty changes the most probable completion.
#[test]
fn generate_supports_a_repetition_penalty() {
    let greedy = |more: &str| {
        let line = format!(
            "generate --model {} --prompt what --temperature 0 --max_completion_length 12 {more}",
            crate::program::MODEL
        );
        let ended = run(&line);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        json_lines(&ended.stdout)[0]["completion"].clone()
    };
    assert_ne!(greedy("--repetition_penalty 1000"), greedy(""));
    run(&format!("generate --model {} --prompt what --repetition_penalty 0", crate::program::MODEL)).assert_error(
        "no penalty",
        2,
        &["--repetition_penalty", "from 0.000001"],
    );
}
