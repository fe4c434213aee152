//! Requests to an engine, and the events that it reports.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::limits::StepLimits;
use crate::error::{Error, Result};
use crate::model::ModelSpec;
use crate::tools::GroupKey;
use crate::types::{FinishReason, RoutedExperts, SamplingParams, TokenLogprob, Trajectory};

/// Maximum number of most probable tokens that are reported with each sampled one; OpenAI's limit.
const MAX_TOP_LOGPROBS: usize = 20;

/// The number of token ids and of experts of a model.
#[derive(Debug, Clone, Copy)]
pub(super) struct ModelIds {
    pub vocab_size: usize,
    pub num_experts: usize,
    /// Experts of a token, summed over all layers.
    pub experts_per_token: usize,
}

/// A prompt to sample `params.num_generations` completions of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// The third word of the random keys, after seed and step. Requests with equal keys and tokens get equal completions.
    pub prompt_id: u64,
    /// Token ids of the prompt; at least one.
    pub token_ids: Vec<u32>,
    /// The step in which the request was first scheduled. It is the second word of the random keys.
    pub first_step: u64,
    /// The number of the first completion, which is the last word of the random keys. It is above 0 if one completion of a group continues alone.
    pub first_sample: usize,
    /// How tokens are sampled and when a completion ends. Requests of one session may have different parameters.
    #[serde(with = "unshared")]
    pub params: Arc<SamplingParams>,
    /// Tokens of each completion that an earlier session sampled; empty for a new request.
    pub begun: Vec<Trajectory>,
    /// Index of the LoRA adapter to sample with, among those in the engine's weights; `None` is the base model. An engine with a single set of
    /// adapters, or with none, accepts only `None`.
    pub adapter: Option<usize>,
}

/// A request's number within its session, from 0 in the order of submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub(super) usize);

/// An event of a step. Completions are numbered from 0 to `num_generations` within their request.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A completion gained a token.
    Token {
        /// The request.
        request: RequestId,
        /// The completion's number within the request.
        sample: usize,
        /// The sampled token id.
        token_id: u32,
        /// Log-probability of the token in nats, as in [`Trajectory::rollout_logprobs`](crate::types::Trajectory::rollout_logprobs).
        logprob: f32,
        /// The most probable token ids, `top_logprobs` of them, most probable first.
        top_logprobs: Vec<TokenLogprob>,
    },
    /// A completion ended.
    Finished {
        /// The request.
        request: RequestId,
        /// The completion's number within the request.
        sample: usize,
        /// Why it ended.
        reason: FinishReason,
    },
    /// The last completion of a request ended. Also reported when all had already ended at submission.
    Complete {
        /// The request.
        request: RequestId,
    },
    /// A completion was preempted: its KV blocks went to other sequences. It keeps its tokens, and its keys and values are computed again.
    Preempted {
        /// The request.
        request: RequestId,
        /// The completion's number within the request.
        sample: usize,
    },
    /// A request was removed because finding the tokens that its structure allows needed more work than the limit per token.
    Failed {
        /// The request.
        request: RequestId,
        /// The reason.
        message: String,
    },
}

impl ModelIds {
    pub fn of(spec: &ModelSpec) -> Self {
        Self {
            vocab_size: spec.vocab_size,
            num_experts: spec.experts().map_or(0, |experts| experts.num_experts),
            experts_per_token: spec.routed_experts_per_token(),
        }
    }
}

/// Serialises shared parameters by value, to send them to another rank.
mod unshared {
    use std::sync::Arc;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use crate::types::SamplingParams;

    pub fn serialize<S: Serializer>(params: &Arc<SamplingParams>, serializer: S) -> Result<S::Ok, S::Error> {
        params.as_ref().serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Arc<SamplingParams>, D::Error> {
        SamplingParams::deserialize(deserializer).map(Arc::new)
    }
}

impl Request {
    /// The group that the request belongs to.
    pub(crate) fn group(&self) -> GroupKey {
        GroupKey { prompt_id: self.prompt_id, first_step: self.first_step }
    }

    /// The prompt and the already sampled tokens of the first completion.
    pub(crate) fn context(&self) -> Vec<u32> {
        let begun = self.begun.first().map_or(&[][..], |trajectory| &trajectory.token_ids);
        [&self.token_ids[..], begun].concat()
    }

