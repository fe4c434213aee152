//! The command line as the user may write it.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::config::{
    Config, Device, Dtype, GradientCheckpointing, HeartbeatConfig, Quantization, RewardConfig, SftConfig,
};
use crate::launch;
use crate::phase::Fault;
use crate::reward;
use crate::types::LengthSpread;

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
    Generate(GenerateArgs),
    /// avg@n, pass@k and maj@n of a model folder on a file of problems
    Eval(EvalArgs),
    /// Make a model folder with random weights, from a preset or a config.json
    Init(InitArgs),
    /// Copy what a run trained out of a checkpoint, or merge LoRA adapters into a model
    Export(ExportArgs),
    /// Bytes of every class in every phase of a run, before it starts
    Plan(RunArgs),
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

/// How many processes, and where they meet.
#[derive(Debug, Clone, Args)]
#[command(rename_all = "snake_case")]
pub struct LaunchArgs {
    /// Processes to start, one per GPU; ignored where RANK and WORLD_SIZE are set (torchrun, srun, operators)
    #[arg(long, visible_aliases = ["nproc_per_node", "num_processes"], default_value_t = 1, value_parser = count)]
    pub nproc: usize,
    /// Address that the rendezvous store is bound to
    #[arg(long, default_value = launch::LOOPBACK)]
    pub master_addr: String,
    /// Port of the rendezvous store; a free one is taken if none is given
    #[arg(long)]
    pub master_port: Option<u16>,
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

/// What is sampled from.
#[derive(Debug, Clone, Args)]
#[command(rename_all = "snake_case")]
pub struct SourceArgs {
    /// Model folder, or a folder of LoRA adapters
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
    /// Longest completion in tokens
    #[arg(long, default_value_t = 512, value_parser = count)]
    pub max_completion_length: usize,
    /// First word of every random key
    #[arg(long, default_value_t = 42)]
    pub seed: u64,
    /// Ranks that share one engine
    #[arg(long, visible_alias = "tp", default_value_t = 1, value_parser = count)]
    pub tensor_parallel_size: usize,
    /// Longest sequence in tokens, prompt and completion, that memory is kept for; the model's context if none is given
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
    pub launch: LaunchArgs,
    #[command(flatten)]
    pub place: PlaceArgs,
    #[command(flatten)]
    pub source: SourceArgs,
    /// The prompt; may be repeated
    #[arg(long, required = true)]
    pub prompt: Vec<String>,
    /// Put each prompt through the chat template as a user's message
    #[arg(long)]
    pub chat: bool,
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
    pub launch: LaunchArgs,
    #[command(flatten)]
    pub place: PlaceArgs,
    #[command(flatten)]
    pub source: SourceArgs,
    /// Problems, JSONL
    #[arg(long)]
    pub data: PathBuf,
    /// Samples per problem
    #[arg(short, long, default_value_t = 1, value_parser = count)]
    pub n: usize,
    /// Reward that decides whether a sample is right (1) or not
    #[arg(long, default_value = "numeric_answer")]
    pub reward: String,
    /// Regular expression of the answer, as the key reward.answer_pattern; by default what stands in <answer>..</answer>
    /// or \boxed{..}, or after ####
    #[arg(long)]
    pub answer_pattern: Option<String>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

impl EvalArgs {
    /// Settings of the reward.
    pub fn reward_config(&self) -> RewardConfig {
        let mut config = RewardConfig::default();
        if let Some(pattern) = &self.answer_pattern {
            config.answer_pattern.clone_from(pattern);
        }
        config
    }
}

/// Which shape a model with random weights has; `tiny` if nothing is named.
#[derive(Debug, Clone, Args)]
#[command(rename_all = "snake_case")]
pub struct ModelArgs {
    /// A named shape, such as qwen2.5-1.5b
    #[arg(long = "model_preset", alias = "preset", conflicts_with = "config_json")]
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
    /// Where the model folder goes
    #[arg(long)]
    pub output: PathBuf,
    /// Write over a model that is there
    #[arg(long)]
    pub overwrite: bool,
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
    /// Where the folder goes
    #[arg(long)]
    pub output: PathBuf,
    /// Write a whole model, the adapters added to their base's weights
    #[arg(long)]
    pub merge: bool,
}

/// `report`.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// The run's output folder
    pub output_dir: PathBuf,
}

/// `bench`.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Tokens per second of forward, backward and AdamW on packed random sequences
    Train(BenchTrainArgs),
    /// Tokens per second of the generation engine on random prompts
    Generate(BenchGenerateArgs),
    /// The decode step's kernels, each against the bytes that it must move; needs a GPU
    Kernels(BenchKernelsArgs),
    /// Whole GRPO steps of the trainer: colo-grpo bench step --preset tiny --prompts 8 zero.stage=3 beta=0.04
    Step(BenchStepArgs),
    /// Memory given back and taken again on all ranks at once; copies to the host and back
    #[command(name = "sleep_wake", alias = "sleep-wake")]
    SleepWake(BenchSleepWakeArgs),
    /// Bandwidth of collectives by operation and size
    Collectives(BenchCollectivesArgs),
    /// Lines of `bench step` side by side: a table, a picture, and what they say of more GPUs
    Compare(BenchCompareArgs),
}

