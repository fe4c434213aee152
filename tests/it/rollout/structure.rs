//! Structured output: the text follows its structure with any weights.

use std::sync::Arc;

use colo_grpo::Error;
use colo_grpo::internal::data::Tokenizer;
use colo_grpo::internal::model::ModelSpec;
use colo_grpo::internal::ranks::World;
use colo_grpo::internal::rollout::EngineOptions;
use colo_grpo::internal::types::{FinishReason, RolloutGroup, SamplingParams, Structure};
use serde_json::{Map, Value, json};

use super::setup::{Model, options, prompts, sampled};
use crate::ranks;

const VOCAB: usize = 300;
const EOS: u32 = 299;

/// A tokenizer with the ASCII bytes, some words of JSON, and an end-of-sequence token.
pub fn tokenizer() -> Tokenizer {
    let mut vocab: Map<String, Value> = (0..128).map(|byte| (format!("<0x{byte:02X}>"), byte.into())).collect();
    let words = ["{\"", "\":", "\",\"", "true", "false", "null", "},", "]}", "12", "ab", "abc", "\"}", ", "];
    for (at, word) in words.iter().enumerate() {
        vocab.insert((*word).to_owned(), (128 + at).into());
    }
    vocab.insert("</s>".to_owned(), EOS.into());
    let eos = json!({"id": EOS, "content": "</s>", "special": true, "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false});
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": [eos],
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": true},
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
    });
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    std::fs::write(folder.path().join("tokenizer_config.json"), r#"{"eos_token": "</s>"}"#).unwrap();
    Tokenizer::from_folder(folder.path()).unwrap()
}

fn model(seed: u64) -> Model {
    let spec = ModelSpec { vocab_size: VOCAB, ..ModelSpec::preset("micro").unwrap() };
    Model { tokenizer: Arc::new(tokenizer()), ..Model::random(spec, seed) }
}

fn params(structure: Structure, max_completion_length: usize) -> SamplingParams {
    SamplingParams { structure: Some(structure), max_completion_length, ..sampled() }
}

fn long() -> EngineOptions {
    EngineOptions { max_model_length: 1024, kv_cache_bytes: 32 << 20, ..options() }
}

/// A pseudo-random number generator that gives the same numbers in every run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

/// A random schema with short values, so that every completion ends.
fn schema(dice: &mut Dice, depth: usize) -> Value {
    match dice.roll(if depth == 0 { 5 } else { 7 }) {
        0 => json!({"type": "integer", "minimum": -20, "maximum": 300}),
        1 => json!({"type": "string", "maxLength": dice.roll(6)}),
        2 => json!({"enum": ["ab", 12, null, [true]]}),
        3 => json!({"type": "boolean"}),
        4 => json!({"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^a[bc]{1,3}$"}]}),
        5 => {
            let least = dice.roll(3);
            json!({"type": "array", "items": schema(dice, depth - 1), "minItems": least, "maxItems": least + 1})
        }
        _ => {
            let fields: Map<_, _> = (0..1 + dice.roll(3)).map(|n| (format!("k{n}"), schema(dice, depth - 1))).collect();
            let names: Vec<_> = fields.keys().cloned().collect();
            json!({"type": "object", "properties": fields, "required": names, "additionalProperties": false})
        }
    }
}

/// Whether a value follows a schema created by [`schema`].
fn follows(value: &Value, schema: &Value) -> bool {
    let kind = schema["type"].as_str();
    if let Some(values) = schema["enum"].as_array() {
        return values.contains(value);
    }
    match (kind, value) {
        (Some("integer"), Value::Number(number)) => number.as_i64().is_some_and(|n| (-20..=300).contains(&n)),
        (Some("string"), Value::String(text)) => text.chars().count() as u64 <= schema["maxLength"].as_u64().unwrap(),
        (Some("boolean"), Value::Bool(_)) => true,
        (Some("array"), Value::Array(items)) => {
            let count = items.len() as u64;
            (schema["minItems"].as_u64().unwrap()..=schema["maxItems"].as_u64().unwrap()).contains(&count)
                && items.iter().all(|item| follows(item, &schema["items"]))
        }
        (Some("object"), Value::Object(fields)) => {
            let properties = schema["properties"].as_object().unwrap();
            fields.len() == properties.len()
                && properties.iter().all(|(name, schema)| fields.get(name).is_some_and(|value| follows(value, schema)))
        }
        (None, Value::Null) => true,
        (None, Value::String(text)) => {
            (2..=4).contains(&text.len()) && text.starts_with('a') && text[1..].chars().all(|c| "bc".contains(c))
        }
        _ => false,
    }
}

fn texts(groups: &[RolloutGroup]) -> impl Iterator<Item = &str> {
    groups.iter().flat_map(|group| &group.completions).map(|completion| {
        assert_eq!(completion.finish_reason, Some(FinishReason::Eos), "{}", completion.text);
        completion.text.as_str()
    })
}

#[test]
fn random_weights_generate_values_that_match_random_schemas() {
    let mut dice = Dice(3);
    let mut different = std::collections::BTreeSet::new();
    for round in 0..8 {
        let (model, schema) = (model(round), schema(&mut dice, 3));
        let structure = Structure::Json { schema: schema.to_string(), is_compact: true };
        let params = SamplingParams { temperature: 0.5 + round as f32 / 8.0, ..params(structure, 900) };
        let (groups, _) = model.generate(long(), &prompts(2), &params);
        for text in texts(&groups) {
            let value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text} of {schema}"));
            assert!(follows(&value, &schema), "{text} of {schema}");
            different.insert(text.to_owned());
        }
    }
    assert!(different.len() > 25, "{different:?}");
}

