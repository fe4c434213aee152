//! Data on the host that modules exchange: prompts, completions and their groups.

mod packed;
mod routed_experts;

use std::ops::Range;
use std::sync::Arc;

use packed::PackedTrajectory;
pub use routed_experts::RoutedExperts;

/// The position of one rank within a group of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Index of the rank in the group, from 0.
    pub rank: usize,
    /// Number of ranks in the group.
    pub size: usize,
}

impl Place {
    /// The rows of this rank, when `len` rows are divided over all ranks: consecutive, in rank order, sizes at most one apart.
    pub fn share(self, len: usize) -> Range<usize> {
        len * self.rank / self.size..len * (self.rank + 1) / self.size
    }
}

/// One row of a data set with its tokenized prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct Prompt {
    /// Index of the row in its data set. Random keys of its samples use it, so that samples do not depend on the world size.
    pub id: u64,
    /// The prompt's text after the chat template, as the tokenizer got it.
    pub text: String,
    /// Token ids of `text`; never empty.
    pub token_ids: Vec<u32>,
    /// All columns of the row, for the rewards.
    pub columns: Arc<serde_json::Map<String, serde_json::Value>>,
}

/// Why a completion ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// An end-of-sequence token was sampled (it is the last of `token_ids`).
    Eos,
    /// A stop string appeared in the text.
    Stop,
    /// `max_completion_length` or the model's context was reached.
    Length,
}

/// The state of a completion's environment when the completion ended.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct EnvironmentEnd {
    /// Class name of the environment.
    pub class: String,
    /// Folder of the Python file that defines the class; empty for a module.
    pub folder: String,
    /// The reward that the environment returned, if any, or the error message if that failed.
    pub reward: Option<Result<f32, String>>,
    /// The pickled environment in base 64, if a reward needs it.
    pub state: Option<String>,
}

/// The continuation of a prompt in one sample: the tokens that the policy sampled, turn by turn, and between two turns the
/// context that an environment or a tool answered with. A completion of one turn is the simplest one.
///
/// ```
/// use colo_grpo::Trajectory;
///
/// let mut completion = Trajectory::default();
/// completion.push_sampled(7, -0.5, 0); // a tool call: token, log-probability, version of the weights
/// completion.push_context(&[8, 9], 0); // the tool's answer
/// completion.push_sampled(10, -0.25, 0);
/// assert_eq!(completion.loss_mask, [true, false, false, true]);
/// assert_eq!((completion.turns(), completion.num_sampled()), (vec![0..1, 3..4], 2));
/// ```
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(into = "PackedTrajectory", try_from = "PackedTrajectory")]
pub struct Trajectory {
    /// Token ids after the prompt, end-of-sequence tokens included.
    pub token_ids: Vec<u32>, // [L]
    /// True for tokens that the policy sampled. Context tokens (false) are attended to, but are in no loss, metric or denominator, as with TRL's
    /// `tool_mask`.
    pub loss_mask: Vec<bool>, // [L]
    /// Log-probability of each sampled token in nats under the sampler, of the raw distribution at the sampling temperature (before top-k, top-p,
    /// min-p and penalties), as the trainer computes it; 0 for context tokens.
    pub rollout_logprobs: Vec<f32>, // [L]
    /// Generation step in which each token was sampled or appended: the version of the weights that sampled it.
    pub weight_versions: Vec<u64>, // [L]
    /// The experts that the sampler's router chose for each token of prompt and completion; empty for models without experts.
    pub routed_experts: RoutedExperts,
    /// Why the newest turn ended; `None` while it is still being sampled.
    pub finish_reason: Option<FinishReason>,
    /// Decoded text without special tokens; empty while the completion is unfinished.
    pub text: String,
    /// Messages after the prompt if the model may call tools: assistant messages with `content` and `tool_calls`, and tool results. Empty without
    /// tools.
    pub messages: Vec<serde_json::Value>,
    /// The final state of the completion's environment, if it has one.
    pub environment: Option<Arc<EnvironmentEnd>>,
    /// Why the environment failed; the completion is then masked.
    pub failure: Option<String>,
    /// One reward per reward function, in configured order; `None` where that reward failed.
    pub rewards: Vec<Option<f32>>,
    /// Weighted sum of the rewards; `None` excludes the sample from the loss and from group statistics.
    pub reward: Option<f32>,
    /// KL penalty that is subtracted from the reward before advantages are computed (`use_kl_in_reward`).
    pub kl_penalty: f32,
    /// Group-relative advantage; 0 until it is computed.
    pub advantage: f32,
}

