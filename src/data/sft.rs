//! Reads SFT examples from rows.

use std::collections::BTreeMap;
use std::path::Path;

use super::answers::AnswerEncoder;
use super::dataset::{copies, is_much, quoted};
use super::digest::RowsDigest;
use super::prompt_text::{ChatFormat, RenderedPrompt};
use super::rows::{DataRow, RawExample, RawPrompt, read_rows};
use super::sources::RowSources;
use super::{DatasetOptions, Message, Tokenizer, ToolSchemas};
use crate::error::{Error, Result};

/// A prompt with the completion to learn. The loss covers `token_ids[prompt_len..]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SftExample {
    /// Token ids of prompt and completion, the end-of-sequence token included.
    pub token_ids: Vec<u32>,
    /// Length of the prompt in tokens.
    pub prompt_len: usize,
}

/// Tokenized SFT examples in file order.
#[derive(Debug, Default)]
pub struct SftDataset {
    /// The examples; never empty.
    pub examples: Vec<SftExample>,
    /// The hash of the rows and their order.
    pub(crate) digest: RowsDigest,
    num_rows: usize,
    too_long: usize,
    max_length: usize,
    /// The notice about the first example with a null field that was added as padding.
    padding: Option<String>,
}

impl SftDataset {
    /// Reads SFT examples from the rows of one file. A row has a prompt (as [`Dataset`](super::Dataset) reads it) and a `completion`, both as text
    /// or as messages, or a conversation in `messages`. The prompt's ids are those of a rollout,
    /// and the completion's those of its text after the prompt.
    ///
    /// Every assistant message, or every one in the `completion`, becomes an example of its own, with all earlier messages as its
    /// prompt. This is what a rollout would see there, even if the chat template omits parts of earlier answers. The example ends at the
    /// first end-of-sequence token (the tokenizer's or one of `model_eos_token_ids`) after the answer. If a completion does
    /// not end with one, the tokenizer's is appended.
    ///
    /// # Errors
    /// The errors of [`Dataset::from_file`](super::Dataset::from_file); [`Error::TokenizerMismatch`] where there is no EOS token to append.
    pub fn from_file(
        path: impl AsRef<Path>,
        tokenizer: &Tokenizer,
        model_eos_token_ids: &[u32],
        max_length: usize,
    ) -> Result<Self> {
        Self::read(
            &RowSources::file(path.as_ref()),
            tokenizer,
            model_eos_token_ids,
            max_length,
            &DatasetOptions::default(),
            &mut |_, _| (),
        )
    }

    /// Reads SFT examples from all `sources`. Only the `options` about prompts apply. `told` is called as in
    /// [`Dataset::read_with`](super::Dataset::read_with).
    ///
    /// # Errors
    /// The errors of [`SftDataset::from_file`].
    pub fn read(
        sources: &RowSources,
        tokenizer: &Tokenizer,
        model_eos_token_ids: &[u32],
        max_length: usize,
        options: &DatasetOptions,
        told: &mut dyn FnMut(usize, bool),
    ) -> Result<Self> {
        let answers = AnswerEncoder::new(tokenizer, model_eos_token_ids);
        let format = ChatFormat::new(options.prompt_format, options.system_prompt.as_deref(), tokenizer);
        let max_bytes = tokenizer.max_bytes(max_length);
        let mut data = Self { max_length, ..Self::default() };
        for (path, weight) in &sources.files {
            for row in read_rows(path)? {
                if sources.max_rows.is_some_and(|most| data.num_rows >= most) {
                    break;
                }
                let row = row?;
                data.padding = data.padding.or_else(|| row.padding(true));
                let copies = copies(*weight, data.num_rows as u64, options.seed);
                data.digest.add(data.num_rows as u64, copies, &row.columns);
                data.num_rows += 1;
                for example in examples(&row, options, &answers, &format, max_bytes)? {
                    match example.filter(|example| example.token_ids.len() <= max_length) {
                        Some(example) => data.examples.extend((0..copies).map(|_| example.clone())),
                        None => data.too_long += 1,
                    }
                }
                told(data.num_rows, false);
            }
        }
        told(data.num_rows, true);
        if data.examples.is_empty() {
            return Err(Error::EmptyDataset { path: sources.name.clone().into(), stages: data.counts() });
        }
        Ok(data)
    }

    /// The warning if more than a tenth of the completions is left out, and the notice about null fields that Arrow added to rows.
    pub fn notices(&self) -> Vec<String> {
        let (lost, all) = (self.too_long, self.examples.len() + self.too_long);
        let told =
            || format!("warning: {lost} of {all} completions are left out: longer than {} tokens", self.max_length);
        is_much(lost, all).then(told).into_iter().chain(self.padding.clone()).collect()
    }

