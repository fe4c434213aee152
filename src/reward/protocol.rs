//! The protocol between a reward pool and a worker process: JSON frames, each prefixed with its length as 4 bytes, big-endian.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::failures::{FailureKind, RewardFailure, Score};
use super::job::{RowLayout, RunProgress, ScoringJob};
use crate::types::{FinishReason, RolloutGroup, Trajectory};

/// The score of each completion of a request, or its failure.
pub(super) type ScoreResults = Vec<Result<Score, RewardFailure>>;

/// Largest size of a reply in bytes.
pub(super) const MAX_REPLY_BYTES: usize = 1 << 20;
/// Size in bytes of a frame's length prefix.
pub(super) const LENGTH_BYTES: usize = 4;

/// The name of the only column in a [`TextRequest`].
pub(super) const VERDICT_COLUMN: &str = "answer";

/// A request to score completions of one prompt. The reply repeats its `id`, which is unique among the worker's requests.
#[derive(Debug, Serialize)]
pub(super) struct ScoreRequest<'a> {
    id: u64,
    prompt: &'a str,
    completions: Vec<&'a str>,
    /// Texts of all turns, if tools are used.
    #[serde(skip_serializing_if = "Option::is_none")]
    texts: Option<Vec<&'a str>>,
    /// Messages of all turns, if tools are used.
    #[serde(skip_serializing_if = "Option::is_none")]
    messages: Option<Vec<&'a [Value]>>,
    /// States of the completions' environments, if there are any.
    #[serde(skip_serializing_if = "Option::is_none")]
    environments: Option<Vec<Option<EnvironmentState<'a>>>>,
    completion_ids: Vec<&'a [u32]>,
    finish_reasons: Vec<Option<FinishReason>>,
    columns: Cow<'a, Map<String, Value>>,
    /// The column with the prompt, if the configuration names one; for Python functions.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_column: Option<&'a str>,
    trainer_state: RunProgress,
}

/// An environment's state, pickled by its class.
#[derive(Debug, Serialize)]
struct EnvironmentState<'a> {
    /// The folder of the file that defines the environment's class.
    folder: &'a str,
    state: &'a str,
}

/// A request as the sandbox worker reads it.
#[derive(Debug, Deserialize)]
pub(super) struct CodeRequest {
    pub id: u64,
    pub completions: Vec<String>,
    pub columns: Map<String, Value>,
}

/// A reply: a reward for each completion, or an error.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RewardReply {
    /// The id of the request. A user's command may leave it out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rewards: Option<Vec<Option<Number>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// The first reply of a worker that belongs to this crate: how it serves requests, or why it cannot.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Ready {
    #[serde(rename = "id")]
    _id: u64,
    #[serde(rename = "rewards", default)]
    _rewards: Vec<f64>,
    error: Option<String>,
    /// Whether the worker serves several requests concurrently.
    #[serde(default)]
    pub is_async: bool,
    /// Columns that its function requires as parameters.
    #[serde(default)]
    pub needed_columns: Vec<String>,
}

/// The first request to a worker that belongs to this crate: asks whether it is ready. Requests with completions have higher ids.
pub(super) fn first_request() -> Vec<u8> {
    frame(&json!({
        "id": 0, "prompt": "", "completions": [], "completion_ids": [], "finish_reasons": [], "columns": {},
    }))
}

impl Ready {
    /// Parses the first reply of a worker. Returns the worker's error if it cannot serve.
    pub fn parse(frame: &[u8]) -> Result<Self, RewardFailure> {
        let ready: Self = serde_json::from_slice(frame)
            .map_err(|error| RewardFailure::new(FailureKind::Output, format!("{error} in {}", excerpt(frame))))?;
        match &ready.error {
            Some(message) => Err(RewardFailure::new(FailureKind::Error, message)),
            None => Ok(ready),
        }
    }
}

/// A number in JSON. JSON cannot represent non-finite numbers, so these are the strings `"nan"` and `"inf"`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Number {
    Finite(f64),
    Text(String),
}

/// A request of a verdict reward: texts to compare with one reference answer.
#[derive(Debug, Serialize)]
pub(super) struct TextRequest<'a> {
    id: u64,
    completions: Vec<&'a str>,
    columns: BTreeMap<&'static str, &'a str>,
}

