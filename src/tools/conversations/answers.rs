//! Handles replies of tools and environments: they become the context of the next turn, or end the trajectory.

use std::sync::Arc;

use serde_json::json;

use super::{Asked, Conversations, EpisodeEnd, OpenTrajectory, Opening, TrajectoryKey, TurnLimits, TurnOutcome};
use crate::data::{RenderedPrompt, ToolCall};
use crate::error::{Error, Result};
use crate::tools::reply::{CallResult, ToolReply};
use crate::types::{EnvironmentEnd, Prompt, Trajectory};

/// Characters of a result that a warning shows.
const SHOWN_CHARS: usize = 1000;

impl Conversations {
    /// Handles a reply from the tools' process.
    pub(super) fn take(&mut self, reply: ToolReply) -> Result<()> {
        match self.asked.remove(&reply.id) {
            Some(Asked::Open(key)) => self.take_opened(key, reply),
            Some(Asked::Calls(key)) => self.take_results(key, reply),
            Some(Asked::Close(key)) => {
                self.take_closed(key, reply);
                Ok(())
            }
            None => Ok(()), // of a rollout that failed
        }
    }

    /// Records that an environment is open or has failed. After the last environment of a group, reports whether they added text to the prompt.
    fn take_opened(&mut self, key: TrajectoryKey, reply: ToolReply) -> Result<()> {
        let (Some(conversation), Some(opening)) = (self.open.get_mut(&key), self.opening.get_mut(&key.group)) else {
            return Ok(());
        };
        opening.num_left -= 1;
        let name = conversation.environment.clone().unwrap_or_default();
        match reply.error {
            Some(error) => conversation.failure = Some(format!("reset: {error}")),
            None => opening.observations.push(reply.observation),
        }
        let Some(opening) = (opening.num_left == 0).then(|| self.opening.remove(&key.group)).flatten() else {
            return Ok(());
        };
        let Opening { prompt, observations, .. } = opening;
        let first = observations.first().cloned().flatten();
        if let Some(other) = observations.iter().find(|observation| **observation != first) {
            let expected = format!(
                "a reset that depends only on the row, as all completions of a group share one prompt: it returned {} \
                 for one of them and {} for another",
                quoted(first.as_ref()),
                quoted(other.as_ref())
            );
            return Err(Error::invalid_value("environment_factory", &self.process.class(&name).name, expected));
        }
        let observed = |observation: String| -> Result<Prompt> {
            let RenderedPrompt { text, token_ids } =
                self.prompts.observed(&prompt.columns, &observation, &self.tokenizer)?;
            self.check_room(token_ids.len())?;
            Ok(Prompt { text, token_ids, ..prompt.clone() })
        };
        let prompt = first.map(observed).transpose()?;
        let key = TrajectoryKey { sample: 0, ..key };
        self.done.push((key, TurnOutcome::Opened(prompt)));
        Ok(())
    }

    /// Returns an error if a completion of `max_completion_length` tokens does not fit after the prompt in the run's longest sequence.
    fn check_room(&self, num_tokens: usize) -> Result<()> {
        let TurnLimits { max_completion_length, max_model_length } = self.limits;
        let longest = max_model_length.saturating_sub(max_completion_length);
        if num_tokens <= longest {
            return Ok(());
        }
        let expected = format!(
            "at least {num_tokens}: reset made a prompt of that length, but the run plans for at most {longest} \
             tokens; set max_prompt_length to the longest possible prompt"
        );
        Err(Error::invalid_value("max_prompt_length", longest, expected))
    }

    /// Ends a trajectory after its environment has returned its reward and state.
    fn take_closed(&mut self, key: TrajectoryKey, mut reply: ToolReply) {
        let Some(OpenTrajectory { number, messages, environment: Some(name), .. }) = self.open.remove(&key) else {
            return;
        };
        self.process.forget(number);
        let class = self.process.class(&name);
        let failure = reply.error.take().map(|error| format!("get_reward: {error}"));
        let end = EnvironmentEnd {
            class: class.name.clone(),
            folder: class.folder.clone(),
            reward: reply.reward(),
            state: reply.state.take(),
        };
        let environment = failure.is_none().then(|| Arc::new(end));
        self.finish(key, EpisodeEnd { messages, environment, failure });
    }

    fn take_results(&mut self, key: TrajectoryKey, reply: ToolReply) -> Result<()> {
        let Some(mut conversation) = self.open.remove(&key) else { return Ok(()) };
        let Some((trajectory, calls)) = conversation.waiting.take() else { return Ok(()) };
        self.stats.num_timeouts += usize::from(reply.is_late());
        self.stats.num_answers += 1;
        self.stats.seconds += reply.seconds;
        self.stats.max_seconds = self.stats.max_seconds.max(reply.seconds);
        let is_lost = reply.is_lost();
        let results = match reply.error {
            None => reply.results,
            Some(error) if conversation.environment.is_some() || is_lost => {
                self.stats.num_calls += calls.len();
                self.stats.num_failures += calls.len();
                conversation.failure = Some(error);
                self.end(key, conversation, &trajectory);
                return Ok(());
            }
            Some(error) => {
                vec![CallResult::error(&error); calls.len()]
            }
        };
        if results.len() != calls.len() {
            return Err(Error::Environment {
                message: format!("tools: received {} results for {} calls", results.len(), calls.len()),
            });
        }
        self.stats.num_calls += calls.len();
        let failed = || calls.iter().zip(&results).filter(|(_, result)| result.failed);
        self.stats.num_failures += failed().count();
        if let Some((ToolCall { name, .. }, result)) =
            failed().next().filter(|_| !std::mem::replace(&mut self.has_warned, true))
        {
            let told: String = result.content.chars().take(SHOWN_CHARS).collect();
            let cut = if told.len() < result.content.len() { " .." } else { "" };
            tracing::warn!("a call of the tool {name} failed; the model received {told}{cut} (reported once)");
        }
        let answers: Vec<(&ToolCall, String)> =
            calls.iter().zip(results.into_iter().map(|result| result.content)).collect();
        self.answer(key, conversation, trajectory, &answers)
    }

