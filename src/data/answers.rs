//! Tokenizes answers as they follow their prompts, up to an end-of-sequence token.
//!
//! Some tokenizers mark the start of a text, as SentencePiece does with "▁". An answer that is tokenized alone would get this mark, although there
//! is none where it follows its prompt. Such tokenizers get the prompt's text and the answer as one text, as in transformers and TRL.

use serde_json::Value;

use super::prompt_text::RenderedPrompt;
use super::tokenizer::Tokenizer;
use crate::error::{Error, Result};

/// Texts to tokenize in front of an answer that has a token in common with its prompt. The first one whose tokens stay the same is used.
const ANCHORS: [&str; 3] = [":", "1", "a"];

/// Tokenizes answers of one data set.
#[derive(Debug)]
pub(super) struct AnswerEncoder<'a> {
    pub tokenizer: &'a Tokenizer,
    /// All token ids that end an answer.
    eos_token_ids: Vec<u32>,
    marks_text_start: bool,
}

impl<'a> AnswerEncoder<'a> {
    /// An encoder whose answers end with the tokenizer's end-of-sequence token or one of the model's.
    pub fn new(tokenizer: &'a Tokenizer, model_eos_token_ids: &[u32]) -> Self {
        let eos_token_ids = tokenizer.eos_token_ids(model_eos_token_ids);
        Self { tokenizer, eos_token_ids, marks_text_start: tokenizer.steps_before_model().iter().any(marks_text_start) }
    }

    /// Token ids of `answer` directly after `prompt`. `add_special_tokens` is the setting with which the prompt was tokenized.
    ///
    /// The prompt's ids stay those of a rollout. If the tokenizer joins the end of the prompt and the start of the answer to one token, the
    /// answer's ids are those in the middle of another text.
    ///
    /// # Errors
    /// [`Error::TokenizerMismatch`].
    pub fn encode(&self, prompt: &RenderedPrompt, add_special_tokens: bool, answer: &str) -> Result<Vec<u32>> {
        if !self.marks_text_start {
            return self.tokenizer.encode(answer, false);
        }
        let whole = self.tokenizer.encode(&format!("{}{answer}", prompt.text), add_special_tokens)?;
        if let Some(ids) = whole.strip_prefix(&prompt.token_ids[..]) {
            return Ok(ids.to_vec());
        }
        for anchor in ANCHORS {
            let whole = self.tokenizer.encode(&format!("{anchor}{answer}"), false)?;
            if let Some(ids) = whole.strip_prefix(&self.tokenizer.encode(anchor, false)?[..]) {
                return Ok(ids.to_vec());
            }
        }
        self.tokenizer.encode(answer, false)
    }

    /// Appends the end-of-sequence token unless the ids end with one.
    ///
    /// # Errors
    /// [`Error::TokenizerMismatch`] if the tokenizer has none.
    pub fn close(&self, mut ids: Vec<u32>) -> Result<Vec<u32>> {
        if !ids.last().is_some_and(|last| self.eos_token_ids.contains(last)) {
            ids.push(self.tokenizer.eos_token_id().ok_or_else(|| Error::TokenizerMismatch {
                message: "tokenizer_config.json has no eos_token to end completions with: add one".into(),
            })?);
        }
        Ok(ids)
    }

    /// Cuts an answer rendered by a chat template after its first end token; the tokens after it lead to the next message.
    ///
    /// # Errors
    /// The errors of [`AnswerEncoder::close`].
    pub fn close_turn(&self, mut ids: Vec<u32>) -> Result<Vec<u32>> {
        let end = ids.iter().position(|id| self.eos_token_ids.contains(id));
        ids.truncate(end.map_or(ids.len(), |end| end + 1));
        self.close(ids)
    }
}