/// `bench compare`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct BenchCompareArgs {
    /// What `bench step` printed, a line each
    pub results: PathBuf,
    /// Folder for compare.json, compare.svg and curves.svg
    #[arg(long)]
    pub output: PathBuf,
    /// A run whose rewards are drawn: label=metrics.jsonl; may be repeated
    #[arg(long = "curve", value_parser = labelled)]
    pub curves: Vec<(String, PathBuf)>,
}

fn labelled(text: &str) -> Result<(String, PathBuf), String> {
    let (label, path) = text.split_once('=').ok_or("expected label=metrics.jsonl")?;
    Ok((label.to_owned(), path.into()))
}

/// `bench train`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct BenchTrainArgs {
    #[command(flatten)]
    pub launch: LaunchArgs,
    #[command(flatten)]
    pub place: PlaceArgs,
    #[command(flatten)]
    pub model: ModelArgs,
    /// Sequences per rank and step
    #[arg(long, default_value_t = 64, value_parser = count)]
    pub sequences: usize,
    /// Tokens per sequence, half of them scored; at least 2
    #[arg(long, default_value_t = 64, value_parser = number(|len: &usize| *len >= 2, "at least 2"))]
    pub sequence_len: usize,
    /// Tokens per prompt instead of half of the sequence
    #[arg(long, value_parser = count)]
    pub prompt_len: Option<usize>,
    /// Tokens per completion, all of them scored, instead of half of the sequence
    #[arg(long, value_parser = count)]
    pub completion_len: Option<usize>,
    /// Tokens per completion drawn from a range instead, such as 512..4096, or tail:512..4096 for few long ones
    #[arg(long, value_parser = spread)]
    pub completion_spread: Option<LengthSpread>,
    /// Neighbouring sequences that have one prompt
    #[arg(long, default_value_t = 1, value_parser = count)]
    pub group: usize,
    /// Run the prompt of a group once
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    pub share_prompts: bool,
    /// Token budget of a micro-batch
    #[arg(long, default_value_t = 4096, value_parser = count)]
    pub max_tokens_per_micro_batch: usize,
    /// ZeRO stage
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(0..=3))]
    pub zero_stage: u8,
    /// Ranks that share one copy of what the stage shards, instead of all: hybrid sharding
    #[arg(long, value_parser = count)]
    pub shard_group_size: Option<usize>,
    /// Type that ranks send gradients in
    #[arg(long, default_value = "auto", value_parser = word::<Dtype>)]
    pub reduce_dtype: Dtype,
    /// Type that gradients are added up in over micro-batches
    #[arg(long, default_value = "auto", value_parser = word::<Dtype>)]
    pub grad_accum_dtype: Dtype,
    /// Train adapters of this rank on every linear projection instead of all weights
    #[arg(long, value_parser = count)]
    pub lora_r: Option<usize>,
    /// How the adapters' base is stored: none or nf4
    #[arg(long, default_value = "none", value_parser = word::<Quantization>)]
    pub quantization: Quantization,
    /// What backward computes again
    #[arg(long, default_value = "none", value_parser = word::<GradientCheckpointing>)]
    pub gradient_checkpointing: GradientCheckpointing,
    /// Blocks, instead of the model's own number: a large model's rate from a few of its blocks
    #[arg(long, value_parser = count)]
    pub layers: Option<usize>,
    /// Log-probabilities alone: no backward, no step
    #[arg(long)]
    pub score: bool,
    /// Times of one step's operations on a GPU by family, beside their floors
    #[arg(long)]
    pub profile: bool,
    /// Timed steps; the median is printed
    #[arg(long, default_value_t = 10, value_parser = count)]
    pub steps: usize,
}

