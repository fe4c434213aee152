//! What a configuration must satisfy by itself, before a model or a world is known.

use regex::Regex;

use super::batch::MAX_COUNT;
use super::field::Field;
use super::heartbeat;
use super::raw::RawConfig;
use super::reward;
use super::{
    AutoOr, CarriedKv, Config, HeartbeatConfig, LossType, OptimizerConfig, ReferenceResidency, SftConfig, ZeroConfig,
};
use crate::error::{Error, Result};
use crate::phase::Fault;

/// Groups begun for each one taken, at most, but that one.
const MAX_OVERSAMPLE: f64 = 16.0;
pub(super) const TIMEOUT: &str = "seconds, above 0 and below a year";

impl Config {
    /// The only way from what was written to a run.
    pub(super) fn validate(raw: &RawConfig) -> Result<Self> {
        raw.check_keys(Self::keys())?;
        let config = Self::read(raw, "", None)?;
        config.check().map_err(|error| raw.locate(error))?;
        Ok(config)
    }

    fn check(&self) -> Result<()> {
        self.check_batch()?;
        self.check_sampling()?;
        self.check_objective()?;
        self.check_rewards()?;
        self.optimizer.check(self.learning_rate)?;
        check_process(self.collective_timeout_s, &self.heartbeat)?;
        check_zero(&self.zero)?;
        self.lora.check(self.quantization)?;
        self.check_split()?;
        let host = AutoOr::Given(ReferenceResidency::Host);
        let on_host = self.lora.r.is_some() && self.residency.reference == host;
        let no_reference = "auto or resident: the frozen base of lora.r is its own reference";
        check("residency.reference", ReferenceResidency::Host.name(), !on_host, no_reference)?;
        count("logging_steps", self.logging_steps)?;
        count("eval_num_generations", self.eval_num_generations)?;
        check_saves(self.save_steps, self.save_total_limit)?;
        self.eval_steps.map_or(Ok(()), |steps| count("eval_steps", steps))?;
        if self.eval_steps.is_some() && self.eval_file.is_none() {
            return Err(Error::invalid_value("eval_file", "none", "the held-out rows, as eval_steps is set"));
        }
        if let Some(fault) = &self.fault {
            fault.parse::<Fault>().map_err(|expected| Error::invalid_value("fault", fault, expected))?;
        }
        Ok(())
    }

    fn check_batch(&self) -> Result<()> {
        let enough = "at least 2: advantages are relative to the group";
        check("num_generations", self.num_generations, self.num_generations >= 2, enough)?;
        for (key, value) in [
            ("per_device_train_batch_size", self.per_device_train_batch_size),
            ("gradient_accumulation_steps", self.gradient_accumulation_steps),
            ("steps_per_generation", self.steps_per_generation.unwrap_or(1)),
            ("generation_batch_size", self.generation_batch_size.unwrap_or(1)),
            ("num_iterations", self.num_iterations),
            ("max_tokens_per_micro_batch", self.max_tokens_per_micro_batch),
        ] {
            count(key, value)?;
        }
        if let (Some(batch), Some(_)) = (self.generation_batch_size, self.steps_per_generation) {
            let expected = "to be left out, as steps_per_generation determines it";
            return Err(Error::invalid_value("generation_batch_size", batch, expected));
        }
        Ok(())
    }