impl Trajectory {
    /// Whether the completion was cut off by a length limit.
    pub fn is_truncated(&self) -> bool {
        self.finish_reason == Some(FinishReason::Length)
    }

    /// The reward for computing advantages: the weighted sum minus the KL penalty.
    pub fn penalized_reward(&self) -> Option<f32> {
        self.reward.map(|reward| reward - self.kl_penalty)
    }

    /// Text of the newest turn without tool results; built-in rewards read it.
    pub fn newest_text(&self) -> &str {
        let newest = self.messages.iter().rfind(|message| message["role"] == "assistant");
        newest.map_or(&self.text, |message| message["content"].as_str().unwrap_or_default())
    }

    /// Number of tokens that the policy sampled.
    pub fn num_sampled(&self) -> usize {
        self.loss_mask.iter().filter(|is_sampled| **is_sampled).count()
    }

    /// Appends a token that the policy sampled in generation step `step`.
    pub fn push_sampled(&mut self, token_id: u32, logprob: f32, step: u64) {
        self.token_ids.push(token_id);
        self.loss_mask.push(true);
        self.rollout_logprobs.push(logprob);
        self.weight_versions.push(step);
    }

    /// Appends context tokens, such as a tool result, at generation step `step`. A request with this trajectory in `begun` samples the next turn.
    pub fn push_context(&mut self, token_ids: &[u32], step: u64) {
        self.token_ids.extend(token_ids);
        let len = self.token_ids.len();
        self.loss_mask.resize(len, false);
        self.rollout_logprobs.resize(len, 0.0);
        self.weight_versions.resize(len, step);
        self.finish_reason = None;
    }

    /// Token ranges of the sampled turns.
    pub fn turns(&self) -> Vec<Range<usize>> {
        let mut turns: Vec<Range<usize>> = Vec::new();
        for at in (0..self.loss_mask.len()).filter(|&at| self.loss_mask[at]) {
            match turns.last_mut() {
                Some(turn) if turn.end == at => turn.end += 1,
                _ => turns.push(at..at + 1),
            }
        }
        turns
    }
}

/// A prompt with its `num_generations` completions; advantages are computed within such a group.
#[derive(Debug, Clone, PartialEq)]
pub struct RolloutGroup {
    /// The prompt that every completion continues.
    pub prompt: Prompt,
    /// Generation step in which the group was first scheduled; part of the random key of all its tokens. Unused while nothing is sampled.
    pub first_step: u64,
    /// Completions in sample order, 0 to `num_generations`; empty if nothing is sampled yet.
    pub completions: Vec<Trajectory>,
}

impl RolloutGroup {
    /// A group without completions, to be sampled from the start.
    pub fn new(prompt: Prompt) -> Self {
        Self { prompt, first_step: 0, completions: Vec::new() }
    }
}

/// A structure that constrains the text of a completion (structured output).
#[derive(Debug, Clone, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum Structure {
    /// JSON text that matches a schema.
    Json {
        /// The JSON schema, an object, as text.
        schema: String,
        /// Whether white space between JSON values is forbidden.
        is_compact: bool,
    },
    /// A regular expression in the syntax of Rust's `regex` that must match the whole text.
    Regex(String),
    /// One of the given texts.
    Choice(Vec<String>),
    /// A context-free grammar in Lark's syntax, as supported by llguidance.
    Grammar(String),
}

