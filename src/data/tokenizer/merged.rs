//! Merges tokens from other files into the tokenizer of `tokenizer.json`, as AutoTokenizer of transformers 5 does.
//!
//! `added_tokens_decoder` of `tokenizer_config.json` takes precedence over `tokenizer.json`. Without it, `special_tokens_map.json` takes
//! precedence over `tokenizer_config.json`, and `tokenizer.json` over `added_tokens.json`. Ids are those of
//! `tokenizer.json`; tokens missing there get the next free ids.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use serde_json::{Map, Value};
use tokenizers::models::ModelWrapper;
use tokenizers::{AddedToken, Tokenizer};

use super::read_json;
use crate::error::{Error, Result};
use crate::untrusted::KeyTable;

/// The keys of named special tokens, in transformers' order.
const NAMED: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
const EXTRA: &str = "extra_special_tokens";
const ADDITIONAL: &str = "additional_special_tokens";
const CONFIG: &str = "tokenizer_config.json";

/// `tokenizer_config.json`, beside a `tokenizer.json`. Any further key that ends in `_token` names a special token.
pub(super) const TOKENIZER_KEYS: KeyTable = KeyTable {
    name: CONFIG,
    served: "added_tokens_decoder additional_special_tokens bos_token chat_template clean_up_tokenization_spaces cls_token eos_token \
        extra_special_tokens mask_token model_specific_special_tokens pad_token sep_token split_special_tokens unk_token",
    harmless: "add_bos_token add_eos_token add_prefix_space auto_map backend chat_control_tokens errors init_inputs is_local legacy \
        local_files_only max_length model_input_names model_max_length name_or_path pad_to_multiple_of pad_token_type_id padding_side \
        processor_class response_schema response_template sp_model_kwargs spaces_between_special_tokens stride tokenizer_class \
        tokenizer_file truncation_side truncation_strategy use_default_system_prompt use_fast verbose vocab_file",
    refused: &[
        (
            "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
            &["false"],
            "decoding does not change the text",
        ),
        (
            "fast_tokenizer_files",
            &["[]", "[\"tokenizer.json\"]"],
            "tokenizer.json is used unchanged with any version of transformers",
        ),
        (
            "fix_mistral_regex",
            &["false"],
            "tokenizer.json determines how a text is split; write a corrected one with save_pretrained",
        ),
    ],
    ignores_unknown: true,
};

/// The contents of the files that describe tokens, without `tokenizer.json`.
#[derive(Debug, Default)]
pub(in crate::data) struct TokenFiles {
    config: Map<String, Value>,
    map: Map<String, Value>,
    added: Map<String, Value>,
    model: Value,
}

/// Special tokens by key, such as `bos_token`, as chat templates use them.
pub type NamedTokens = BTreeMap<String, String>;

/// Special tokens that a tokenizer's files define.
pub struct MergedTokens {
    pub named: NamedTokens,
    /// Id of the end-of-sequence token. `None` if the files define a token that `tokenizer.json` lacks, because no model was trained on it.
    pub eos_token_id: Option<u32>,
}

impl TokenFiles {
    /// Reads the files; each may be missing.
    ///
    /// # Errors
    /// [`Error::BadFile`] if a file is not a JSON object or has an unsupported key.
    pub fn read(folder: &Path) -> Result<Self> {
        let read = |name: &str| match read_json(&folder.join(name))? {
            Value::Null => Ok(Map::new()),
            Value::Object(map) => Ok(map),
            _ => Err(Error::bad_file(folder.join(name), "expected a JSON object")),
        };
        let config = read(CONFIG)?;
        TOKENIZER_KEYS.check(&folder.join(CONFIG), "", &config)?;
        let model = read_json(&folder.join("config.json"))?;
        Ok(Self { config, map: read("special_tokens_map.json")?, added: read("added_tokens.json")?, model })
    }

    /// The model's `config.json`; `null` if there is none.
    pub fn model(&self) -> &Value {
        &self.model
    }

    /// The value of a key in `tokenizer_config.json`.
    pub fn get(&self, key: &str) -> &Value {
        self.config.get(key).unwrap_or(&Value::Null)
    }

    /// The text of the end-of-sequence token.
    pub fn eos_token(&self) -> Option<String> {
        self.named().into_iter().find(|(name, _)| name == "eos_token").map(|(_, token)| token.content)
    }

    /// Adds the tokens to the tokenizer with their flags, and returns the special tokens.
    ///
    /// # Errors
    /// A message that says what is wrong with a file.
    pub fn merge_into(&self, tokenizer: &mut Tokenizer) -> Result<MergedTokens, String> {
        self.check_model(tokenizer)?;
        let described = self.described(tokenizer)?;
        let named = self.named();
        let mut texts: HashSet<String> =
            tokenizer.get_added_tokens_decoder().into_values().map(|it| it.content).collect();
        texts.extend(described.iter().map(|(_, token)| token.content.clone()));
        let mut tokens: Vec<AddedToken> = described.iter().map(|(_, token)| token.clone()).collect();
        let more = named.iter().map(|(_, token)| token.clone()).chain(self.extra());
        tokens.extend(more.filter(|token| texts.insert(token.content.clone())));
        for token in &mut tokens {
            token.special |= named.iter().any(|(_, name)| name.content == token.content);
        }
        let eos = named.iter().find(|(name, _)| name == "eos_token").map(|(_, token)| token.content.as_str());
        let eos = eos.filter(|eos| {
            tokenizer.token_to_id(eos).is_some() || described.iter().any(|(_, token)| token.content == *eos)
        });
        tokenizer.add_tokens(tokens).map_err(|error| error.to_string())?;
        if let Some((id, token)) =
            described.iter().find(|(id, token)| tokenizer.token_to_id(&token.content) != Some(*id))
        {
            let found = tokenizer.token_to_id(&token.content).map_or_else(|| "none".to_owned(), |id| id.to_string());
            return Err(format!(
                "'{}' has id {id} in added_tokens_decoder, but {found} in tokenizer.json",
                token.content
            ));
        }
        tokenizer.set_encode_special_tokens(self.get("split_special_tokens") == true);
        let eos_token_id = eos.and_then(|eos| tokenizer.token_to_id(eos));
        Ok(MergedTokens { named: named.into_iter().map(|(name, token)| (name, token.content)).collect(), eos_token_id })
    }

