//! Reads and writes [`ModelSpec`] as `config.json` and `generation_config.json` of a Hugging Face folder.
//!
//! transformers 5 writes `dtype` and `rope_parameters` where version 4 wrote `torch_dtype`, `rope_theta` and `rope_scaling`. Both are read, and both
//! are written. Settings that the decoder cannot compute are refused, never ignored.

mod delta_net;
mod experts;
pub(crate) mod keys;
mod layer_types;
mod quantization;
pub(super) mod rope;
#[cfg(test)]
mod tests;
mod text_part;
mod windows;

use std::path::Path;

use serde_json::{Map, Value, json};
use tch::Kind;

use super::families::{Names, Traits, Window};
use super::files;
use super::json::{CONFIG, JsonObject};
use super::spec::{AttentionSpec, BlockSpec, Family, ModelSpec, RopeSpec};
use crate::error::{Error, Result};
use crate::ops::swiglu::Activation;

/// The key of the padding token's id.
const PADDING: &str = "pad_token_id";
/// Standard deviation of randomly initialized weights, written to `config.json`.
pub(super) const INITIALIZER_RANGE: f64 = 0.02;

impl ModelSpec {
    /// Reads a model folder's `config.json`, and the end-of-sequence ids of `generation_config.json` if it has them. As in transformers, if the
    /// weights contain a head that differs from the embedding table, that head is used regardless of `tie_word_embeddings`.
    ///
    /// # Errors
    /// [`Error::BadFile`] with the key, what was found and what was expected: architectures, activations, rope types, biases and mixtures of windows
    /// that the decoder does not support, and sizes that do not fit together.
    pub fn from_folder(folder: impl AsRef<Path>) -> Result<Self> {
        let mut spec = parse(JsonObject::read(&folder.as_ref().join(CONFIG))?)?;
        spec.tie_word_embeddings &= !files::has_own_head(folder.as_ref(), &spec);
        let generation = folder.as_ref().join("generation_config.json");
        if generation.exists() {
            let generation = JsonObject::read(&generation)?;
            generation.check(&keys::GENERATION_KEYS)?;
            if generation.get("eos_token_id").is_some() {
                spec.eos_token_ids = token_ids(&generation, "eos_token_id", spec.vocab_size)?;
            }
        }
        Ok(spec)
    }

    /// Reads one `config.json`, without looking at weights.
    ///
    /// # Errors
    /// The errors of [`ModelSpec::from_folder`].
    pub fn from_config_json(path: impl AsRef<Path>) -> Result<Self> {
        parse(JsonObject::read(path.as_ref())?)
    }

    /// The content of `config.json`, readable by transformers 4 and 5.
    pub fn to_config_json(&self) -> Value {
        let Traits { architecture, model_type, window, rotary_factor, write, .. } = self.family.traits();
        let dtype = dtype_name(self.dtype);
        let attention = self.attention();
        let rope = self.rotations().into_iter().flatten().next();
        let rope = rope.map_or(Value::Null, |rope| rope::write(rope.theta, rope.scaling.as_ref()));
        let of_expert = || self.experts().map(|experts| experts.expert);
        let mlp = self.dense().or_else(of_expert).expect("a block has an MLP or experts");
        let mut config = json!({
            "architectures": [architecture],
            "model_type": model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": mlp.intermediate,
            "num_hidden_layers": self.num_layers(),
            "num_attention_heads": attention.num_heads,
            "num_key_value_heads": attention.num_kv_heads,
            "head_dim": attention.head_dim,
            "hidden_act": activation_name(self.layers[0].mlp.activation()),
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": rope["rope_theta"],
            "rope_scaling": if rope["rope_type"] == "default" { Value::Null } else { rope.clone() },
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
            "sliding_window": self.windows().into_iter().flatten().next(),
        });
        if let Some(delta_net) = self.delta_net() {
            delta_net::write(self, delta_net.heads, &mut config);
        }
        if let Some(experts) = self.experts() {
            experts::write(self, experts, &mut config);
        }
        if let (Some(_), Some(rope)) = (rotary_factor, attention.rope) {
            config["rope_parameters"]["partial_rotary_factor"] = json!(rope.partial_rotary_factor);
        }
        if matches!(window, Window::Switched | Window::Listed | Window::Patterned(_)) {
            windows::write(self, window, &mut config);
        }
        write(self, &mut config);
        config
    }