/// `bench generate`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct BenchGenerateArgs {
    #[command(flatten)]
    pub launch: LaunchArgs,
    #[command(flatten)]
    pub place: PlaceArgs,
    #[command(flatten)]
    pub model: ModelArgs,
    /// Prompts per rank
    #[arg(long, default_value_t = 16, value_parser = count)]
    pub prompts: usize,
    /// Completions per prompt
    #[arg(long, default_value_t = 8, value_parser = count)]
    pub group: usize,
    /// Tokens per prompt
    #[arg(long, default_value_t = 16, value_parser = count)]
    pub prompt_len: usize,
    /// Tokens per completion, exactly
    #[arg(long, default_value_t = 32, value_parser = count)]
    pub completion_len: usize,
    /// Tokens per completion drawn from a range instead: 512..4096, or tail:512..4096 for as many from every doubling
    #[arg(long, value_parser = spread)]
    pub completion_spread: Option<LengthSpread>,
    /// Most sequences decoded at once; 0: all
    #[arg(long, default_value_t = 0)]
    pub max_num_seqs: usize,
    /// One algorithm of products and one split of attention for every batch size
    #[arg(long)]
    pub strict: bool,
    /// Time of every operation of a decode step at every batch size
    #[arg(long)]
    pub profile: bool,
    /// Ranks that share one engine
    #[arg(long, visible_alias = "tp", default_value_t = 1, value_parser = count)]
    pub tensor_parallel_size: usize,
    /// Timed repetitions; the median is printed
    #[arg(long, default_value_t = 3, value_parser = count)]
    pub repeats: usize,
}

/// `bench kernels`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct BenchKernelsArgs {
    #[command(flatten)]
    pub place: PlaceArgs,
    #[command(flatten)]
    pub model: ModelArgs,
    /// Sequences of a step
    #[arg(long, default_value_t = 256, value_parser = count)]
    pub rows: usize,
    /// Tokens of every sequence
    #[arg(long, default_value_t = 1024, value_parser = count)]
    pub context: usize,
    /// Sequences that share a prompt
    #[arg(long, default_value_t = 8, value_parser = count)]
    pub group: usize,
    /// Tokens of the prompt that they share
    #[arg(long, default_value_t = 512)]
    pub prompt_len: usize,
}

/// `bench step`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct BenchStepArgs {
    #[command(flatten)]
    pub launch: LaunchArgs,
    #[command(flatten)]
    pub model: ModelArgs,
    /// Prompts per step, over all ranks
    #[arg(long, default_value_t = 16, value_parser = count)]
    pub prompts: usize,
    /// Completions per prompt
    #[arg(long, default_value_t = 8, value_parser = number(|group: &usize| *group >= 2, "at least 2"))]
    pub group: usize,
    /// Tokens per prompt
    #[arg(long, default_value_t = 16, value_parser = count)]
    pub prompt_len: usize,
    /// Tokens per completion, exactly
    #[arg(long, default_value_t = 32, value_parser = count)]
    pub completion_len: usize,
    /// Tokens per completion drawn from a range instead: 512..4096, or tail:512..4096 for as many from every doubling
    #[arg(long, value_parser = spread)]
    pub completion_spread: Option<LengthSpread>,
    /// Timed steps; medians are printed
    #[arg(long, default_value_t = 5, value_parser = count)]
    pub steps: usize,
    /// Any configuration key: key=value, section.key=value (also --section.key value)
    pub overrides: Vec<String>,
}

