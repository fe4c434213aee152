use super::*;
use crate::types::FinishReason;

const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// An episode against a model with one token per byte. The test takes the role of the engine.
struct EpisodeFixture {
    model: ServedModel,
    episodes: Episodes,
    name: String,
}

impl EpisodeFixture {
    fn new(params: &SamplingParams) -> Self {
        let model = ServedModel::of_bytes("policy", TEMPLATE);
        let episodes = Episodes::new(9);
        let name = episodes.open(GroupKey { prompt_id: 4, first_step: 5 }, 1, params);
        Self { model, episodes, name }
    }

    fn ask(&self, messages: &[Value], more: Value) -> Result<(Request, TurnRecorder), Refusal> {
        let mut body = json!({"messages": messages});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let episode = self.episodes.find(&self.name).unwrap();
        episode.request(&self.model, body.to_string().as_bytes()).map(|(_, request, recorder)| (request, recorder))
    }

    /// Answers with `text` in unusual tokens, one per letter, which the tokenizer would not produce. Returns the answer and the token ids.
    fn answer(&self, (request, recorder): (Request, TurnRecorder), text: &str) -> (Value, Vec<u32>) {
        let letters = text.chars().map(|letter| self.model.tokenizer.encode(&letter.to_string(), false).unwrap());
        let sampled = [letters.collect::<Vec<_>>().concat(), self.model.eos_token_ids.clone()].concat();
        let mut trajectory = request.begun.first().cloned().unwrap_or_default();
        sampled.iter().for_each(|&id| trajectory.push_sampled(id, -0.5, 7));
        trajectory.finish_reason = Some(FinishReason::Eos);
        let message = json!({"role": "assistant", "content": text});
        recorder.record(trajectory, message.clone());
        (message, [request.context(), sampled].concat())
    }
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

#[test]
fn a_request_continues_the_longest_matching_conversation_or_branches() {
    let played = EpisodeFixture::new(&SamplingParams { num_generations: 3, step: 7, ..SamplingParams::default() });
    let mut messages = vec![user("go")];
    let first = played.ask(&messages, json!({})).unwrap();
    assert_eq!((first.0.prompt_id, first.0.first_step, first.0.first_sample), (4, 5, 1));
    let prompt = first.0.token_ids.clone();
    let (said, whole) = played.answer(first, " left ");
    // The client sends it back in its own form, and adds what it does not know.
    let back = json!({"role": "assistant", "content": [{"type": "text", "text": "left"}], "refusal": null});
    messages.extend([back, user("on")]);
    let second = played.ask(&messages, json!({})).unwrap();
    let context = second.0.context();
    assert_eq!((&second.0.token_ids, &context[..whole.len()]), (&prompt, &whole[..]), "ids that were sampled");
    let mut rest = context[whole.len()..].to_vec();
    rest.insert(0, played.model.eos_token_ids[0]);
    let expected = "<|im_end|>\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(rest, played.model.tokenizer.encode(expected, false).unwrap());
    assert_eq!(second.0.first_sample, 1 + 3, "other random keys");
    // Two requests from one turn: the one that is recorded first goes on with it, the other is a branch of it.
    let other = played.ask(&messages, json!({})).unwrap();
    assert_eq!((other.0.context(), other.0.first_sample), (context.clone(), 1 + 6));
    let (_, whole_second) = played.answer(second, "a");
    let (_, whole_other) = played.answer(other, "bb");
    // From the first turn again, by another message; and with an answer that was never sampled.
    let from_first = vec![user("go"), said, user("back")];
    let third = played.ask(&from_first, json!({})).unwrap();
    assert!(third.0.begun.is_empty() && third.0.token_ids.starts_with(&whole), "known ids are its prompt");
    let (_, whole_third) = played.answer(third, "ccc");
    let strange = vec![user("go"), json!({"role": "assistant", "content": "right"}), user("on")];
    let fourth = played.ask(&strange, json!({})).unwrap();
    assert!(fourth.0.begun.is_empty() && !fourth.0.token_ids.starts_with(&whole));
    let (_, whole_fourth) = played.answer(fourth, "dddd");
    let late = played.ask(&[user("late")], json!({})).unwrap();
    let PlayedEpisode { conversations, num_requests } = played.episodes.close(&played.name);
    late.1.record(Trajectory::default(), user("it has ended"));
    assert_eq!(num_requests, 6);
    let seen: Vec<_> = conversations
        .iter()
        .map(|PlayedConversation { prompt, trajectory }| {
            let masks: Vec<bool> = trajectory.loss_mask.clone();
            assert!(
                trajectory.rollout_logprobs.iter().zip(&masks).all(|(logprob, sampled)| (*logprob != 0.0) == *sampled)
            );
            ([&prompt[..], &trajectory.token_ids].concat(), trajectory.num_sampled(), trajectory.messages.len())
        })
        .collect();
    let expected = [(whole_second, 7 + 2, 3), (whole_other, 3, 1), (whole_third, 4, 1), (whole_fourth, 5, 1)];
    assert_eq!(seen, expected, "each token that was sampled is trained on once");
}

#[test]
fn sampling_parameters_that_episodes_may_not_change_are_refused() {
    let params = SamplingParams { temperature: 0.7, max_completion_length: 20, ..SamplingParams::default() };
    let played = EpisodeFixture::new(&params);
    for (more, part) in [
        (json!({"temperature": 1.0}), "temperature: expected the value of the training run"),
        (json!({"top_p": 0.5}), "top_p: "),
        (json!({"top_k": 3}), "top_k: "),
        (json!({"seed": 3}), "seed: "),
        (json!({"n": 2}), "n: expected 1"),
        (json!({"response_format": {"type": "json_object"}}), "response_format: "),
        (json!({"add_generation_prompt": false}), "add_generation_prompt: "),
    ] {
        let refusal = played.ask(&[user("go")], more.clone()).unwrap_err();
        assert!(refusal.status == 400 && refusal.message.starts_with(part), "{more}: {refusal:?}");
    }
    let same = played.ask(&[user("go")], json!({"temperature": 0.7, "max_tokens": 5, "stop": "x"})).unwrap();
    let expected = SamplingParams { num_generations: 1, max_completion_length: 5, stop: vec!["x".into()], ..params };
    assert_eq!(*same.0.params, expected, "and the model's name is the client's affair");
    let (said, _) = played.answer(same, "0123456789012345678");
    let refusal = played.ask(&[user("go"), said, user("on")], json!({})).unwrap_err();
    assert!(refusal.message.contains("max_completion_length = 20 tokens may follow the first request"), "{refusal:?}");
    assert_eq!(refusal.code, Some("context_length_exceeded"), "by which harnesses know that they may say less");
    for _ in 1..9 {
        played.ask(&[user("go")], json!({})).unwrap();
    }
    let refusal = played.ask(&[user("go")], json!({})).unwrap_err();
    assert!(refusal.message.contains("agent_max_requests = 9 requests"), "{refusal:?}");
    assert_eq!(played.episodes.take_num_refused(), 9);
}
