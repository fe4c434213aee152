//! Detects where AutoTokenizer of transformers 5 tokenizes a text differently than `tokenizer.json`. For some tokenizer classes it takes only the
//! vocabulary from the file; normalizer, pre-tokenizer and model flags come from the class. scripts/golden_tokenizers.py records its results.

use serde_json::{Value, json};
use tokenizers::Tokenizer;
use tokenizers::models::ModelWrapper;
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;

use super::merged::TokenFiles;

/// Texts that tokenizers often tokenize differently: white space, digits, scripts, combining characters, code, special tokens as text.
const HARD_TEXTS: &str = include_str!("hard_texts.json");

/// The tokenizer class for a model type, used if no file names a class. If the flag is true, it is used even if a file does.
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
/// The class that uses `tokenizer.json` unchanged.
const FILE: &str = "TokenizersBackend";

/// The pattern by which Qwen's tokenizers split a text. In Qwen3.5's, `{letter}` includes combining marks.
const QWEN_WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?{letter}+|\p{N}| ?[^\s{letters}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The texts of [`HARD_TEXTS`].
pub(super) fn hard_texts() -> Vec<String> {
    serde_json::from_str(HARD_TEXTS).expect("a list of texts")
}

/// How AutoTokenizer loads a tokenizer: its class and the options that affect it.
#[derive(Debug, Default)]
pub(super) struct AutoClass {
    name: Option<String>,
    add_prefix_space: Option<bool>,
    is_legacy: bool,
}

impl AutoClass {
    /// Determines the class from `tokenizer_config.json` and `config.json`.
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

    /// A notice for the user if AutoTokenizer tokenizes one of the hard texts differently.
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

    /// The tokenizer that AutoTokenizer builds from the file's vocabulary; `None` if it equals the file's tokenizer.
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

/// Whether a tokenizer's pre-tokenizer or decoder is byte-level. If so, transformers uses it from the file even for LlamaTokenizer.
fn is_byte_level(tokenizer: &Tokenizer) -> bool {
    let pieces = [serde_json::to_value(tokenizer.get_pre_tokenizer()), serde_json::to_value(tokenizer.get_decoder())];
    pieces.into_iter().flatten().any(|piece| piece.to_string().contains("\"ByteLevel\""))
}