/// `bench sleep_wake`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct BenchSleepWakeArgs {
    #[command(flatten)]
    pub launch: LaunchArgs,
    #[command(flatten)]
    pub place: PlaceArgs,
    /// Memory that sleeps and wakes on each rank, in GiB
    #[arg(long, default_value_t = 1.0, value_parser = number(|gib: &f64| *gib >= 0.001, "at least 0.001"))]
    pub gib: f64,
    /// State that is copied to the host and back on each rank, in GiB
    #[arg(long, default_value_t = 1.0, value_parser = number(|gib: &f64| *gib >= 0.001, "at least 0.001"))]
    pub offload_gib: f64,
    /// Times that it sleeps and wakes
    #[arg(long, default_value_t = 20, value_parser = count)]
    pub cycles: usize,
}

/// `bench collectives`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct BenchCollectivesArgs {
    #[command(flatten)]
    pub launch: LaunchArgs,
    #[command(flatten)]
    pub place: PlaceArgs,
    /// Largest tensor, in MiB
    #[arg(long, default_value_t = 1024)]
    #[arg(value_parser = number(|mib: &usize| (1..=1 << 20).contains(mib), "1 to 1048576"))]
    pub max_mib: usize,
}

/// A word that a configuration key takes.
fn word<T: serde::de::DeserializeOwned>(text: &str) -> Result<T, String> {
    serde_json::from_value(text.into()).map_err(|error| error.to_string())
}

/// A range of lengths, both ends included.
fn spread(text: &str) -> Result<LengthSpread, String> {
    let (long_tailed, range) = text.strip_prefix("tail:").map_or((false, text), |range| (true, range));
    let ends = range.split_once("..").and_then(|(low, high)| Some((low.parse().ok()?, high.parse().ok()?)));
    let ends = ends.filter(|(low, high): &(usize, usize)| (1..=*high).contains(low));
    let (shortest, longest) = ends.ok_or("expected a range such as 512..4096 or tail:512..4096")?;
    Ok(LengthSpread { shortest, longest, long_tailed })
}

/// A number of which there must be one.
fn count(text: &str) -> Result<usize, String> {
    number(|count: &usize| *count >= 1, "at least 1")(text)
}

fn number<T: std::str::FromStr>(
    holds: fn(&T) -> bool,
    expected: &'static str,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync {
    move |text| text.parse().ok().filter(holds).ok_or_else(|| format!("expected {expected}"))
}

const SUBCOMMANDS: &[&str] = &[
    "train",
    "sft",
    "generate",
    "eval",
    "init",
    "export",
    "plan",
    "report",
    "bench",
    reward::code::SANDBOX_COMMAND,
    "help",
];
/// The options of commands that take overrides; every other `--name` is a configuration key.
const RUN_OPTIONS: &[&str] =
    &["config", "nproc", "nproc_per_node", "num_processes", "master_addr", "master_port", "help", "version"];

/// The further options of `bench step`, which takes overrides too.
const STEP_OPTIONS: &[&str] = &[
    "model_preset",
    "preset",
    "config_json",
    "prompts",
    "group",
    "prompt_len",
    "completion_len",
    "completion_spread",
    "steps",
];

