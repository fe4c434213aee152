//! Rotary frequencies in `config.json`: `rope_parameters` as transformers 5 writes them, or `rope_theta` and `rope_scaling`.

use serde_json::{Value, json};

use super::{keys, layer_types};
use crate::error::Result;
use crate::model::json::JsonObject;
use crate::ops::rope::{Llama3Scaling, RopeScaling, YarnMscale, YarnScaling};

/// Base of the frequencies if a file has none, as in transformers.
const DEFAULT_ROPE_THETA: f64 = 10_000.0;
const ORIGINAL: &str = "original_max_position_embeddings";

/// Reads the base and the scaling for layers of a type. If both spellings are present, `rope_scaling` takes precedence, as in transformers 5, unless
/// `rope_parameters` is nested by layer type.
pub(super) fn read(config: &JsonObject, layer_type: &str) -> Result<(f64, Option<RopeScaling>)> {
    let of_type = config.object("rope_parameters")?.map_or(Ok(None), |rope| rope.object(layer_type))?;
    let key = if config.get("rope_scaling").is_some() { "rope_scaling" } else { "rope_parameters" };
    let Some(rope) = of_type.map_or_else(|| config.object(key), |rope| Ok(Some(rope)))? else {
        let theta = config.get("rope_theta").map(|_| config.positive("rope_theta")).transpose()?;
        return Ok((theta.unwrap_or(DEFAULT_ROPE_THETA), None));
    };
    let theta = match [&rope, config].into_iter().find(|place| place.get("rope_theta").is_some()) {
        Some(place) => place.positive("rope_theta")?,
        None => DEFAULT_ROPE_THETA,
    };
    let type_key = if rope.get("rope_type").is_some() { "rope_type" } else { "type" };
    let scaling = match rope.get(type_key).map(Value::as_str) {
        None | Some(Some("default")) => None,
        Some(Some("linear")) => Some(RopeScaling::Linear { factor: rope.positive("factor")? }),
        Some(Some("llama3")) => Some(RopeScaling::Llama3(llama3(&rope)?)),
        Some(Some("yarn")) => Some(RopeScaling::Yarn(yarn(config, &rope)?)),
        Some(Some("longrope" | "su")) => {
            let expected = "another type: LongRoPE is not supported (its frequencies depend on the longest sequence)";
            return Err(rope.wrong(type_key, expected));
        }
        Some(_) => return Err(rope.wrong(type_key, "\"default\", \"linear\", \"llama3\" or \"yarn\"")),
    };
    Ok((theta, scaling))
}

/// Checks the keys of all objects that describe rotary embeddings, which may be nested by layer type, and returns these objects.
pub(super) fn objects(config: &JsonObject, may_differ: bool) -> Result<Vec<JsonObject>> {
    let mut objects: Vec<_> = config.object("rope_scaling")?.into_iter().collect();
    if let Some(rope) = config.object("rope_parameters")? {
        let types = if may_differ { &[layer_types::FULL, layer_types::SLIDING][..] } else { &[] };
        let of_types = types.iter().map(|layer_type| rope.object(layer_type));
        let of_types: Vec<_> = of_types.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect();
        if of_types.is_empty() { objects.push(rope) } else { objects.extend(of_types) }
    }
    objects.iter().try_for_each(|rope| rope.check(&keys::ROPE_KEYS))?;
    Ok(objects)
}

/// Reads the fraction of a head's columns that is rotated, and checks that it gives an even number of columns. Returns `usual` if the file has no
/// such key.
pub(super) fn partial_rotary_factor(config: &JsonObject, head_dim: usize, usual: f64) -> Result<f64> {
    const KEY: &str = "partial_rotary_factor";
    let rope = config.object("rope_parameters")?;
    let place = rope.as_ref().into_iter().chain([config]).find(|place| place.has(KEY));
    let Some(place) = place else { return Ok(usual) };
    let factor = place.positive(KEY)?;
    let columns = (head_dim as f64 * factor) as usize;
    match factor <= 1.0 && columns > 0 && columns.is_multiple_of(2) {
        true => Ok(factor),
        false => Err(place.wrong(
            KEY,
            format!("at most 1, and such that an even number of the {head_dim} columns of a head is rotated"),
        )),
    }
}

/// The context in tokens that YaRN extends the model to; 0 without YaRN. Files with YaRN often still state the context length of pre-training.
pub(super) fn extended_context(config: &JsonObject) -> Result<usize> {
    Ok(match read(config, layer_types::FULL)?.1 {
        Some(RopeScaling::Yarn(yarn)) => ((yarn.original_max_position_embeddings * yarn.factor) as usize).min(1 << 31),
        _ => 0,
    })
}

fn llama3(rope: &JsonObject) -> Result<Llama3Scaling> {
    let scaling = Llama3Scaling {
        factor: rope.positive("factor")?,
        low_freq_factor: rope.positive("low_freq_factor")?,
        high_freq_factor: rope.positive("high_freq_factor")?,
        original_max_position_embeddings: rope.size(ORIGINAL, 1 << 31)? as f64,
    };
    match scaling.high_freq_factor > scaling.low_freq_factor {
        true => Ok(scaling),
        false => Err(rope.wrong("high_freq_factor", "more than low_freq_factor")),
    }
}

/// Reads YaRN's keys. Defaults are those of transformers: the original context is the model's, and a value of 0 counts as absent.
fn yarn(config: &JsonObject, rope: &JsonObject) -> Result<YarnScaling> {
    let given = |key| match rope.get(key) {
        None => Ok(None),
        Some(value) if value.as_f64() == Some(0.0) => Ok(None),
        Some(_) => rope.positive(key).map(Some),
    };
    let place = [config, rope].into_iter().find(|place| place.get(ORIGINAL).is_some());
    let original = match place {
        Some(place) => place.size(ORIGINAL, 1 << 31)?,
        None => config.size("max_position_embeddings", 1 << 31)?,
    };
    let factor = rope.positive("factor")?;
    let mscale = given("mscale")?.zip(given("mscale_all_dim")?);
    let mscale = mscale.map(|(mscale, all_dim)| YarnMscale { mscale, all_dim });
    let scaling = YarnScaling {
        factor,
        original_max_position_embeddings: original as f64,
        beta_fast: given("beta_fast")?.unwrap_or(32.0),
        beta_slow: given("beta_slow")?.unwrap_or(1.0),
        attention_factor: match rope.get("attention_factor") {
            Some(_) => rope.positive("attention_factor")?,
            None => YarnScaling::default_attention_factor(factor, mscale),
        },
        truncate: rope.get("truncate").is_none() || rope.flag("truncate")?,
    };
    match scaling.beta_fast > scaling.beta_slow {
        true => Ok(scaling),
        false => Err(rope.wrong("beta_fast", "more than beta_slow")),
    }
}

/// The value of `rope_parameters`.
pub(in crate::model) fn write(theta: f64, scaling: Option<&RopeScaling>) -> Value {
    let mut rope = match scaling {
        None => json!({"rope_type": "default"}),
        Some(RopeScaling::Linear { factor }) => json!({"rope_type": "linear", "factor": factor}),
        Some(RopeScaling::Llama3(scaling)) => json!({
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            ORIGINAL: scaling.original_max_position_embeddings as u64,
        }),
        Some(RopeScaling::Yarn(scaling)) => json!({
            "rope_type": "yarn",
            "factor": scaling.factor,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "attention_factor": scaling.attention_factor,
            "truncate": scaling.truncate,
            ORIGINAL: scaling.original_max_position_embeddings as u64,
        }),
    };
    rope["rope_theta"] = json!(theta);
    rope
}
