//! Self-distillation: builds the prompts with which the policy scores its own samples as their teacher. They are a row's prompt with a worked answer,
//! a hint, feedback, or a successful completion.

use std::sync::{Arc, LazyLock};

use regex::Regex;
use serde_json::Value;

use crate::config::{Config, DistillationConfig, SelfDistillation};
use crate::data::{DatasetOptions, Tokenizer};
use crate::error::{Error, Result};
use crate::metrics::StepMetrics;
use crate::train::Sequence;
use crate::types::{RolloutGroup, Trajectory};

/// Name of the column that only the teacher sees, as in TRL.
const COLUMN: &str = "privileged_context";
/// The pattern by which thoughts are removed, as in TRL.
static THOUGHT: LazyLock<Regex> = LazyLock::new(|| Regex::new("(?s)<think>.*?</think>").expect("a valid pattern"));

/// Builds the prompts of the policy as its own teacher.
#[derive(Debug)]
pub(super) struct OwnTeacher {
    tokenizer: Arc<Tokenizer>,
    options: DatasetOptions,
    /// Maximum tokens of prompt and completion together.
    max_model_length: usize,
    config: DistillationConfig,
}

/// Number of completions in a batch, and number of those with a teacher's prompt.
#[derive(Debug, Default)]
pub(super) struct TaughtCounts {
    num_samples: usize,
    num_taught: usize,
    num_with_solution: usize,
    num_with_feedback: usize,
}

impl TaughtCounts {
    /// Adds TRL's metrics for this rank's part.
    pub fn add_metrics(&self, metrics: &mut StepMetrics) {
        for (name, count) in [
            ("reprompt_sample_fraction", self.num_taught),
            ("success_sample_fraction", self.num_with_solution),
            ("feedback_used_fraction", self.num_with_feedback),
        ] {
            metrics.set_mean(format!("self_distillation/{name}"), count as f64, self.num_samples as f64);
        }
    }
}

impl OwnTeacher {
    /// Creates it if the configuration requests self-distillation; `options` say how rows became prompts.
    pub fn new(
        config: &Config,
        options: &DatasetOptions,
        tokenizer: &Arc<Tokenizer>,
        max_model_length: usize,
    ) -> Option<Self> {
        config.teaches_itself().then(|| Self {
            tokenizer: Arc::clone(tokenizer),
            options: options.clone(),
            max_model_length,
            config: config.distillation.clone(),
        })
    }

    /// Sets the teacher's prompt of each sequence, if it has one. `sequences` must be those of the groups' completions with a reward, in order.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a row without the column that `sdft` reads, and for a prompt that leaves too few tokens for its completion.
    pub fn prompt(&self, groups: &[RolloutGroup], sequences: &mut [Sequence]) -> Result<TaughtCounts> {
        let mut counts = TaughtCounts::default();
        let mut sequences = sequences.iter_mut();
        for group in groups {
            for (index, _) in group.completions.iter().enumerate().filter(|(_, completion)| completion.reward.is_some())
            {
                let Some(sequence) = sequences.next() else { return Ok(counts) };
                counts.num_samples += 1;
                let prompt = match self.config.self_distillation {
                    SelfDistillation::Sdpo => self.reprompt(group, index, &mut counts)?,
                    _ => Some(self.with_context(group)?),
                };
                counts.num_taught += usize::from(prompt.is_some());
                sequence.teacher_skips = self.config.num_loss_tokens_to_skip;
                sequence.teacher_prompt = prompt.map(|ids| self.fitting(ids, sequence.completion_len())).transpose()?;
            }
        }
        Ok(counts)
    }

    /// For SDFT: the prompt with the row's context.
    fn with_context(&self, group: &RolloutGroup) -> Result<Vec<u32>> {
        let columns = &group.prompt.columns;
        let Some(context) = columns.get(COLUMN).and_then(text_of) else {
            let expected =
                format!("rows with a column {COLUMN} (text or messages), as self_distillation = sdft needs it");
            return Err(Error::InvalidArgument {
                op: "self_distillation",
                expected,
                got: "a row without this column".to_owned(),
            });
        };
        let template = &self.config.teacher_prompt_template;
        let write = |prompt: &str| filled(template, &[("{prompt}", prompt), ("{privileged_context}", &context)]);
        self.options.rewritten(columns, write, &self.tokenizer)
    }

