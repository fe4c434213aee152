//! What passes between the rooms as host data: prompts, completions and their groups.

use std::sync::Arc;

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

impl FinishReason {
    /// Whether the completion was cut by a length limit rather than ended by the model.
    pub fn is_truncated(self) -> bool {
        self == FinishReason::Length
    }
}

/// One sampled continuation of a prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct Completion {
    /// Sampled ids, the end-of-sequence token included.
    pub token_ids: Vec<u32>,
    /// Sampler's log-probability of each id in nats, of the raw distribution at the sampling temperature
    /// (before top-k, top-p, min-p and penalties), as the trainer computes it.
    pub rollout_logprobs: Vec<f32>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Decoded text, special tokens skipped.
    pub text: String,
    /// One entry per reward function in configured order; `None` where that reward failed.
    pub rewards: Vec<Option<f32>>,
    /// Weighted sum of the rewards; `None` masks the sample out of the loss and the group statistics.
    pub reward: Option<f32>,
    /// Group-relative advantage; 0 until assigned.
    pub advantage: f32,
}

/// A prompt with its `num_generations` completions: the unit of advantage statistics.
#[derive(Debug, Clone, PartialEq)]
pub struct RolloutGroup {
    /// The prompt that every completion continues.
    pub prompt: Prompt,
    /// In sample order, 0 to `num_generations`.
    pub completions: Vec<Completion>,
}

/// A group in the making, which a rollout goes on with.
#[derive(Debug, Clone, PartialEq)]
pub struct UnfinishedGroup {
    /// The prompt that every completion continues.
    pub prompt: Prompt,
    /// Step at which it was first scheduled: that of the random keys of all its tokens. Of a group of which nothing is
    /// sampled yet it does not count.
    pub first_step: u64,
    /// In sample order; empty if nothing is sampled yet.
    pub completions: Vec<UnfinishedCompletion>,
}

impl UnfinishedGroup {
    /// A prompt that is still to be begun.
    pub fn new(prompt: Prompt) -> Self {
        Self { prompt, first_step: 0, completions: Vec::new() }
    }
}

/// What has been sampled of a completion.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(into = "PackedCompletion", try_from = "PackedCompletion")]
pub struct UnfinishedCompletion {
    /// Sampled ids.
    pub token_ids: Vec<u32>,
    /// One for each id, of the weights that sampled it, as in [`Completion::rollout_logprobs`].
    pub rollout_logprobs: Vec<f32>,
    /// Why it ended, if it has.
    pub finish_reason: Option<FinishReason>,
}

/// The same with its numbers as eight hexadecimal digits each: short, on one line, and exact.
#[derive(serde::Serialize, serde::Deserialize)]
struct PackedCompletion {
    token_ids: String,
    rollout_logprobs: String,
    finish_reason: Option<FinishReason>,
}

impl From<UnfinishedCompletion> for PackedCompletion {
    fn from(completion: UnfinishedCompletion) -> Self {
        let UnfinishedCompletion { token_ids, rollout_logprobs, finish_reason } = completion;
        let digits = |words: &mut dyn Iterator<Item = u32>| words.map(|word| format!("{word:08x}")).collect();
        Self {
            token_ids: digits(&mut token_ids.into_iter()),
            rollout_logprobs: digits(&mut rollout_logprobs.into_iter().map(f32::to_bits)),
            finish_reason,
        }
    }
}

impl TryFrom<PackedCompletion> for UnfinishedCompletion {
    type Error = String;

    fn try_from(packed: PackedCompletion) -> Result<Self, String> {
        let PackedCompletion { token_ids, rollout_logprobs, finish_reason } = packed;
        let words = |digits: &str| -> Option<Vec<u32>> {
            let word = |digits: &[u8]| u32::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok();
            digits.as_bytes().chunks(8).map(word).collect()
        };
        let both =
            words(&token_ids).zip(words(&rollout_logprobs)).filter(|(ids, logprobs)| ids.len() == logprobs.len());
        let (token_ids, logprobs) = both.ok_or("a completion's tokens are not one hexadecimal word each")?;
        Ok(Self { token_ids, rollout_logprobs: logprobs.into_iter().map(f32::from_bits).collect(), finish_reason })
    }
}

