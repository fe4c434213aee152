//! [`ModelSpec`] from and to a Hugging Face folder's `config.json` and `generation_config.json`.
//!
//! transformers 5 writes `dtype` and `rope_parameters` where 4 wrote `torch_dtype`, `rope_theta` and `rope_scaling`.
//! Both are read, and both are written. What the decoder cannot compute is refused, never ignored.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use tch::Kind;

use super::spec::{Family, Llama3Scaling, ModelSpec};
use crate::error::{Error, Result};

/// Longest JSON file that is read, in bytes.
const MAX_JSON_BYTES: u64 = 100_000_000;
/// Standard deviation of fresh weights, as every family's configuration has it.
pub(super) const INITIALIZER_RANGE: f64 = 0.02;
/// transformers' default where a file names no base.
const DEFAULT_ROPE_THETA: f64 = 10_000.0;

impl ModelSpec {
    /// Reads a model folder's `config.json`, and the end-of-sequence ids of `generation_config.json` where it has them.
    ///
    /// # Errors
    /// [`Error::BadFile`] with the key, what was found and what is expected: architectures, activations, rope types,
    /// biases and mixtures of windows that the decoder does not compute, and sizes that do not fit one another.
    pub fn from_folder(folder: impl AsRef<Path>) -> Result<Self> {
        let config = Config::read(folder.as_ref().join("config.json"))?;
        let mut spec = parse(&config)?;
        let generation = folder.as_ref().join("generation_config.json");
        if generation.exists() {
            let generation = Config::read(generation)?;
            if generation.get("eos_token_id").is_some() {
                spec.eos_token_ids = generation.token_ids("eos_token_id", spec.vocab_size)?;
            }
        }
        Ok(spec)
    }

    /// Reads one `config.json`, as [`ModelSpec::from_folder`] does.
    ///
    /// # Errors
    /// The same.
    pub fn from_config_json(path: impl AsRef<Path>) -> Result<Self> {
        parse(&Config::read(path.as_ref().to_owned())?)
    }

    /// `config.json`, readable by transformers 4 and 5.
    pub fn to_config_json(&self) -> Value {
        let (architecture, model_type) = names(self.family);
        let dtype = dtype_name(self.dtype);
        let mut rope = json!({"rope_type": "default", "rope_theta": self.rope_theta});
        if let Some(scaling) = &self.rope_scaling {
            rope = json!({
                "rope_type": "llama3",
                "rope_theta": self.rope_theta,
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position_embeddings as u64,
            });
        }
        let mut config = json!({
            "architectures": [architecture],
            "model_type": model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling.as_ref().map(|_| rope.clone()),
            "rope_parameters": rope,
            "tie_word_embeddings": self.tie_word_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "attention_dropout": 0.0,
            "initializer_range": INITIALIZER_RANGE,
            "use_cache": true,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_json(),
            "dtype": dtype,
            "torch_dtype": dtype,
            "sliding_window": self.sliding_window,
        });
        if matches!(self.family, Family::Qwen2 | Family::Qwen3) {
            config["use_sliding_window"] = json!(self.sliding_window.is_some());
            config["max_window_layers"] = json!(if self.sliding_window.is_some() { 0 } else { self.num_layers });
        }
        config
    }

    /// Writes `config.json` and `generation_config.json` into an existing folder.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write_config(&self, folder: impl AsRef<Path>) -> Result<()> {
        let generation = json!({"bos_token_id": self.bos_token_id, "eos_token_id": self.eos_json()});
        for (name, value) in [("config.json", self.to_config_json()), ("generation_config.json", generation)] {
            let path = folder.as_ref().join(name);
            std::fs::write(&path, format!("{value:#}\n")).map_err(Error::io(path))?;
        }
        Ok(())
    }

    fn eos_json(&self) -> Value {
        match self.eos_token_ids[..] {
            [] => Value::Null,
            [id] => json!(id),
            _ => json!(self.eos_token_ids),
        }
    }
}

