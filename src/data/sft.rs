//! Rows to learn from by imitation.

use std::path::Path;

use super::Tokenizer;
use super::rows::read_jsonl;
use crate::error::{Error, Result};

/// A prompt with the completion to imitate; the loss covers `token_ids[prompt_len..]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SftExample {
    /// Prompt, completion and the end-of-sequence token.
    pub token_ids: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt_len: usize,
}

/// Examples in file order, tokenized.
#[derive(Debug)]
pub struct SftDataset {
    /// The examples; never empty.
    pub examples: Vec<SftExample>,
    /// Rows left out because they are longer than the limit.
    pub too_long: usize,
}

impl SftDataset {
    /// Reads JSONL rows of a prompt (as [`Dataset`](super::Dataset) takes it) and a `completion` as text. Both are
    /// tokenized on their own, so that the prompt's ids are those that a rollout would start from.
    ///
    /// # Errors
    /// As [`Dataset::from_jsonl`](super::Dataset::from_jsonl); [`Error::TokenizerMismatch`] without an EOS token.
    pub fn from_jsonl(path: impl AsRef<Path>, tokenizer: &Tokenizer, max_length: usize) -> Result<Self> {
        let path = path.as_ref();
        let eos_token_id = tokenizer.eos_token_id().ok_or_else(|| Error::TokenizerMismatch {
            message: "no eos_token in tokenizer_config.json: a completion could not be ended".into(),
        })?;
        let mut examples = Vec::new();
        let mut read = 0;
        for row in read_jsonl(path)? {
            let row = row?;
            read += 1;
            let (_, mut token_ids) = row.prompt()?.render(&row, tokenizer, None)?;
            let prompt_len = token_ids.len();
            let completion = tokenizer.encode(row.text("completion")?, false);
            token_ids.extend(completion.map_err(|error| row.bad(error.to_string()))?);
            token_ids.push(eos_token_id);
            if token_ids.len() <= max_length {
                examples.push(SftExample { token_ids, prompt_len });
            }
        }
        let too_long = read - examples.len();
        if examples.is_empty() {
            let stages = format!("{read} read, {too_long} longer than max_length {max_length}, 0 kept");
            return Err(Error::EmptyDataset { path: path.to_owned(), stages });
        }
        Ok(Self { examples, too_long })
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::Folder;
    use super::*;

    #[test]
    fn the_completion_is_followed_by_eos_and_long_rows_are_counted() {
        let folder = Folder::new();
        let rows = [
            r#"{"prompt": "what is one plus one", "completion": "two"}"#,
            r#"{"question": "one", "completion": "one two three"}"#,
            r#"{"prompt": "what", "completion": ""}"#,
        ];
        folder.write("sft.jsonl", &rows.join("\n"));
        let path = folder.path().join("sft.jsonl");
        let tokenizer = folder.tokenizer();
        let data = SftDataset::from_jsonl(&path, &tokenizer, 6).unwrap();
        assert_eq!(data.too_long, 1);
        assert_eq!(data.examples[0], SftExample { token_ids: vec![0, 1, 1, 2, 3, 9], prompt_len: 2 });
        assert_eq!(data.examples[1], SftExample { token_ids: vec![0, 7, 9], prompt_len: 2 });
        let error = SftDataset::from_jsonl(&path, &tokenizer, 2).unwrap_err().to_string();
        assert!(error.contains("3 read, 3 longer than max_length 2, 0 kept"), "{error}");
    }

    #[test]
    fn a_row_without_completion_is_named_and_a_missing_eos_told() {
        let folder = Folder::new();
        folder.write("sft.jsonl", "\n{\"prompt\": \"one\", \"answer\": 1}\n");
        let error = SftDataset::from_jsonl(folder.path().join("sft.jsonl"), &folder.tokenizer(), 6).unwrap_err();
        assert!(error.to_string().ends_with("sft.jsonl:2: no column 'completion'; columns seen: prompt, answer"));
        folder.write("tokenizer_config.json", "{}");
        let error = SftDataset::from_jsonl(folder.path().join("sft.jsonl"), &folder.tokenizer(), 6).unwrap_err();
        assert!(error.to_string().contains("no eos_token"), "{error}");
    }
}
