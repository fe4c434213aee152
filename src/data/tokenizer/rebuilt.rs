//! Where AutoTokenizer of transformers 5 makes other tokens of a text than `tokenizer.json` says: of some classes it takes the vocabulary
//! from the file, and normalizer, pre-tokenizer and the model's flags from the class. scripts/golden_tokenizers.py records what it does.

use serde_json::{Value, json};
use tokenizers::Tokenizer;
use tokenizers::models::ModelWrapper;
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;

use super::merged::TokenFiles;

/// Texts in which tokenizers differ: white space, digits, scripts, combining characters, code, special tokens as text.
const HARD_TEXTS: &str = include_str!("hard_texts.json");

/// The class that transformers has for a model's type, which counts where no file names one. Of some types it counts in any case.
const CLASSES: [(&str, &str, bool); 12] = [
    ("granite", FILE, true),
    ("mistral", FILE, true),
    ("olmo2", FILE, true),
    ("qwen2", "Qwen2Tokenizer", true),
    ("qwen2_moe", "Qwen2Tokenizer", false),
    ("qwen3", "Qwen2Tokenizer", false),
    ("qwen3_moe", "Qwen2Tokenizer", false),
    ("qwen3_next", "Qwen2Tokenizer", false),
    ("qwen3_5", "Qwen3_5Tokenizer", true),
    ("qwen3_5_text", "Qwen3_5Tokenizer", false),
    ("qwen3_5_moe", "Qwen3_5Tokenizer", true),
    ("qwen3_5_moe_text", "Qwen3_5Tokenizer", true),
];
/// Reads the file as it is.
const FILE: &str = "TokenizersBackend";

/// How Qwen's tokenizers split a text; Qwen3.5's count combining marks as letters.
const QWEN_WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?{letter}+|\p{N}| ?[^\s{letters}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Hard texts.
pub(super) fn hard_texts() -> Vec<String> {
    serde_json::from_str(HARD_TEXTS).expect("a list of texts")
}

/// How AutoTokenizer reads the folder of a tokenizer.
#[derive(Debug, Default)]
pub(super) struct AutoClass {
    name: Option<String>,
    add_prefix_space: Option<bool>,
    is_legacy: bool,
}

impl AutoClass {
    /// The class by `tokenizer_config.json` and `config.json`.
    pub fn of(files: &TokenFiles) -> Self {
        let model = files.model();
        let declared = [files.get("tokenizer_class"), &model["tokenizer_class"]].into_iter().find_map(Value::as_str);
        let declared = declared.map(|name| name.strip_suffix("Fast").unwrap_or(name));
        let known = CLASSES.iter().find(|(model_type, ..)| model["model_type"] == *model_type);
        let name = match (declared, known) {
            (Some(declared), Some(&(_, class, is_fixed))) => Some(if is_fixed { class } else { declared }),
            (declared, known) => declared.or(known.map(|(_, class, _)| *class)),
        };
        Self {
            name: name.map(str::to_owned),
            add_prefix_space: files.get("add_prefix_space").as_bool(),
            is_legacy: files.get("legacy") == true,
        }
    }

    /// A line for the user if it makes other tokens of a hard text.
    pub fn notice(&self, tokenizer: &Tokenizer) -> Option<String> {
        let rebuilt = self.rebuilt(tokenizer)?;
        let ids = |tokenizer: &Tokenizer, text: &str| Some(tokenizer.encode_fast(text, false).ok()?.get_ids().to_vec());
        let differs = |text: &String| ids(tokenizer, text) != ids(&rebuilt, text);
        let text = hard_texts().into_iter().find(differs)?;
        let name = self.name.as_deref().unwrap_or_default();
        Some(format!(
            "notice: AutoTokenizer of transformers 5 uses the rules of its class {name} instead of tokenizer.json, \
             which colo-grpo uses: {text:?} gets other tokens there (see docs/files.md)"
        ))
    }

    /// The tokenizer that the class makes of a file's, where it is another.
    pub fn rebuilt(&self, tokenizer: &Tokenizer) -> Option<Tokenizer> {
        let ModelWrapper::BPE(model) = tokenizer.get_model() else { return None };
        let (normalizer, pre_tokenizer) = self.pieces(tokenizer)?;
        let is_llama = self.name.as_deref() == Some("LlamaTokenizer");
        let of_model = (model.fuse_unk, model.byte_fallback, model.ignore_merges, &model.unk_token);
        let json = |normalizer, pre_tokenizer| serde_json::to_value((normalizer, pre_tokenizer)).ok();
        let of_file = json(tokenizer.get_normalizer(), tokenizer.get_pre_tokenizer());
        if of_model == (is_llama, is_llama, false, &None)
            && json(normalizer.as_ref(), pre_tokenizer.as_ref()) == of_file
        {
            return None;
        }
        let mut own = model.clone(); // some megabytes, which no equal tokenizer needs
        (own.fuse_unk, own.byte_fallback, own.ignore_merges, own.unk_token) = (is_llama, is_llama, false, None);
        let mut rebuilt = tokenizer.clone();
        rebuilt.with_model(own).with_pre_tokenizer(pre_tokenizer).with_normalizer(normalizer).ok()?;
        Some(rebuilt)
    }

    fn pieces(&self, tokenizer: &Tokenizer) -> Option<(Option<NormalizerWrapper>, Option<PreTokenizerWrapper>)> {
        let is_prefixed = self.add_prefix_space.unwrap_or(false);
        let byte_level = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": is_prefixed, "trim_offsets": true, "use_regex": use_regex});
        let words = |letter: &str, letters: &str| {
            let pattern = QWEN_WORDS.replace("{letter}", letter).replace("{letters}", letters);
            let split =
                json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
            json!({"type": "Sequence", "pretokenizers": [split, byte_level(false)]})
        };
        let composed = json!({"type": "NFC"});
        let (normalizer, pre_tokenizer) = match self.name.as_deref()? {
            "GPT2Tokenizer" => (Value::Null, byte_level(true)),
            "Qwen2Tokenizer" => (composed, words(r"\p{L}", r"\p{L}")),
            "Qwen3_5Tokenizer" => (composed, words(r"[\p{L}\p{M}]", r"\p{L}\p{M}")),
            "LlamaTokenizer" if !is_byte_level(tokenizer) => {
                let scheme = match (self.add_prefix_space.unwrap_or(true), self.is_legacy) {
                    (false, _) => "never",
                    (true, true) => "always",
                    (true, false) => "first",
                };
                (
                    Value::Null,
                    json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false}),
                )
            }
            _ => return None,
        };
        Some((serde_json::from_value(normalizer).ok()?, serde_json::from_value(pre_tokenizer).ok()?))
    }
}

/// Whether a tokenizer's pre-tokenizer or decoder works on bytes; transformers then takes it from the file for LlamaTokenizer, too.
fn is_byte_level(tokenizer: &Tokenizer) -> bool {
    let pieces = [serde_json::to_value(tokenizer.get_pre_tokenizer()), serde_json::to_value(tokenizer.get_decoder())];
    pieces.into_iter().flatten().any(|piece| piece.to_string().contains("\"ByteLevel\""))
}
