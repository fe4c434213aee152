//! The command line as the user may write it.

mod bench;
mod serve;

use std::path::{Path, PathBuf};

use clap::{Args, Parser, Subcommand};

pub use bench::*;
pub use serve::*;

use crate::config::{Device, Dtype, HeartbeatConfig, PromptFormat, ResidualDtype, RewardConfig};
use crate::launch;
use crate::metrics::check_samples_file;
use crate::model::{ModelSpec, PRESETS};
use crate::phase::Fault;
use crate::reward;

/// Trains language models with GRPO on one node: every GPU generates, then every GPU trains.
#[derive(Debug, Parser)]
#[command(name = "colo-grpo", version, max_term_width = 100)]
pub struct Cli {
    /// What to do; `train` if nothing else is named.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train with GRPO (the default): colo-grpo --nproc 8 --config run.toml learning_rate=2e-6
    Train(RunArgs),
    /// Supervised warm-up on prompt/completion rows, through the same trainer
    Sft(RunArgs),
    /// Sample from a model folder
    Generate(Placed<GenerateArgs>),
    /// avg@n, pass@k and maj@n of a model folder on a file of problems
    Eval(Placed<EvalArgs>),
    /// Compare the logits of a model with those of transformers in Python, before anything is trained
    Verify(VerifyArgs),
    /// Turn a configuration of TRL, open-r1 or verl into one of this program, and list what became of each key
    Import(ImportArgs),
    /// Serve a model folder over HTTP, with OpenAI's protocol
    Serve(Placed<ServeArgs>),
    /// Talk with a model in the terminal
    Chat(ChatArgs),
    /// Make a model folder with random weights, from a preset or a config.json
    Init(InitArgs),
    /// Copy what a run trained out of a checkpoint, or merge LoRA adapters into a model
    Export(ExportArgs),
    /// Bytes of every class in every phase of a run, before it starts
    Plan(PlanArgs),
    /// Every configuration key with its default, as a file to start from
    Config(ConfigArgs),
    /// Write report.html of a run's output folder again
    Report(ReportArgs),
    /// Benchmarks; each prints one JSON line
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Serves the reward `code`; started by a run
    #[command(hide = true, name = reward::code::SANDBOX_COMMAND)]
    SandboxWorker {
        /// Its settings as JSON
        settings: String,
    },
}

impl Command {
    /// Whether this process computes itself, and does not only start those that do.
    pub fn computes(&self) -> bool {
        match self {
            Self::Train(args) | Self::Sft(args) => args.launch.nproc == 1,
            Self::Generate(args) => args.launch.nproc == 1,
            Self::Eval(args) => args.launch.nproc == 1,
            Self::Serve(args) => args.launch.nproc == 1,
            Self::Chat(_) | Self::Bench(_) | Self::Verify(_) => true,
            _ => false,
        }
    }
}

/// How many processes, and where they meet.
#[derive(Debug, Clone, Args)]
#[command(rename_all = "snake_case")]
pub struct LaunchArgs {
    /// Processes, one per GPU; not under torchrun or srun, which start them
    #[arg(long, aliases = ["nproc_per_node", "num_processes"], default_value_t = 1, value_parser = count)]
    pub nproc: usize,
    /// Address that the ranks meet at
    #[arg(long, value_name = "ADDRESS", default_value = launch::LOOPBACK)]
    pub master_addr: String,
    /// Port that the ranks meet at [default: a free one]
    #[arg(long, value_name = "PORT")]
    pub master_port: Option<u16>,
}

impl LaunchArgs {
    /// One process.
    pub fn alone() -> Self {
        Self { nproc: 1, master_addr: launch::LOOPBACK.to_owned(), master_port: None }
    }
}

/// Where to compute, and in what kind.
#[derive(Debug, Clone, Copy, Args)]
pub struct PlaceArgs {
    /// auto (CUDA where a GPU is visible), cpu or cuda
    #[arg(long, default_value = "auto", value_parser = word::<Device>)]
    pub device: Device,
    /// auto (bfloat16 on CUDA, float32 on a CPU), float32 or bfloat16
    #[arg(long, default_value = "auto", value_parser = word::<Dtype>)]
    pub dtype: Dtype,
}

/// A command's own arguments, after those of where its ranks run and compute.
#[derive(Debug, Args)]
pub struct Placed<T: Args> {
    #[command(flatten)]
    pub launch: LaunchArgs,
    #[command(flatten)]
    pub place: PlaceArgs,
    #[command(flatten)]
    pub own: T,
}

