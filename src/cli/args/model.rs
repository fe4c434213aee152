//! Arguments of commands that create, export or check a model folder.

use std::path::PathBuf;

use clap::Args;

use super::{PlaceArgs, SourceArgs, count, number};
use crate::error::Error;
use crate::model::{ModelSpec, PRESETS};

/// Arguments of `verify`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct VerifyArgs {
    #[command(flatten)]
    pub place: PlaceArgs,
    /// Model: a folder, or a name on the Hugging Face Hub
    #[arg(long)]
    pub model: PathBuf,
    /// A prompt, as plain text; may be repeated [default: four prompts of prose, digits, code and other scripts]
    #[arg(long)]
    pub prompt: Vec<String>,
    /// Number of tokens that the engine adds to each prompt, by greedy sampling
    #[arg(long, default_value_t = 16, value_parser = count)]
    pub max_completion_length: usize,
    /// Multiplies every limit of the table: 2 accepts twice the usual difference to transformers
    #[arg(long, default_value_t = 1.0, value_parser = number(|factor: &f64| *factor >= 0.0, "a number of at least 0"))]
    pub tolerance: f64,
    /// Python interpreter that has torch and transformers
    #[arg(long, default_value = "python3")]
    pub python: String,
}

/// The shape of a model without files; `tiny` by default.
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
    /// The name of the shape in benchmark results.
    pub fn name(&self) -> String {
        let file = self.config_json.as_ref().map(|path| path.display().to_string());
        file.or_else(|| self.preset.clone()).unwrap_or_else(|| "tiny".to_owned())
    }

    /// Whether a shape was given.
    pub fn is_given(&self) -> bool {
        self.preset.is_some() || self.config_json.is_some()
    }

    /// The model shape that the arguments describe.
    ///
    /// # Errors
    /// An error of the config.json.
    pub fn spec(&self) -> crate::error::Result<ModelSpec> {
        match &self.config_json {
            Some(path) => ModelSpec::from_config_json(path),
            None => Ok(ModelSpec::preset(&self.name()).expect("the parser takes known names only")),
        }
    }
}

/// Adds a tip to a usage error: how to describe a shape without a name, or how to give a key together with a configuration.
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

/// Arguments of `init`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct InitArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Folder whose tokenizer files are copied into the model folder
    #[arg(long)]
    pub tokenizer: Option<PathBuf>,
    /// Model folder to create; it must be new or empty
    #[arg(long)]
    pub output: PathBuf,
    /// Random seed of the weights
    #[arg(long, default_value_t = 42, value_parser = super::seed)]
    pub seed: u64,
    /// Add a draft head (mtp.*), for models with gated delta nets
    #[arg(long)]
    pub draft_head: bool,
}

impl InitArgs {
    /// The shape of the model to create.
    ///
    /// # Errors
    /// An error of the config.json; [`Error::InvalidValue`] for a draft head that the model's family does not support.
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

/// Arguments of `export`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct ExportArgs {
    #[command(flatten)]
    pub source: SourceArgs,
    /// Folder to create; it must be new or empty
    #[arg(long)]
    pub output: PathBuf,
    /// Write a full model, with the adapters merged into the weights of their base
    #[arg(long)]
    pub merge: bool,
    /// Write a full model in FP8: matrices of blocks in e4m3 with one scale per 128 x 128 block, as in Qwen's FP8 checkpoints
    #[arg(long)]
    pub fp8: bool,
}

impl ExportArgs {
    /// Refuses options that do not apply to a full model, or to adapters.
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
