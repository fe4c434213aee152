//! A model folder with a word tokenizer, for the room's tests.

use std::path::Path;

use super::Tokenizer;

/// Removed when dropped.
pub(super) struct Folder(tempfile::TempDir);

impl Folder {
    /// Words `one two three plus minus is what answer`, BOS `<s>`, EOS `</s>`, no chat template.
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