    /// Rejects BPE dropout, which makes token ids random, and the cleanup of spaces when decoding, which makes text depend on the tokens after it.
    fn check_model(&self, tokenizer: &Tokenizer) -> Result<(), String> {
        match tokenizer.get_model() {
            ModelWrapper::BPE(model) if model.dropout.is_some_and(|dropout| dropout > 0.0) => {
                Err("model.dropout in tokenizer.json is above 0: expected null, so that a text always gets the same \
                     tokens"
                    .into())
            }
            ModelWrapper::BPE(_) => Ok(()), // transformers does not clean up after it
            _ if self.get("clean_up_tokenization_spaces") == true => {
                Err("clean_up_tokenization_spaces is true: expected false, as spaces before punctuation are kept"
                    .into())
            }
            _ => Ok(()),
        }
    }

    /// The tokens with their ids, sorted by id. Each has the flags of the file with the highest precedence.
    fn described(&self, tokenizer: &Tokenizer) -> Result<Vec<(u32, AddedToken)>, String> {
        let mut tokens = BTreeMap::new();
        if let Some(decoder) = self.config.get("added_tokens_decoder") {
            for (id, described) in decoder.as_object().ok_or("added_tokens_decoder is not an object")? {
                let token = token(described, false).filter(|_| described.is_object());
                let (Ok(id), Some(token)) = (id.parse(), token) else {
                    return Err(format!(
                        "added_tokens_decoder has \"{id}\": {described}: expected an id as key and an object that \
                         describes the token"
                    ));
                };
                tokens.insert(id, token);
            }
            return Ok(tokens.into_iter().collect());
        }
        let special: Vec<AddedToken> = self.named().into_iter().map(|(_, token)| token).chain(self.extra()).collect();
        for (text, id) in &self.added {
            let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
            let id = id.ok_or_else(|| format!("added_tokens.json has no id for '{text}'"))?;
            tokens.insert(id, AddedToken::from(text, special.iter().any(|token| token.content == *text)));
        }
        tokens.extend(tokenizer.get_added_tokens_decoder());
        Ok(tokens.into_iter().collect())
    }

    /// The value of a key in the files. `special_tokens_map.json` is used only if there is no `added_tokens_decoder`.
    fn value(&self, key: &str) -> &Value {
        self.map.get(key).filter(|_| !self.is_whole()).unwrap_or_else(|| self.get(key))
    }

    fn is_whole(&self) -> bool {
        self.config.contains_key("added_tokens_decoder")
    }

    /// Named special tokens, the standard ones first.
    fn named(&self) -> Vec<(String, AddedToken)> {
        let usual = NAMED.iter().filter_map(|name| Some(((*name).to_owned(), token(self.value(name), true)?)));
        let is_other = |key: &str| key.ends_with("_token") && !NAMED.contains(&key);
        let others =
            self.config.iter().chain(self.map.iter().filter(|_| !self.is_whole())).filter(|(key, _)| is_other(key));
        let objects = [self.get("model_specific_special_tokens"), self.extra_value()];
        let others = others.chain(objects.into_iter().filter_map(Value::as_object).flatten());
        usual.chain(others.filter_map(|(name, value)| Some((name.clone(), token(value, true)?)))).collect()
    }

    fn extra_value(&self) -> &Value {
        let is_empty = |value: &Value| match value {
            Value::Array(items) => items.is_empty(),
            Value::Object(map) => map.is_empty(),
            value => value.is_null(),
        };
        Some(self.value(EXTRA)).filter(|extra| !is_empty(extra)).unwrap_or_else(|| self.value(ADDITIONAL))
    }

    /// Special tokens that have no key of their own.
    fn extra(&self) -> Vec<AddedToken> {
        let lists = [self.get(EXTRA), self.extra_value()].into_iter().filter_map(Value::as_array);
        lists.flatten().filter_map(|value| token(value, true)).collect()
    }
}

/// Reads a token given as a string or as an object with flags. By default, a special token is not normalized and any other token is.
fn token(value: &Value, is_special: bool) -> Option<AddedToken> {
    let flag = |key: &str| value[key].as_bool();
    match value {
        Value::String(text) => Some(AddedToken::from(text, is_special)),
        Value::Object(_) => {
            let special = is_special || flag("special").unwrap_or(false);
            Some(AddedToken {
                content: value["content"].as_str()?.to_owned(),
                single_word: flag("single_word").unwrap_or(false),
                lstrip: flag("lstrip").unwrap_or(false),
                rstrip: flag("rstrip").unwrap_or(false),
                normalized: flag("normalized").unwrap_or(!special),
                special,
            })
        }
        _ => None,
    }
}