/// In what kind a network keeps its residual stream.
#[derive(Debug, Clone, Copy, Args)]
#[command(rename_all = "snake_case")]
pub struct ResidualArgs {
    /// Type of the residual stream: auto (that of dtype) or float32; the files of a model do not say which it was trained with
    #[arg(long, default_value = "auto", value_parser = word::<ResidualDtype>)]
    pub residual_dtype: ResidualDtype,
}

/// A run described by a configuration file.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct RunArgs {
    #[command(flatten)]
    pub launch: LaunchArgs,
    /// Configuration, TOML or YAML
    #[arg(long)]
    pub config: Option<PathBuf>,
    /// Overrides: key=value, section.key=value (also --section.key value)
    pub overrides: Vec<String>,
}

/// `plan`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct PlanArgs {
    #[command(flatten)]
    pub run: RunArgs,
    /// Plan for GPUs with so many GiB free each, not for this machine (H100: 79, H200: 139)
    #[arg(long, value_parser = number(|gib: &f64| *gib > 0.0 && *gib < 1e6, "above 0 and below 1000000"))]
    pub gpu_memory_gib: Option<f64>,
    /// Host memory of that machine in GiB; as much as is wanted if none is given
    #[arg(long, requires = "gpu_memory_gib")]
    #[arg(value_parser = number(|gib: &f64| *gib > 0.0 && *gib < 1e6, "above 0 and below 1000000"))]
    pub host_memory_gib: Option<f64>,
    #[command(flatten)]
    pub model: ModelArgs,
}

/// What is sampled from.
#[derive(Debug, Clone, Args)]
#[command(rename_all = "snake_case")]
pub struct SourceArgs {
    /// Model, or LoRA adapters: a folder, or a name on the Hugging Face Hub
    #[arg(long)]
    pub model: PathBuf,
    /// The adapters' model folder, where they do not name it
    #[arg(long)]
    pub base_model: Option<PathBuf>,
}

/// How tokens are drawn.
#[derive(Debug, Clone, Args)]
#[command(rename_all = "snake_case")]
pub struct SamplingArgs {
    /// Softmax temperature; 0 is greedy
    #[arg(long, default_value_t = 1.0, allow_negative_numbers = true)]
    #[arg(value_parser = number(|t: &f32| t.is_finite() && *t >= 0.0, "a number of at least 0"))]
    pub temperature: f32,
    /// Nucleus mass; 1 is off
    #[arg(long, default_value_t = 1.0, value_parser = number(|p: &f32| *p > 0.0 && *p <= 1.0, "in (0, 1]"))]
    pub top_p: f32,
    /// Highest logits kept; 0 is off
    #[arg(long, default_value_t = 0)]
    pub top_k: usize,
    /// Least probability relative to the most probable token; 0 is off
    #[arg(long, default_value_t = 0.0, value_parser = number(|p: &f32| (0.0..=1.0).contains(p), "in [0, 1]"))]
    pub min_p: f32,
    /// String that ends a completion; may be repeated
    #[arg(long, value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub stop: Vec<String>,
    /// Longest completion in tokens
    #[arg(long, default_value_t = 512, value_parser = count)]
    pub max_completion_length: usize,
    /// First word of every random key
    #[arg(long, default_value_t = 42)]
    pub seed: u64,
    /// Ranks that share one engine
    #[arg(long, visible_alias = "tp", default_value_t = 1, value_parser = count)]
    pub tensor_parallel_size: usize,
    /// Longest prompt and completion together in tokens [default: the model's context]
    #[arg(long, value_parser = number(|length: &usize| *length >= 2, "at least 2"))]
    pub max_model_length: Option<usize>,
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
    #[arg(short, long, default_value_t = 1, value_parser = count)]
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
    #[arg(conflicts_with_all = ["top_k", "min_p", "stop", "max_completion_length", "seed", "max_model_length"])]
    pub config: Option<PathBuf>,
    /// Problems: a file of rows (JSONL, JSON, Parquet, CSV)
    #[arg(long, required_unless_present = "config")]
    pub data: Option<PathBuf>,
    /// Writes every sample with its rewards and the reference answer to this file, .jsonl or .parquet
    #[arg(long)]
    pub output: Option<PathBuf>,
    /// Samples per problem [default: 1, or the run's eval_num_generations]
    #[arg(short, long, value_parser = count)]
    pub n: Option<usize>,
    /// System message put before every prompt that has none, as the key of that name
    #[arg(long)]
    pub system_prompt: Option<String>,
    /// What becomes of a prompt that is text: auto (a user's message where the model has a chat template), chat or text
    #[arg(long, default_value = "auto", value_parser = word::<PromptFormat>)]
    pub prompt_format: PromptFormat,
    /// Reward of a sample; in pass@k and maj@n a sample is solved where it is 1
    #[arg(long, default_value = "numeric_answer")]
    pub reward: String,
    /// Regular expression of the answer [default: <answer>..</answer>, \boxed{..} or after ####]
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
    /// [`Error::InvalidValue`](crate::Error::InvalidValue) for a pattern that marks no answer, or samples that could not be written.
    pub fn check(&self) -> crate::error::Result<()> {
        self.output.as_deref().map_or(Ok(()), check_samples_file)?;
        self.reward_config().map(drop)
    }

