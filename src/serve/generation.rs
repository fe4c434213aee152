//! Default sampling parameters from a model's `generation_config.json`.

use std::path::Path;

use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::rollout::ParamFault;
use crate::types::SamplingParams;
use crate::untrusted::{self, MAX_MODEL_JSON_BYTES};

/// Default sampling parameters in a model's folder, the same as vLLM reads. Training does not use them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SamplingDefaults {
    /// Softmax temperature.
    pub temperature: Option<f32>,
    /// Probability mass of nucleus sampling (top-p).
    pub top_p: Option<f32>,
    /// Number of highest logits that are kept (top-k).
    pub top_k: Option<usize>,
    /// Smallest probability relative to the most probable token (min-p).
    pub min_p: Option<f32>,
    /// Repetition penalty: divides positive and multiplies negative logits of tokens that already occurred.
    pub repetition_penalty: Option<f32>,
}

impl SamplingDefaults {
    /// Reads `generation_config.json` of a model's folder; all fields are `None` if it does not exist. `do_sample` is ignored, as in vLLM.
    ///
    /// # Errors
    /// [`Error::BadFile`] for values that are invalid in a request.
    pub fn of_folder(folder: &Path) -> Result<Self> {
        let path = folder.join("generation_config.json");
        if !path.exists() {
            return Ok(Self::default());
        }
        let bad = |message: String| Error::bad_file(&path, message);
        let text = untrusted::read_text(&path, MAX_MODEL_JSON_BYTES).map_err(|error| bad(error.to_string()))?;
        let map: Map<String, Value> = serde_json::from_str(&text).map_err(|error| bad(error.to_string()))?;
        let number = |key: &str| match map.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => value.as_f64().map(Some).ok_or_else(|| bad(format!("{key} = {value}: expected a number"))),
        };
        let float = |key: &str| number(key).map(|value| value.map(|value| value as f32));
        let defaults = Self {
            temperature: float("temperature")?,
            top_p: float("top_p")?,
            top_k: number("top_k")?.map(|top_k| top_k.max(0.0) as usize), // -1 is off, as with vLLM
            min_p: float("min_p")?,
            repetition_penalty: float("repetition_penalty")?,
        };
        match defaults.over(SamplingParams::default()).fault() {
            Some(ParamFault { name, expected, got }) => Err(bad(format!("{name} = {got}: expected {expected}"))),
            None => Ok(defaults),
        }
    }

    /// `params`, with fields replaced by the defaults in the model's folder.
    pub fn over(&self, params: SamplingParams) -> SamplingParams {
        SamplingParams {
            temperature: self.temperature.unwrap_or(params.temperature),
            top_p: self.top_p.unwrap_or(params.top_p),
            top_k: self.top_k.unwrap_or(params.top_k),
            min_p: self.min_p.or(params.min_p).filter(|least| *least > 0.0),
            repetition_penalty: self.repetition_penalty.unwrap_or(params.repetition_penalty),
            ..params
        }
    }

    /// Describes the values that differ from a request's own defaults; `None` if there are none.
    pub fn listed(&self) -> Option<String> {
        let (own, plain) = (self.over(SamplingParams::default()), SamplingParams::default());
        let differs = [
            (own.temperature != plain.temperature).then(|| format!("temperature {}", own.temperature)),
            (own.top_p != plain.top_p).then(|| format!("top_p {}", own.top_p)),
            (own.top_k != plain.top_k).then(|| format!("top_k {}", own.top_k)),
            own.min_p.map(|min_p| format!("min_p {min_p}")),
            (own.repetition_penalty != plain.repetition_penalty)
                .then(|| format!("repetition_penalty {}", own.repetition_penalty)),
        ];
        let differs: Vec<String> = differs.into_iter().flatten().collect();
        (!differs.is_empty()).then(|| differs.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<SamplingDefaults> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("generation_config.json"), text).unwrap();
        SamplingDefaults::of_folder(folder.path())
    }

    #[test]
    fn generation_config_values_are_used_as_in_vllm() {
        let qwen = read(
            r#"{"do_sample": true, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "min_p": null,
                "eos_token_id": [1, 2], "max_new_tokens": 2048}"#,
        );
        let qwen = qwen.unwrap();
        assert_eq!(qwen.listed().unwrap(), "temperature 0.7, top_p 0.8, top_k 20, repetition_penalty 1.05");
        let asked = qwen.over(SamplingParams { seed: 7, ..SamplingParams::default() });
        assert_eq!((asked.temperature, asked.top_p, asked.top_k, asked.min_p, asked.seed), (0.7, 0.8, 20, None, 7));
        let off = read(r#"{"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0}"#).unwrap();
        assert_eq!((off.listed(), off.over(SamplingParams::default()).top_k), (None, 0));
        assert_eq!(SamplingDefaults::of_folder(Path::new("/none/such")).unwrap(), SamplingDefaults::default());
    }

    #[test]
    fn invalid_generation_config_values_are_refused_by_name() {
        for (text, part) in [
            (r#"{"temperature": -1}"#, "temperature = -1"),
            (r#"{"top_p": "high"}"#, "top_p = \"high\": expected a number"),
            (r#"{"repetition_penalty": 0}"#, "repetition_penalty = 0"),
            ("[]", "generation_config.json"),
        ] {
            let said = read(text).unwrap_err().to_string();
            assert!(said.contains(part), "{text}: {said}");
        }
    }
}
