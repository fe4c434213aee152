//! Arguments of commands that make, copy or check a model's folder.

use std::path::PathBuf;

use clap::Args;

use super::{PlaceArgs, SourceArgs, count, number};
use crate::error::Error;
use crate::model::{ModelSpec, PRESETS};

/// `verify`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct VerifyArgs {
    #[command(flatten)]
    pub place: PlaceArgs,
    /// Model: a folder, or a name on the Hugging Face Hub
    #[arg(long)]
    pub model: PathBuf,
    /// A prompt, as plain text; may be repeated [default: four of prose, digits, code and other scripts]
    #[arg(long)]
    pub prompt: Vec<String>,
    /// Tokens that the engine adds to each prompt, greedily
    #[arg(long, default_value_t = 16, value_parser = count)]
    pub max_completion_length: usize,
    /// Factor on every limit of the table: 2 accepts twice the usual distance from transformers
    #[arg(long, default_value_t = 1.0, value_parser = number(|factor: &f64| *factor >= 0.0, "a number of at least 0"))]
    pub tolerance: f64,
    /// Interpreter that has torch and transformers
    #[arg(long, default_value = "python3")]
    pub python: String,
}

/// Which shape a model has that is in no folder; `tiny` if nothing is named.
#[derive(Debug, Clone, Args)]
#[command(rename_all = "snake_case")]
pub struct ModelArgs {
    /// A named shape
    #[arg(long = "model_preset", visible_alias = "preset", conflicts_with = "config_json", value_parser = PRESETS)]
    pub preset: Option<String>,
    /// A Hugging Face config.json
    #[arg(long)]
    pub config_json: Option<PathBuf>,
}

impl ModelArgs {
    /// The name that benchmarks give it.
    pub fn name(&self) -> String {
        let file = self.config_json.as_ref().map(|path| path.display().to_string());
        file.or_else(|| self.preset.clone()).unwrap_or_else(|| "tiny".to_owned())
    }

    /// Whether one was named.
    pub fn is_given(&self) -> bool {
        self.preset.is_some() || self.config_json.is_some()
    }

    /// Description of the model that the arguments name.
    ///
    /// # Errors
    /// An error of the file.
    pub fn spec(&self) -> crate::error::Result<ModelSpec> {
        match &self.config_json {
            Some(path) => ModelSpec::from_config_json(path),
            None => Ok(ModelSpec::preset(&self.name()).expect("the parser takes known names only")),
        }
    }
}

/// Says how a shape is given that has no name, and how a key is given beside a configuration.
pub fn with_tips(mut usage: clap::Error) -> clap::Error {
    use clap::error::{ContextKind, ContextValue, ErrorKind};
    let begins = |kind, start| usage.get(kind).is_some_and(|value: &ContextValue| value.to_string().starts_with(start));
    let is_conflict = usage.kind() == ErrorKind::ArgumentConflict
        && [ContextKind::InvalidArg, ContextKind::PriorArg].iter().any(|kind| begins(*kind, "--config <"));
    let tip = match () {
        () if begins(ContextKind::InvalidArg, "--model_preset") => {
            "for a model of another shape give its Hugging Face config.json with --config_json FILE"
        }
        () if is_conflict => "with --config, give keys of the run as key=value, for example max_completion_length=16",
        () => return usage,
    };
    usage.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    usage
}

/// `init`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct InitArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Folder whose tokenizer files are copied
    #[arg(long)]
    pub tokenizer: Option<PathBuf>,
    /// The model folder, which must be new or empty
    #[arg(long)]
    pub output: PathBuf,
    /// Key of the random weights
    #[arg(long, default_value_t = 42, value_parser = super::seed)]
    pub seed: u64,
    /// With a head that drafts tokens (mtp.*), of a model with gated delta nets
    #[arg(long)]
    pub draft_head: bool,
}

impl InitArgs {
    /// Description of the model that is made.
    ///
    /// # Errors
    /// An error of the file; [`Error::InvalidValue`] for a head that the model's family has not.
    pub fn spec(&self) -> crate::error::Result<ModelSpec> {
        let spec = self.model.spec()?;
        match self.draft_head.then(|| spec.clone().with_draft_head()) {
            None => Ok(spec),
            Some(spec) if spec.draft_head.is_some() => Ok(spec),
            Some(_) => {
                let expected = "false for this model: only draft heads of models with gated delta nets are supported";
                Err(Error::invalid_value("--draft_head", true, expected))
            }
        }
    }
}

/// `export`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct ExportArgs {
    #[command(flatten)]
    pub source: SourceArgs,
    /// The folder to make, which must be new or empty
    #[arg(long)]
    pub output: PathBuf,
    /// Write a whole model, the adapters added to their base's weights
    #[arg(long)]
    pub merge: bool,
    /// Write a whole model in FP8: matrices of blocks in e4m3 with a scale for each 128 x 128, as Qwen's checkpoints in FP8
    #[arg(long)]
    pub fp8: bool,
}

impl ExportArgs {
    /// Refuses what does not go with a model, or with adapters.
    ///
    /// # Errors
    /// [`Error::InvalidValue`](crate::Error::InvalidValue) on the option.
    pub fn check(&self, are_adapters: bool) -> crate::error::Result<()> {
        let refuse = |option: &str, expected: &str| {
            Err(crate::error::Error::invalid_value(option, self.source.model.display(), expected))
        };
        match (self.merge, self.fp8, are_adapters) {
            (true, _, false) => {
                refuse("--merge", "a folder of LoRA adapters: this is a full model, so there is nothing to merge")
            }
            (false, true, true) => {
                refuse("--fp8", "a full model; for LoRA adapters add --merge, as adapters alone are not quantized")
            }
            _ => Ok(()),
        }
    }
}