fn names(family: Family) -> (&'static str, &'static str) {
    match family {
        Family::Qwen2 => ("Qwen2ForCausalLM", "qwen2"),
        Family::Qwen3 => ("Qwen3ForCausalLM", "qwen3"),
        Family::Llama => ("LlamaForCausalLM", "llama"),
        Family::Mistral => ("MistralForCausalLM", "mistral"),
    }
}

fn dtype_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Float => "float32",
        Kind::BFloat16 => "bfloat16",
        Kind::Half => "float16",
        other => panic!("weights are never stored as {other:?}"),
    }
}

fn parse(config: &Config) -> Result<ModelSpec> {
    let family = family(config)?;
    refuse_unsupported(config)?;
    let hidden_size = config.size("hidden_size", 1 << 20)?;
    let num_heads = config.size("num_attention_heads", 1 << 12)?;
    let num_layers = config.size("num_hidden_layers", 1 << 12)?;
    let vocab_size = config.size("vocab_size", 1 << 24)?;
    let max_position_embeddings = config.size("max_position_embeddings", 1 << 31)?;
    let (rope_theta, rope_scaling) = rope(config)?;
    let spec = ModelSpec {
        family,
        vocab_size,
        hidden_size,
        intermediate_size: config.size("intermediate_size", 1 << 24)?,
        num_layers,
        num_heads,
        num_kv_heads: config.size("num_key_value_heads", 1 << 12)?,
        head_dim: head_dim(config, family, hidden_size, num_heads)?,
        rms_norm_eps: config.positive("rms_norm_eps")?,
        rope_theta,
        rope_scaling,
        tie_word_embeddings: config.flag("tie_word_embeddings")?,
        qkv_bias: family == Family::Qwen2,
        qk_norm: family == Family::Qwen3,
        sliding_window: sliding_window(config, family, num_layers)?,
        max_position_embeddings,
        bos_token_id: config.token_ids("bos_token_id", vocab_size)?.first().copied(),
        eos_token_ids: config.token_ids("eos_token_id", vocab_size)?,
        dtype: dtype(config)?,
    };
    if !spec.num_heads.is_multiple_of(spec.num_kv_heads) {
        return Err(config.wrong("num_key_value_heads", format!("a divisor of num_attention_heads = {num_heads}")));
    }
    Ok(spec)
}

fn family(config: &Config) -> Result<Family> {
    let all = [Family::Qwen2, Family::Qwen3, Family::Llama, Family::Mistral];
    let architecture = config.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str);
    let model_type = config.get("model_type").and_then(Value::as_str);
    let found = all.into_iter().find(|&family| match architecture {
        Some(architecture) => names(family).0 == architecture,
        None => Some(names(family).1) == model_type,
    });
    found.ok_or_else(|| {
        let key = if architecture.is_some() { "architectures" } else { "model_type" };
        config.wrong(key, format!("one of {}", all.map(|family| names(family).0).join(", ")))
    })
}

fn refuse_unsupported(config: &Config) -> Result<()> {
    if config.get("hidden_act").is_some_and(|act| act != "silu") {
        return Err(config.wrong("hidden_act", "\"silu\""));
    }
    for key in ["attention_bias", "mlp_bias"] {
        if config.flag(key)? {
            return Err(config.wrong(key, "false (Qwen2's own biases need no key)"));
        }
    }
    if config.get("partial_rotary_factor").is_some_and(|factor| factor.as_f64() != Some(1.0)) {
        return Err(config.wrong("partial_rotary_factor", "1"));
    }
    match config.get("quantization_config") {
        Some(_) => Err(config.wrong("quantization_config", "none: unquantised weights")),
        None => Ok(()),
    }
}

