//! Arguments of commands that sample from a model: the model and the sampling parameters.

use std::path::PathBuf;

use clap::Args;

use super::{completions, count, number, seed, word};
use crate::config::{
    EngineShape, HeartbeatConfig, KvCacheDtype, PipelinePartition, PromptFormat, Quantization, ResidualDtype,
    RewardConfig, RolloutQuantization, Speculation, StateDtype,
};
use crate::metrics::check_samples_file;
use crate::model::ModelSource;
use crate::phase::Fault;
use crate::rollout::{EngineFormats, SpeculationOptions};
use crate::serve::{EngineDivision, SamplingDefaults};
use crate::types::SamplingParams;

/// Dtype of the residual stream of a model.
#[derive(Debug, Clone, Copy, Args)]
#[command(rename_all = "snake_case")]
pub struct ResidualArgs {
    /// Dtype of the residual stream: auto (that of dtype) or float32; model files do not record which one training used
    #[arg(long, default_value = "auto", value_parser = word::<ResidualDtype>)]
    pub residual_dtype: ResidualDtype,
}

/// Source of sampling parameters that are not given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GenerationConfig {
    /// Use the model's `generation_config.json`.
    Auto,
    /// Use the program's defaults: temperature 1 and no filters.
    None,
}

impl std::str::FromStr for GenerationConfig {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "none" | "vllm" => Ok(Self::None),
            _ => Err("expected auto or none".to_owned()),
        }
    }
}

/// Whether the model's own sampling parameters are used.
#[derive(Debug, Clone, Copy, Args)]
#[command(rename_all = "snake_case")]
pub struct GenerationArgs {
    /// Source of sampling parameters that are not given: auto (the model's generation_config.json) or none (temperature 1, no filters)
    #[arg(long, default_value = "auto")]
    pub generation_config: GenerationConfig,
}

impl GenerationArgs {
    /// The sampling parameters of the model's folder, if they are to be used, and a notice about them.
    ///
    /// # Errors
    /// [`Error::BadFile`](crate::Error::BadFile) for invalid values.
    pub(in crate::cli) fn defaults(
        &self,
        model: &ModelSource,
    ) -> crate::error::Result<(SamplingDefaults, Option<String>)> {
        let of_model = SamplingDefaults::of_folder(&model.base)?;
        let Some(listed) = of_model.listed() else { return Ok(Default::default()) };
        Ok(match self.generation_config {
            GenerationConfig::Auto => {
                let told = "by default, from the model's generation_config.json (--generation_config none: temperature \
                            1, no filters)";
                (of_model, Some(format!("sampling with {listed} {told}")))
            }
            GenerationConfig::None => (SamplingDefaults::default(), None),
        })
    }
}

/// The model to sample from.
#[derive(Debug, Clone, Args)]
#[command(rename_all = "snake_case")]
pub struct SourceArgs {
    /// Model, or LoRA adapters: a folder, or a name on the Hugging Face Hub
    #[arg(long)]
    pub model: PathBuf,
    /// Base model folder of the adapters, if the adapters do not name it
    #[arg(long)]
    pub base_model: Option<PathBuf>,
    /// Storage of the base weights: none (as in the files) or nf4 (rounded to NF4, as in runs with quantization = nf4) [default: as the adapters were
    /// trained]
    #[arg(long, value_parser = word::<Quantization>)]
    pub quantization: Option<Quantization>,
}

/// Sampling parameters.
#[derive(Debug, Clone, Args)]
#[command(rename_all = "snake_case")]
pub struct SamplingArgs {
    /// Softmax temperature; 0 is greedy [default: 1]
    #[arg(long, allow_negative_numbers = true)]
    #[arg(value_parser = number(|t: &f32| SamplingParams::is_temperature(*t), "0, or a number of at least 0.000001"))]
    pub temperature: Option<f32>,
    /// Nucleus sampling: probability mass that is kept; 1 is off [default: 1]
    #[arg(long, value_parser = number(|p: &f32| SamplingParams::is_top_p(*p), "in (0, 1]"))]
    pub top_p: Option<f32>,
    /// Number of highest logits that are kept; 0 is off [default: 0]
    #[arg(long)]
    pub top_k: Option<usize>,
    /// Minimum probability relative to the most probable token; 0 is off [default: 0]
    #[arg(long, value_parser = number(|p: &f32| (0.0..=1.0).contains(p), "in [0, 1]"))]
    pub min_p: Option<f32>,
    /// Divides positive and multiplies negative logits of tokens already seen; 1 is off [default: 1]
    #[arg(long)]
    #[arg(value_parser = number(
        |penalty: &f32| (SamplingParams::MIN_PENALTY..=SamplingParams::MAX_PENALTY).contains(penalty),
        "from 0.000001 to 1000000"
    ))]
    pub repetition_penalty: Option<f32>,
    /// Stop string that ends a completion; may be repeated
    #[arg(long, value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub stop: Vec<String>,
    /// Maximum completion length in tokens
    #[arg(long, aliases = ["max_tokens", "max_new_tokens"], default_value_t = 512, value_parser = count)]
    pub max_completion_length: usize,
    /// Random seed
    #[arg(long, default_value_t = 42, value_parser = seed)]
    pub seed: u64,
    /// Ranks that share one engine
    #[arg(long, visible_alias = "tp", default_value_t = 1, value_parser = count)]
    pub tensor_parallel_size: usize,
    #[command(flatten)]
    pub pipeline: PipelineArgs,
    /// In models with experts, give each rank whole experts instead of a slice of every expert
    #[arg(long)]
    pub enable_expert_parallel: bool,
    /// Maximum length of prompt and completion together, in tokens [default: the model's context]
    #[arg(long, value_parser = number(|length: &usize| *length >= 2, "at least 2"))]
    pub max_model_length: Option<usize>,
    #[command(flatten)]
    pub formats: FormatArgs,
    #[command(flatten)]
    pub speculation: SpeculationArgs,
    #[command(flatten)]
    pub supervision: SupervisionArgs,
}