    /// Writes `config.json` and `generation_config.json` into an existing folder. The second also contains `base`'s other generation settings, such
    /// as temperature and top_p. If the model is the text part of a model with a vision tower, the first is a copy of `base`'s with the type of these
    /// weights.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::BadFile`] for a file of `base` that cannot be read; [`Error::InvalidArgument`] for a text part without a `base`.
    pub fn write_config(&self, folder: impl AsRef<Path>, base: Option<&Path>) -> Result<()> {
        self.write_config_with(folder.as_ref(), base, None)
    }

    /// Writes the files like [`ModelSpec::write_config`], for FP8 weights from [`WeightWriter::create_fp8`](super::WeightWriter::create_fp8).
    ///
    /// # Errors
    /// The errors of [`ModelSpec::write_config`].
    pub fn write_config_fp8(&self, folder: impl AsRef<Path>, base: Option<&Path>) -> Result<()> {
        self.write_config_with(folder.as_ref(), base, Some(quantization::of_fp8(self)))
    }

    fn write_config_with(&self, folder: &Path, base: Option<&Path>, quantized: Option<Value>) -> Result<()> {
        let of_base = |name: &str| match base.map(|base| base.join(name)).filter(|path| path.exists()) {
            Some(path) => JsonObject::read(&path).map(JsonObject::into_map),
            None => Ok(Map::new()),
        };
        let mut generation = of_base("generation_config.json")?;
        generation.entry("bos_token_id").or_insert_with(|| json!(self.bos_token_id));
        generation.insert("eos_token_id".into(), self.eos_json());
        let generation = Value::Object(generation);
        let mut config = if self.is_text_part { text_part::whole_config(self, base)? } else { self.to_config_json() };
        // Without it transformers takes the family's default, which may be outside of the vocabulary.
        if let Some(id) = of_base(CONFIG)?.remove(PADDING) {
            config[PADDING] = id;
        }
        if let Some(quantized) = quantized {
            config[quantization::KEY] = quantized;
        }
        for (name, value) in [(CONFIG, config), ("generation_config.json", generation)] {
            let path = folder.join(name);
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

fn dtype_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Float => "float32",
        Kind::BFloat16 => "bfloat16",
        Kind::Half => "float16",
        other => panic!("weights are never stored as {other:?}"),
    }
}

fn parse(whole: JsonObject) -> Result<ModelSpec> {
    let (family, is_text_part) = family(&whole)?;
    let traits = family.traits();
    let mut config = if is_text_part { text_part::read(whole)? } else { whole };
    if let Value::Object(usual) = (traits.defaults)() {
        config.complete(usual);
    }
    if traits.reads_mxfp4 {
        take_mxfp4(&mut config)?;
    }
    let qkv_bias = match traits.has_attention_bias {
        true => config.take_flag("attention_bias")?.unwrap_or(traits.qkv_bias),
        false => traits.qkv_bias,
    };
    let traits = Traits { qkv_bias, ..traits };
    let config = &config;
    config.check(&keys::CONFIG_KEYS)?;
    quantization::check(config)?;
    refuse_unsupported(config, &traits)?;
    if traits.has_shared_expert && config.has("qkv_bias") && !config.flag("qkv_bias")? {
        return Err(config.wrong("qkv_bias", "true"));
    }
    let vocab_size = config.size("vocab_size", 1 << 24)?;
    let max_position_embeddings = config.size("max_position_embeddings", 1 << 31)?;
    let layers = layers(config, &traits)?;
    let spec = ModelSpec {
        family,
        vocab_size,
        hidden_size: config.size("hidden_size", 1 << 20)?,
        layers,
        draft_head: None,
        embedding_multiplier: 1.0,
        rounds_embedding_multiplier: false,
        logits_scaling: 1.0,
        rms_norm_eps: config.positive("rms_norm_eps")?,
        tie_word_embeddings: config.flag("tie_word_embeddings")?,
        zero_centred_norms: traits.zero_centred_norms,
        router_aux_loss_coef: if traits.has_experts { experts::aux_loss_coef(config)? } else { 0.0 },
        max_position_embeddings: max_position_embeddings.max(rope::extended_context(config)?),
        bos_token_id: token_ids(config, "bos_token_id", vocab_size)?.first().copied(),
        eos_token_ids: token_ids(config, "eos_token_id", vocab_size)?,
        dtype: dtype(config)?,
        is_text_part,
    };
    (traits.read)(config, spec)
}

/// The layers according to the keys that all families share; the family's own `read` may then change them.
fn layers(config: &JsonObject, traits: &Traits) -> Result<Vec<BlockSpec>> {
    let hidden = config.size("hidden_size", 1 << 20)?;
    let num_heads = config.size("num_attention_heads", 1 << 12)?;
    let num_layers = config.size("num_hidden_layers", 1 << 12)?;
    let types = match traits.has_delta_nets {
        true => None, // `delta_net` reads keys of its own
        false => layer_types::read(config, [layer_types::FULL, layer_types::SLIDING], num_layers)?,
    };
    let head_dim = head_dim(config, traits.head_dim, hidden, num_heads)?;
    let experts = if traits.has_experts { Some(experts::read(config, hidden, traits)?) } else { None };
    let intermediate = match &experts {
        // If all layers have experts, the file may omit the width of a dense MLP.
        Some(experts) if traits.has_delta_nets && !config.has("intermediate_size") => experts.expert.intermediate,
        _ => config.size("intermediate_size", 1 << 24)?,
    };
    let num_kv_heads = config.size("num_key_value_heads", 1 << 12)?;
    if !num_heads.is_multiple_of(num_kv_heads) {
        return Err(config.wrong("num_key_value_heads", format!("a divisor of num_attention_heads = {num_heads}")));
    }
    let partial_rotary_factor = match traits.rotary_factor {
        Some(usual) => rope::partial_rotary_factor(config, head_dim, usual)?,
        None => 1.0,
    };
    let turned = (head_dim as f64 * partial_rotary_factor) as usize;
    if traits.turns_pairs && !head_dim.is_multiple_of(turned) {
        let expected = format!("a fraction whose number of rotated columns divides the head width {head_dim}");
        return Err(config.wrong("partial_rotary_factor", expected));
    }
    let rotation = |layer_type| -> Result<Option<RopeSpec>> {
        let (theta, scaling) = rope::read(config, layer_type)?;
        Ok(Some(RopeSpec { theta, scaling, partial_rotary_factor }))
    };
    let (full, sliding) = (rotation(layer_types::FULL)?, rotation(layer_types::SLIDING)?);
    let attention = AttentionSpec {
        hidden,
        num_heads,
        num_kv_heads,
        head_dim,
        qkv_bias: traits.qkv_bias,

        o_bias: false,
        sinks: false,
        qk_norm: traits.qk_norm,
        output_gate: traits.has_delta_nets,
        rope: full,
        window: None,
        scale: AttentionSpec::usual_scale(head_dim),
    };
    let windows = windows::read(config, traits.window, types, num_layers)?;
    let layer = |window: Option<usize>| {
        let rope = if window.is_some() { sliding } else { full };
        BlockSpec::dense(AttentionSpec { window, rope, ..attention }, intermediate, traits.norms)
    };
    let mut layers: Vec<_> = windows.into_iter().map(layer).collect();
    if traits.has_delta_nets {
        delta_net::read(config, hidden, &mut layers)?;
    }
    if let Some(experts) = experts {
        experts::place(config, experts, &mut layers)?;
    }
    let activation = activation(config)?;
    layers.iter_mut().for_each(|block| block.mlp = block.mlp.activated_by(activation));
    Ok(layers)
}

/// The model family, and whether the file describes it in `text_config`.
fn family(config: &JsonObject) -> Result<(Family, bool)> {
    let architecture = config.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str);
    let model_type = config.get("model_type").and_then(Value::as_str);
    let is_named = |names: Names| match architecture {
        Some(architecture) => names.architecture == architecture,
        None => Some(names.model_type) == model_type,
    };
    let contradicts = |names: Names| {
        let other = model_type.filter(|&model_type| model_type != names.model_type);
        other.map(|_| {
            config.wrong("model_type", format!("\"{}\", the model_type of {}", names.model_type, names.architecture))
        })
    };
    let found = Family::ALL.iter().find_map(|&family| {
        let Traits { architecture, model_type, whole, .. } = family.traits();
        let of_text = Names { architecture, model_type };
        let names =
            [whole.map(|whole| whole.names), Some(of_text)].into_iter().flatten().find(|&names| is_named(names))?;
        let is_text_part = names.architecture != architecture;
        Some(contradicts(names).map_or(Ok((family, is_text_part)), Err))
    });
    found.unwrap_or_else(|| {
        let key = if architecture.is_some() { "architectures" } else { "model_type" };
        let names = Family::ALL.iter().flat_map(|family| {
            let Traits { architecture, whole, .. } = family.traits();
            std::iter::once(architecture).chain(whole.map(|whole| whole.names.architecture))
        });
        Err(config.wrong(key, format!("one of {}", names.collect::<Vec<_>>().join(", "))))
    })
}

