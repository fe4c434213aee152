//! The command line as the user may write it.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::config::{Config, GradientCheckpointing, RewardConfig, SftConfig};

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
    /// avg@n and pass@k of a model folder on a file of problems
    Eval(EvalArgs),
    /// Make a model folder with random weights, from a preset or a config.json
    Init(InitArgs),
    /// Bytes of every class in every phase of a run, before it starts
    Plan(RunArgs),
    /// Write report.html of a run's output folder again
    Report(ReportArgs),
    /// Benchmarks; each prints one JSON line
    #[command(subcommand)]
    Bench(BenchCommand),
}

/// How many processes, and where they meet.
#[derive(Debug, Clone, Args)]
pub struct LaunchArgs {
    /// Processes to start, one per GPU; ignored where RANK and WORLD_SIZE are set (torchrun, srun, operators)
    #[arg(long, visible_aliases = ["nproc_per_node", "num_processes"], default_value_t = 1)]
    pub nproc: usize,
    /// Port of the rendezvous store on the loopback; another is chosen if none is given
    #[arg(long, alias = "master-port")]
    pub master_port: Option<u16>,
}

/// A run described by a configuration file.
#[derive(Debug, Args)]
pub struct RunArgs {
    #[command(flatten)]
    pub launch: LaunchArgs,
    /// Configuration, TOML or YAML
    #[arg(long)]
    pub config: Option<PathBuf>,
    /// Overrides: key=value, section.key=value (also --section.key value)
    pub overrides: Vec<String>,
}

/// How tokens are drawn.
#[derive(Debug, Clone, Args)]
pub struct SamplingArgs {
    /// Softmax temperature; 0 is greedy
    #[arg(long, default_value_t = 1.0)]
    pub temperature: f32,
    /// Nucleus mass; 1 is off
    #[arg(long, default_value_t = 1.0)]
    pub top_p: f32,
    /// Highest logits kept; 0 is off
    #[arg(long, default_value_t = 0)]
    pub top_k: usize,
    /// Longest completion in tokens
    #[arg(long, default_value_t = 512)]
    pub max_completion_length: usize,
    /// First word of every random key
    #[arg(long, default_value_t = 42)]
    pub seed: u64,
    /// Ranks that share one engine
    #[arg(long, visible_alias = "tp", default_value_t = 1)]
    pub tensor_parallel_size: usize,
}

/// `generate`.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    #[command(flatten)]
    pub launch: LaunchArgs,
    /// Model folder
    #[arg(long)]
    pub model: PathBuf,
    /// The prompt; may be repeated
    #[arg(long, required = true)]
    pub prompt: Vec<String>,
    /// Put each prompt through the chat template as a user's message
    #[arg(long)]
    pub chat: bool,
    /// Completions per prompt
    #[arg(short, long, default_value_t = 1)]
    pub n: usize,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

