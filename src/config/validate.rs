//! What keys must satisfy together, before a model or a world is known; what one takes stands beside it.

use regex::Regex;

use super::field::Field;
use super::range::ANY;
use super::raw::RawConfig;
use super::reward;
use super::{AutoOr, CarriedKv, Config, LossType, ReferenceResidency, SftConfig, ZeroConfig};
use crate::error::{Error, Result};
use crate::phase::Fault;

impl Config {
    /// The only way from what was written to a run.
    pub(super) fn validate(raw: &RawConfig) -> Result<Self> {
        raw.check_keys(Self::keys())?;
        let config = Self::read(raw, "", None, &ANY)?;
        config.check().map_err(|error| raw.locate(error))?;
        Ok(config)
    }

    fn check(&self) -> Result<()> {
        self.check_batch()?;
        self.check_sampling()?;
        self.check_objective()?;
        self.check_rewards()?;
        self.zero.check()?;
        self.lora.check(self.quantization)?;
        self.check_split()?;
        let host = AutoOr::Given(ReferenceResidency::Host);
        let on_host = self.lora.r.is_some() && self.residency.reference == host;
        let no_reference = "auto or resident: the frozen base of lora.r is its own reference";
        check("residency.reference", ReferenceResidency::Host.name(), !on_host, no_reference)?;
        let has_rows = self.eval_steps.is_none() || self.eval_file.is_some();
        check("eval_file", "none", has_rows, "the held-out rows, as eval_steps is set")?;
        if let Some(fault) = &self.fault {
            fault.parse::<Fault>().map_err(|expected| Error::invalid_value("fault", fault, expected))?;
        }
        Ok(())
    }

    fn check_batch(&self) -> Result<()> {
        if let (Some(batch), Some(_)) = (self.generation_batch_size, self.steps_per_generation) {
            let expected = "to be left out, as steps_per_generation determines it";
            return Err(Error::invalid_value("generation_batch_size", batch, expected));
        }
        Ok(())
    }

    fn check_sampling(&self) -> Result<()> {
        if self.partial_rollout {
            let surplus = "to be left out: without oversample above 0 every group is complete when a step ends";
            check("partial_rollout", true, self.oversample > 0.0, surplus)?;
            let corrected = "true, as tokens of partial_rollout may come from older weights";
            let is_corrected = self.importance_sampling_correction;
            check("importance_sampling_correction", is_corrected, is_corrected, corrected)?;
        }
        if self.keeps_kv_cache() {
            let keep = CarriedKv::Keep.name();
            let carried = "recompute, or partial_rollout = true: nothing else is carried to the next step";
            check("carried_kv", keep, self.partial_rollout, carried)?;
            let strict = "recompute: with strict a completion's bits do not depend on when it is computed";
            check("carried_kv", keep, !self.strict, strict)?;
        }
        if let Some(context) = self.max_model_length {
            let prompt = self.max_prompt_length.unwrap_or(1);
            let expected = format!(
                "at least max_prompt_length + max_completion_length = {prompt} + {} = {}",
                self.max_completion_length,
                prompt + self.max_completion_length
            );
            check("max_model_length", context, context >= prompt + self.max_completion_length, expected)?;
        }
        let alone = "false: sums over the ranks of an engine change with the batch, or tensor_parallel_size = 1";
        check("strict", self.strict, !self.strict || self.tensor_parallel_size == 1, alone)?;
        check("stop", "\"\"", !self.stop.iter().any(String::is_empty), "strings that are not empty")
    }

    fn check_objective(&self) -> Result<()> {
        let Some(delta) = self.delta else { return Ok(()) };
        let high = self.epsilon_high.unwrap_or(self.epsilon);
        check("delta", delta, delta > 1.0 + high, format!("above 1 + epsilon_high = {}", 1.0 + high))?;
        check("delta", delta, self.loss_type != LossType::Cispo, "to be left out: loss_type cispo does not read it")
    }

    fn check_rewards(&self) -> Result<()> {
        reward::check_names(self)?;
        let weights = &self.reward_weights;
        let expected = format!("one weight for each of the {} reward_funcs, or none", self.reward_funcs.len());
        check(
            "reward_weights",
            format!("{weights:?}"),
            weights.is_empty() || weights.len() == self.reward_funcs.len(),
            expected,
        )?;
        self.rewards.check()?;
        self.reward.check()
    }
}

impl SftConfig {
    pub(super) fn validate(raw: &RawConfig) -> Result<Self> {
        raw.check_keys(&Self::keys())?;
        let config = Self::read(raw, "", None, &ANY)?;
        let checked = config.zero.check().and_then(|()| config.lora.check(config.quantization));
        checked.map_err(|error| raw.locate(error))?;
        Ok(config)
    }
}

impl ZeroConfig {
    fn check(&self) -> Result<()> {
        let Some(size) = self.shard_group_size else { return Ok(()) };
        check("zero.shard_group_size", size, self.stage > 0, "to be left out: stage 0 shards nothing")
    }
}

pub(super) fn compiles(key: &str, pattern: &str) -> Result<Regex> {
    Regex::new(pattern).map_err(|error| Error::invalid_value(key, pattern, format!("a regular expression: {error}")))
}

pub(super) fn check(key: &str, got: impl ToString, holds: bool, expected: impl Into<String>) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::invalid_value(key, got, expected)) }
}