impl<'a> TextRequest<'a> {
    /// A request with texts and the reference answer in column [`VERDICT_COLUMN`].
    pub fn new(id: u64, completions: Vec<&'a str>, reference: &'a str) -> Self {
        Self { id, completions, columns: BTreeMap::from([(VERDICT_COLUMN, reference)]) }
    }
}

impl<'a> ScoreRequest<'a> {
    /// A request for the completions of a job, which belong to `group`. With a `layout`, columns that only other rows have are null.
    pub fn new(id: u64, group: &'a RolloutGroup, job: &ScoringJob, layout: Option<&'a RowLayout>) -> Self {
        let completions = &group.completions[job.completions.clone()];
        let has_turns = completions.iter().any(|completion| !completion.messages.is_empty());
        let has_environments = completions.iter().any(|completion| completion.environment.is_some());
        Self {
            id,
            prompt: &group.prompt.text,
            completions: completions.iter().map(Trajectory::newest_text).collect(),
            texts: has_turns.then(|| completions.iter().map(|completion| completion.text.as_str()).collect()),
            messages: has_turns.then(|| completions.iter().map(|completion| completion.messages.as_slice()).collect()),
            environments: has_environments.then(|| completions.iter().map(state_of).collect()),
            completion_ids: completions.iter().map(|completion| completion.token_ids.as_slice()).collect(),
            finish_reasons: completions.iter().map(|completion| completion.finish_reason).collect(),
            columns: columns_of(group, layout),
            prompt_column: layout.and_then(|layout| layout.prompt_column.as_deref()),
            trainer_state: job.progress,
        }
    }
}

/// The columns of a group's row, with null in each column that the row lacks and `layout` has.
fn columns_of<'a>(group: &'a RolloutGroup, layout: Option<&RowLayout>) -> Cow<'a, Map<String, Value>> {
    let own = &*group.prompt.columns;
    let mut columns = Cow::Borrowed(own);
    for name in layout.iter().flat_map(|layout| &layout.columns).filter(|name| !own.contains_key(*name)) {
        columns.to_mut().insert(name.clone(), Value::Null);
    }
    columns
}

/// The state of a completion's environment, if it is known.
fn state_of(completion: &Trajectory) -> Option<EnvironmentState<'_>> {
    let end = completion.environment.as_ref()?;
    end.state.as_ref().map(|state| EnvironmentState { folder: &end.folder, state })
}

impl RewardReply {
    /// A reply that reports an error instead of scores.
    pub fn error(id: Option<u64>, message: String) -> Self {
        Self { id, rewards: None, error: Some(message) }
    }

    /// A reply with the scores of a request's completions.
    pub fn rewards(id: u64, rewards: Vec<f64>) -> Self {
        let rewards = rewards.into_iter().map(|reward| Some(Number::Finite(reward))).collect();
        Self { id: Some(id), rewards: Some(rewards), error: None }
    }

    /// Parses a reply from a worker's output.
    pub fn parse(frame: &[u8]) -> Result<Self, RewardFailure> {
        let bad = |what: String| RewardFailure::new(FailureKind::Output, format!("{what} in {}", excerpt(frame)));
        let reply: Self = serde_json::from_slice(frame).map_err(|error| bad(error.to_string()))?;
        if reply.rewards.is_some() == reply.error.is_some() {
            return Err(bad("expected either \"rewards\" or \"error\"".to_owned()));
        }
        Ok(reply)
    }

    /// The scores of `num_completions` completions, each a number or a failure of its own; or a failure of all of them.
    pub fn scores(self, num_completions: usize) -> Result<ScoreResults, RewardFailure> {
        if let Some(message) = self.error {
            return Err(RewardFailure::new(FailureKind::Error, message));
        }
        let rewards = self.rewards.unwrap_or_default();
        if rewards.len() != num_completions {
            let what = format!("expected {num_completions} rewards, one for each completion, got {}", rewards.len());
            return Err(RewardFailure::new(FailureKind::Error, what));
        }
        rewards.into_iter().map(|reward| reward.map_or(Ok(Ok(Score::NotApplicable)), Number::read)).collect()
    }
}