impl Structure {
    /// Size of the schema, expression, choices or grammar in bytes.
    pub fn num_bytes(&self) -> usize {
        match self {
            Self::Json { schema: text, .. } | Self::Regex(text) | Self::Grammar(text) => text.len(),
            Self::Choice(texts) => texts.iter().map(|text| text.len() + 1).sum(),
        }
    }
}

/// A candidate token with its log-probability.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenLogprob {
    /// Id of the token.
    pub token_id: u32,
    /// Log-probability of the token in nats, of the same distribution as [`Trajectory::rollout_logprobs`].
    pub logprob: f32,
}

/// How tokens are drawn. Defaults are those of TRL's `GRPOConfig`.
///
/// ```
/// use colo_grpo::engine::{SamplingParams, Structure};
///
/// let verdict = Structure::Choice(vec!["yes".to_owned(), "no".to_owned()]);
/// let params = SamplingParams { temperature: 0.7, structure: Some(verdict), ..SamplingParams::default() };
/// assert!(params.num_generations == 8 && SamplingParams::is_temperature(params.temperature));
/// ```
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct SamplingParams {
    /// Completions per prompt.
    pub num_generations: usize,
    /// Softmax temperature, at least [`SamplingParams::MIN_TEMPERATURE`]; 0 for greedy sampling.
    pub temperature: f32,
    /// Nucleus mass in (0, 1]; 1 is off.
    pub top_p: f32,
    /// Number of highest logits kept; 0 is off.
    pub top_k: usize,
    /// Minimum probability relative to the most probable token, in [0, 1]; `None` is off.
    pub min_p: Option<f32>,
    /// Divides positive and multiplies negative logits of token ids already seen; 1 is off.
    pub repetition_penalty: f32,
    /// Maximum completion length in tokens.
    pub max_completion_length: usize,
    /// Stop strings that end a completion; their tokens stay in `token_ids`.
    pub stop: Vec<String>,
    /// Number of most probable tokens reported for each sampled token, with their log-probabilities.
    pub top_logprobs: usize,
    /// The structure that the completion's text must match. Sampling and log-probabilities use the distribution over the tokens that the structure
    /// allows next.
    pub structure: Option<Structure>,
    /// Seed: the first word of every random key.
    pub seed: u64,
    /// Generation step: the second word of the random keys of groups that start in it, and the weight version of its tokens.
    pub step: u64,
}

impl SamplingParams {
    /// Smallest temperature above 0; a smaller one would overflow logits in float32.
    pub const MIN_TEMPERATURE: f32 = 1e-6;
    /// Smallest repetition penalty; a smaller one would overflow logits in float32.
    pub const MIN_PENALTY: f32 = 1e-6;
    /// Largest repetition penalty; a larger one would overflow logits in float32.
    pub const MAX_PENALTY: f32 = 1e6;

    /// Whether a temperature is valid: 0 (greedy), or finite and at least [`SamplingParams::MIN_TEMPERATURE`].
    pub fn is_temperature(temperature: f32) -> bool {
        temperature == 0.0 || (temperature.is_finite() && temperature >= Self::MIN_TEMPERATURE)
    }

    /// Whether a nucleus mass (top_p) is valid: in (0, 1] and no subnormal number, which some processors treat as 0.
    pub fn is_top_p(top_p: f32) -> bool {
        (f32::MIN_POSITIVE..=1.0).contains(&top_p)
    }
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            num_generations: 8,
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: None,
            repetition_penalty: 1.0,
            max_completion_length: 512,
            stop: Vec::new(),
            top_logprobs: 0,
            structure: None,
            seed: 42,
            step: 0,
        }
    }
}

/// Test data shared by several modules.
#[cfg(test)]
pub(crate) mod fixtures {
    use super::*;

    /// A prompt of two tokens without columns.
    pub(crate) fn prompt(id: u64) -> Prompt {
        Prompt { id, text: "what".into(), token_ids: vec![1, 2], columns: Arc::default() }
    }

