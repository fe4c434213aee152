//! Structured output: computes which tokens may come next so that a completion follows a JSON schema, a regular expression, a choice or a
//! grammar. Independent of engines and their logits.
//!
//! Grammars come from clients. They are compiled on a thread with limits. The work of every later step is limited by a counter of the grammar
//! library, not by time, so that all ranks reject the same grammars.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, SimpleVob, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory, token_bytes_from_tokenizer_json};
use serde_json::{Value, json};

use super::Tokenizer;
use crate::error::{Error, Result};
use crate::types::Structure;
use crate::untrusted::{self, ThreadLimits};

/// Limits of the thread that compiles one grammar.
const LIMITS: ThreadLimits = ThreadLimits { stack_bytes: 256 << 20, memory_bytes: 256 << 20, cpu_s: 10 };
/// Largest size of a schema, expression, choice or grammar in bytes.
const MAX_BYTES: usize = 256 << 10;
/// Distinct grammars in use at a time.
const MAX_GRAMMARS: usize = 256;
/// Number of grammars that may exceed a limit during compilation. Each leaves an abandoned thread behind.
const MAX_BREACHES: usize = 16;
/// Largest number of lexer states of one grammar; a state takes one to two KiB.
const MAX_LEXER_STATES: usize = 10_000;
/// Work units of lexer and parser to compute the mask of one token; equal to some milliseconds.
const STEP_FUEL: u64 = 100_000;
/// Parser items to compute the mask of one token.
const STEP_ITEMS: usize = 25_000;
/// Characters of the grammar library's error message that are passed on.
const MAX_REASON_CHARS: usize = 500;
/// Error code of the grammar library for a grammar that no token can continue.
const NO_TOKEN_CODE: &str = "NoExtensionBias";
const NO_TOKEN: &str = "a structure that no sequence of the model's tokens can match";

/// Compiles grammars for one tokenizer. Requests with the same structure share the compiled grammar while it is in use.
pub struct GrammarCompiler {
    tokenizer: Arc<Tokenizer>,
    eos_token_ids: Vec<u32>,
    factory: OnceLock<Result<Arc<ParserFactory>, String>>,
    known: Mutex<HashMap<Structure, Weak<Grammar>>>,
    num_breaches: AtomicUsize,
}

/// A compiled grammar. Each completion that follows it has its own [`GrammarState`].
pub struct Grammar {
    matcher: Mutex<Matcher>,
    first: TokenMask,
}

/// The position of one completion in its grammar.
pub struct GrammarState {
    matcher: Matcher,
    /// Keeps the grammar in the compiler's cache, so that it is not compiled again for another request.
    _grammar: Arc<Grammar>,
}

/// The state of a grammar at the beginning of a completion.
#[derive(Debug)]
pub struct GrammarStart {
    /// State that follows the completion's tokens.
    pub state: GrammarState,
    /// Tokens with which the completion may begin.
    pub allowed: TokenMask,
}

/// A set of token ids.
#[derive(Clone)]
pub struct TokenMask(Arc<SimpleVob>);

impl GrammarCompiler {
    /// A compiler for grammars over `tokenizer`. The tokenizer's vocabulary is read at the first use.
    pub fn new(tokenizer: Arc<Tokenizer>, eos_token_ids: Vec<u32>) -> Self {
        Self {
            tokenizer,
            eos_token_ids,
            factory: OnceLock::new(),
            known: Mutex::new(HashMap::new()),
            num_breaches: AtomicUsize::new(0),
        }
    }