fn refuse_unsupported(config: &JsonObject, traits: &Traits) -> Result<()> {
    const FACTOR: &str = "partial_rotary_factor";
    let rope = rope::objects(config, matches!(traits.window, Window::Patterned(_)))?;
    let mut places = rope.iter().chain([config]).filter(|_| traits.rotary_factor.is_none());
    let in_part = |place: &&JsonObject| place.get(FACTOR).is_some_and(|factor| factor.as_f64() != Some(1.0));
    places.find(in_part).map_or(Ok(()), |place| Err(place.wrong(FACTOR, "1")))
}

/// Activations, by their names in transformers.
const ACTIVATIONS: [(&str, Activation); 2] = [("silu", Activation::Silu), ("gelu_pytorch_tanh", Activation::GeluTanh)];
/// The name that files give an activation that their family implies.
const IMPLIED: &str = "silu";

fn activation_name(activation: Activation) -> &'static str {
    ACTIVATIONS.iter().find(|(_, own)| *own == activation).map_or(IMPLIED, |(name, _)| name)
}

/// Reads the activation from `hidden_act`, or `hidden_activation` in some families; SiLU if both are absent.
fn activation(config: &JsonObject) -> Result<Activation> {
    let key = ["hidden_activation", "hidden_act"].into_iter().find(|key| config.get(key).is_some());
    let Some(key) = key else { return Ok(Activation::Silu) };
    let found = ACTIVATIONS.iter().find(|(name, _)| config.get(key).is_some_and(|value| value == name));
    found.map(|(_, activation)| *activation).ok_or_else(|| {
        let names: Vec<_> = ACTIVATIONS.iter().map(|(name, _)| format!("\"{name}\"")).collect();
        config.wrong(key, names.join(" or "))
    })
}

