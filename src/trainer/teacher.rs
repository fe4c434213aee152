//! The teacher of a run. It is found and checked before anything is loaded.

use std::path::PathBuf;
use std::sync::Arc;

use crate::config::Config;
use crate::data::{Hub, Tokenizer};
use crate::error::{Error, Result};
use crate::model::{ModelSource, ModelSpec, ParamTable};

const KEY: &str = "teacher_model_name_or_path";

/// A teacher model that scores the policy's samples.
#[derive(Debug)]
pub struct Teacher {
    /// Folder of the teacher's model.
    pub folder: PathBuf,
    /// The layout of its weights, sharded like the policy's.
    pub table: Arc<ParamTable>,
}

impl Teacher {
    /// Opens the configured teacher, if any, for sequences tokenized by `tokenizer`.
    ///
    /// # Errors
    /// Errors of its folder; [`Error::InvalidValue`] if it has adapters or another tokenizer.
    pub fn open(config: &Config, tokenizer: &Tokenizer, shards: usize) -> Result<Option<Self>> {
        let named = &config.distillation.teacher_model_name_or_path;
        let Some((name, source)) = named.as_ref().zip(Self::source(config)?) else { return Ok(None) };
        let invalid = |expected: String| Err(Error::invalid_value(KEY, name.display(), expected));
        if source.adapters.is_some() {
            return invalid("a full model: merge these LoRA adapters into their base first".to_owned());
        }
        let spec = Arc::new(ModelSpec::from_folder(&source.base)?);
        if let Some(difference) = tokenizer.difference(&Tokenizer::from_folder(&source.base)?) {
            return invalid(format!(
                "a model with the policy's tokenizer, as the teacher scores the policy's token ids; {difference}"
            ));
        }
        Self::check_top(config, spec.vocab_size)?;
        Ok(Some(Self { folder: source.base, table: Arc::new(ParamTable::new(spec, shards)) }))
    }

    /// The architecture of the one that the configuration names, if any.
    ///
    /// # Errors
    /// An error of its folder.
    pub fn spec(config: &Config) -> Result<Option<ModelSpec>> {
        Self::source(config)?.map(|source| ModelSpec::from_folder(&source.base)).transpose()
    }

    fn source(config: &Config) -> Result<Option<ModelSource>> {
        let (named, revision) =
            (&config.distillation.teacher_model_name_or_path, &config.distillation.teacher_model_revision);
        let find = |name| ModelSource::find(name, revision.as_deref(), None, &Hub::cached());
        named.as_deref().map(find).transpose()
    }

    /// Refuses more tokens of each distribution than a teacher has.
    ///
    /// # Errors
    /// [`Error::InvalidValue`].
    pub fn check_top(config: &Config, vocab_size: usize) -> Result<()> {
        let top = config.distillation.num_top().unwrap_or(0);
        let expected = || format!("at most {vocab_size}, the size of the vocabulary");
        if top <= vocab_size { Ok(()) } else { Err(Error::invalid_value("distillation_topk", top, expected())) }
    }

    /// Refuses a teacher whose context is shorter than the run's longest sequence.
    pub fn check_context(&self, max_model_length: usize) -> Result<()> {
        let context = self.table.spec.max_position_embeddings;
        if max_model_length <= context {
            return Ok(());
        }
        let expected = format!(
            "at most the {context} tokens of the teacher's context (now {max_model_length}); set max_model_length, or \
             max_prompt_length and max_completion_length"
        );
        Err(Error::invalid_value("max_model_length", max_model_length, expected))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_teacher_with_another_tokenizer_or_a_short_context_is_refused() {
        let keys = ["model_name_or_path=m", "train_file=t", "reward_funcs=[\"format\"]"];
        let teacher = "teacher_model_name_or_path=configs/arithmetic/model";
        let overrides: Vec<String> = keys.into_iter().chain([teacher]).map(str::to_owned).collect();
        let config = Config::load(None, &overrides).unwrap();
        let own = Tokenizer::from_folder("configs/arithmetic/model").unwrap();
        let found = Teacher::open(&config, &own, 2).unwrap().unwrap();
        let with_top = |top: usize| {
            let keys = ["distillation_mode=topk_logits".to_owned(), format!("distillation_topk={top}")];
            Teacher::open(&Config::load(None, &[&overrides[..], &keys].concat()).unwrap(), &own, 2)
        };
        assert!(with_top(64).is_ok());
        let error = with_top(65).unwrap_err().to_string();
        assert!(error.contains("distillation_topk = 65: expected at most 64, the size of the vocabulary"), "{error}");
        let context = found.table.spec.max_position_embeddings;
        assert!(found.check_context(context).is_ok());
        let error = found.check_context(context + 1).unwrap_err().to_string();
        assert!(error.contains("of the teacher's context"), "{error}");
        let error = Teacher::open(&config, &Tokenizer::of_ids(10).unwrap(), 2).unwrap_err().to_string();
        assert!(error.contains("a model with the policy's tokenizer") && error.contains("there and"), "{error}");
    }
}