    /// A finished completion with one token per byte of `text`, not scored.
    pub(crate) fn completion(text: &str) -> Trajectory {
        Trajectory {
            token_ids: text.bytes().map(u32::from).collect(),
            loss_mask: vec![true; text.len()],
            rollout_logprobs: vec![0.0; text.len()],
            weight_versions: vec![0; text.len()],
            finish_reason: Some(FinishReason::Eos),
            text: text.to_owned(),
            ..Trajectory::default()
        }
    }

    /// A group of completions that have only rewards.
    pub(crate) fn scored(rewards: &[Option<f32>]) -> RolloutGroup {
        let scored = |reward: &Option<f32>| Trajectory { rewards: vec![*reward], reward: *reward, ..completion("x") };
        RolloutGroup { completions: rewards.iter().map(scored).collect(), ..RolloutGroup::new(prompt(0)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unfinished_trajectory_round_trips_bit_for_bit() {
        let one_turn = Trajectory {
            token_ids: vec![0, 7, u32::MAX],
            loss_mask: vec![true; 3],
            rollout_logprobs: vec![-0.1, f32::MIN_POSITIVE, f32::NEG_INFINITY],
            weight_versions: vec![4, 4, 6],
            finish_reason: Some(FinishReason::Stop),
            routed_experts: RoutedExperts { per_token: 3, experts: vec![0, 255, 4095, 1, 2, 3].into() },
            ..Trajectory::default()
        };
        let text = serde_json::to_string(&one_turn).unwrap();
        assert!(text.contains(r#""token_ids":"0000000000000007ffffffff""#), "{text}");
        assert!(text.contains(r#""routed_experts":[3,"000000ff0fff000100020003"]"#), "{text}");
        let mut two_turns = one_turn.clone();
        two_turns.push_context(&[5, 6], 7);
        assert_eq!((two_turns.turns().len(), two_turns.num_sampled(), two_turns.finish_reason), (1, 3, None));
        for trajectory in [one_turn, two_turns, Trajectory::default()] {
            let text = serde_json::to_string(&trajectory).unwrap();
            assert_eq!(serde_json::from_str::<Trajectory>(&text).unwrap(), trajectory, "{text}");
        }
        for torn in [
            r#"{"token_ids": "00000001", "rollout_logprobs": "", "finish_reason": null, "weight_versions": [[0, 1]]}"#,
            r#"{"token_ids": "00000001", "rollout_logprobs": "00000000", "finish_reason": null, "weight_versions": []}"#,
            r#"{"token_ids": "00000001", "rollout_logprobs": "00000000", "finish_reason": null, "turns": [2],
                "weight_versions": [[0, 1]]}"#,
            r#"{"token_ids": "00000001", "rollout_logprobs": "00000000", "finish_reason": null, "weight_versions": [[0, 1]],
                "routed_experts": [2, "000100020003"]}"#,
            r#"{"token_ids": "00000001", "rollout_logprobs": "00000000", "finish_reason": null, "weight_versions": [[0, 1]],
                "routed_experts": [1, "00010"]}"#,
            r#"{"token_ids": "+0000001", "rollout_logprobs": "00000000", "finish_reason": null, "weight_versions": [[0, 1]]}"#,
            r#"{"token_ids": "é0000001", "rollout_logprobs": "00000000", "finish_reason": null, "weight_versions": [[0, 1]]}"#,
            r#"{"token_ids": "é000001", "rollout_logprobs": "00000000", "finish_reason": null, "weight_versions": [[0, 1]]}"#,
            r#"{"token_ids": "00000001", "rollout_logprobs": "00000000", "finish_reason": null, "weight_versions": [[0, 1]],
                "turns": [18446744073709551615, 2]}"#,
            r#"{"token_ids": "00000001", "rollout_logprobs": "00000000", "finish_reason": null,
                "weight_versions": [[0, 18446744073709551615], [1, 2]]}"#,
            r#"{"token_ids": "00000001", "rollout_logprobs": "00000000", "finish_reason": null, "weight_versions": [[0, 1]],
                "routed_experts": [0, "0001"]}"#,
        ] {
            assert!(serde_json::from_str::<Trajectory>(torn).is_err(), "{torn}");
        }
    }
}
