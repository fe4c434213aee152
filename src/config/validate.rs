//! Rules that keys must satisfy together, before a model or a world is known. The range of a single key is in its declaration.

use regex::Regex;

use super::field::{Field, names_in_files};
use super::range::ANY;
use super::raw::RawConfig;
use super::reward;
use super::{
    AutoOr, CarriedKv, Config, DataConfig, DynamicSampling, KvCacheDtype, MixedPrecision, MultiObjectiveAggregation,
    Quantization, ReferenceModel, ReferenceResidency, RolloutQuantization, SftConfig, StateDtype, ZeroConfig,
};
use crate::error::{Error, Result};
use crate::phase::Fault;
use crate::types::SamplingParams;

impl StateDtype {
    /// Refuses states of gated delta nets that are rounded between the steps of a `strict` engine.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] on `mamba_ssm_cache_dtype`.
    pub(crate) fn check_strict(self, strict: bool) -> Result<()> {
        let whole = "float32: with strict = true a completion's bits do not depend on how it is cut into steps, after each of which states are rounded";
        check("mamba_ssm_cache_dtype", self.name(), !strict || self == Self::Float32, whole)
    }
}

impl Config {
    /// The only way from what was written to a run.
    pub(super) fn validate(raw: &RawConfig) -> Result<Self> {
        validated(raw, Self::checks)
    }

    /// Checks the configuration against the longest sequence that its model was made for.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] where the completion leaves no room for a prompt.
    pub fn validate_context(&self, max_position_embeddings: usize) -> Result<()> {
        let context = self.max_model_length.unwrap_or(max_position_embeddings);
        let expected = format!(
            "at most {}: the model's context of {context} tokens holds the prompt too, and rows with a longer one than \
             is left are dropped",
            context.saturating_sub(1)
        );
        let completion = self.max_completion_length;
        check("max_completion_length", completion, completion < context, expected)
    }

    fn checks(&self) -> Vec<Result<()>> {
        let of_objective = self.check_objective();
        let before = [self.data.check(), self.check_batch(), self.check_sampling(), self.check_dynamic_sampling()];
        let after = [
            reward::check_names(self),
            self.check_weights(),
            self.rewards.check(),
            self.reward.check(),
            self.zero.check(),
            self.lora.check(self.quantization),
            self.optimizer.check(&self.lora),
            self.mixed_precision.check(self.quantization),
            self.check_split(),
            self.check_pipeline(),
            self.check_curriculum(),
            self.check_distillation(),
            self.check_tools(),
            self.best.check(self.eval_steps),
            self.check_rest(),
        ];
        before.into_iter().chain(of_objective).chain(after).collect()
    }

    fn check_rest(&self) -> Result<()> {
        let host = AutoOr::Given(ReferenceResidency::Host);
        let on_host = self.lora.r.is_some() && self.residency.reference == host;
        let no_reference = "auto or resident: the frozen base of lora.r is its own reference";
        check("residency.reference", ReferenceResidency::Host.name(), !on_host, no_reference)?;
        let base_of_adapters = self.lora.r.is_some() || self.reference == ReferenceModel::Initial;
        check(
            "reference",
            "base",
            base_of_adapters,
            "initial, or lora.r set: without adapters it is the initial model",
        )?;
        let has_rows = self.eval_steps.is_none() || self.data.has_held_out(self.eval_steps);
        let needed = "the held-out rows, or dataset_name with dataset_test_split, as eval_steps is set";
        check("eval_file", "none", has_rows, needed)?;
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
        let (coldest, penalties) =
            (SamplingParams::MIN_TEMPERATURE, SamplingParams::MIN_PENALTY..=SamplingParams::MAX_PENALTY);
        let warm = "at least 0.000001: smaller ones divide logits out of float32's range";
        check("temperature", format!("{:e}", self.temperature), self.temperature >= coldest, warm)?;
        let of_evaluations = self.eval_temperature();
        let (is_valid, expected) =
            (SamplingParams::is_temperature(of_evaluations), format!("0, which is greedy, or {warm}"));
        check("eval_temperature", format!("{of_evaluations:e}"), is_valid, expected)?;
        let (num, one) =
            (self.eval_num_generations, "1, as greedy samples of a problem (eval_temperature = 0) are all equal");
        check("eval_num_generations", num, of_evaluations > 0.0 || num == 1, one)?;
        let (penalty, mild) = (self.repetition_penalty, "a number from 0.000001 to 1000000");
        check("repetition_penalty", format!("{penalty:e}"), penalties.contains(&penalty), mild)?;
        let normal = "a number in (0, 1], at least float32's smallest normal one, 1.2e-38";
        check("top_p", format!("{:e}", self.top_p), SamplingParams::is_top_p(self.top_p), normal)?;
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
        if self.rollout_quantization == RolloutQuantization::Fp8 {
            self.check_fp8()?;
        }
        if self.mixed_precision != MixedPrecision::None {
            self.check_is_corrected(&format!("mixed_precision = {}", self.mixed_precision.name()))?;
        }
        if self.kv_cache_dtype == KvCacheDtype::Fp8 {
            self.check_is_corrected("kv_cache_dtype = fp8")?;
        }
        self.mamba_ssm_cache_dtype.check_strict(self.strict)?;
        if self.mamba_ssm_cache_dtype == StateDtype::Bfloat16 {
            self.check_is_corrected("mamba_ssm_cache_dtype = bfloat16")?;
        }
        let alone = "false: sums over the ranks of an engine change with the batch, or tensor_parallel_size = 1";
        check("strict", self.strict, !self.strict || self.tensor_parallel_size == 1, alone)?;
        check("stop", "\"\"", !self.stop.iter().any(String::is_empty), "strings that are not empty")
    }

