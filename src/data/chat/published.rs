//! Tests of published chat templates against what transformers renders from them.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;

use serde_json::{Value, json};

use super::{ChatTemplate, Conversation};
use crate::data::tool_calls::ToolCallParser;
use crate::error::Result;

/// Contents of a file written by scripts/golden_templates.py.
#[derive(serde::Deserialize)]
struct PublishedTemplates {
    now: u64,
    tokens: BTreeMap<String, String>,
    conversations: BTreeMap<String, (Vec<Value>, BTreeMap<String, Value>)>,
    templates: BTreeMap<String, Published>,
}

#[derive(serde::Deserialize)]
struct Published {
    source: String,
    texts: BTreeMap<String, Option<String>>,
}

impl PublishedTemplates {
    fn read() -> Self {
        let mut text = String::new();
        let golden = &include_bytes!("../../../tests/golden/templates.json.gz")[..];
        flate2::read::GzDecoder::new(golden).read_to_string(&mut text).unwrap();
        serde_json::from_str(&text).unwrap()
    }

    fn template(&self, source: &str) -> Result<ChatTemplate> {
        ChatTemplate::at((self.now, super::LIMITS), source, self.tokens.clone())
    }
}

/// Templates of TRL's wheel, and of families that it lacks, with conversations that have system prompts, several turns, reasoning, tools, calls and
/// parts. Conversations that transformers rejects may be rendered here. Text that transformers would drop is passed as a part.
#[test]
fn published_templates_render_as_by_transformers() {
    let golden = PublishedTemplates::read();
    let (mut num_equal, mut wrong) = (0, Vec::new());
    for (name, Published { source, texts }) in &golden.templates {
        let template = match golden.template(source) {
            Ok(template) => template,
            Err(error) => {
                wrong.push(format!("{name}: {error}"));
                continue;
            }
        };
        for (case, expected) in texts.iter().filter_map(|(case, text)| Some((case, text.as_ref()?))) {
            let (messages, mut options) = golden.conversations[case].clone();
            let tools = options.remove("tools").unwrap_or_default();
            let add_generation_prompt = options.remove("add_generation_prompt") == Some(Value::Bool(true));
            let variables = options.into_iter().collect();
            let found = template.converse(Conversation { messages, tools, variables, add_generation_prompt });
            match found {
                Ok(found) if found == *expected => num_equal += 1,
                // Of a plain text nothing is left there.
                Ok(found) if !expected.contains("What is 3") && found.contains("What is 3") => num_equal += 1,
                Ok(found) => {
                    let same = found.chars().zip(expected.chars()).take_while(|(ours, theirs)| ours == theirs).count();
                    let behind = |text: &str| text.chars().skip(same.saturating_sub(20)).take(60).collect::<String>();
                    wrong.push(format!("{name}, {case}: {:?}, not {:?}", behind(&found), behind(expected)));
                }
                Err(error) => wrong.push(format!("{name}, {case}: {error}")),
            }
        }
    }
    assert!(wrong.is_empty(), "{num_equal} equal, {} not:\n{}", wrong.len(), wrong.join("\n"));
    assert_eq!(num_equal, 1_344, "docs/templates.md has this number");
}

/// Calls as each template writes them in a conversation are parsed with the format that the template is recognised by.
#[test]
fn calls_that_published_templates_write_are_parsed() {
    let golden = PublishedTemplates::read();
    let tools = json!([{"type": "function", "function": {"name": "multiply", "description": "Multiplies.", "parameters": {
        "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"],
    }}}]);
    let arguments = json!({"a": 3, "b": "x < \"y\""});
    let call =
        |id: &str| json!({"id": id, "type": "function", "function": {"name": "multiply", "arguments": arguments}});
    let (mut found, mut wrong) = (BTreeMap::<&str, BTreeSet<&str>>::new(), Vec::new());
    for (name, Published { source, .. }) in &golden.templates {
        let Some(parser) = ToolCallParser::of_template(source) else { continue };
        let template = golden.template(source).unwrap();
        for calls in [vec![call("call00001")], vec![call("call00001"), call("call00002")]] {
            let answer = json!({"role": "assistant", "content": "", "tool_calls": calls});
            let render = |messages: &[Value], add_generation_prompt| {
                let (messages, tools, variables) = (messages.to_vec(), tools.clone(), serde_json::Map::new());
                template.converse(Conversation { messages, tools, variables, add_generation_prompt })
            };
            let user = json!({"role": "user", "content": "What is 3 times 4?"});
            let (Ok(prompt), Ok(whole)) = (render(std::slice::from_ref(&user), true), render(&[user, answer], false))
            else {
                continue; // Llama 3 writes one call at most
            };
            let same = prompt.chars().zip(whole.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum();
            let (before, written) = whole.split_at(same);
            let thought = before.trim_end().ends_with("<think>").then_some("</think>");
            let parsed = parser.parse(written, &tools, thought);
            let read = parsed.tool_calls.iter().map(|call| (call.name.as_str(), &call.arguments));
            // The harmony format has one call in a turn.
            let num_written = if parser == ToolCallParser::OpenAi { 1 } else { calls.len() };
            if read.eq(vec![("multiply", &arguments); num_written]) {
                let _ = found.entry(parser.name()).or_default().insert(name);
            } else {
                wrong.push(format!("{name}, {} calls, {}: {written:?}: {parsed:?}", calls.len(), parser.name()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    for (parser, names) in [
        ("hermes", &["qwen2_5", "qwen3"][..]),
        ("qwen3_xml", &["qwen3_6", "qwen3_8"]),
        ("llama3_json", &["llama3_1", "llama3_2"]),
        (
            "mistral",
            &["Mistral-Nemo-Instruct-2407", "Mistral-Small-3.2-24B-Instruct-2506", "Ministral-3-14B-Reasoning-2512"],
        ),
        ("glm45", &["glm4moe", "GLM-4.6"]),
        ("openai", &["gptoss"]),
    ] {
        for name in names {
            assert!(found[parser].contains(name), "{name} is not among those with calls of {parser}: {found:?}");
        }
    }
}
