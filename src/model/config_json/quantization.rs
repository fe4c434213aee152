//! The key `quantization_config`: which FP8 files can be read, and its value for files that we write.

use serde_json::{Value, json};

use crate::error::Result;
use crate::model::files::names::{kept_modules, tensors};
use crate::model::json::JsonObject;
use crate::model::spec::ModelSpec;
use crate::ops::fp8::BLOCK;

pub(super) const KEY: &str = "quantization_config";

/// Refuses quantized files that cannot be read. Supported is e4m3 with scales per block of 128 x 128, per row or per matrix.
///
/// # Errors
/// [`Error::BadFile`](crate::Error::BadFile) with the offending key.
pub(super) fn check(config: &JsonObject) -> Result<()> {
    let Some(own) = config.object(KEY)? else { return Ok(()) };
    match own.get("quant_method").and_then(Value::as_str) {
        Some("fp8") => {
            expect(&own, "fmt", &["e4m3"])?;
            match own.get("weight_block_size") {
                Some(block) if *block != json!([BLOCK, BLOCK]) => Err(own.wrong("weight_block_size", "[128, 128]")),
                _ => Ok(()),
            }
        }
        Some("compressed-tensors") => {
            expect(&own, "format", &["float-quantized"])?;
            if own.get("kv_cache_scheme").is_some() {
                return Err(own.wrong("kv_cache_scheme", "none: fixed scales for the KV cache are not supported"));
            }
            let groups = own
                .object("config_groups")?
                .ok_or_else(|| own.wrong("config_groups", "an object with the format of each group of weights"))?;
            groups.keys().try_for_each(|group| {
                let group = groups.object(group)?.ok_or_else(|| groups.wrong(group, "an object"))?;
                let weights = group
                    .object("weights")?
                    .ok_or_else(|| group.wrong("weights", "an object with the format of the weights"))?;
                expect(&weights, "type", &["float"])?;
                expect(&weights, "strategy", &["channel", "tensor", "block"])?;
                if weights.get("num_bits") != Some(&json!(8)) {
                    return Err(weights.wrong("num_bits", "8"));
                }
                match weights.get("block_structure") {
                    Some(block) if *block != json!([BLOCK, BLOCK]) => {
                        Err(weights.wrong("block_structure", "[128, 128]"))
                    }
                    _ => Ok(()),
                }
            })
        }
        _ => {
            let expected = "fp8 or compressed-tensors, in e4m3: other quantized weights are not supported";
            Err(own.wrong("quant_method", expected))
        }
    }
}

/// Checks that a key is absent or one of `words`.
fn expect(object: &JsonObject, key: &str, words: &[&str]) -> Result<()> {
    match object.get(key) {
        Some(value) if !words.iter().any(|word| value == word) => Err(object.wrong(key, words.join(" or "))),
        _ => Ok(()),
    }
}

/// The value of `quantization_config` for files with e4m3 matrices in blocks of 128 x 128, as in Qwen's checkpoints.
pub(super) fn of_fp8(spec: &ModelSpec) -> Value {
    let all = spec.units().flat_map(|unit| tensors(spec, unit)).filter(|tensor| tensor.shape.len() == 2);
    let plain = all.filter(|tensor| !tensor.is_rounded_as_published());
    let plain = plain.map(|tensor| tensor.name.trim_end_matches(".weight").to_owned());
    let modules: Vec<String> = plain.chain(kept_modules(spec)).collect();
    json!({
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": modules,
    })
}