    /// Where the rows come from.
    pub fn rows(&self) -> std::path::Display<'_> {
        self.config.as_deref().or(self.data.as_deref()).unwrap_or(Path::new("")).display()
    }

    /// Settings of the reward.
    ///
    /// # Errors
    /// [`Error::InvalidValue`](crate::Error::InvalidValue) for a pattern that marks no answer.
    pub fn reward_config(&self) -> crate::error::Result<RewardConfig> {
        let mut config = RewardConfig::default();
        if let Some(pattern) = &self.answer_pattern {
            config.answer_pattern.clone_from(pattern);
        }
        if let Some(python) = &self.python {
            config.python.clone_from(python);
        }
        config.check().map(|()| config)
    }
}

/// `import`.
#[derive(Debug, Args)]
pub struct ImportArgs {
    /// An open-r1 recipe or a file for `trl grpo --config` (YAML), a configuration of verl (YAML), or the script that starts verl (.sh)
    pub file: PathBuf,
    /// The TOML file to write, which must be new [default: standard output]
    #[arg(long)]
    pub output: Option<PathBuf>,
}

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
    /// Largest mean difference that passes, of a position's logits and of the engine's log-probabilities [default: 0.001 in float32,
    /// 0.2 in bfloat16]
    #[arg(long, value_parser = number(|most: &f64| *most >= 0.0, "a number of at least 0"))]
    pub tolerance: Option<f64>,
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
    /// What benchmarks call it.
    pub fn name(&self) -> String {
        let file = self.config_json.as_ref().map(|path| path.display().to_string());
        file.or_else(|| self.preset.clone()).unwrap_or_else(|| "tiny".to_owned())
    }

    /// Whether one was named.
    pub fn is_given(&self) -> bool {
        self.preset.is_some() || self.config_json.is_some()
    }

    /// Its description.
    ///
    /// # Errors
    /// What is wrong with the file.
    pub fn spec(&self) -> crate::error::Result<ModelSpec> {
        match &self.config_json {
            Some(path) => ModelSpec::from_config_json(path),
            None => Ok(ModelSpec::preset(&self.name()).expect("the parser takes known names only")),
        }
    }
}

/// Says how a shape is given that has no name.
pub fn with_other_shapes(mut usage: clap::Error) -> clap::Error {
    use clap::error::{ContextKind, ContextValue};
    let of_preset = |value: &ContextValue| value.to_string().starts_with("--model_preset");
    if usage.get(ContextKind::InvalidArg).is_some_and(of_preset) {
        let tip = "a model of any other shape: --config_json FILE, its config.json of Hugging Face";
        usage.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    }
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
    #[arg(long, default_value_t = 42)]
    pub seed: u64,
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
}

/// `config`.
#[derive(Debug, Args)]
pub struct ConfigArgs {
    /// The keys of supervised fine-tuning
    #[arg(long)]
    pub sft: bool,
    /// The page docs/config.md instead
    #[arg(long, conflicts_with = "sft")]
    pub markdown: bool,
}

/// `report`.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// The run's output folder
    pub output_dir: PathBuf,
}

/// A word that a configuration key takes.
fn word<T: serde::de::DeserializeOwned>(text: &str) -> Result<T, String> {
    serde_json::from_value(text.into()).map_err(|error| error.to_string())
}

/// A number of which there must be one.
fn count(text: &str) -> Result<usize, String> {
    number(|count: &usize| *count >= 1, "a whole number of at least 1")(text)
}

fn number<T: std::str::FromStr>(
    holds: fn(&T) -> bool,
    expected: &'static str,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync {
    move |text| text.parse().ok().filter(holds).ok_or_else(|| format!("expected {expected}"))
}
