//! Host data that rooms exchange: prompts, completions and their groups.

mod packed;
mod routed_experts;

use std::ops::Range;
use std::sync::Arc;

use packed::PackedTrajectory;
pub use routed_experts::RoutedExperts;

/// One of some ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Its number, from 0.
    pub rank: usize,
    /// How many ranks there are.
    pub size: usize,
}

impl Place {
    /// Its share of `len` rows: consecutive, in rank order, sizes at most one apart.
    pub fn share(self, len: usize) -> Range<usize> {
        len * self.rank / self.size..len * (self.rank + 1) / self.size
    }
}

/// One row of a data set, ready to be generated from.
#[derive(Debug, Clone, PartialEq)]
pub struct Prompt {
    /// Identity of the row within its data set: the random key of its samples, the same at any world size.
    pub id: u64,
    /// The rendered text (after the chat template), as the tokenizer saw it.
    pub text: String,
    /// Token ids of `text`; never empty.
    pub token_ids: Vec<u32>,
    /// Every column of the row, for the rewards.
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

/// The end of a completion's environment.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct EnvironmentEnd {
    /// Name of its class.
    pub class: String,
    /// Folder of the file that has the class; empty for a module.
    pub folder: String,
    /// The environment's own reward, if it has one, or why that failed.
    pub reward: Option<Result<f32, String>>,
    /// The environment's state in base 64, as Python's pickle writes it, where a reward may ask for it.
    pub state: Option<String>,
}

/// The continuation of a prompt in one sample: the tokens that the policy sampled, turn by turn, and between two turns the
/// context that
/// an environment or a tool answered with. A completion of one turn is the simplest one.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(into = "PackedTrajectory", try_from = "PackedTrajectory")]
pub struct Trajectory {
    /// Ids after the prompt, end-of-sequence tokens included.
    pub token_ids: Vec<u32>, // [L]
    /// Whether the policy sampled the token. Later tokens attend to the others, which are in no loss, metric or denominator, as
    /// with TRL's `tool_mask`.
    pub loss_mask: Vec<bool>, // [L]
    /// Sampler's log-probability of each sampled id in nats, of the raw distribution at the sampling temperature
    /// (before top-k, top-p, min-p and penalties), as the trainer computes it; 0 of the others.
    pub rollout_logprobs: Vec<f32>, // [L]
    /// Generation step in which each id was sampled or appended, and so whose weights sampled it.
    pub weight_versions: Vec<u64>, // [L]
    /// The experts that the sampler's router chose for each token of prompt and completion, of a model that has some.
    pub routed_experts: RoutedExperts,
    /// Why the newest turn ended; `None` while it is under way.
    pub finish_reason: Option<FinishReason>,
    /// Decoded text, special tokens skipped; empty while the request is under way.
    pub text: String,
    /// Messages after the prompt, of a trajectory whose model may call tools: the assistant's with `content` and `tool_calls`, and
    /// tools' answers. Empty where there are no tools.
    pub messages: Vec<serde_json::Value>,
    /// The trajectory's environment, if it has one.
    pub environment: Option<Arc<EnvironmentEnd>>,
    /// Why the environment was lost: the trajectory is masked then.
    pub failure: Option<String>,
    /// One entry per reward function in configured order; `None` where that reward failed.
    pub rewards: Vec<Option<f32>>,
    /// Weighted sum of the rewards; `None` masks the sample out of the loss and the group statistics.
    pub reward: Option<f32>,
    /// The KL penalty that is taken off the reward before advantages are computed (`use_kl_in_reward`).
    pub kl_penalty: f32,
    /// Group-relative advantage; 0 until assigned.
    pub advantage: f32,
}

impl Trajectory {
    /// Whether the completion was cut by a length limit rather than ended by the model.
    pub fn is_truncated(&self) -> bool {
        self.finish_reason == Some(FinishReason::Length)
    }

    /// The reward that advantages are computed from: the weighted sum less the KL penalty.
    pub fn penalized_reward(&self) -> Option<f32> {
        self.reward.map(|reward| reward - self.kl_penalty)
    }

    /// Text of the newest turn, which built-in rewards read: never what a tool answered.
    pub fn newest_text(&self) -> &str {
        let newest = self.messages.iter().rfind(|message| message["role"] == "assistant");
        newest.map_or(&self.text, |message| message["content"].as_str().unwrap_or_default())
    }

    /// Tokens that the policy sampled.
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

    /// Appends what an environment answered in generation step `step`. A request with `self` in `begun` samples the next turn.
    pub fn push_context(&mut self, token_ids: &[u32], step: u64) {
        self.token_ids.extend(token_ids);
        let len = self.token_ids.len();
        self.loss_mask.resize(len, false);
        self.rollout_logprobs.resize(len, 0.0);
        self.weight_versions.resize(len, step);
        self.finish_reason = None;
    }