    /// Compiles `structure`, or returns the compiled grammar if it is in use.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] with the reason: the structure is malformed, unsupported or too large, or the bytes of the tokenizer's
    /// tokens are not known.
    pub fn compile(&self, structure: &Structure) -> Result<Arc<Grammar>> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(grammar) = known.get(structure).and_then(Weak::upgrade) {
            return Ok(grammar);
        }
        known.retain(|_, grammar| grammar.strong_count() > 0);
        let refuse = |got: String| Error::InvalidArgument {
            op: "structured output",
            expected: "a valid schema, regular expression, choice or grammar".into(),
            got,
        };
        let num_breaches = self.num_breaches.load(Ordering::Relaxed);
        if known.len() >= MAX_GRAMMARS {
            return Err(refuse(format!(
                "more than {MAX_GRAMMARS} different structures in use at once; try again later"
            )));
        }
        if num_breaches >= MAX_BREACHES {
            return Err(refuse(format!(
                "another structure after {num_breaches} that exceeded a limit; restart the server"
            )));
        }
        if structure.num_bytes() > MAX_BYTES {
            return Err(refuse(format!("a structure of {} bytes, more than {MAX_BYTES}", structure.num_bytes())));
        }
        let factory = self.factory.get_or_init(|| self.read_tokenizer()).clone().map_err(refuse)?;
        let wanted = structure.clone();
        let compiled = untrusted::once("grammar", LIMITS, move || compile(&factory, wanted));
        let compiled = compiled.unwrap_or_else(|breach| {
            self.num_breaches.fetch_add(1, Ordering::Relaxed);
            Err(breach)
        });
        let grammar = Arc::new(compiled.map_err(|error| refuse(reason(&error)))?);
        known.insert(structure.clone(), Arc::downgrade(&grammar));
        Ok(grammar)
    }

    /// Reads the bytes of every token of the tokenizer.
    fn read_tokenizer(&self) -> Result<Arc<ParserFactory>, String> {
        if self.eos_token_ids.is_empty() {
            return Err("a model without an end-of-sequence token".to_owned());
        }
        let tokenizer = self.tokenizer.json().map_err(|error| error.to_string())?;
        let eos_token_ids = self.eos_token_ids.clone();
        let read = move || {
            let mut bytes = token_bytes_from_tokenizer_json(&tokenizer)
                .map_err(|error| without_bytes(&tokenizer, &error.to_string()))?;
            let least = eos_token_ids.iter().max().map_or(0, |id| *id as usize + 1);
            bytes.resize(bytes.len().max(least), Vec::new());
            let trie = TokTrie::from(&TokRxInfo::new(bytes.len() as u32, eos_token_ids[0]), &bytes);
            let environment = Arc::new(ApproximateTokEnv::new(trie.with_eos_tokens(&eos_token_ids)));
            let mut factory = ParserFactory::new_simple(&(environment as _)).map_err(|error| error.to_string())?;
            factory.quiet();
            let limits = factory.limits_mut();
            limits.max_lexer_states = MAX_LEXER_STATES;
            limits.step_lexer_fuel = STEP_FUEL;
            limits.step_max_items = STEP_ITEMS;
            limits.verbose_errors = false;
            // What the library makes at its first use is made now, before any stranger's schema: see `statics`.
            let _ = compile(&factory, Structure::Json { schema: "{}".to_owned(), is_compact: false });
            Ok(Arc::new(factory))
        };
        untrusted::once("tokenizer", ThreadLimits { memory_bytes: 4 << 30, cpu_s: 120, ..LIMITS }, read)
            .unwrap_or_else(|breach| Err(format!("a tokenizer that could not be processed: {breach}")))
    }
}

impl fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarCompiler").finish_non_exhaustive()
    }
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammar").field("first", &self.first).finish_non_exhaustive()
    }
}

impl fmt::Debug for GrammarState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarState").finish_non_exhaustive()
    }
}

impl fmt::Debug for TokenMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} tokens", self.0.num_set(), self.0.len())
    }
}

/// The error message if the bytes of a tokenizer's tokens cannot be determined, in most cases because of its decoder.
fn without_bytes(tokenizer: &Value, error: &str) -> String {
    let decoder = &tokenizer["decoder"];
    let mut parts = decoder["decoders"].as_array().into_iter().flatten().chain([decoder]);
    if parts.any(|part| part["type"] == "ByteLevel" || part["type"] == "ByteFallback") {
        return format!("a tokenizer whose tokens cannot be mapped to bytes: {error}");
    }
    let kind = decoder["type"].as_str().unwrap_or("none");
    format!(
        "a tokenizer whose tokens cannot be mapped to bytes (decoder {kind} in tokenizer.json): structured output \
         needs the decoder ByteLevel, or a Sequence with ByteFallback; requests without a structure work"
    )
}