    /// Appends tool results, each with its call. If they do not fit they are dropped, and the trajectory ends.
    pub(super) fn answer(
        &mut self,
        key: TrajectoryKey,
        mut conversation: OpenTrajectory,
        mut trajectory: Trajectory,
        answers: &[(&ToolCall, String)],
    ) -> Result<()> {
        let num_before = trajectory.token_ids.len();
        let mut messages = Vec::new();
        for (call, content) in answers {
            let content = self.cut(content);
            messages.push(json!({"role": "tool", "name": call.name, "content": content}));
        }
        let step = trajectory.weight_versions.last().copied().unwrap_or_default();
        let labels = labels(answers.iter().map(|(call, _)| *call));
        let labelled = messages.iter().zip(labels).map(|(message, label)| {
            let mut message = message.clone();
            message["tool_call_id"] = label.into();
            message
        });
        let TurnLimits { max_completion_length, max_model_length } = self.limits;
        let limit = max_completion_length.min(max_model_length.saturating_sub(conversation.prompt_len + 1));
        if !self.turns.append(&mut trajectory, &labelled.collect::<Vec<_>>(), step, limit)? {
            self.stats.num_overlong += 1;
            self.end(key, conversation, &trajectory);
            return Ok(());
        }
        conversation.messages.extend(messages);
        conversation.num_answered += 1;
        let context = trajectory.token_ids.split_off(num_before);
        self.open.insert(key, conversation);
        self.done.push((key, TurnOutcome::Continues(context)));
        Ok(())
    }

    /// The result; if it is too long, its middle is cut out.
    fn cut(&mut self, content: &str) -> String {
        let num_chars = content.chars().count();
        if num_chars <= self.max_response_length {
            return content.to_owned();
        }
        self.stats.num_cut += 1;
        let half = self.max_response_length / 2;
        let head: String = content.chars().take(half).collect();
        let tail: String = content.chars().skip(num_chars - half).collect();
        format!("{head}...(truncated)...{tail}")
    }

    pub(super) fn end(&mut self, key: TrajectoryKey, conversation: OpenTrajectory, trajectory: &Trajectory) {
        let num_turns = trajectory.turns().len();
        self.stats.num_trajectories += 1;
        self.stats.num_turns += num_turns;
        self.stats.max_turns = self.stats.max_turns.max(num_turns);
        match (&conversation.environment, conversation.failure) {
            (Some(name), None) => {
                self.asked.insert(self.process.close(conversation.number, name), Asked::Close(key));
                self.open.insert(key, OpenTrajectory { failure: None, ..conversation });
            }
            (_, failure) => {
                self.process.forget(conversation.number);
                self.finish(key, EpisodeEnd { messages: conversation.messages, environment: None, failure });
            }
        }
    }

    fn finish(&mut self, key: TrajectoryKey, end: EpisodeEnd) {
        if let Some(failure) = &end.failure {
            self.stats.num_failed += 1;
            if !std::mem::replace(&mut self.has_failed, true) {
                tracing::warn!(
                    "a trajectory failed, its completion is masked: {failure}; further failures are not reported"
                );
            }
            self.loss.get_or_insert_with(|| failure.clone());
        }
        self.done.push((key, TurnOutcome::Ended(end)));
    }
}

/// The observation that `reset` returned, for an error message.
fn quoted(observation: Option<&String>) -> String {
    observation.map_or_else(|| "nothing".to_owned(), |text| format!("{text:?}"))
}

/// The ids by which a template matches results with their calls, all different: those that the model wrote, if they have the form that Mistral's
/// templates ask for, and are not those of earlier calls.
fn labels<'c>(calls: impl Iterator<Item = &'c ToolCall>) -> Vec<String> {
    let is_usual = |id: &&String| id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric());
    let written: Vec<Option<&String>> = calls.map(|call| call.id.as_ref().filter(is_usual)).collect();
    let mut labels: Vec<String> = Vec::new();
    for (index, own) in written.iter().enumerate() {
        let made = |number: usize| format!("call{number:05}");
        let is_new = |label: &String| !labels.contains(label);
        let label = own.filter(|id| is_new(id)).cloned().unwrap_or_else(|| {
            let is_free = |label: &String| is_new(label) && !written.contains(&Some(label));
            (index..).map(made).find(is_free).expect("there are more numbers than calls")
        });
        labels.push(label);
    }
    labels
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn results_carry_the_ids_that_the_model_wrote() {
        let labelled = |ids: &[Option<&str>]| {
            let call = |id: &Option<&str>| ToolCall { id: id.map(str::to_owned), ..ToolCall::new("add", Value::Null) };
            labels(ids.iter().map(call).collect::<Vec<_>>().iter())
        };
        assert_eq!(labelled(&[Some("aB3defgh1"), None]), ["aB3defgh1", "call00001"]);
        for id in [None, Some(""), Some("abcdefgh"), Some("abcdefgh-"), Some("abcdefgh12")] {
            assert_eq!(labelled(&[id]), ["call00000"], "{id:?}");
        }
        let same = Some("aB3defgh1");
        assert_eq!(labelled(&[same, same, same]), ["aB3defgh1", "call00001", "call00002"]);
        assert_eq!(labelled(&[None, Some("call00000"), None]), ["call00001", "call00000", "call00002"]);
    }
}