impl Number {
    fn read(self) -> Result<Result<Score, RewardFailure>, RewardFailure> {
        match self {
            Self::Finite(value) => Ok(Score::finite(value as f32)),
            Self::Text(text) => match text.parse::<f32>() {
                Ok(value) if !value.is_finite() => Ok(Score::finite(value)),
                _ => Err(RewardFailure::new(FailureKind::Output, format!("expected a number, got {text:.200?}"))),
            },
        }
    }
}

/// Encodes one value as JSON with its length prefix.
pub(crate) fn frame(value: &impl Serialize) -> Vec<u8> {
    let mut bytes = vec![0; LENGTH_BYTES];
    serde_json::to_writer(&mut bytes, value).expect("plain data is JSON");
    let length = u32::try_from(bytes.len() - LENGTH_BYTES).expect("a group's text is far below 4 GiB");
    bytes[..LENGTH_BYTES].copy_from_slice(&length.to_be_bytes());
    bytes
}

/// Removes the next complete frame from `received` and returns it without its length prefix.
pub(crate) fn take_frame(received: &mut Vec<u8>) -> Option<Vec<u8>> {
    let end = LENGTH_BYTES + length(received)?;
    (received.len() >= end).then(|| received.drain(..end).skip(LENGTH_BYTES).collect())
}

/// Decodes a length prefix.
pub(super) fn length(bytes: &[u8]) -> Option<usize> {
    bytes.get(..LENGTH_BYTES).map(|bytes| u32::from_be_bytes(bytes.try_into().expect("4 bytes")) as usize)
}

/// Reads the next frame from a worker's standard input; `None` at its end.
pub(super) fn read_frame(input: &mut impl Read) -> io::Result<Option<Vec<u8>>> {
    let mut head = [0; LENGTH_BYTES];
    match input.read_exact(&mut head) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        other => other?,
    }
    let mut bytes = vec![0; u32::from_be_bytes(head) as usize];
    input.read_exact(&mut bytes)?;
    Ok(Some(bytes))
}

/// Writes a worker's reply to its standard output.
pub(super) fn write_frame(output: &mut impl Write, reply: &RewardReply) -> io::Result<()> {
    output.write_all(&frame(reply))?;
    output.flush()
}

/// The beginning of a malformed text, for error messages.
pub(super) fn excerpt(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(200)]).into_owned();
    format!("{text:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(frame: &[u8], num_completions: usize) -> Result<ScoreResults, RewardFailure> {
        RewardReply::parse(frame)?.scores(num_completions)
    }

    #[test]
    fn replies_outside_of_the_schema_are_refused() {
        assert_eq!(RewardReply::parse(br#"{"id": 7, "rewards": [1.0]}"#).unwrap().id, Some(7));
        let scores = read(br#"{"rewards": [0.5, null, "nan", 1e300]}"#, 4).unwrap();
        assert_eq!(scores[..2], [Ok(Score::Value(0.5)), Ok(Score::NotApplicable)]);
        for score in &scores[2..] {
            assert_eq!(score.as_ref().unwrap_err().kind, FailureKind::NonFinite);
        }
        let failure = |text: &str| read(text.as_bytes(), 1).unwrap_err();
        assert_eq!(failure(r#"{"error": "no tests"}"#), RewardFailure::new(FailureKind::Error, "no tests"));
        for (text, count) in [(r#"{"rewards": [1.0, 1.0]}"#, 2), (r#"{"rewards": []}"#, 0)] {
            let cause = format!("expected 1 rewards, one for each completion, got {count}");
            assert_eq!(failure(text), RewardFailure::new(FailureKind::Error, cause));
        }
        for text in [
            "",
            "1",
            "{}",
            "[1.0]",
            "{\"rewards\": [\"1.0\"]}",
            "{\"rewards\": [true]}",
            "{\"rewards\": [NaN]}",
            "{\"rewards\": [1.0], \"error\": \"x\"}",
            "{\"rewards\": [1.0], \"advantage\": 9}",
            "{\"id\": \"1\", \"rewards\": [1.0]}",
            "{\"rewards\": [1.0]} {\"rewards\": [1.0]}",
        ] {
            assert_eq!(failure(text).kind, FailureKind::Output, "{text}");
        }
    }
}