    /// Describes the data set with the first example as text.
    ///
    /// # Errors
    /// [`Error::TokenizerMismatch`].
    pub fn description(&self, tokenizer: &Tokenizer) -> Result<String> {
        let SftExample { token_ids, prompt_len } = &self.examples[0];
        let (prompt, completion) = token_ids.split_at(*prompt_len);
        let text = |ids: &[u32]| tokenizer.decode_all(ids).map(|text| quoted(&text));
        Ok(format!("examples: the first one learns {} after {}", text(completion)?, text(prompt)?))
    }

    /// Describes the numbers of rows and completions that were read, left out and kept.
    pub fn counts(&self) -> String {
        let Self { examples, num_rows, too_long, max_length, .. } = self;
        let (all, kept) = (examples.len() + too_long, examples.len());
        format!("{num_rows} rows read, {all} completions, {too_long} longer than {max_length} tokens, {kept} kept")
    }
}

/// The examples of a row; `None` if it is larger than `max_bytes`. Such a row is not tokenized, because that could need hundreds of
/// bytes of memory per byte of text.
fn examples(
    row: &DataRow,
    options: &DatasetOptions,
    answers: &AnswerEncoder<'_>,
    format: &ChatFormat<'_>,
    max_bytes: usize,
) -> Result<Vec<Option<SftExample>>> {
    let format = &ChatFormat { tools: ToolSchemas::new(row.tools()?, BTreeMap::new()), ..format.clone() };
    let tokenizer = answers.tokenizer;
    let encode = |prompt: &RenderedPrompt, adds_special: bool, answer: &str| {
        answers.encode(prompt, adds_special, answer).map_err(|error| row.bad(error.to_string()))
    };
    let example = |prompt: RenderedPrompt, completion: Vec<u32>| {
        let prompt_len = prompt.token_ids.len();
        SftExample { token_ids: [prompt.token_ids, completion].concat(), prompt_len }
    };
    let (messages, first) = match row.example(options.prompt_column.as_deref(), options.completion_column.as_deref())? {
        RawExample::Conversation(mut messages, first) => {
            if first == 0 && messages[0].role == "assistant" {
                return Err(
                    row.bad("the first message is from the assistant: expected a user message before it".into())
                );
            }
            let num_given = messages.len();
            format.add_system_prompt(&mut messages);
            let num_added = messages.len() - num_given;
            (messages, first + num_added)
        }
        RawExample::Completion(prompt, text) if prompt.num_bytes() + text.len() > max_bytes => return Ok(vec![None]),
        RawExample::Completion(prompt, text) => {
            let adds_special = prompt.is_text() && !format.text_is_chat;
            let prompt = prompt.render(row, tokenizer, format)?;
            let completion = answers.close(encode(&prompt, adds_special, &text)?)?;
            return Ok(vec![Some(example(prompt, completion))]);
        }
    };
    let turns = (first..messages.len()).filter(|&index| messages[index].role == "assistant");
    let examples = turns.map(|index| {
        if messages[..=index].iter().map(Message::num_bytes).sum::<usize>() > max_bytes {
            return Ok(None);
        }
        let prompt = RawPrompt::Conversation(messages[..index].to_vec()).render(row, tokenizer, format)?;
        let whole = tokenizer.converse(format.conversation(row, tokenizer, &messages[..=index], false)?)?;
        let answer = whole.strip_prefix(&prompt.text).ok_or_else(|| {
            row.bad(format!(
                "the chat template does not render the answer in message {index} directly after its prompt; give \
                 prompt and completion as text"
            ))
        })?;
        let completion = answers.close_turn(encode(&prompt, false, answer)?)?;
        Ok(Some(example(prompt, completion)))
    });
    let examples: Vec<_> = examples.collect::<Result<_>>()?;
    if examples.is_empty() {
        Err(row.bad("no message is from the assistant: there is nothing to train on".into()))
    } else {
        Ok(examples)
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::TokenizerFolder;
    use super::*;

    const TURNS: &str = "{% for m in messages %}{% if m.role == 'user' %}what {{ m.content }} {% else %}answer {{ m.content }} \
                         </s> is {% endif %}{% endfor %}{% if add_generation_prompt %}answer {% endif %}";

    fn read(folder: &TokenizerFolder, rows: &[&str], max_length: usize) -> Result<SftDataset> {
        folder.write("sft.jsonl", &rows.join("\n"));
        SftDataset::from_file(folder.path().join("sft.jsonl"), &folder.tokenizer(), &[], max_length)
    }

    fn example(prompt: &[u32], completion: &[u32]) -> SftExample {
        SftExample { token_ids: [prompt, completion].concat(), prompt_len: prompt.len() }
    }

    #[test]
    fn completions_end_with_eos_and_long_rows_are_counted() {
        let rows = [
            r#"{"prompt": "what is one plus one", "completion": "two"}"#,
            r#"{"question": "one", "completion": "one two three"}"#,
            r#"{"prompt": "what", "completion": ""}"#,
            r#"{"prompt": "what", "completion": "one </s>", "messages": null}"#,
        ];
        let data = read(&TokenizerFolder::new(), &rows, 6).unwrap();
        assert_eq!(data.counts(), "4 rows read, 4 completions, 1 longer than 6 tokens, 3 kept");
        let told = data.description(&TokenizerFolder::new().tokenizer()).unwrap();
        assert_eq!(told, "examples: the first one learns \"one two three </s>\" after \"<s> one\"");
        assert_eq!(data.notices(), ["warning: 1 of 4 completions are left out: longer than 6 tokens"]);
        assert_eq!(data.examples, [example(&[0, 1], &[1, 2, 3, 9]), example(&[0, 7], &[9]), example(&[0, 7], &[1, 9])]);
        let error = read(&TokenizerFolder::new(), &rows, 2).unwrap_err().to_string();
        assert!(error.contains("(4 rows read, 4 completions, 4 longer than 2 tokens, 0 kept)"), "{error}");
    }

    #[test]
    fn huge_examples_are_counted_as_too_long() {
        let folder = TokenizerFolder::new();
        folder.write("chat_template.jinja", TURNS);
        let long = "one ".repeat(1 << 20);
        let text = format!(r#"{{"prompt": "what", "completion": "{long}"}}"#);
        let turn = |role: &str, content: &str| format!(r#"{{"role": "{role}", "content": "{content}"}}"#);
        let turns = [turn("user", "one"), turn("assistant", "two"), turn("user", &long), turn("assistant", "one")];
        let data = read(&folder, &[&text, &format!(r#"{{"messages": [{}]}}"#, turns.join(", "))], 6).unwrap();
        assert_eq!(data.counts(), "2 rows read, 3 completions, 2 longer than 6 tokens, 1 kept");
    }

    #[test]
    fn every_assistant_turn_is_an_example_up_to_its_end_token() {
        let folder = TokenizerFolder::new();
        folder.write("chat_template.jinja", TURNS);
        let turns = r#"{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}"#;
        let (question, answer) =
            (r#"{"role": "user", "content": "three"}"#, r#"{"role": "assistant", "content": "one plus"}"#);
        let whole = format!("{{\"messages\": [{turns}, {question}, {answer}]}}");
        let last = format!("{{\"prompt\": [{turns}, {question}], \"completion\": [{answer}]}}");
        let (first, second) = (example(&[7, 1, 8], &[2, 9]), example(&[7, 1, 8, 2, 9, 6, 7, 3, 8], &[1, 4, 9]));
        assert_eq!(read(&folder, &[&whole], 99).unwrap().examples, [first, second.clone()]);
        assert_eq!(read(&folder, &[&last], 99).unwrap().examples, [second]);
        let text = r#"{"prompt": [{"role": "user", "content": "one"}], "completion": "two"}"#;
        assert_eq!(read(&folder, &[text], 99).unwrap().examples, [example(&[7, 1, 8], &[2, 9])]);

        let refused = |row: &str| read(&folder, &[row], 99).unwrap_err().to_string();
        for (row, why) in [
            (r#"{"messages": [{"role": "user", "content": "one"}]}"#, ":1: no message is from the assistant"),
            (r#"{"messages": [{"role": "assistant", "content": "one"}]}"#, "expected a user message before it"),
            (r#"{"messages": "one"}"#, "column 'messages' is not a list of {role, content}"),
            (
                r#"{"prompt": "one", "completion": [{"role": "assistant", "content": "one"}]}"#,
                "although the prompt is text",
            ),
        ] {
            assert!(refused(row).contains(why), "{}", refused(row));
        }
        folder.write(
            "chat_template.jinja",
            "{% if messages[1] %}is {% endif %}{% for m in messages %}{{ m.content }} {% endfor %}",
        );
        assert!(
            refused(&whole).contains("does not render the answer in message 1 directly after"),
            "{}",
            refused(&whole)
        );
    }

    /// Tool calls are learned as the chat template writes them, with arguments as an object, after the functions from the row's column `tools`.
    #[test]
    fn conversations_may_contain_tool_calls() {
        let folder = TokenizerFolder::new();
        folder.write(
            "chat_template.jinja",
            "{% for t in tools %}{{ t.name }} {% endfor %}{% for m in messages %}{% if m.role == 'user' %}what {{ m.content }} \
             {% elif m.role == 'tool' %}is {{ m.content }} {% else %}answer {% for c in m.tool_calls %}{{ c.function.arguments.a }} \
             {% endfor %}{{ m.content }} </s> {% endif %}{% endfor %}{% if add_generation_prompt %}answer {% endif %}",
        );
        let call = r#"{"type": "function", "function": {"name": "f", "arguments": "{\"a\": \"three\"}"}}"#;
        let messages = format!(
            r#"[{{"role": "user", "content": "one", "name": null}}, {{"role": "assistant", "content": null, "tool_calls": [{call}]}},
                {{"role": "tool", "content": "two", "tool_call_id": "1"}}, {{"role": "assistant", "content": "two"}}]"#
        );
        let messages = messages.replace('\n', " ");
        let called = |start: &[u32]| example(&[start, &[7, 1, 8]].concat(), &[3, 9]);
        let answered = |start: &[u32]| example(&[start, &[7, 1, 8, 3, 9, 6, 2, 8]].concat(), &[2, 9]);
        for (tools, start) in [
            (r#", "tools": [{"name": "plus"}]"#, &[4][..]),
            (r#", "tools": "[{\"name\": \"plus\"}]""#, &[4]),
            (r#", "tools": []"#, &[]),
            ("", &[]),
        ] {
            let row = format!("{{\"messages\": {messages}{tools}}}");
            assert_eq!(read(&folder, &[&row], 99).unwrap().examples, [called(start), answered(start)], "{tools}");
        }
        let padded = r#"[{"name": "plus", "parameters": {"x": {}, "y": null}}]"#;
        let row = format!("{{\"messages\": {messages}, \"tools\": {padded}}}");
        let [notice] = &read(&folder, &[&row, &row], 99).unwrap().notices()[..] else { panic!("one notice") };
        assert!(
            notice.starts_with("notice: ") && notice.contains(":1: tools[0].parameters.y is null, because Arrow"),
            "{notice}"
        );
        let argued =
            messages.replace(r#"{\"a\": \"three\"}""#, r#"x""#).replace("\"x\"", r#"{"a": "three", "b": null}"#);
        let notices = read(&folder, &[&format!("{{\"messages\": {argued}}}")], 99).unwrap().notices();
        assert!(notices[0].contains(":1: messages[1].tool_calls[0].function.arguments.b is null"), "{notices:?}");
        let refused = |row: &str| read(&folder, &[row], 99).unwrap_err().to_string();
        let wrong = refused(&format!(r#"{{"messages": {messages}, "tools": "f"}}"#));
        assert!(wrong.contains("column 'tools': expected a list of JSON schemas of functions, got \"f\""), "{wrong}");
        for (message, why) in [
            (
                r#"{"role": "assistant", "content": "one", "weight": 1}"#,
                ":1: the chat template does not use the field 'weight' of a",
            ),
            (
                r#"{"role": "assistant", "content": "one", "thinking": "two"}"#,
                "the chat template does not use the field 'thinking'",
            ),
            (r#"{"role": "assistant", "content": null}"#, "column 'messages', message 2: expected content (text)"),
        ] {
            let wrong = refused(&format!(r#"{{"messages": [{{"role": "user", "content": "one"}}, {message}]}}"#));
            assert!(wrong.contains(why), "{wrong}");
        }
    }

    /// Rows like GSM8K's. A configured column must exist, even if default columns do.
    #[test]
    fn completions_are_read_from_the_configured_column() {
        let folder = TokenizerFolder::new();
        let options = DatasetOptions { completion_column: Some("answer".into()), ..Default::default() };
        let read = |row: &str| {
            folder.write("sft.jsonl", row);
            SftDataset::read(
                &RowSources::file(folder.path().join("sft.jsonl")),
                &folder.tokenizer(),
                &[],
                99,
                &options,
                &mut |_, _| (),
            )
        };
        let row = r#"{"question": "one", "answer": "two", "completion": "three"}"#;
        assert_eq!(read(row).unwrap().examples, [example(&[0, 1], &[2, 9])]);
        let lacks = read(r#"{"prompt": "one", "messages": [{"role": "user", "content": "one"}]}"#).unwrap_err();
        assert!(lacks.to_string().contains("no column 'answer'; columns seen: "), "{lacks}");
    }

    #[test]
    fn a_missing_completion_or_eos_token_is_an_error() {
        let folder = TokenizerFolder::new();
        let error = read(&folder, &["", r#"{"prompt": "one", "answer": 1}"#], 6).unwrap_err().to_string();
        assert!(
            error.ends_with(
                "sft.jsonl:2: no column 'completion' or 'messages'; columns seen: prompt, answer; to use another \
                 column set dataset_completion_column"
            ),
            "{error}"
        );
        folder.write("tokenizer_config.json", "{}");
        let error = read(&folder, &[r#"{"prompt": "one", "completion": "two"}"#], 6).unwrap_err().to_string();
        assert!(error.contains("no eos_token"), "{error}");
    }
}
