//! Checks of keys that need neither model nor number of ranks: single values, and the table of exclusions. Ranges of numbers are checked where a key
//! is declared.

use super::check::check;
use super::field::{Field, names_in_files};
use super::range::ANY;
use super::raw::RawConfig;
use super::reward;
use super::together::Combination;
use super::{Config, DataConfig, SftConfig};
use crate::error::{Error, Result};
use crate::phase::Fault;
use crate::types::SamplingParams;

impl Config {
    /// Validates raw entries; every configuration of a run is built here.
    pub(super) fn validate(raw: &RawConfig) -> Result<Self> {
        validated(raw, Self::checks)
    }

    /// Most tokens of a prompt with its completion, for a model with this context.
    pub fn context_len(&self, max_position_embeddings: usize) -> usize {
        self.max_model_length.unwrap_or(max_position_embeddings)
    }

    /// Checks the configuration against the model's context length.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] if the completion leaves no space for a prompt.
    pub fn validate_context(&self, max_position_embeddings: usize) -> Result<()> {
        let context = self.context_len(max_position_embeddings);
        let expected = format!(
            "at most {}: prompt and completion share the model's context of {context} tokens, and rows whose prompt \
             does not fit are dropped",
            context.saturating_sub(1)
        );
        let completion = self.max_completion_length;
        check("max_completion_length", completion, completion < context, expected)
    }

    fn checks(&self) -> Vec<Result<()>> {
        vec![
            self.data.check(),
            self.check_sampling(),
            self.check_bounds(),
            reward::check_names(self),
            self.check_weights(),
            self.rewards.check(),
            self.reward.check(),
            self.lora.check(),
            self.check_pipeline(),
            self.check_tools(),
            self.check_environment(),
            self.check_distillation(),
            self.check_fault(),
        ]
    }

    fn check_fault(&self) -> Result<()> {
        let Some(fault) = &self.fault else { return Ok(()) };
        fault.parse::<Fault>().map(|_| ()).map_err(|expected| Error::invalid_value("fault", fault, expected))
    }

    fn check_sampling(&self) -> Result<()> {
        let (coldest, penalties) =
            (SamplingParams::MIN_TEMPERATURE, SamplingParams::MIN_PENALTY..=SamplingParams::MAX_PENALTY);
        let warm = "at least 0.000001: with smaller values logits / temperature overflows float32";
        check("temperature", format!("{:e}", self.temperature), self.temperature >= coldest, warm)?;
        let of_evaluations = self.eval_temperature();
        let (is_valid, expected) = (SamplingParams::is_temperature(of_evaluations), format!("0 (greedy) or {warm}"));
        check("eval_temperature", format!("{of_evaluations:e}"), is_valid, expected)?;
        let (penalty, mild) = (self.repetition_penalty, "a number from 0.000001 to 1000000");
        check("repetition_penalty", format!("{penalty:e}"), penalties.contains(&penalty), mild)?;
        let normal = "a number in (0, 1] and at least 1.2e-38, the smallest normal float32";
        check("top_p", format!("{:e}", self.top_p), SamplingParams::is_top_p(self.top_p), normal)?;
        if let Some(context) = self.max_model_length {
            let prompt = self.max_prompt_length.unwrap_or(1);
            let expected = format!(
                "at least max_prompt_length + max_completion_length = {prompt} + {} = {}",
                self.max_completion_length,
                prompt + self.max_completion_length
            );
            check("max_model_length", context, context >= prompt + self.max_completion_length, expected)?;
        }
        check("stop", "\"\"", !self.stop.iter().any(String::is_empty), "non-empty strings")
    }

    fn check_weights(&self) -> Result<()> {
        let (weights, num_rewards) = (&self.reward_weights, self.reward_funcs.len());
        let expected = format!("one weight for each of the {num_rewards} reward_funcs, or [] for 1 each");
        let fits = weights.is_empty() || weights.len() == num_rewards;
        check("reward_weights", format!("{weights:?}"), fits, expected)
    }
}

impl SftConfig {
    pub(super) fn validate(raw: &RawConfig) -> Result<Self> {
        validated(raw, |config: &Self| vec![config.data.check(), config.lora.check()])
    }
}

/// The validated configuration, or all its errors: first those of single keys; if there are none, those of combinations.
fn validated<T: Field>(raw: &RawConfig, checks: impl Fn(&T) -> Vec<Result<()>>) -> Result<T> {
    let mut wrong = Vec::new();
    let config = T::read(raw, "", None, &ANY, &mut wrong);
    let unknown = raw.unknown_keys(&names_in_files::<T>());
    if !unknown.is_empty() {
        wrong.insert(0, Error::UnknownKeys(unknown));
    }
    if let Some(config) = config.as_ref().filter(|_| wrong.is_empty()) {
        let refused = checks(config).into_iter().filter_map(Result::err);
        wrong = refused.chain(Combination::of_keys(config).refusals()).map(|error| raw.locate(error)).collect();
    }
    if config.is_none() {
        // Which rows a run reads is checked with the single keys: without any, that is the first thing to mend.
        let data = DataConfig::read(raw, "", None, &ANY, &mut Vec::new());
        wrong.extend(data.and_then(|data| data.check_source(raw).err()).map(|error| raw.locate(error)));
    }
    match (wrong.len(), config) {
        (0, Some(config)) => Ok(config),
        (1, _) => Err(wrong.remove(0)),
        _ => Err(Error::InvalidConfig(wrong)),
    }
}