fn compile(factory: &ParserFactory, structure: Structure) -> Result<Grammar, String> {
    let grammar = match structure {
        Structure::Json { schema, is_compact } => {
            let mut schema: Value =
                serde_json::from_str(&schema).map_err(|error| format!("a schema that is not valid JSON: {error}"))?;
            let expected = || "a schema that is not a JSON object".to_owned();
            let options = json!({"whitespace_flexible": !is_compact});
            schema.as_object_mut().ok_or_else(expected)?.insert("x-guidance".to_owned(), options);
            GrammarWithLexer::from_json_schema(schema)
        }
        Structure::Regex(expression) => GrammarWithLexer::from_regex(&expression),
        Structure::Choice(texts) => {
            let texts: Vec<String> = texts.iter().map(|text| regex::escape(text)).collect();
            GrammarWithLexer::from_regex(&format!("({})", texts.join("|")))
        }
        Structure::Grammar(lark) => GrammarWithLexer::from_lark(lark),
    };
    let parser = factory.create_parser(TopLevelGrammar::from_grammar(grammar));
    let mut matcher = Matcher::new(Ok(parser.map_err(|error| format!("{error:#}"))?));
    let first = next(&mut matcher)?;
    Ok(Grammar { matcher: Mutex::new(matcher), first })
}

/// The tokens that may come next; includes the end-of-sequence tokens where the text may end.
fn next(matcher: &mut Matcher) -> Result<TokenMask, String> {
    let mask = matcher.compute_mask_or_eos().map_err(|error| reason(&error))?;
    if mask.is_zero() { Err(NO_TOKEN.to_owned()) } else { Ok(TokenMask(Arc::new(mask))) }
}

fn reason(error: &dyn fmt::Display) -> String {
    let text = error.to_string();
    if text.contains(NO_TOKEN_CODE) {
        return NO_TOKEN.to_owned();
    }
    text.replace("<non-verbose/>", "").trim().chars().take(MAX_REASON_CHARS).collect()
}

impl Grammar {
    /// Begins a completion: returns its state and the tokens with which it may begin.
    pub fn begin(self: &Arc<Self>) -> GrammarStart {
        let matcher = self.matcher.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let state = GrammarState { matcher, _grammar: Arc::clone(self) };
        GrammarStart { state, allowed: self.first.clone() }
    }
}

impl GrammarState {
    /// Advances the state by a token that was allowed, and returns the tokens that may follow it.
    ///
    /// # Errors
    /// The grammar library's message, if the grammar needs more work than a step is allowed.
    pub fn advance(&mut self, token_id: u32) -> Result<TokenMask, String> {
        self.matcher.consume_token(token_id).map_err(|error| reason(&error))?;
        next(&mut self.matcher)
    }
}

impl TokenMask {
    /// The set of the token ids in a list.
    #[cfg(test)]
    pub(crate) fn of_ids(ids: &[u32], vocab_size: usize) -> Self {
        let mut set = SimpleVob::alloc(vocab_size);
        ids.iter().for_each(|id| set.allow_token(*id));
        Self(Arc::new(set))
    }

    /// Writes the set as a bit mask: bit `id % 32` of word `id / 32`. Words beyond the set are set to zero.
    pub(crate) fn write_bits(&self, words: &mut [i32]) {
        words.fill(0);
        let set = self.0.as_slice();
        words.iter_mut().zip(set).for_each(|(word, bits)| *word = *bits as i32);
    }

    /// Whether the set contains the token id.
    pub fn contains(&self, token_id: usize) -> bool {
        token_id < self.0.len() && self.0.get(token_id)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_error_for_a_tokenizer_without_byte_tokens_names_its_decoder() {
        let said = |decoder: Value| {
            let tokenizer = json!({"decoder": decoder, "added_tokens": [], "model": {"vocab": 3}});
            without_bytes(&tokenizer, &token_bytes_from_tokenizer_json(&tokenizer).unwrap_err().to_string())
        };
        let metaspace = said(json!({"type": "Metaspace", "replacement": "\u{2581}"}));
        assert!(
            metaspace.contains("(decoder Metaspace in tokenizer.json)") && metaspace.contains("ByteFallback"),
            "{metaspace}"
        );
        assert!(said(Value::Null).contains("(decoder none "));
        let known = said(json!({"type": "Sequence", "decoders": [{"type": "ByteFallback"}]}));
        assert!(known.contains("error parsing vocab"), "{known}");
    }
}