    /// For SDPO: the prompt with the first successful completion of the group, and with the row's feedback.
    fn reprompt(&self, group: &RolloutGroup, index: usize, counts: &mut TaughtCounts) -> Result<Option<Vec<u32>>> {
        let config = &self.config;
        let is_successful = |completion: &Trajectory| {
            completion.reward.is_some_and(|reward| f64::from(reward) >= config.success_reward_threshold)
        };
        let mut others = group.completions.iter().enumerate();
        let shown = others.find(|(other, completion)| {
            let is_itself = config.dont_reprompt_on_self_success && *other == index;
            config.use_successful_as_teacher && !is_itself && is_successful(completion)
        });
        let shown = shown.map(|(_, completion)| match config.remove_thinking_from_demonstration {
            true => THOUGHT.replace_all(&completion.text, "").trim().to_owned(),
            false => completion.text.clone(),
        });
        let feedback = group.prompt.columns.get(COLUMN).and_then(Value::as_str).filter(|text| !text.trim().is_empty());
        let feedback = feedback.filter(|_| {
            let only_without = config.environment_feedback_only_without_solution;
            config.include_environment_feedback && !(only_without && shown.is_some())
        });
        counts.num_with_solution += usize::from(shown.is_some());
        counts.num_with_feedback += usize::from(feedback.is_some());
        if shown.is_none() && feedback.is_none() {
            return Ok(None);
        }
        let part = |template: &str, place: &str, text: Option<&str>| {
            text.map_or_else(String::new, |text| filled(template, &[(place, text)]))
        };
        let solution = part(&config.solution_template, "{successful_previous_attempt}", shown.as_deref());
        let feedback = part(&config.feedback_template, "{feedback_raw}", feedback);
        let parts = [("{solution}", &*solution), ("{feedback}", &*feedback)];
        let write =
            |prompt: &str| filled(&config.reprompt_template, &[&[("{prompt}", prompt)][..], &parts[..]].concat());
        self.options.rewritten(&group.prompt.columns, write, &self.tokenizer).map(Some)
    }

    /// Truncates a prompt to its last ids, as many as are allowed.
    fn fitting(&self, mut ids: Vec<u32>, completion_len: usize) -> Result<Vec<u32>> {
        let kept = ids.len().min(self.config.max_reprompt_len);
        ids.drain(..ids.len() - kept);
        if ids.len() + completion_len <= self.max_model_length {
            return Ok(ids);
        }
        let expected = format!(
            "at most {} tokens for the teacher's prompt and the completion together: lower max_reprompt_len, or raise \
             max_model_length",
            self.max_model_length
        );
        Err(Error::InvalidArgument {
            op: "self_distillation",
            expected,
            got: format!("{} and {completion_len}", ids.len()),
        })
    }
}

/// Fills texts into the placeholders of a template. Placeholders inside the texts are not replaced.
pub(super) fn filled(template: &str, texts: &[(&str, &str)]) -> String {
    let mut filled = String::new();
    let mut rest = template;
    while let Some((at, place, text)) =
        texts.iter().filter_map(|(place, text)| Some((rest.find(place)?, *place, *text))).min()
    {
        filled += &rest[..at];
        filled += text;
        rest = &rest[at + place.len()..];
    }
    filled + rest
}

/// The text of a value: a string, or the texts of messages, one per line.
fn text_of(value: &Value) -> Option<String> {
    match value {
        Value::Null => None,
        Value::String(text) => Some(text.clone()),
        Value::Array(messages) if messages.iter().all(Value::is_object) => {
            let content = |message: &Value| match &message["content"] {
                Value::Array(parts) => {
                    parts.iter().filter_map(|part| part["text"].as_str()).collect::<Vec<_>>().join(" ")
                }
                content => content.as_str().unwrap_or_default().to_owned(),
            };
            let texts: Vec<String> = messages.iter().map(content).filter(|text| !text.is_empty()).collect();
            Some(texts.join("\n"))
        }
        other => Some(other.to_string()),
    }
}