impl SamplingArgs {
    /// Sampling parameters for `n` completions per prompt: those of the options, else those of `model`.
    pub fn params(&self, n: usize, model: &SamplingDefaults) -> SamplingParams {
        let given = SamplingDefaults {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
        };
        let own = SamplingParams {
            num_generations: n,
            stop: self.stop.clone(),
            max_completion_length: self.max_completion_length,
            seed: self.seed,
            ..SamplingParams::default()
        };
        given.over(model.over(own))
    }

    /// Number of ranks of one engine.
    pub fn engine_shape(&self) -> EngineShape {
        self.pipeline.engine_shape(self.tensor_parallel_size)
    }

    /// How the ranks of an engine divide the model.
    pub fn division(&self) -> EngineDivision<'_> {
        EngineDivision {
            shape: self.engine_shape(),
            pipeline_partition: self.pipeline.sizes(),
            enable_expert_parallel: self.enable_expert_parallel,
        }
    }
}

/// Precision of the engine's weights and caches.
#[derive(Debug, Clone, Copy, Args)]
#[command(rename_all = "snake_case")]
pub struct FormatArgs {
    /// Precision of block weights in the engine's GEMMs: none (that of dtype), fp8, int8 (without experts) or mxfp4 (experts only)
    #[arg(long, default_value = "none", value_parser = word::<RolloutQuantization>)]
    pub rollout_quantization: RolloutQuantization,
    /// Dtype of the KV cache: auto (that of dtype), fp8 or int8
    #[arg(long, default_value = "auto", value_parser = word::<KvCacheDtype>)]
    pub kv_cache_dtype: KvCacheDtype,
    /// Dtype in which states of gated delta nets are stored between steps: float32 or bfloat16
    #[arg(long = "mamba_ssm_cache_dtype", default_value = "float32", value_parser = word::<StateDtype>)]
    pub state_dtype: StateDtype,
}

impl FormatArgs {
    /// The formats for the engine.
    pub fn formats(self) -> EngineFormats {
        let Self { rollout_quantization: quantization, kv_cache_dtype, state_dtype } = self;
        EngineFormats { quantization, kv_cache_dtype, state_dtype }
    }
}

/// Options of speculative decoding.
#[derive(Debug, Clone, Copy, Args)]
#[command(rename_all = "snake_case")]
pub struct SpeculationArgs {
    /// Draft tokens, which do not change completions: none, ngram (what followed the same tokens before), mtp (the model's own draft head) or auto
    /// (ngram, as many as are worth it)
    #[arg(long, default_value = "none", value_parser = word::<Speculation>)]
    pub speculation: Speculation,
    /// Maximum number of draft tokens per completion and step
    #[arg(long, default_value_t = 7, value_parser = number(|count: &usize| (1..=64).contains(count), "from 1 to 64"))]
    pub num_speculative_tokens: usize,
}

impl SpeculationArgs {
    /// The engine's options for speculative decoding.
    pub fn options(self) -> SpeculationOptions {
        SpeculationOptions { method: self.speculation, num_tokens: self.num_speculative_tokens }
    }
}

/// Options of pipeline stages.
#[derive(Debug, Clone, Args)]
#[command(rename_all = "snake_case")]
pub struct PipelineArgs {
    /// Number of pipeline stages of one engine, each with its own ranks
    #[arg(long, visible_alias = "pp", default_value_t = 1, value_parser = count)]
    pub pipeline_parallel_size: usize,
    /// Number of layers of each stage, such as 10,10,8 [default: balanced by time]
    #[arg(long)]
    pub pipeline_partition: Option<PipelinePartition>,
}

impl PipelineArgs {
    /// Number of ranks of an engine whose stages have `tensor_parallel_size` ranks each.
    pub fn engine_shape(&self, tensor_parallel_size: usize) -> EngineShape {
        EngineShape { tensor_parallel_size, pipeline_parallel_size: self.pipeline_parallel_size }
    }

    /// Number of layers of each stage, if given.
    pub fn sizes(&self) -> &[usize] {
        self.pipeline_partition.as_ref().map_or(&[], |partition| &partition.0)
    }
}

