//! Arguments of commands that sample from a model: what from, and how.

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

/// In what kind a network keeps its residual stream.
#[derive(Debug, Clone, Copy, Args)]
#[command(rename_all = "snake_case")]
pub struct ResidualArgs {
    /// Type of the residual stream: auto (that of dtype) or float32; the files of a model do not say which it was trained with
    #[arg(long, default_value = "auto", value_parser = word::<ResidualDtype>)]
    pub residual_dtype: ResidualDtype,
}

/// Whose values of sampling count where none are given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GenerationConfig {
    /// The model's own, of its `generation_config.json`.
    Auto,
    /// This program's: temperature 1, all tokens.
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

/// Sampling values of the model's own.
#[derive(Debug, Clone, Copy, Args)]
#[command(rename_all = "snake_case")]
pub struct GenerationArgs {
    /// Sampling values where none are given: auto (those of the model's generation_config.json) or none (temperature 1, all tokens)
    #[arg(long, default_value = "auto")]
    pub generation_config: GenerationConfig,
}

impl GenerationArgs {
    /// The values of the model's folder, where they are wanted, and what is said of them.
    ///
    /// # Errors
    /// [`Error::BadFile`](crate::Error::BadFile) for values that no request may have.
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
    /// The adapters' model folder, where they do not name it
    #[arg(long)]
    pub base_model: Option<PathBuf>,
    /// The base's weights: none (as its files have them) or nf4 (rounded to NF4, as a run with quantization = nf4 trains on them)
    /// [default: as the adapters were trained]
    #[arg(long, value_parser = word::<Quantization>)]
    pub quantization: Option<Quantization>,
}

/// How tokens are drawn.
#[derive(Debug, Clone, Args)]
#[command(rename_all = "snake_case")]
pub struct SamplingArgs {
    /// Softmax temperature; 0 is greedy [default: 1]
    #[arg(long, allow_negative_numbers = true)]
    #[arg(value_parser = number(|t: &f32| SamplingParams::is_temperature(*t), "0, or a number of at least 0.000001"))]
    pub temperature: Option<f32>,
    /// Nucleus mass; 1 is off [default: 1]
    #[arg(long, value_parser = number(|p: &f32| SamplingParams::is_top_p(*p), "in (0, 1]"))]
    pub top_p: Option<f32>,
    /// Highest logits kept; 0 is off [default: 0]
    #[arg(long)]
    pub top_k: Option<usize>,
    /// Least probability relative to the most probable token; 0 is off [default: 0]
    #[arg(long, value_parser = number(|p: &f32| (0.0..=1.0).contains(p), "in [0, 1]"))]
    pub min_p: Option<f32>,
    /// Divides positive and multiplies negative logits of tokens already seen; 1 is off [default: 1]
    #[arg(long)]
    #[arg(value_parser = number(
        |penalty: &f32| (SamplingParams::MIN_PENALTY..=SamplingParams::MAX_PENALTY).contains(penalty),
        "from 0.000001 to 1000000"
    ))]
    pub repetition_penalty: Option<f32>,
    /// String that ends a completion; may be repeated
    #[arg(long, value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub stop: Vec<String>,
    /// Longest completion in tokens
    #[arg(long, aliases = ["max_tokens", "max_new_tokens"], default_value_t = 512, value_parser = count)]
    pub max_completion_length: usize,
    /// First word of every random key
    #[arg(long, default_value_t = 42, value_parser = seed)]
    pub seed: u64,
    /// Ranks that share one engine
    #[arg(long, visible_alias = "tp", default_value_t = 1, value_parser = count)]
    pub tensor_parallel_size: usize,
    #[command(flatten)]
    pub pipeline: PipelineArgs,
    /// Each of them has some experts whole, of a model with experts, in place of a part of every expert
    #[arg(long)]
    pub enable_expert_parallel: bool,
    /// Longest prompt and completion together in tokens [default: the model's context]
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
    /// How a command samples `n` completions a prompt: as its options say, else as `model` does.
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

    /// The ranks of one engine.
    pub fn engine_shape(&self) -> EngineShape {
        self.pipeline.engine_shape(self.tensor_parallel_size)
    }

    /// How the ranks of one engine share the model.
    pub fn division(&self) -> EngineDivision<'_> {
        EngineDivision {
            shape: self.engine_shape(),
            pipeline_partition: self.pipeline.sizes(),
            enable_expert_parallel: self.enable_expert_parallel,
        }
    }
}