/// Absent, it is `hidden_size / num_attention_heads`, but 128 in Qwen3, as in transformers.
fn head_dim(config: &Config, family: Family, hidden_size: usize, num_heads: usize) -> Result<usize> {
    let head_dim = match config.get("head_dim") {
        Some(_) => config.size("head_dim", 1 << 12)?,
        None if family == Family::Qwen3 => 128,
        None if hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
        None => {
            return Err(config.wrong("num_attention_heads", format!("a divisor of hidden_size = {hidden_size}")));
        }
    };
    match head_dim {
        even if even > 0 && even.is_multiple_of(2) => Ok(even),
        odd => Err(config.wrong("head_dim", format!("an even number (it works out as {odd}): rope turns pairs"))),
    }
}

/// Where both spellings are present, `rope_scaling` counts, as in transformers 5.
fn rope(config: &Config) -> Result<(f64, Option<Llama3Scaling>)> {
    let key = if config.get("rope_scaling").is_some() { "rope_scaling" } else { "rope_parameters" };
    let Some(value) = config.get(key) else {
        let theta = config.get("rope_theta").map(|_| config.positive("rope_theta")).transpose()?;
        return Ok((theta.unwrap_or(DEFAULT_ROPE_THETA), None));
    };
    let map = value.as_object().ok_or_else(|| config.wrong(key, "an object"))?.clone();
    let rope = Config { path: config.path.clone(), within: format!("{key}."), map };
    let theta = match [&rope, config].into_iter().find(|place| place.get("rope_theta").is_some()) {
        Some(place) => place.positive("rope_theta")?,
        None => DEFAULT_ROPE_THETA,
    };
    let type_key = if rope.get("rope_type").is_some() { "rope_type" } else { "type" };
    match rope.get(type_key).map(Value::as_str) {
        None | Some(Some("default")) => Ok((theta, None)),
        Some(Some("llama3")) => {
            let scaling = Llama3Scaling {
                factor: rope.positive("factor")?,
                low_freq_factor: rope.positive("low_freq_factor")?,
                high_freq_factor: rope.positive("high_freq_factor")?,
                original_max_position_embeddings: rope.size("original_max_position_embeddings", 1 << 31)? as f64,
            };
            if scaling.high_freq_factor <= scaling.low_freq_factor {
                return Err(rope.wrong("high_freq_factor", "more than low_freq_factor"));
            }
            Ok((theta, Some(scaling)))
        }
        Some(_) => Err(rope.wrong(type_key, "\"default\" or \"llama3\"")),
    }
}

/// Qwen's window counts only with `use_sliding_window`, and from layer `max_window_layers` on; Mistral's counts in every
/// layer and is 4096 where the key is missing.
fn sliding_window(config: &Config, family: Family, num_layers: usize) -> Result<Option<usize>> {
    let key = "sliding_window";
    let window = match family {
        Family::Llama => return Ok(None),
        Family::Mistral if !config.map.contains_key(key) => return Ok(Some(4096)),
        Family::Qwen2 | Family::Qwen3 if !config.flag("use_sliding_window")? => return Ok(None),
        _ if config.get(key).is_none() => return Ok(None),
        _ => config.size(key, 1 << 31)?,
    };
    if family == Family::Mistral {
        return Ok(Some(window));
    }
    let num_sliding = match config.get("layer_types").and_then(Value::as_array) {
        Some(types) => types.iter().filter(|&layer| layer == "sliding_attention").count(),
        None => num_layers.saturating_sub(config.count("max_window_layers")?),
    };
    match num_sliding {
        0 => Ok(None),
        all if all == num_layers => Ok(Some(window)),
        some => {
            let expected = format!("a window in all layers or in none; here {some} of {num_layers} layers have one");
            Err(config.wrong("use_sliding_window", expected))
        }
    }
}

fn dtype(config: &Config) -> Result<Kind> {
    let key = if config.get("dtype").is_some() { "dtype" } else { "torch_dtype" };
    match config.get(key).map(|name| name.as_str().unwrap_or_default().trim_start_matches("torch.")) {
        None | Some("float32") => Ok(Kind::Float),
        Some("bfloat16") => Ok(Kind::BFloat16),
        Some("float16") => Ok(Kind::Half),
        Some(_) => Err(config.wrong(key, "float32, bfloat16 or float16")),
    }
}