    /// Ranges of the tokens of each turn.
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

/// A prompt with its `num_generations` completions: the unit of advantage statistics.
#[derive(Debug, Clone, PartialEq)]
pub struct RolloutGroup {
    /// The prompt that every completion continues.
    pub prompt: Prompt,
    /// Generation step at which it was first scheduled: that of the random keys of all its tokens. Of a group of which nothing is
    /// sampled yet it does not count.
    pub first_step: u64,
    /// In sample order, 0 to `num_generations`; none if nothing is sampled yet.
    pub completions: Vec<Trajectory>,
}

impl RolloutGroup {
    /// A prompt that is still to be begun.
    pub fn new(prompt: Prompt) -> Self {
        Self { prompt, first_step: 0, completions: Vec::new() }
    }
}

/// A form that a completion's text is held to.
#[derive(Debug, Clone, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum Structure {
    /// A value of a JSON schema.
    Json {
        /// The schema, an object, as text.
        schema: String,
        /// No white space between values.
        is_compact: bool,
    },
    /// A regular expression in the syntax of Rust's `regex`, over the whole text.
    Regex(String),
    /// One of several texts.
    Choice(Vec<String>),
    /// A context-free grammar in Lark's syntax, as llguidance has it.
    Grammar(String),
}

impl Structure {
    /// Bytes of its text.
    pub fn num_bytes(&self) -> usize {
        match self {
            Self::Json { schema: text, .. } | Self::Regex(text) | Self::Grammar(text) => text.len(),
            Self::Choice(texts) => texts.iter().map(|text| text.len() + 1).sum(),
        }
    }
}

/// A token that might have been sampled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenLogprob {
    /// Id of the token.
    pub token_id: u32,
    /// Log-probability of the token in nats, of the distribution that [`Trajectory::rollout_logprobs`] are of.
    pub logprob: f32,
}

/// How tokens are drawn. Defaults are those of TRL's `GRPOConfig`.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct SamplingParams {
    /// Completions per prompt.
    pub num_generations: usize,
    /// Softmax temperature, at least [`SamplingParams::MIN_TEMPERATURE`]; or 0, greedy.
    pub temperature: f32,
    /// Nucleus mass in (0, 1]; 1 is off.
    pub top_p: f32,
    /// Number of highest logits kept; 0 is off.
    pub top_k: usize,
    /// Least probability relative to the most probable token, in [0, 1]; `None` is off.
    pub min_p: Option<f32>,
    /// Divides positive and multiplies negative logits of ids already seen; 1 is off.
    pub repetition_penalty: f32,
    /// Longest completion in tokens.
    pub max_completion_length: usize,
    /// Strings that end a completion; the matched text is kept in `token_ids`.
    pub stop: Vec<String>,
    /// Most probable tokens that are reported beside each sampled one, with their log-probabilities.
    pub top_logprobs: usize,
    /// The structure that the completion's text must follow. Tokens are drawn, and their log-probabilities taken, from the
    /// distribution over those that may come next.
    pub structure: Option<Structure>,
    /// First word of every random key.
    pub seed: u64,
    /// Generation step: the second word of every random key of groups that it begins, and the weight version of its tokens.
    pub step: u64,
}

impl SamplingParams {
    /// Least temperature above 0: by a smaller one, logits would be divided out of float32's range, and no token could be drawn.
    pub const MIN_TEMPERATURE: f32 = 1e-6;
    /// Least repetition penalty, for the same reason.
    pub const MIN_PENALTY: f32 = 1e-6;
    /// Largest repetition penalty, for the same reason.
    pub const MAX_PENALTY: f32 = 1e6;

    /// Whether a request may be sampled at this temperature: 0, which is greedy, or a finite one of at least
    /// [`SamplingParams::MIN_TEMPERATURE`].
    pub fn is_temperature(temperature: f32) -> bool {
        temperature == 0.0 || (temperature.is_finite() && temperature >= Self::MIN_TEMPERATURE)
    }

    /// Whether a request may have this nucleus mass: in (0, 1], and no subnormal number, which some processors take for 0.
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

/// Data that the tests of several rooms share.
#[cfg(test)]
pub(crate) mod fixtures {
    use super::*;

    /// A prompt of two tokens without columns.
    pub(crate) fn prompt(id: u64) -> Prompt {
        Prompt { id, text: "what".into(), token_ids: vec![1, 2], columns: Arc::default() }
    }

    /// Ended, a token a byte, not scored.
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

    /// Completions of which nothing but the reward is of interest.
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
