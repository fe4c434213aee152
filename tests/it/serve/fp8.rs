//! Models sampled in FP8.

use super::{Server, asked, generated, parts};
use crate::program::{MODEL, command, end, random_model_of, stdout_of};
use serde_json::json;

const FP8: &str = "--rollout_quantization fp8 --kv_cache_dtype fp8";

/// Server and `generate` sample the same with FP8, for concurrent and sequential requests, with other probabilities than unquantized weights.
#[test]
fn a_server_in_fp8_answers_as_generate_does() {
    let sampled = "--seed 7 -n 3";
    let lines = generated(MODEL, &format!("{sampled} {FP8}"));
    let server = Server::start(FP8);
    let choices = server.choices("/v1/completions", &asked(json!({"seed": 7, "n": 3})));
    assert_eq!(choices.len(), lines.len());
    for (choice, line) in choices.iter().zip(&lines) {
        assert_eq!(choice["text"], line["completion"]);
    }
    let again = server.choices("/v1/completions", &asked(json!({"seed": 7, "n": 3})));
    assert_eq!(parts(&again), parts(&choices));
    server.stop();
    let sum = |lines: &[serde_json::Value]| lines.iter().map(|line| line["logprob"].as_f64().unwrap()).sum::<f64>();
    let [of_weights, of_cache] = ["--rollout_quantization fp8", "--kv_cache_dtype fp8"]
        .map(|one| sum(&generated(MODEL, &format!("{sampled} {one}"))));
    let (plain, both) = (sum(&generated(MODEL, sampled)), sum(&lines));
    assert!([of_weights, of_cache, both].iter().all(|sum| *sum != plain) && of_weights != of_cache, "{plain} {both}");
}

/// A checkpoint in FP8 is loaded with its stored values: it samples the same as an unquantized export of it, and differently from the original
/// model. Matrices of experts are included.
#[test]
fn fp8_exports_are_served_as_stored() {
    let made = tempfile::tempdir().unwrap();
    let experts = random_model_of(made.path(), "configs/arithmetic/config-moe.json", &json!({}));
    for model in [MODEL.to_owned(), experts.display().to_string()] {
        let folder = tempfile::tempdir().unwrap();
        let [rounded, whole] = ["rounded", "whole"].map(|name| folder.path().join(name).display().to_string());
        stdout_of(&format!("export --model {model} --output {rounded} --fp8"));
        stdout_of(&format!("export --model {rounded} --output {whole}"));
        let config = |folder: &str| std::fs::read_to_string(format!("{folder}/config.json")).unwrap();
        assert!(config(&rounded).contains("\"quantization_config\""));
        assert!(!config(&whole).contains("quantization_config"));
        let [before, of_rounded, of_whole] =
            [&model, &rounded, &whole].map(|model| generated(model, "--seed 7 -n 3")[0]["logprob"].clone());
        assert_eq!(of_rounded, of_whole, "{model}");
        assert_ne!(of_rounded, before, "{model}");
    }
}

#[test]
fn incompatible_serve_options_are_refused() {
    let options = "--prompt a --mamba_ssm_cache_dtype bfloat16";
    let ended = end(command(&format!("generate --device cpu --model {MODEL} {options}")).spawn().unwrap());
    assert_eq!(ended.code, Some(2), "{}", ended.stderr);
    assert!(ended.stderr.contains("the model has no gated delta nets"), "{}", ended.stderr);
}

/// Formats of rollouts that do not support a model are refused before anything is loaded or counted.
#[test]
fn formats_that_do_not_support_a_model_are_refused() {
    let made = tempfile::tempdir().unwrap();
    let experts = random_model_of(made.path(), "configs/arithmetic/config-moe.json", &json!({}));
    let cases = [(experts.display().to_string(), "int8", "fp8 supports them"), (MODEL.to_owned(), "mxfp4", "experts")];
    for (model, format, reason) in cases {
        let options = format!("--model {model} --prompt a --rollout_quantization {format}");
        let ended = end(command(&format!("generate --device cpu {options}")).spawn().unwrap());
        assert_eq!(ended.code, Some(2), "{format}: {}", ended.stderr);
        let is_named = [format!("rollout_quantization = {format}"), reason.to_owned()];
        assert!(is_named.iter().all(|part| ended.stderr.contains(part)), "{format}: {}", ended.stderr);
    }
}