/// A JSON object with the file it came from, for errors that name both.
struct Config {
    path: PathBuf,
    within: String,
    map: Map<String, Value>,
}

impl Config {
    fn read(path: PathBuf) -> Result<Self> {
        let map = read_json(&path)?;
        Ok(Self { path, within: String::new(), map })
    }

    /// The value; `null` counts as absent.
    fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// A count from 1 to `max`.
    fn size(&self, key: &str, max: usize) -> Result<usize> {
        let value = self.get(key).and_then(Value::as_u64).and_then(|size| usize::try_from(size).ok());
        value
            .filter(|&size| (1..=max).contains(&size))
            .ok_or_else(|| self.wrong(key, format!("a whole number from 1 to {max}")))
    }

    /// A count that may be 0.
    fn count(&self, key: &str) -> Result<usize> {
        let value = self.get(key).and_then(Value::as_u64).and_then(|count| usize::try_from(count).ok());
        value.ok_or_else(|| self.wrong(key, "a whole number"))
    }

    fn positive(&self, key: &str) -> Result<f64> {
        let value = self.get(key).and_then(Value::as_f64).filter(|&value| value > 0.0 && value.is_finite());
        value.ok_or_else(|| self.wrong(key, "a number above 0"))
    }

    /// True or false; absent is false.
    fn flag(&self, key: &str) -> Result<bool> {
        match self.get(key) {
            None => Ok(false),
            Some(value) => value.as_bool().ok_or_else(|| self.wrong(key, "true or false")),
        }
    }

    /// One id, several, or none.
    fn token_ids(&self, key: &str, vocab_size: usize) -> Result<Vec<u32>> {
        let values: &[Value] = match self.get(key) {
            None => &[],
            Some(Value::Array(values)) => values,
            Some(value) => std::slice::from_ref(value),
        };
        let id = |value: &Value| value.as_u64().filter(|&id| id < vocab_size as u64).map(|id| id as u32);
        let ids: Option<Vec<u32>> = values.iter().map(id).collect();
        ids.ok_or_else(|| self.wrong(key, format!("token ids below vocab_size = {vocab_size}")))
    }

    fn wrong(&self, key: &str, expected: impl AsRef<str>) -> Error {
        let found = self.get(key).map_or("absent".to_owned(), Value::to_string);
        Error::bad_file(&self.path, format!("{}{key} is {found}: expected {}", self.within, expected.as_ref()))
    }
}