/// Makes `train` the default, turns `--a.b c` of a configuration key into the override `a.b=c` (`--key` alone into
/// `key=true`), and takes hyphens for underscores in names.
pub fn normalise(argv: Vec<String>) -> Vec<String> {
    let mut rest = argv.into_iter().peekable();
    let mut out: Vec<String> = rest.next().into_iter().collect();
    let Some(first) = rest.peek() else {
        out.push("--help".into());
        return out;
    };
    let meta = ["-h", "--help", "-V", "--version"].contains(&first.as_str());
    let named = SUBCOMMANDS.contains(&first.as_str());
    let mut takes_overrides = !meta && (!named || ["train", "sft", "plan"].contains(&first.as_str()));
    let mut own_options = RUN_OPTIONS.to_vec();
    if !meta && !named {
        out.push("train".into());
    } else if first == "bench" {
        out.extend(rest.next());
        takes_overrides = rest.peek().is_some_and(|bench| bench == "step");
        own_options.extend(STEP_OPTIONS);
    }
    while let Some(argument) = rest.next() {
        let Some(option) = argument.strip_prefix("--") else {
            out.push(argument);
            continue;
        };
        let (name, value) =
            option.split_once('=').map_or((option, None), |(name, value)| (name, Some(value.to_owned())));
        let name = name.replace('-', "_");
        if takes_overrides && !own_options.contains(&name.as_str()) {
            let name = key_of(name);
            // An option or an override that follows is not this one's value: `--flag key=value`.
            let is_value = |next: &String| !next.starts_with("--") && !is_override(next);
            let value = value.or_else(|| rest.next_if(is_value));
            out.push(format!("{name}={}", value.as_deref().unwrap_or("true")));
        } else {
            out.push(format!("--{name}{}", value.map(|value| format!("={value}")).unwrap_or_default()));
        }
    }
    out
}

/// The configuration key that an option names: `--zero_stage` is `zero.stage`, `--tp` the tensor-parallel size.
fn key_of(option: String) -> String {
    let dotted = option.replacen('_', ".", 1);
    match option.as_str() {
        "tp" => "tensor_parallel_size".to_owned(),
        _ if Config::keys().contains(&dotted) => dotted,
        _ => option,
    }
}

/// Whether a word is `key=value` of a configuration key.
fn is_override(word: &str) -> bool {
    let key = word.split_once('=').map(|(key, _)| key);
    key.is_some_and(|key| Config::keys().iter().chain(&SftConfig::keys()).any(|known| known == key))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn normalised(line: &str) -> String {
        normalise(line.split(' ').map(str::to_owned).collect()).join(" ")
    }

    #[test]
    fn train_is_the_default_and_dotted_options_are_overrides() {
        assert_eq!(
            normalised("colo-grpo --nproc 8 --config a.toml --zero.stage 3 --learning_rate=1e-5 beta=0.1"),
            "colo-grpo train --nproc 8 --config a.toml zero.stage=3 learning_rate=1e-5 beta=0.1"
        );
        assert_eq!(
            normalised("colo-grpo plan --log-completions --max-steps 3 --learnign_rate 1 --nproc-per-node=2"),
            "colo-grpo plan log_completions=true max_steps=3 learnign_rate=1 --nproc_per_node=2"
        );
        assert_eq!(normalised("colo-grpo --log_completions beta=1"), "colo-grpo train log_completions=true beta=1");
        assert_eq!(normalised("colo-grpo"), "colo-grpo --help");
        assert_eq!(
            normalised("colo-grpo bench step --preset tiny --nproc 2 --tp 2 --zero-stage 3 --residency-optimizer swap"),
            "colo-grpo bench step --preset tiny --nproc 2 tensor_parallel_size=2 zero.stage=3 residency.optimizer=swap"
        );
        assert_eq!(normalised("colo-grpo bench train --zero-stage 3"), "colo-grpo bench train --zero_stage 3");
        assert_eq!(normalised("colo-grpo eval --top-p 1 -n 2"), "colo-grpo eval --top_p 1 -n 2");
    }

    #[test]
    fn the_command_line_is_well_formed() {
        use clap::CommandFactory;
        let mut command = Cli::command();
        command.build();
        let names: Vec<String> = command.get_subcommands().map(|known| known.get_name().to_owned()).collect();
        assert_eq!(names, SUBCOMMANDS);
        let train = command.find_subcommand("train").unwrap();
        let longs = train.get_arguments().flat_map(|known| known.get_long_and_visible_aliases().unwrap_or_default());
        longs.for_each(|long| assert!(RUN_OPTIONS.contains(&long), "{long}"));
        command.debug_assert();
    }
}