    fn check_fp8(&self) -> Result<()> {
        let fp8 = RolloutQuantization::Fp8.name();
        let strict =
            "none: with strict = true a product adds up in one order for all numbers of rows, in FP8 it does not";
        check("rollout_quantization", fp8, !self.strict, strict)?;
        let stored = "none: quantization = nf4 dequantises one block after the other";
        check("rollout_quantization", fp8, self.quantization == Quantization::None, stored)?;
        self.check_is_corrected("rollout_quantization = fp8")
    }

    fn check_is_corrected(&self, key: &str) -> Result<()> {
        let corrected = format!("true, as {key} samples from other probabilities than the trainer's");
        let is_corrected = self.importance_sampling_correction;
        check("importance_sampling_correction", is_corrected, is_corrected, corrected)
    }

    fn check_dynamic_sampling(&self) -> Result<()> {
        let (mode, replace) = (self.dynamic_sampling, DynamicSampling::Replace);
        let surplus =
            "none or filter: with oversample above 0 the first complete groups are the batch, whatever their rewards";
        check("dynamic_sampling", replace.name(), mode != replace || self.oversample == 0.0, surplus)?;
        let sums = self.objective.multi_objective_aggregation == MultiObjectiveAggregation::SumThenNormalize;
        let scaled = "none: multi_objective_aggregation = normalize_then_sum learns from groups whose weighted sums are equal, too";
        check("dynamic_sampling", mode.name(), mode == DynamicSampling::None || sums, scaled)?;
        let [low, high] = self.dynamic_sampling_range.unwrap_or_default();
        let has_effect = self.dynamic_sampling_range.is_none() || mode != DynamicSampling::None;
        let unread = "to be left out, or dynamic_sampling = replace or filter";
        check("dynamic_sampling_range", format!("[{low}, {high}]"), has_effect, unread)
    }

    fn check_weights(&self) -> Result<()> {
        let (weights, num_rewards) = (&self.reward_weights, self.reward_funcs.len());
        let expected = format!("one weight for each of the {num_rewards} reward_funcs, or none");
        let fits = weights.is_empty() || weights.len() == num_rewards;
        check("reward_weights", format!("{weights:?}"), fits, expected)
    }
}

impl SftConfig {
    pub(super) fn validate(raw: &RawConfig) -> Result<Self> {
        validated(raw, |config: &Self| {
            let optimizer = config.optimizer.check(&config.lora);
            let precision = config.mixed_precision.check(config.quantization);
            vec![config.data.check(), config.zero.check(), config.lora.check(config.quantization), optimizer, precision]
        })
    }
}

/// The validated configuration, or all that is wrong with it: keys and values each by itself, and where none is wrong, their
/// combination.
fn validated<T: Field>(raw: &RawConfig, checks: impl Fn(&T) -> Vec<Result<()>>) -> Result<T> {
    let mut wrong = Vec::new();
    let config = T::read(raw, "", None, &ANY, &mut wrong);
    let unknown = raw.unknown_keys(&names_in_files::<T>());
    if !unknown.is_empty() {
        wrong.insert(0, Error::UnknownKeys(unknown));
    }
    if let Some(config) = config.as_ref().filter(|_| wrong.is_empty()) {
        wrong = checks(config).into_iter().filter_map(Result::err).map(|error| raw.locate(error)).collect();
    }
    if config.is_none() {
        // Which rows a run reads is checked with the single keys: without any, that is the first thing to mend.
        let data = DataConfig::read(raw, "", None, &ANY, &mut Vec::new());
        wrong.extend(data.and_then(|data| data.check().err()).map(|error| raw.locate(error)));
    }
    match (wrong.len(), config) {
        (0, Some(config)) => Ok(config),
        (1, _) => Err(wrong.remove(0)),
        _ => Err(Error::InvalidConfig(wrong)),
    }
}

impl MixedPrecision {
    fn check(self, stored: Quantization) -> Result<()> {
        let fits = self == MixedPrecision::None || stored == Quantization::None;
        check("mixed_precision", self.name(), fits, "none: quantization = nf4 has rounded the weights already")
    }
}

impl ZeroConfig {
    /// Ranks that share one copy of the state, of `num_trainers` ranks with `local_size` on each node.
    pub fn shard_group(&self, num_trainers: usize, local_size: usize) -> usize {
        let fits = self.stage > 0 && num_trainers > local_size && num_trainers.is_multiple_of(local_size);
        self.shard_group_size.unwrap_or(if fits { local_size } else { num_trainers })
    }

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