    fn check_sampling(&self) -> Result<()> {
        for (key, value) in [
            ("max_completion_length", self.max_completion_length),
            ("max_prompt_length", self.max_prompt_length.unwrap_or(1)),
            ("tensor_parallel_size", self.tensor_parallel_size),
            ("max_model_length", self.max_model_length.unwrap_or(1)),
            ("kv_block_size", self.kv_block_size),
            ("max_num_seqs", self.max_num_seqs),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
        ] {
            count(key, value)?;
        }
        let kv_cache_bytes = self.kv_cache_bytes.unwrap_or(1);
        check("kv_cache_bytes", kv_cache_bytes, kv_cache_bytes >= 1, "at least 1")?;
        check("oversample", self.oversample, (0.0..=MAX_OVERSAMPLE).contains(&self.oversample), "0 to 16")?;
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
        let greedy = "above 0: greedy samples of a group are all equal";
        check("temperature", self.temperature, self.temperature > 0.0, greedy)?;
        check("top_p", self.top_p, self.top_p > 0.0 && self.top_p <= 1.0, "in (0, 1]")?;
        let min_p = self.min_p.unwrap_or(0.0);
        check("min_p", min_p, (0.0..=1.0).contains(&min_p), "in [0, 1]")?;
        check("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0.0, "above 0")?;
        let share = self.gpu_memory_utilization;
        check("gpu_memory_utilization", share, share > 0.0 && share <= 1.0, "in (0, 1]")?;
        let alone = "false: sums over the ranks of an engine change with the batch, or tensor_parallel_size = 1";
        check("strict", self.strict, !self.strict || self.tensor_parallel_size == 1, alone)?;
        check("stop", "\"\"", !self.stop.iter().any(String::is_empty), "strings that are not empty")
    }

    fn check_objective(&self) -> Result<()> {
        check("beta", self.beta, self.beta >= 0.0, "at least 0")?;
        check("epsilon", self.epsilon, (0.0..1.0).contains(&self.epsilon), "in [0, 1)")?;
        let high = self.epsilon_high.unwrap_or(self.epsilon);
        check("epsilon_high", high, high >= 0.0, "at least 0")?;
        if let Some(delta) = self.delta {
            check("delta", delta, delta > 1.0 + high, format!("above 1 + epsilon_high = {}", 1.0 + high))?;
            let other = "to be left out: loss_type cispo does not read it";
            check("delta", delta, self.loss_type != LossType::Cispo, other)?;
        }
        let clip_max = self.importance_sampling_clip_max;
        check("importance_sampling_clip_max", clip_max, clip_max > 0.0, "above 0")
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
        let config = Self::read(raw, "", None)?;
        config.check().map_err(|error| raw.locate(error))?;
        Ok(config)
    }

    fn check(&self) -> Result<()> {
        for (key, value) in [
            ("max_length", self.max_length),
            ("per_device_train_batch_size", self.per_device_train_batch_size),
            ("gradient_accumulation_steps", self.gradient_accumulation_steps),
            ("max_tokens_per_micro_batch", self.max_tokens_per_micro_batch),
            ("logging_steps", self.logging_steps),
        ] {
            count(key, value)?;
        }
        check_saves(self.save_steps, self.save_total_limit)?;
        self.optimizer.check(self.learning_rate)?;
        check_process(self.collective_timeout_s, &self.heartbeat)?;
        check_zero(&self.zero)?;
        self.lora.check(self.quantization)
    }
}

impl OptimizerConfig {
    fn check(&self, learning_rate: f64) -> Result<()> {
        for (key, value) in [
            ("learning_rate", learning_rate),
            ("adam_epsilon", self.adam_epsilon),
            ("num_train_epochs", self.num_train_epochs),
        ] {
            check(key, value, value > 0.0, "above 0")?;
        }
        for (key, value) in [("weight_decay", self.weight_decay), ("max_grad_norm", self.max_grad_norm)] {
            check(key, value, value >= 0.0, "at least 0")?;
        }
        for (key, value) in [("adam_beta1", self.adam_beta1), ("adam_beta2", self.adam_beta2)] {
            check(key, value, (0.0..1.0).contains(&value), "in [0, 1)")?;
        }
        let warmup = self.warmup_steps;
        check("warmup_steps", warmup, warmup <= MAX_COUNT, format!("at most {MAX_COUNT}"))?;
        count("max_steps", self.max_steps.unwrap_or(1))
    }
}

fn check_saves(save_steps: Option<usize>, save_total_limit: Option<usize>) -> Result<()> {
    save_steps.map_or(Ok(()), |steps| count("save_steps", steps))?;
    save_total_limit.map_or(Ok(()), |limit| count("save_total_limit", limit))
}

fn check_process(collective_timeout_s: f64, heartbeat: &HeartbeatConfig) -> Result<()> {
    check("collective_timeout_s", collective_timeout_s, is_timeout(collective_timeout_s), TIMEOUT)?;
    heartbeat::check(heartbeat, is_timeout, TIMEOUT)
}

fn check_zero(zero: &ZeroConfig) -> Result<()> {
    check("zero.stage", zero.stage, zero.stage <= 3, "0, 1, 2 or 3")?;
    if let Some(size) = zero.shard_group_size {
        count("zero.shard_group_size", size)?;
        check("zero.shard_group_size", size, zero.stage > 0, "to be left out: stage 0 shards nothing")?;
    }
    Ok(())
}

pub(super) fn compiles(key: &str, pattern: &str) -> Result<Regex> {
    Regex::new(pattern).map_err(|error| Error::invalid_value(key, pattern, format!("a regular expression: {error}")))
}

pub(super) fn is_timeout(seconds: f64) -> bool {
    seconds > 0.0 && seconds < 365.0 * 86_400.0
}

/// A number of things of which there must be one. The upper bound keeps products of two counts within 64 bits.
pub(super) fn count(key: &str, value: usize) -> Result<()> {
    check(key, value, (1..=MAX_COUNT).contains(&value), format!("1 to {MAX_COUNT}"))
}

pub(super) fn check(key: &str, got: impl ToString, holds: bool, expected: impl Into<String>) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::invalid_value(key, got, expected)) }
}