/// `eval`.
#[derive(Debug, Args)]
pub struct EvalArgs {
    #[command(flatten)]
    pub launch: LaunchArgs,
    /// Model folder
    #[arg(long)]
    pub model: PathBuf,
    /// Problems, JSONL
    #[arg(long)]
    pub data: PathBuf,
    /// Samples per problem
    #[arg(short, long, default_value_t = 1)]
    pub n: usize,
    /// Reward that decides whether a sample is right (1) or not
    #[arg(long, default_value = "numeric_answer")]
    pub reward: String,
    /// Regular expression of the answer, as the key reward.answer_pattern
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
pub struct ModelArgs {
    /// A named shape, such as qwen2.5-1.5b
    #[arg(long = "model-preset", alias = "preset", conflicts_with = "config_json")]
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
pub struct InitArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Folder whose tokenizer files are copied
    #[arg(long)]
    pub tokenizer: Option<PathBuf>,
    /// Where the model folder goes
    #[arg(long)]
    pub output: PathBuf,
    /// Key of the random weights
    #[arg(long, default_value_t = 42)]
    pub seed: u64,
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
}

/// `bench train`.
#[derive(Debug, Args)]
pub struct BenchTrainArgs {
    #[command(flatten)]
    pub launch: LaunchArgs,
    #[command(flatten)]
    pub model: ModelArgs,
    /// Sequences per rank and step
    #[arg(long, default_value_t = 64)]
    pub sequences: usize,
    /// Tokens per sequence, half of them scored
    #[arg(long, default_value_t = 64)]
    pub sequence_len: usize,
    /// Token budget of a micro-batch
    #[arg(long, default_value_t = 4096)]
    pub max_tokens_per_micro_batch: usize,
    /// ZeRO stage
    #[arg(long, default_value_t = 2)]
    pub zero_stage: u8,
    /// What backward computes again
    #[arg(long, default_value = "none", value_parser = recomputation)]
    pub gradient_checkpointing: GradientCheckpointing,
    /// Timed steps; the median is printed
    #[arg(long, default_value_t = 10)]
    pub steps: usize,
}

/// `bench generate`.
#[derive(Debug, Args)]
pub struct BenchGenerateArgs {
    #[command(flatten)]
    pub launch: LaunchArgs,
    #[command(flatten)]
    pub model: ModelArgs,
    /// Prompts per rank
    #[arg(long, default_value_t = 16)]
    pub prompts: usize,
    /// Completions per prompt
    #[arg(long, default_value_t = 8)]
    pub group: usize,
    /// Tokens per prompt
    #[arg(long, default_value_t = 16)]
    pub prompt_len: usize,
    /// Tokens per completion, exactly
    #[arg(long, default_value_t = 32)]
    pub completion_len: usize,
    /// Ranks that share one engine
    #[arg(long, visible_alias = "tp", default_value_t = 1)]
    pub tensor_parallel_size: usize,
    /// Timed repetitions; the median is printed
    #[arg(long, default_value_t = 3)]
    pub repeats: usize,
}

fn recomputation(text: &str) -> Result<GradientCheckpointing, String> {
    serde_json::from_value(text.into()).map_err(|_| format!("one of {}", GradientCheckpointing::NAMES.join(", ")))
}

const SUBCOMMANDS: &[&str] = &["train", "sft", "generate", "eval", "init", "plan", "report", "bench", "help"];

/// Makes `train` the default and turns `--a.b c` or `--key c` of a configuration key into the override `a.b=c`.
pub fn normalise(argv: Vec<String>) -> Vec<String> {
    let mut arguments = argv.into_iter();
    let mut out: Vec<String> = arguments.next().into_iter().collect();
    let mut rest = arguments.peekable();
    let first = rest.peek().map(String::as_str).unwrap_or("--help");
    let meta = ["-h", "--help", "-V", "--version"].contains(&first);
    let named = SUBCOMMANDS.contains(&first);
    if !meta && !named {
        out.push("train".into());
    }
    let takes_overrides = !meta && (!named || ["train", "sft", "plan"].contains(&first));
    if rest.peek().is_none() {
        out.retain(|argument| argument != "train");
        out.push("--help".into());
    }
    while let Some(argument) = rest.next() {
        let key = argument.strip_prefix("--").filter(|_| takes_overrides);
        let is_key = |key: &str| {
            let name = key.split('=').next().unwrap_or(key);
            name.contains('.') || Config::keys().iter().chain(&SftConfig::keys()).any(|key| key == name)
        };
        match key.filter(|key| is_key(key)) {
            Some(key) if key.contains('=') => out.push(key.to_owned()),
            Some(key) => out.push(format!("{key}={}", rest.next().unwrap_or_default())),
            None => out.push(argument),
        }
    }
    out
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
        assert_eq!(normalised("colo-grpo"), "colo-grpo --help");
        assert_eq!(normalised("colo-grpo eval --temperature 0"), "colo-grpo eval --temperature 0");
    }

    #[test]
    fn the_command_line_is_well_formed() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }
}
