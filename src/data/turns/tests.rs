//! Tests of conversations that are continued by tokens.

use super::*;
use crate::data::fixtures::{Dice, bytes};
use crate::types::FinishReason;

/// A template in Qwen's form: a tool's result is a user message.
const CHATML: &str = "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n\
    </tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
/// A template in Llama 3's form: a header followed by two line ends, and no line end after a turn.
const HEADERS: &str = "{% for m in messages %}<|im_start|>{{ m.role }}<|sep|>\n\n{{ m.content }}<|im_end|>{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant<|sep|>\n\n{% endif %}";
/// A template in Mistral's form: no generation prompt.
const BRACKETS: &str = "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>{% else %}[INST] \
    {{ m.content }} [/INST]{% endif %}{% endfor %}";
/// A template that opens a thought in the generation prompt and keeps thoughts of earlier turns.
const THINKS: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{# </think> #}{% endif %}";

fn turns(tokenizer: &Arc<Tokenizer>, reply: Reply) -> Result<TurnContext> {
    let eos = tokenizer.eos_token_id().unwrap();
    TurnContext::probe(Arc::clone(tokenizer), &[eos], &Value::Null, &Map::new(), reply)
}

#[test]
fn a_template_that_rewrites_earlier_turns_is_refused_with_the_difference() {
    let drops_thoughts = CHATML.replace("{{ m.content }}<|im_end|>", "{{ m.content.split('</think>')[-1] }}<|im_end|>");
    let of_last = "{% for m in messages %}<|im_start|>{{ m.role }}{% if loop.last %} last{% endif %}\n{{ m.content }}\
        <|im_end|>\n{% endfor %}";
    let counts = "{{ messages | length }}: {% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}";
    let no_end = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";
    let answers_first = "{% for m in messages %}{% if m.role == 'assistant' %}{% if not loop.last %}{{ messages[loop.index].content }}\
        {% endif %}{{ m.content }}<|im_end|>{% elif loop.first %}{{ m.content }}{% endif %}{% endfor %}";
    let mut dice = Dice(1);
    for (template, differences) in [
        (drops_thoughts.as_str(), &["drops the model's earlier output when a", SAID][..]),
        (of_last, &["rewrites earlier turns", " last", "becomes"]),
        (counts, &["rewrites earlier turns", "'1: ", "'3: "]),
        (no_end, &["must end with an end-of-sequence token"]),
        (answers_first, &["does not appear after the turn"]),
    ] {
        let tokenizer = Arc::new(bytes(&mut dice, template));
        for reply in [Reply::Tool, Reply::User] {
            let error = turns(&tokenizer, reply).unwrap_err().to_string();
            assert!(differences.iter().all(|part| error.contains(part)), "{error}");
        }
    }
    for template in [CHATML, HEADERS, BRACKETS, THINKS] {
        let tokenizer = Arc::new(bytes(&mut dice, template));
        turns(&tokenizer, Reply::Tool).unwrap();
        turns(&tokenizer, Reply::User).unwrap();
    }
}

#[test]
fn appended_context_starts_right_after_the_sampled_turn() {
    let tokenizer = Arc::new(bytes(&mut Dice(2), CHATML));
    let (turns, eos) = (turns(&tokenizer, Reply::Tool).unwrap(), tokenizer.eos_token_id().unwrap());
    let answers = [json!({"role": "tool", "content": "4"}), json!({"role": "tool", "content": "<5>"})];
    let expected = "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>user\n<tool_response>\n<5>\n\
        </tool_response><|im_end|>\n<|im_start|>assistant\n";
    let expected = tokenizer.encode(expected, false).unwrap();
    let sampled = |ids: &[u32]| Trajectory {
        token_ids: ids.to_vec(),
        loss_mask: vec![true; ids.len()],
        rollout_logprobs: vec![-1.0; ids.len()],
        weight_versions: vec![3; ids.len()],
        finish_reason: Some(FinishReason::Eos),
        ..Trajectory::default()
    };
    for (ids, end) in [(&[65, 66, eos][..], &[][..]), (&[65, 66], &[eos])] {
        let mut trajectory = sampled(ids);
        assert!(turns.append(&mut trajectory, &answers, 4, usize::MAX).unwrap());
        let context = [end, &expected].concat();
        assert_eq!(trajectory.token_ids, [ids, &context].concat(), "a turn that was cut off is ended in context");
        assert_eq!(trajectory.loss_mask, [vec![true; ids.len()], vec![false; context.len()]].concat());
        assert_eq!(trajectory.weight_versions[ids.len()..], vec![4; context.len()]);
        assert_eq!(trajectory.finish_reason, None);
        assert!(turns.append(&mut trajectory, &answers, 5, usize::MAX).is_err(), "no turn was sampled since");
    }
}

/// A result's label: the name of the call with its id, or of the only call that a turn may have.
#[test]
fn tool_results_are_labelled_with_their_calls() {
    let by_id = "{% for m in messages %}{% if m.role == 'tool' %}{% for c in messages[1].tool_calls %}{% if c.id == m.tool_call_id %}\
        [{{ c.id }} {{ c.function.name }}]{% endif %}{% endfor %}{{ m.content }}{% else %}{{ m.content }}{% for c in m.tool_calls %}\
        {{ c.function.arguments.x }}{% endfor %}<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}>{% endif %}";
    let of_one = "{% for m in messages %}{% if m.role == 'tool' %}[{{ messages[1].tool_calls[0].function.name }}]{{ m.content }}\
        {% else %}{{ m.content }}{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}\
        {{ m.tool_calls[0].function.arguments.x }}{% endif %}<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}>{% endif %}";
    let shows_one = of_one.replace("{{ raise_exception('one') }}", "");
    let answer = |name: &str, id: &str| json!({"role": "tool", "name": name, "tool_call_id": id, "content": "4"});
    let answers = [answer("add", "abcdefgh1"), answer("mul", "abcdefgh2")];
    for (template, one, both) in [
        (by_id, "[abcdefgh1 add]4>", "[abcdefgh1 add]4[abcdefgh2 mul]4>"),
        (of_one, "[add]4>", "[add]4[add]4>"),
        (&shows_one, "[add]4>", "[add]4[add]4>"),
    ] {
        let tokenizer = Arc::new(bytes(&mut Dice(3), template));
        let turns = turns(&tokenizer, Reply::Tool).unwrap();
        for (answers, expected) in [(&answers[..1], one), (&answers[..], both)] {
            let (text, _) = turns.text_between(answers).unwrap();
            assert_eq!(text, format!("<|im_end|>{expected}"));
        }
    }
}

/// Many long replies would exceed the limits of template rendering.
#[test]
fn replies_longer_than_the_limit_are_not_rendered() {
    let refuses = CHATML.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if m.content | length > 70000 %}\
        {{ raise_exception('too long for the template') }}{% endif %}",
    );
    let tokenizer = Arc::new(bytes(&mut Dice(4), &refuses));
    let turns = turns(&tokenizer, Reply::Tool).unwrap();
    let reply = |num_bytes: usize| [json!({"role": "tool", "content": "x".repeat(num_bytes)})];
    let mut trajectory = Trajectory::default();
    trajectory.push_sampled(tokenizer.eos_token_id().unwrap(), -1.0, 0);
    let before = trajectory.clone();
    assert!(!turns.append(&mut trajectory, &reply(1 << 20), 0, 100).unwrap());
    assert!(
        turns.append(&mut trajectory, &reply(1 << 20), 0, usize::MAX).is_err(),
        "where it could fit it is rendered"
    );
    assert!(!turns.append(&mut trajectory, &reply(3000), 0, 100).unwrap());
    assert_eq!(trajectory, before);
    assert!(turns.append(&mut trajectory, &reply(30), 0, 1000).unwrap());
}

