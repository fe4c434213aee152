//! Requests to an engine, and the events that it reports.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::limits::StepLimits;
use crate::error::{Error, Result};
use crate::model::ModelSpec;
use crate::tools::GroupKey;
use crate::types::{FinishReason, RoutedExperts, SamplingParams, TokenLogprob, Trajectory};

/// Most tokens that are reported beside each sampled one, as with OpenAI.
const MAX_TOP_LOGPROBS: usize = 20;

/// The numbers of tokens and experts that a model has.
#[derive(Debug, Clone, Copy)]
pub(super) struct ModelIds {
    pub vocab_size: usize,
    pub num_experts: usize,
    /// Experts of a token in all layers.
    pub experts_per_token: usize,
}

/// A prompt to be continued `params.num_generations` times.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// Third word of the random keys, after seed and step. Requests with equal keys and tokens get equal completions.
    pub prompt_id: u64,
    /// Token ids of the prompt; at least one.
    pub token_ids: Vec<u32>,
    /// Step at which the request was first scheduled: second word of the random keys.
    pub first_step: u64,
    /// Number of its first completion: last word of the random keys. Above 0 where one completion of a group goes on alone.
    pub first_sample: usize,
    /// How tokens are drawn and when a completion ends. Requests of one session may differ in theirs.
    #[serde(with = "unshared")]
    pub params: Arc<SamplingParams>,
    /// Tokens that an earlier session sampled of each completion; empty if none.
    pub begun: Vec<Trajectory>,
    /// The adapter to sample with, of those that the engine's weights let requests choose among; `None` is the base model. An engine with
    /// one set of adapters, or with none, takes `None` alone.
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
        /// The completion.
        sample: usize,
        /// The sampled id.
        token_id: u32,
        /// Log-probability of the token in nats, as in [`Trajectory::rollout_logprobs`](crate::types::Trajectory::rollout_logprobs).
        logprob: f32,
        /// The most probable ids, as many as `top_logprobs` asks for, most probable first.
        top_logprobs: Vec<TokenLogprob>,
    },
    /// A completion ended.
    Finished {
        /// The request.
        request: RequestId,
        /// The completion.
        sample: usize,
        /// Why it ended.
        reason: FinishReason,
    },
    /// The last completion of a request ended, or all had ended when it was submitted.
    Complete {
        /// The request.
        request: RequestId,
    },
    /// A completion gave its KV blocks to others. It keeps its tokens and is computed again.
    Preempted {
        /// The request.
        request: RequestId,
        /// The completion.
        sample: usize,
    },
    /// A request was removed, because its structure took more work than a token may.
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

/// Parameters on their way to another rank.
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
    /// The group that it belongs to.
    pub(crate) fn group(&self) -> GroupKey {
        GroupKey { prompt_id: self.prompt_id, first_step: self.first_step }
    }

    /// All tokens that its first completion goes on from.
    pub(crate) fn context(&self) -> Vec<u32> {
        let begun = self.begun.first().map_or(&[][..], |trajectory| &trajectory.token_ids);
        [&self.token_ids[..], begun].concat()
    }

    /// Whether an engine whose model has `ids`, with `num_adapters` to choose among and `limits`, can serve the request.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] with what it can serve.
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
        // Kernels index by what is recorded.
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

/// A sampling parameter that is out of its range.
pub(crate) struct ParamFault {
    pub name: &'static str,
    /// The range, in words.
    pub expected: &'static str,
    /// The value.
    pub got: String,
}

impl SamplingParams {
    /// Whether all values are within their ranges.
    pub(super) fn check(&self) -> Result<()> {
        match self.fault() {
            Some(fault) => refuse(fault.expected.to_owned(), fault.got),
            None => Ok(()),
        }
    }

    /// The first value that is out of its range.
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