    /// Checks that an engine supports this request. `ids` describe its model, `num_adapters` is the number of its adapters.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] that says what the engine supports.
    pub(super) fn check(&self, ids: ModelIds, num_adapters: usize, limits: &StepLimits) -> Result<()> {
        self.params.check()?;
        if let Some(adapter) = self.adapter.filter(|adapter| *adapter >= num_adapters) {
            return refuse(format!("the index of one of {num_adapters} adapters, or none"), format!("index {adapter}"));
        }
        let vocab_size = ids.vocab_size;
        let begun = self.begun.iter().flat_map(|trajectory| &trajectory.token_ids);
        if let Some(id) = self.token_ids.iter().chain(begun).find(|&&id| id as usize >= vocab_size) {
            return refuse(format!("token ids below {vocab_size}"), format!("{id} in prompt {}", self.prompt_id));
        }
        // Kernels index by the recorded experts, so check them.
        for RoutedExperts { per_token, experts } in self.begun.iter().map(|trajectory| &trajectory.routed_experts) {
            let ModelIds { num_experts, experts_per_token, .. } = ids;
            let unknown = experts.iter().max().filter(|&&expert| usize::from(expert) >= num_experts);
            if !experts.is_empty() && (*per_token != experts_per_token || unknown.is_some()) {
                let expected =
                    format!("{experts_per_token} recorded experts per token, with indices below {num_experts}");
                let number = unknown.map_or_else(String::new, |expert| format!(", with index {expert}"));
                return refuse(expected, format!("{per_token} per token{number} in prompt {}", self.prompt_id));
            }
        }
        let num_generations = self.params.num_generations;
        if !self.begun.is_empty() && self.begun.len() != num_generations {
            let expected = format!("num_generations = {num_generations} unfinished completions to continue");
            return refuse(expected, format!("{} of prompt {}", self.begun.len(), self.prompt_id));
        }
        if self.params.structure.is_some() && !self.begun.is_empty() {
            return refuse(
                "no unfinished completions with structured output".to_owned(),
                "an unfinished completion".to_owned(),
            );
        }
        if limits.runs_ahead && limits.num_stages > 1 && self.params.top_logprobs > 0 {
            let expected = "top_logprobs of 0 with an engine in stages on GPUs";
            return refuse(expected.to_owned(), self.params.top_logprobs.to_string());
        }
        limits.check(self.token_ids.len(), self.params.max_completion_length)
    }
}

/// A sampling parameter outside its valid range.
pub(crate) struct ParamFault {
    pub name: &'static str,
    /// The valid range, in words.
    pub expected: &'static str,
    /// The value that was passed.
    pub got: String,
}

impl SamplingParams {
    /// Checks that all values are within their ranges.
    pub(super) fn check(&self) -> Result<()> {
        match self.fault() {
            Some(fault) => refuse(fault.expected.to_owned(), fault.got),
            None => Ok(()),
        }
    }

    /// The first parameter outside its valid range.
    pub(crate) fn fault(&self) -> Option<ParamFault> {
        let min_p = self.min_p.map_or_else(|| "none".to_owned(), |p| p.to_string());
        let has_min_p = self.min_p.is_none_or(|p| is_within(p, 0.0..=1.0));
        let is_penalty = is_within(self.repetition_penalty, Self::MIN_PENALTY..=Self::MAX_PENALTY);
        let is_temperature = Self::is_temperature(self.temperature);
        let (stop, has_text) = (format!("{:?}", self.stop), self.stop.iter().all(|stop| !stop.is_empty()));
        let checks: [(_, _, _, &dyn fmt::Display); 8] = [
            ("num_generations", self.num_generations >= 1, "num_generations of at least 1", &self.num_generations),
            (
                "max_completion_length",
                self.max_completion_length >= 1,
                "max_completion_length of at least 1",
                &self.max_completion_length,
            ),
            ("temperature", is_temperature, "a temperature of 0 (greedy) or of at least 0.000001", &self.temperature),
            ("top_p", Self::is_top_p(self.top_p), "top_p in (0, 1]", &self.top_p),
            ("min_p", has_min_p, "min_p in [0, 1]", &min_p),
            (
                "repetition_penalty",
                is_penalty,
                "a repetition_penalty from 0.000001 to 1000000",
                &self.repetition_penalty,
            ),
            ("top_logprobs", self.top_logprobs <= MAX_TOP_LOGPROBS, "top_logprobs of at most 20", &self.top_logprobs),
            ("stop", has_text, "stop strings with text", &stop),
        ];
        let fault = checks.into_iter().find(|(_, holds, ..)| !holds);
        fault.map(|(name, _, expected, got)| ParamFault { name, expected, got: got.to_string() })
    }
}

fn is_within(value: f32, range: std::ops::RangeInclusive<f32>) -> bool {
    range.contains(&value)
}

pub(super) fn refuse<T>(expected: String, got: String) -> Result<T> {
    Err(Error::InvalidArgument { op: "RolloutEngine::generate", expected, got })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampling_parameters_out_of_range_are_refused() {
        let base = SamplingParams::default();
        let wrong = [
            (SamplingParams { num_generations: 0, ..base.clone() }, "num_generations"),
            (SamplingParams { temperature: -1.0, ..base.clone() }, "temperature"),
            (SamplingParams { temperature: f32::NAN, ..base.clone() }, "temperature"),
            (SamplingParams { temperature: 1e-37, ..base.clone() }, "temperature"),
            (SamplingParams { top_p: 0.0, ..base.clone() }, "top_p"),
            (SamplingParams { min_p: Some(1.5), ..base.clone() }, "min_p"),
            (SamplingParams { repetition_penalty: 0.0, ..base.clone() }, "repetition_penalty"),
            (SamplingParams { repetition_penalty: 1e30, ..base.clone() }, "repetition_penalty"),
            (SamplingParams { stop: vec![String::new()], ..base.clone() }, "stop"),
        ];
        for (params, key) in wrong {
            assert!(params.check().unwrap_err().to_string().contains(key), "{key}");
        }
        SamplingParams { temperature: 0.0, min_p: Some(0.0), ..base }.check().unwrap();
    }
}