#[test]
fn regexes_choices_and_grammars_constrain_the_output() {
    let model = model(1);
    let expression = regex::Regex::new("^[a-c]{3}-[0-9]{1,4}( or [xyz]+){0,2}$").unwrap();
    let regex = Structure::Regex("[a-c]{3}-[0-9]{1,4}( or [xyz]{1,9}){0,2}".into());
    let (groups, _) = model.generate(long(), &prompts(3), &params(regex, 64));
    texts(&groups).for_each(|text| assert!(expression.is_match(text), "{text}"));

    let choices = ["yes", "no", "(maybe)", "a.b*c"].map(str::to_owned).to_vec();
    let (groups, _) = model.generate(long(), &prompts(5), &params(Structure::Choice(choices.clone()), 64));
    texts(&groups).for_each(|text| assert!(choices.iter().any(|choice| choice == text), "{text}"));

    let sums = "start: sum\nsum: NUMBER | \"(\" NUMBER \"+\" NUMBER \")\"\nNUMBER: /[1-9][0-9]{0,2}/\n";
    let expression = regex::Regex::new(r"^([1-9][0-9]{0,2}|\([1-9][0-9]{0,2}\+[1-9][0-9]{0,2}\))$").unwrap();
    let (groups, _) = model.generate(long(), &prompts(3), &params(Structure::Grammar(sums.to_owned()), 64));
    texts(&groups).for_each(|text| assert!(expression.is_match(text), "{text}"));
}

/// Each rank masks its part of the vocabulary with its own grammar state.
fn structured_as_one_rank(world: &World) {
    let mesh = world.mesh(world.size(), world.size()).unwrap();
    let model = model(2);
    let structure = Structure::Json {
        schema: json!({"type": "array", "items": {"type": "integer"}}).to_string(),
        is_compact: false,
    };
    let params = SamplingParams { top_k: 40, ..params(structure, 40) };
    let of = |tp| {
        let (groups, _) = model.generate_on(tp, long(), &prompts(2), &params);
        groups
            .iter()
            .flat_map(|group| &group.completions)
            .map(|completion| completion.token_ids.clone())
            .collect::<Vec<_>>()
    };
    let split = of(mesh.tp.clone());
    let alone = of(super::setup::alone());
    assert_eq!(split[..alone.len().min(split.len())], alone);
}

#[test]
fn ranks_of_an_engine_agree_on_structured_output() {
    ranks::run(2, "rollout::structure::ranks_of_an_engine_agree_on_structured_output", |world| {
        structured_as_one_rank(&world)
    });
}

#[test]
fn invalid_structures_are_refused_with_the_reason() {
    let model = model(1);
    let json = |schema: &str| Structure::Json { schema: schema.to_owned(), is_compact: false };
    let deep = format!("{}{{}}{}", "{\"items\":".repeat(20_000), "}".repeat(20_000));
    let many: String =
        (0..5_000).map(|n| format!("\"f{n}\": {{\"type\": \"string\", \"pattern\": \"^(a|b){{{n}}}$\"}},")).collect();
    for (structure, reason) in [
        (json("{"), "not valid JSON"),
        (json("[]"), "not a JSON object"),
        (json(r#"{"type": "integer", "minimum": 3, "maximum": 2}"#), "nsatisfiable"),
        (json(r#"{"type": "text"}"#), "type"),
        (json(&deep), "recursion limit"),
        (json(&format!("{{\"properties\": {{{many} \"z\": {{}}}}}}")), ""),
        (json(&" ".repeat(300_000)), "300000 bytes"),
        (Structure::Regex("a(b".into()), "regex"),
        (Structure::Regex("(".repeat(50_000)), ""),
        (Structure::Regex("((((a{1,999}){1,999}){1,999}){1,999}){1,999}".into()), ""),
        (Structure::Regex("\u{1F600}+[\u{4E00}-\u{4E05}]".into()), "no sequence of the model's tokens can match"), // bytes that no token has
        (Structure::Grammar("start: missing".into()), "missing"),
        (Structure::Grammar(format!("start: {}\"a\"{}", "(".repeat(50_000), ")".repeat(50_000))), ""),
    ] {
        let mut engine = model.engine(long(), super::setup::alone());
        let mut rollout = engine.wake(model.weights(&*super::setup::alone()), 1).unwrap();
        let outcome = rollout.generate(&prompts(1), &params(structure.clone(), 8), |_| ());
        let got = format!("{outcome:?}");
        let shown: String = format!("{structure:?}").chars().take(60).collect();
        match outcome {
            Err(Error::InvalidArgument { got, .. }) => assert!(got.contains(reason), "{shown}: {got}"),
            _ => assert!(reason.is_empty() && got.len() < 100_000, "{shown}: {}", &got[..got.len().min(300)]),
        }
    }
    // Words are not bytes: a text cannot be told from its tokens.
    let words = Model::micro();
    let words = Model { spec: Arc::new(ModelSpec { eos_token_ids: vec![3], ..(*words.spec).clone() }), ..words };
    let mut engine = words.engine(long(), super::setup::alone());
    let mut rollout = engine.wake(words.weights(&*super::setup::alone()), 1).unwrap();
    let refused = rollout.generate(&prompts(1), &params(Structure::Regex("a".into()), 8), |_| ()).unwrap_err();
    assert!(refused.to_string().contains("whose tokens cannot be mapped to bytes"), "{refused}");
}