/// Whether a normalizer or pre-tokenizer in the format of `tokenizer.json`, or one within it, adds a mark to the start of a text.
fn marks_text_start(step: &Value) -> bool {
    let marks = match step["type"].as_str() {
        Some("Prepend") => true,
        Some("Metaspace") => step["prepend_scheme"] != "never",
        Some("ByteLevel") => step["add_prefix_space"] == true,
        _ => false,
    };
    let within = ["normalizers", "pretokenizers"].iter().filter_map(|key| step[*key].as_array());
    marks || within.flatten().any(marks_text_start)
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, json};

    use super::super::fixtures::{Dice, TokenizerFolder, bytes};
    use super::super::{RowSources, SftDataset};
    use super::*;

    const TEMPLATE: &str = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}:{% else %}{{ m.content }}</s>{% endif %}{% endfor %}";
    const TOKENS: [&str; 18] = [
        "<unk>", "<s>", "</s>", "▁", ":", "1", "t", "w", "o", "n", "e", "tw", "two", "▁two", "on", "one", "▁one", "::",
    ];

    /// A tokenizer like Llama's, whose "▁" at the start of a text is from the normalizer (`legacy`) or from the pre-tokenizer.
    fn sentencepiece(legacy: bool) -> TokenizerFolder {
        let folder = TokenizerFolder::new();
        let added = |id: usize| {
            json!({"id": id, "content": TOKENS[id], "special": true, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false})
        };
        let vocab: Map<_, _> = TOKENS.iter().enumerate().map(|(id, token)| (token.to_string(), id.into())).collect();
        let merges = ["t w", "tw o", "▁ two", "o n", "on e", "▁ one", ": :"];
        let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
        let (normalizer, pre_tokenizer) = if legacy {
            let prepend = json!({"type": "Prepend", "prepend": "▁"});
            (json!({"type": "Sequence", "normalizers": [prepend, replace]}), Value::Null)
        } else {
            let metaspace = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false});
            (Value::Null, metaspace)
        };
        let bos = json!({"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}});
        let single = json!([{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]);
        let pair = json!([{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}]);
        let tokenizer = json!({
            "version": "1.0",
            "added_tokens": [added(0), added(1), added(2)],
            "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer,
            "post_processor": {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": bos},
            "model": {"type": "BPE", "vocab": vocab, "merges": merges, "unk_token": "<unk>"},
        });
        folder.write("tokenizer.json", &tokenizer.to_string());
        folder
    }

    /// Prompt and completion of each example, as tokens.
    fn learned(folder: &TokenizerFolder, rows: &[Value]) -> Vec<[Vec<String>; 2]> {
        let (path, tokenizer) = (folder.path().join("sft.jsonl"), folder.tokenizer());
        folder.write("sft.jsonl", &rows.iter().map(Value::to_string).collect::<Vec<_>>().join("\n"));
        let read = SftDataset::read(&RowSources::file(&path), &tokenizer, &[], 99, &Default::default(), &mut |_, _| ());
        let tokens = |ids: &[u32]| -> Vec<String> { ids.iter().map(|&id| tokenizer.token(id).unwrap()).collect() };
        let split = |ids: &[u32], at| [tokens(&ids[..at]), tokens(&ids[at..])];
        read.unwrap().examples.iter().map(|example| split(&example.token_ids, example.prompt_len)).collect()
    }

    /// The expected tokens are those of the whole text, except where its tokens join the prompt and the answer.
    #[test]
    fn answers_have_the_tokens_that_follow_the_prompt() {
        let cases = [
            ("one:", "two", "▁one :", "two"),
            ("one:", " two", "▁one :", "▁two"),
            ("one: two", "", "▁one : ▁two", ""),
            ("one:", "two</s>", "▁one :", "two"),
            ("one: ", "two", "▁one : ▁", "two"), // the whole text has the token "▁two"
            ("one:", ":two", "▁one :", ": two"), // and here "::"
        ];
        for legacy in [false, true] {
            let folder = sentencepiece(legacy);
            for (prompt, answer, prompt_tokens, answer_tokens) in cases {
                let row = json!({"prompt": prompt, "completion": answer});
                let expected = [format!("<s> {prompt_tokens}"), format!("{answer_tokens} </s>")];
                let expected = expected.map(|text| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
                assert_eq!(learned(&folder, &[row]), [expected], "{prompt:?}, {answer:?}, {legacy}");
            }
        }
    }

    #[test]
    fn answers_in_a_conversation_have_the_tokens_that_follow_the_prompt() {
        for legacy in [false, true] {
            let folder = sentencepiece(legacy);
            folder.write("chat_template.jinja", TEMPLATE);
            let turn = |role: &str, content: &str| json!({"role": role, "content": content});
            let turns =
                [turn("user", "one"), turn("assistant", "two"), turn("user", " one"), turn("assistant", " two one")];
            let owned = |tokens: [Vec<&str>; 2]| {
                tokens.map(|tokens| tokens.iter().map(|&token| token.to_owned()).collect::<Vec<_>>())
            };
            let first = owned([vec!["▁one", ":"], vec!["two", "</s>"]]);
            // A normalizer also marks the start of a text after a special token.
            let mark: &[&str] = if legacy { &["▁"] } else { &[] };
            let prompt = [&["▁one", ":", "two", "</s>"], mark, &["▁one", ":"]].concat();
            let second = owned([prompt, vec!["▁two", "▁one", "</s>"]]);
            assert_eq!(learned(&folder, &[json!({"messages": turns})]), [first.clone(), second], "{legacy}");
            let text = json!({"prompt": "one", "completion": "two"});
            assert_eq!(learned(&folder, &[text]), [first], "{legacy}");
        }
    }

    #[test]
    fn byte_level_answers_are_tokenized_alone() {
        let mut dice = Dice(3);
        let tokenizer = bytes(&mut dice, "");
        let answers = AnswerEncoder::new(&tokenizer, &[]);
        let mut text = || (0..8).map(|_| ['a', 'b', 'c', 'd', ' ', '\n'][dice.roll(6) as usize]).collect::<String>();
        for _ in 0..64 {
            let (text, answer) = (text(), text());
            let prompt = RenderedPrompt { token_ids: tokenizer.encode(&text, false).unwrap(), text };
            assert_eq!(answers.encode(&prompt, false, &answer).unwrap(), tokenizer.encode(&answer, false).unwrap());
        }
    }

    #[test]
    fn marks_at_the_start_of_a_text_are_found() {
        let metaspace = |scheme: &str| json!({"type": "Metaspace", "prepend_scheme": scheme});
        let bytes = |adds: bool| json!({"type": "ByteLevel", "add_prefix_space": adds});
        let nested = |step: Value| json!({"type": "Sequence", "pretokenizers": [{"type": "Digits"}, step]});
        for (step, expected) in [
            (metaspace("first"), true),
            (metaspace("always"), true),
            (metaspace("never"), false),
            (bytes(true), true),
            (bytes(false), false),
            (nested(bytes(true)), true),
            (nested(bytes(false)), false),
            (json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}]}), true),
            (Value::Null, false),
        ] {
            assert_eq!(marks_text_start(&step), expected, "{step}");
        }
    }
}