/// Reads `head_dim`. If it is absent, returns the family's default or `hidden_size / num_attention_heads`, as transformers does.
fn head_dim(config: &JsonObject, usual: Option<usize>, hidden_size: usize, num_heads: usize) -> Result<usize> {
    let head_dim = match (config.get("head_dim"), usual) {
        (Some(_), _) => config.size("head_dim", 1 << 12)?,
        (None, Some(usual)) => usual,
        (None, None) if hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
        (None, None) => {
            return Err(config.wrong("num_attention_heads", format!("a divisor of hidden_size = {hidden_size}")));
        }
    };
    match head_dim {
        even if even > 0 && even.is_multiple_of(2) => Ok(even),
        odd => Err(config
            .wrong("head_dim", format!("an even number (it works out as {odd}), as RoPE rotates pairs of columns"))),
    }
}

/// Removes the quantization key of MXFP4, as weights are read in both forms regardless of it.
fn take_mxfp4(config: &mut JsonObject) -> Result<()> {
    const KEY: &str = "quantization_config";
    let Some(quantised) = config.object(KEY)? else { return Ok(()) };
    match quantised.get("quant_method").and_then(Value::as_str) {
        Some("mxfp4") => {
            config.remove(KEY);
            if !config.has("dtype") && !config.has("torch_dtype") {
                config.complete(Map::from_iter([("dtype".to_owned(), json!("bfloat16"))])); // the type of all unquantized weights
            }
            Ok(())
        }
        _ => Err(quantised.wrong("quant_method", "\"mxfp4\"")),
    }
}

fn dtype(config: &JsonObject) -> Result<Kind> {
    let key = if config.get("dtype").is_some() { "dtype" } else { "torch_dtype" };
    match config.get(key).map(|name| name.as_str().unwrap_or_default().trim_start_matches("torch.")) {
        None | Some("float32") => Ok(Kind::Float),
        Some("bfloat16") => Ok(Kind::BFloat16),
        Some("float16") => Ok(Kind::Half),
        Some(_) => Err(config.wrong(key, "float32, bfloat16 or float16")),
    }
}

/// Reads a key that contains one id, a list of ids, or nothing.
fn token_ids(config: &JsonObject, key: &str, vocab_size: usize) -> Result<Vec<u32>> {
    let values: &[Value] = match config.get(key) {
        None => &[],
        Some(Value::Array(values)) => values,
        Some(value) => std::slice::from_ref(value),
    };
    let id = |value: &Value| value.as_u64().filter(|&id| id < vocab_size as u64).map(|id| id as u32);
    let ids: Option<Vec<u32>> = values.iter().map(id).collect();
    ids.ok_or_else(|| config.wrong(key, format!("token ids below vocab_size = {vocab_size}")))
}
