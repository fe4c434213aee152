//! A model folder with a word tokenizer, for the tests of this module.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::Tokenizer;

/// A pseudo-random number generator that gives the same numbers in every run.
pub(crate) struct Dice(pub u64);

impl Dice {
    pub fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }

    /// A random token whose text is ASCII.
    pub fn ascii_token(&mut self, tokenizer: &Tokenizer) -> u32 {
        loop {
            let id = self.roll(tokenizer.vocab_size() as u64) as u32;
            let text = tokenizer.decode(&[id]).unwrap();
            if text.is_ascii() && !text.is_empty() {
                return id;
            }
        }
    }
}

/// A byte-level BPE tokenizer with random merges, whose messages are between `<|im_start|>` and `<|im_end|>`, the EOS token.
pub(crate) fn bytes(dice: &mut Dice, template: &str) -> Tokenizer {
    bytes_and(dice, template, &[])
}

/// The tokenizer of [`bytes`] with additional tokens, each a text and whether it is special.
pub(crate) fn bytes_and(dice: &mut Dice, template: &str, more: &[(String, bool)]) -> Tokenizer {
    let is_itself = |byte: &u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut others = (256..).map(|code| char::from_u32(code).unwrap());
    let letter = |byte| if is_itself(&byte) { char::from_u32(byte).unwrap() } else { others.next().unwrap() };
    let mut tokens: Vec<String> = (0..256).map(letter).map(String::from).collect();
    let mut merges = Vec::new();
    while merges.len() < 150 {
        // Of few letters, so that most tokens can be merged with their neighbours.
        let letters = [0; 2].map(|_| 97 + dice.roll(6) as usize);
        let merged = 256 + dice.roll(2 + 2 * merges.len() as u64) as usize;
        let (left, right) = (if merged < tokens.len() { merged } else { letters[0] }, letters[1]);
        let merged = format!("{}{}", tokens[left], tokens[right]);
        if merged.is_ascii() && merged.len() <= 6 && !tokens.contains(&merged) {
            merges.push(json!([tokens[left], tokens[right]]));
            tokens.push(merged);
        }
    }
    let added = |id: usize, content: &str, is_special: bool| {
        json!({"id": id, "content": content, "special": is_special, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false})
    };
    let names = ["<|im_start|>", "<|im_end|>", "<|sep|>"];
    let named =
        names.iter().map(|name| (*name, true)).chain(more.iter().map(|(name, special)| (name.as_str(), *special)));
    let added: Vec<Value> =
        named.enumerate().map(|(at, (name, special))| added(tokens.len() + at, name, special)).collect();
    let vocab: Map<String, Value> = tokens.iter().enumerate().map(|(id, token)| (token.clone(), id.into())).collect();
    let folder = TokenizerFolder(tempfile::tempdir().unwrap());
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let tokenizer = json!({"version": "1.0", "added_tokens": added, "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges}});
    folder.write("tokenizer.json", &tokenizer.to_string());
    folder.write("tokenizer_config.json", r#"{"eos_token": "<|im_end|>"}"#);
    folder.write("chat_template.jinja", template);
    folder.tokenizer()
}

/// A temporary model folder with a tokenizer, removed when dropped.
pub(super) struct TokenizerFolder(tempfile::TempDir);

impl TokenizerFolder {
    /// A tokenizer with the words `one two three plus minus is what answer`, BOS `<s>`, EOS `</s>` and no chat template.
    pub fn new() -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        let words = ["<s>", "one", "two", "three", "plus", "minus", "is", "what", "answer", "</s>"];
        let vocab: serde_json::Map<_, _> = words.iter().enumerate().map(|(id, w)| (w.to_string(), id.into())).collect();
        let added = |id: u32, content: &str| {
            serde_json::json!({"id": id, "content": content, "special": true, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false})
        };
        let bos = serde_json::json!({"id": "<s>", "ids": [0], "tokens": ["<s>"]});
        let tokenizer = serde_json::json!({
            "version": "1.0",
            "added_tokens": [added(0, "<s>"), added(9, "</s>")],
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {"<s>": bos},
            },
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
        });
        folder.write("tokenizer.json", &tokenizer.to_string());
        folder.write("tokenizer_config.json", r#"{"bos_token": "<s>", "eos_token": "</s>"}"#);
        folder
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path().join(name), text).unwrap();
    }

    pub fn tokenizer(&self) -> Tokenizer {
        Tokenizer::from_folder(self.path()).unwrap()
    }
}