/// Time limit for ranks without progress, and injected faults for tests.
#[derive(Debug, Clone, Args)]
#[command(rename_all = "snake_case")]
pub struct SupervisionArgs {
    /// Time limit in seconds for a rank without a heartbeat
    #[arg(long, default_value_t = HeartbeatConfig::default().timeout_s)]
    #[arg(value_parser = number(|seconds: &f64| *seconds > 0.0 && *seconds < 1e7, "above 0 and below 10000000"))]
    pub heartbeat_timeout_s: f64,
    /// Injected fault, as in the configuration key `fault`; for tests
    #[arg(long, hide = true)]
    pub fault: Option<Fault>,
}

/// Arguments of `generate`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct GenerateArgs {
    #[command(flatten)]
    pub residual: ResidualArgs,
    #[command(flatten)]
    pub generation: GenerationArgs,
    #[command(flatten)]
    pub source: SourceArgs,
    /// The prompt; may be repeated
    #[arg(long, required = true)]
    pub prompt: Vec<String>,
    /// Pass each prompt through the chat template as a user message
    #[arg(long)]
    pub chat: bool,
    /// System message before the prompt
    #[arg(long, requires = "chat")]
    pub system_prompt: Option<String>,
    /// Completions per prompt
    #[arg(short, long, default_value_t = 1, value_parser = completions)]
    pub n: usize,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

/// Arguments of `eval`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct EvalArgs {
    #[command(flatten)]
    pub residual: ResidualArgs,
    #[command(flatten)]
    pub source: SourceArgs,
    /// Configuration of a run (its run_config.json, or the TOML or YAML it was started with), whose evaluation rows, prompts, sampling and rewards
    /// are used
    #[arg(long, conflicts_with_all = ["data", "system_prompt", "prompt_format", "reward", "answer_pattern", "temperature", "top_p"])]
    #[arg(conflicts_with_all = ["top_k", "min_p", "repetition_penalty", "stop", "max_completion_length", "seed", "max_model_length"])]
    pub config: Option<PathBuf>,
    /// Keys of rows, prompts, sampling and rewards that replace the run's: key=value, section.key=value
    #[arg(requires = "config")]
    pub overrides: Vec<String>,
    /// Problems, as in the key eval_file: a file of rows (JSONL, JSON, Parquet, CSV), a pattern, a folder (its split `test`), or files of the Hub
    /// (hf://datasets/USER/NAME/PATTERN)
    #[arg(long, required_unless_present = "config")]
    pub data: Option<String>,
    /// Write every sample with its rewards and the reference answer to this file, .jsonl or .parquet
    #[arg(long)]
    pub output: Option<PathBuf>,
    /// Number of samples per problem [default: 1, or the run's eval_num_generations]
    #[arg(short, long, value_parser = completions)]
    pub n: Option<usize>,
    /// System message put before every prompt without one, as in the key of that name
    #[arg(long)]
    pub system_prompt: Option<String>,
    /// How a prompt that is plain text reaches the model: auto (as a user message if there is a chat template), chat or text
    #[arg(long, default_value = "auto", value_parser = word::<PromptFormat>)]
    pub prompt_format: PromptFormat,
    /// Reward of a sample; for pass@k and maj@n a sample is solved if the reward is 1
    #[arg(long, default_value = "numeric_answer")]
    pub reward: String,
    /// Regular expression for the answer [default: <answer>..</answer>, \boxed{..}, \fbox{..} or after ####]
    #[arg(long)]
    pub answer_pattern: Option<String>,
    /// Python interpreter for rewards [default: python3]
    #[arg(long)]
    pub python: Option<String>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

impl EvalArgs {
    /// Checks the arguments before any process starts.
    ///
    /// # Errors
    /// [`Error::InvalidValue`](crate::Error::InvalidValue) for a pattern without a group, an output that cannot be written, or keys of a run without
    /// `--config`.
    pub fn check(&self) -> crate::error::Result<()> {
        if let Some(first) = self.overrides.first().filter(|_| self.config.is_none()) {
            let expected = "no key=value without --config: these are keys of a configuration; without --config use \
                            options such as --temperature";
            return Err(crate::error::Error::invalid_value("eval", first, expected));
        }
        self.output.as_deref().map_or(Ok(()), check_samples_file)?;
        self.reward_config().map(drop)
    }

    /// Name of the rows for messages.
    pub fn rows(&self) -> String {
        self.config.as_ref().map(|file| file.display().to_string()).or(self.data.clone()).unwrap_or_default()
    }

    /// Settings of the reward.
    ///
    /// # Errors
    /// [`Error::InvalidValue`](crate::Error::InvalidValue) for a pattern without a group.
    pub fn reward_config(&self) -> crate::error::Result<RewardConfig> {
        let mut config = RewardConfig::default();
        config.answer_pattern.clone_from(&self.answer_pattern);
        if let Some(python) = &self.python {
            config.python.clone_from(python);
        }
        config.check().map(|()| config)
    }
}