/// How an engine's products read weights, and how it stores what it keeps.
#[derive(Debug, Clone, Copy, Args)]
#[command(rename_all = "snake_case")]
pub struct FormatArgs {
    /// Precision in which the engine multiplies by the weights of blocks: none (that of dtype) or fp8
    #[arg(long, default_value = "none", value_parser = word::<RolloutQuantization>)]
    pub rollout_quantization: RolloutQuantization,
    /// Type of keys and values in the cache: auto (that of dtype), fp8 or int8
    #[arg(long, default_value = "auto", value_parser = word::<KvCacheDtype>)]
    pub kv_cache_dtype: KvCacheDtype,
    /// Type in which states of gated delta nets are stored between steps: float32 or bfloat16
    #[arg(long = "mamba_ssm_cache_dtype", default_value = "float32", value_parser = word::<StateDtype>)]
    pub state_dtype: StateDtype,
}

impl FormatArgs {
    /// The engine's formats.
    pub fn formats(self) -> EngineFormats {
        let Self { rollout_quantization: quantization, kv_cache_dtype, state_dtype } = self;
        EngineFormats { quantization, kv_cache_dtype, state_dtype }
    }
}

/// Draft tokens.
#[derive(Debug, Clone, Copy, Args)]
#[command(rename_all = "snake_case")]
pub struct SpeculationArgs {
    /// Draft tokens, which change no completion: none, ngram (what followed the same tokens before) or auto (as many as pay)
    #[arg(long, default_value = "none", value_parser = word::<Speculation>)]
    pub speculation: Speculation,
    /// Most draft tokens of a completion in one step
    #[arg(long, default_value_t = 7, value_parser = number(|count: &usize| (1..=64).contains(count), "from 1 to 64"))]
    pub num_speculative_tokens: usize,
}

impl SpeculationArgs {
    /// How the engine drafts.
    pub fn options(self) -> SpeculationOptions {
        SpeculationOptions { method: self.speculation, num_tokens: self.num_speculative_tokens }
    }
}

/// Stages of an engine's layers.
#[derive(Debug, Clone, Args)]
#[command(rename_all = "snake_case")]
pub struct PipelineArgs {
    /// Stages of layers of one engine, each on ranks of its own
    #[arg(long, visible_alias = "pp", default_value_t = 1, value_parser = count)]
    pub pipeline_parallel_size: usize,
    /// Layers of each stage, as 10,10,8 [default: where the slowest stage is fastest]
    #[arg(long)]
    pub pipeline_partition: Option<PipelinePartition>,
}

impl PipelineArgs {
    /// Ranks of an engine with so many for each stage.
    pub fn engine_shape(&self, tensor_parallel_size: usize) -> EngineShape {
        EngineShape { tensor_parallel_size, pipeline_parallel_size: self.pipeline_parallel_size }
    }

    /// Layers of each stage, if they are given.
    pub fn sizes(&self) -> &[usize] {
        self.pipeline_partition.as_ref().map_or(&[], |partition| &partition.0)
    }
}

/// How long a silent rank is waited for, and faults for tests.
#[derive(Debug, Clone, Args)]
#[command(rename_all = "snake_case")]
pub struct SupervisionArgs {
    /// Longest time that a rank may show no sign of life, in seconds
    #[arg(long, default_value_t = HeartbeatConfig::default().timeout_s)]
    #[arg(value_parser = number(|seconds: &f64| *seconds > 0.0 && *seconds < 1e7, "above 0 and below 10000000"))]
    pub heartbeat_timeout_s: f64,
    /// Injected fault, as the configuration key of that name; for tests
    #[arg(long, hide = true)]
    pub fault: Option<Fault>,
}