/// A range of completion lengths, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct LengthSpread {
    /// Fewest tokens.
    pub shortest: usize,
    /// Most tokens.
    pub longest: usize,
    /// As many lengths from every doubling (few long ones), rather than from every number of tokens.
    pub long_tailed: bool,
}

impl LengthSpread {
    /// The length that a uniform word stands for.
    pub fn length(self, word: u64) -> usize {
        let Self { shortest, longest, long_tailed } = self;
        if !long_tailed {
            return shortest + (word % (longest - shortest + 1) as u64) as usize;
        }
        let share = word as f64 / 2.0_f64.powi(64);
        let length = shortest as f64 * ((longest + 1) as f64 / shortest as f64).powf(share);
        (length as usize).clamp(shortest, longest)
    }
}

/// How tokens are drawn. Defaults are those of TRL's `GRPOConfig`.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// Completions per prompt.
    pub num_generations: usize,
    /// Softmax temperature; 0 is greedy.
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
    /// Each completion's own limit is drawn from this range, counter-based as its tokens are: the long tail of benchmarks on
    /// random weights.
    pub spread_lengths: Option<LengthSpread>,
    /// Strings that end a completion; the matched text is kept in `token_ids`.
    pub stop: Vec<String>,
    /// First word of every random key.
    pub seed: u64,
    /// Step at which these samples are first scheduled: second word of every random key.
    pub step: u64,
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
            spread_lengths: None,
            stop: Vec::new(),
            seed: 42,
            step: 0,
        }
    }
}

/// What the tests of several rooms are made of.
#[cfg(test)]
pub(crate) mod fixtures {
    use super::*;

    /// A prompt of two tokens without columns.
    pub(crate) fn prompt(id: u64) -> Prompt {
        Prompt { id, text: "what".into(), token_ids: vec![1, 2], columns: Arc::default() }
    }

    /// Ended, a token a byte, not scored.
    pub(crate) fn completion(text: &str) -> Completion {
        Completion {
            token_ids: text.bytes().map(u32::from).collect(),
            rollout_logprobs: vec![0.0; text.len()],
            finish_reason: FinishReason::Eos,
            text: text.to_owned(),
            rewards: Vec::new(),
            reward: None,
            advantage: 0.0,
        }
    }

    /// Completions of which nothing but the reward is of interest.
    pub(crate) fn scored(rewards: &[Option<f32>]) -> RolloutGroup {
        let scored = |reward: &Option<f32>| Completion { rewards: vec![*reward], reward: *reward, ..completion("x") };
        RolloutGroup { prompt: prompt(0), completions: rewards.iter().map(scored).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unfinished_completion_comes_back_bit_for_bit() {
        let completion = UnfinishedCompletion {
            token_ids: vec![0, 7, u32::MAX],
            rollout_logprobs: vec![-0.1, f32::MIN_POSITIVE, f32::NEG_INFINITY],
            finish_reason: Some(FinishReason::Stop),
        };
        for completion in [completion, UnfinishedCompletion::default()] {
            let text = serde_json::to_string(&completion).unwrap();
            assert_eq!(serde_json::from_str::<UnfinishedCompletion>(&text).unwrap(), completion, "{text}");
        }
        let torn = r#"{"token_ids": "00000001", "rollout_logprobs": "", "finish_reason": null}"#;
        assert!(serde_json::from_str::<UnfinishedCompletion>(torn).is_err());
    }

    #[test]
    fn lengths_stay_in_their_range_and_a_long_tail_is_short_in_the_middle() {
        let lengths = |long_tailed| -> Vec<usize> {
            let spread = LengthSpread { shortest: 16, longest: 255, long_tailed };
            let mut lengths: Vec<_> = (0..=1000).map(|part| spread.length(u64::MAX / 1000 * part)).collect();
            lengths.sort_unstable();
            lengths
        };
        let (even, tailed) = (lengths(false), lengths(true));
        let ends = |lengths: &[usize]| (lengths[0], lengths[1000]);
        assert!(ends(&even).0 >= 16 && ends(&even).1 <= 255, "{:?}", ends(&even));
        assert_eq!(ends(&tailed), (16, 255));
        assert!((125..145).contains(&even[500]), "{}", even[500]);
        assert!((60..68).contains(&tailed[500]), "{}", tailed[500]); // sqrt(16 x 256)
    }
}