/// A JSON file's object.
pub(super) fn read_json(path: &Path) -> Result<Map<String, Value>> {
    let missing = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::NotFound => Error::bad_file(path, "missing; a Hugging Face model folder has it"),
        _ => Error::Io { path: path.to_owned(), source: error },
    };
    let bytes = std::fs::metadata(path).map_err(missing)?.len();
    if bytes > MAX_JSON_BYTES {
        return Err(Error::bad_file(path, format!("{bytes} bytes: expected at most {MAX_JSON_BYTES}")));
    }
    let text = std::fs::read(path).map_err(Error::io(path))?;
    match serde_json::from_slice(&text) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(Error::bad_file(path, "expected a JSON object")),
        Err(error) => Err(Error::bad_file(path, format!("not JSON: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(config: &Value) -> Result<ModelSpec> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        ModelSpec::from_folder(folder.path())
    }

    /// `config` with `key` set, or removed where `value` is the text "remove".
    fn with(config: &Value, key: &str, value: Value) -> Value {
        let mut config = config.clone();
        match value {
            Value::String(text) if text == "remove" => _ = config.as_object_mut().unwrap().shift_remove(key),
            value => config[key] = value,
        }
        config
    }

    #[test]
    fn every_preset_is_read_back_from_what_it_writes() {
        for name in super::super::PRESETS {
            let spec = ModelSpec::preset(name).unwrap();
            let folder = tempfile::tempdir().unwrap();
            spec.write_config(folder.path()).unwrap();
            assert_eq!(ModelSpec::from_folder(folder.path()).unwrap(), spec, "{name}");
        }
        let window = ModelSpec { sliding_window: Some(64), ..ModelSpec::preset("tiny").unwrap() };
        for family in [Family::Qwen2, Family::Mistral] {
            let spec = ModelSpec { family, qkv_bias: family == Family::Qwen2, ..window.clone() };
            assert_eq!(load(&spec.to_config_json()).unwrap(), spec);
        }
    }

    #[test]
    fn both_spellings_of_rope_and_type_are_read() {
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

    #[test]
    fn absent_keys_mean_what_they_mean_to_transformers() {
        let qwen2 = ModelSpec::preset("micro").unwrap().to_config_json();
        assert_eq!(load(&with(&qwen2, "head_dim", Value::Null)).unwrap().head_dim, 8);
        assert_eq!(load(&with(&qwen2, "architectures", json!("remove"))).unwrap().family, Family::Qwen2);
        let windowed = with(&qwen2, "sliding_window", json!(16));
        assert_eq!(load(&windowed).unwrap().sliding_window, None);
        let used = with(&windowed, "use_sliding_window", json!(true));
        assert_eq!(load(&used).unwrap().sliding_window, None);
        let all = with(&used, "max_window_layers", json!(0));
        assert_eq!(load(&all).unwrap().sliding_window, Some(16));
        let mistral =
            with(&with(&qwen2, "architectures", json!(["MistralForCausalLM"])), "model_type", json!("mistral"));
        assert_eq!(load(&mistral).unwrap().sliding_window, None);
        assert_eq!(load(&with(&mistral, "sliding_window", json!("remove"))).unwrap().sliding_window, Some(4096));
    }

    #[test]
    fn what_cannot_be_computed_is_refused_by_name() {
        let good = ModelSpec::preset("micro").unwrap().to_config_json();
        load(&good).unwrap();
        let cases = [
            (
                "architectures",
                json!(["GPT2LMHeadModel"]),
                "architectures is [\"GPT2LMHeadModel\"]: expected one of Qwen2",
            ),
            ("hidden_act", json!("gelu"), "hidden_act is \"gelu\": expected \"silu\""),
            ("attention_bias", json!(true), "attention_bias is true"),
            ("mlp_bias", json!(true), "mlp_bias is true"),
            ("quantization_config", json!({"bits": 4}), "quantization_config"),
            ("partial_rotary_factor", json!(0.5), "partial_rotary_factor is 0.5"),
            ("rope_scaling", json!({"rope_type": "yarn", "factor": 4.0}), "rope_scaling.rope_type is \"yarn\""),
            ("rope_scaling", json!({"type": "dynamic"}), "rope_scaling.type is \"dynamic\""),
            ("rope_scaling", json!({"rope_type": "llama3"}), "rope_scaling.factor is absent"),
            ("rope_parameters", json!({"rope_theta": 0}), "rope_parameters.rope_theta is 0"),
            (
                "num_key_value_heads",
                json!(3),
                "num_key_value_heads is 3: expected a divisor of num_attention_heads = 4",
            ),
            ("num_attention_heads", json!(0), "num_attention_heads is 0"),
            ("head_dim", json!(7), "head_dim is 7: expected an even number"),
            ("head_dim", json!(1u64 << 40), "head_dim is 1099511627776: expected a whole number"),
            ("hidden_size", json!(-1), "hidden_size is -1"),
            ("vocab_size", json!("remove"), "vocab_size is absent"),
            ("rms_norm_eps", json!("remove"), "rms_norm_eps is absent"),
            ("torch_dtype", json!("int8"), "torch_dtype is \"int8\""),
            ("eos_token_id", json!([1, 96]), "eos_token_id is [1,96]: expected token ids below vocab_size = 96"),
            ("tie_word_embeddings", json!("yes"), "tie_word_embeddings is \"yes\": expected true or false"),
            ("layer_types", json!(["sliding_attention", "full_attention"]), "1 of 2 layers have one"),
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
}