/// `generate`.
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
    /// Put each prompt through the chat template as a user's message
    #[arg(long)]
    pub chat: bool,
    /// System message before it
    #[arg(long, requires = "chat")]
    pub system_prompt: Option<String>,
    /// Completions per prompt
    #[arg(short, long, default_value_t = 1, value_parser = completions)]
    pub n: usize,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

/// `eval`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct EvalArgs {
    #[command(flatten)]
    pub residual: ResidualArgs,
    #[command(flatten)]
    pub source: SourceArgs,
    /// Configuration of a run (its run_config.json, or the TOML or YAML that it was started with): the run's held-out rows,
    /// prompts, sampling and rewards are taken
    #[arg(long, conflicts_with_all = ["data", "system_prompt", "prompt_format", "reward", "answer_pattern", "temperature", "top_p"])]
    #[arg(conflicts_with_all = ["top_k", "min_p", "repetition_penalty", "stop", "max_completion_length", "seed", "max_model_length"])]
    pub config: Option<PathBuf>,
    /// Keys of rows, prompts, sampling and rewards that differ from the run's: key=value, section.key=value
    #[arg(requires = "config")]
    pub overrides: Vec<String>,
    /// Problems, named as in the key eval_file: a file of rows (JSONL, JSON, Parquet, CSV), a pattern, a folder, whose split `test`
    /// is read, or files of the Hub (hf://datasets/USER/NAME/PATTERN)
    #[arg(long, required_unless_present = "config")]
    pub data: Option<String>,
    /// Writes every sample with its rewards and the reference answer to this file, .jsonl or .parquet
    #[arg(long)]
    pub output: Option<PathBuf>,
    /// Samples per problem [default: 1, or the run's eval_num_generations]
    #[arg(short, long, value_parser = completions)]
    pub n: Option<usize>,
    /// System message put before every prompt that has none, as the key of that name
    #[arg(long)]
    pub system_prompt: Option<String>,
    /// How a prompt that is text is read: auto (a user's message where the model has a chat template), chat or text
    #[arg(long, default_value = "auto", value_parser = word::<PromptFormat>)]
    pub prompt_format: PromptFormat,
    /// Reward of a sample; in pass@k and maj@n a sample is solved where it is 1
    #[arg(long, default_value = "numeric_answer")]
    pub reward: String,
    /// Regular expression of the answer [default: <answer>..</answer>, \boxed{..}, \fbox{..} or after ####]
    #[arg(long)]
    pub answer_pattern: Option<String>,
    /// Interpreter of rewards that run in Python [default: python3]
    #[arg(long)]
    pub python: Option<String>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

impl EvalArgs {
    /// Refuses what can be known to be wrong before any process starts.
    ///
    /// # Errors
    /// [`Error::InvalidValue`](crate::Error::InvalidValue) for a pattern that marks no answer, samples that could not be written, or keys
    /// of a run that is not named.
    pub fn check(&self) -> crate::error::Result<()> {
        if let Some(first) = self.overrides.first().filter(|_| self.config.is_none()) {
            let expected = "no key=value without --config: these are keys of a configuration; without --config use \
                            options such as --temperature";
            return Err(crate::error::Error::invalid_value("eval", first, expected));
        }
        self.output.as_deref().map_or(Ok(()), check_samples_file)?;
        self.reward_config().map(drop)
    }

    /// Where the rows come from.
    pub fn rows(&self) -> String {
        self.config.as_ref().map(|file| file.display().to_string()).or(self.data.clone()).unwrap_or_default()
    }

    /// Settings of the reward.
    ///
    /// # Errors
    /// [`Error::InvalidValue`](crate::Error::InvalidValue) for a pattern that marks no answer.
    pub fn reward_config(&self) -> crate::error::Result<RewardConfig> {
        let mut config = RewardConfig::default();
        config.answer_pattern.clone_from(&self.answer_pattern);
        if let Some(python) = &self.python {
            config.python.clone_from(python);
        }
        config.check().map(|()| config)
    }
}
