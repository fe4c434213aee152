//! Compares the tokens of texts from this program with those of transformers, by `tokenizer.json` and by AutoTokenizer.

use super::Tokenized;
use super::peer::{PeerTokens, TokensOrReason};

/// Texts with different tokens, or why this is not known.
type OtherTexts = Result<Vec<String>, String>;

/// The comparison of all texts.
#[derive(Debug)]
pub(super) struct TextComparison {
    num_texts: usize,
    by_file: OtherTexts,
    by_auto: OtherTexts,
    class: String,
}

impl TextComparison {
    pub fn new(own: &[Tokenized], theirs: &PeerTokens) -> Self {
        let others = |theirs: &TokensOrReason| match theirs {
            TokensOrReason::Reason(reason) => Err(reason.clone()),
            TokensOrReason::Tokens(ids) if ids.len() != own.len() => {
                Err(format!("it returned the tokens of {} texts", ids.len()))
            }
            TokensOrReason::Tokens(ids) => {
                let both = own.iter().zip(ids).filter(|(own, ids)| own.token_ids != **ids);
                Ok(both.map(|(own, _)| own.text.clone()).collect())
            }
        };
        let PeerTokens { file, auto, class } = theirs;
        Self { num_texts: own.len(), by_file: others(file), by_auto: others(auto), class: class.clone() }
    }

    /// Rows of the table: what is compared, the figure and its limit.
    pub fn rows(&self) -> Vec<[String; 3]> {
        let row = |reader: &str, others: &OtherTexts, allowed: &str| {
            let (figure, allowed) = match others {
                Ok(others) => (format!("{} of {}", self.num_texts - others.len(), self.num_texts), allowed.to_owned()),
                Err(reason) => ("not read".to_owned(), format!("({reason:.60})")),
            };
            [format!("texts with the tokens of {reader}"), figure, allowed]
        };
        vec![row("tokenizer.json", &self.by_file, "all"), row("AutoTokenizer", &self.by_auto, "")]
    }

    /// The note about AutoTokenizer giving other tokens, if it does.
    pub fn note(&self) -> Option<String> {
        let text = self.by_auto.as_ref().ok()?.first()?;
        Some(format!(
            "AutoTokenizer gives other tokens, first for {text:?}: its class {}, chosen by tokenizer_class in \
             tokenizer_config.json or the model's type, does not follow tokenizer.json, which colo-grpo uses: see \
             docs/files.md",
            self.class
        ))
    }

    /// The error if tokens differ from those of `tokenizer.json`.
    pub fn fault(&self) -> Option<String> {
        let others = self.by_file.as_ref().ok()?;
        let text = others.first()?;
        let (count, all) = (others.len(), self.num_texts);
        Some(format!("{count} of {all} texts get other tokens than with tokenizer.json, first {text:?}"))
    }
}