/// Turns of random tokens, most of which are not reproduced by tokenizing their text. The trajectory contains all sampled tokens in place,
/// and its text equals the template's rendering of the conversation.
#[test]
fn sampled_tokens_stay_unchanged_over_many_turns() {
    let num_trajectories: usize =
        std::env::var("COLO_GRPO_TRAJECTORIES").ok().and_then(|count| count.parse().ok()).unwrap_or(60);
    let (mut dice, mut num_other) = (Dice(7), 0);
    for number in 0..num_trajectories {
        let template = [CHATML, HEADERS, BRACKETS, THINKS][number % 4];
        let tokenizer = Arc::new(bytes(&mut dice, template));
        let turns = turns(&tokenizer, Reply::Tool).unwrap();
        let eos = tokenizer.eos_token_id().unwrap();
        let mut messages = vec![json!({"role": "user", "content": "go"})];
        let prompt = turns.render(messages.clone(), true).unwrap();
        let (mut trajectory, mut sampled) = (Trajectory::default(), Vec::new());
        for turn in 0..1 + dice.roll(32) {
            if turn > 0 {
                let answer = json!({"role": "tool", "name": "f", "content": format!("answer {}", dice.roll(1000))});
                assert!(turns.append(&mut trajectory, std::slice::from_ref(&answer), turn, usize::MAX).unwrap());
                messages.push(answer);
            }
            let ids: Vec<u32> = (0..1 + dice.roll(12)).map(|_| dice.ascii_token(&tokenizer)).collect();
            let text = tokenizer.decode(&ids).unwrap();
            num_other += usize::from(tokenizer.encode(&text, false).unwrap() != ids);
            messages.push(json!({"role": "assistant", "content": text}));
            for id in ids.into_iter().chain([eos]) {
                trajectory.push_sampled(id, -1.0, turn);
                sampled.push(id);
            }
        }
        let kept = trajectory.token_ids.iter().zip(&trajectory.loss_mask).filter(|(_, is_sampled)| **is_sampled);
        assert!(kept.map(|(id, _)| *id).eq(sampled), "trajectory {number}");
        assert_eq!(trajectory.turns().len(), messages.len() / 2);
        let (whole, text) =
            (turns.render(messages, false).unwrap(), tokenizer.decode_all(&trajectory.token_ids).unwrap());
        assert!(whole.starts_with(&(prompt.clone() + &text)), "{whole}\nis not\n{prompt}{text}");
    }
    assert!(num_other > num_trajectories, "tokens that another rendering would have changed: {num_other}");
}
