//! The arguments of `bench`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{
    FormatArgs, LaunchArgs, MOST_TOKENS, ModelArgs, PipelineArgs, PlaceArgs, Placed, ResidualArgs, SpeculationArgs,
    count, number, streams, tokens, word,
};
use crate::bench::{BenchRouting, LengthSpread};
use crate::config::{Dtype, GradientCheckpointing, MixedPrecision, OptimizerName, Quantization, Speculation};
use crate::types::SamplingParams;

/// The benchmarks.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Tokens per second of forward, backward and AdamW on packed random sequences
    Train(Placed<BenchTrainArgs>),
    /// Tokens per second of the generation engine on random prompts
    Generate(Placed<BenchGenerateArgs>),
    /// Concurrent HTTP streams against plain batches of the engine, and the time to the first token
    Serve(Placed<BenchServeArgs>),
    /// The kernels of a decode step, each compared with the bytes that it must move; needs a GPU
    Kernels(BenchKernelsArgs),
    /// Whole GRPO steps of the trainer: colo-grpo bench step --preset tiny --prompts 8 zero.stage=3 beta=0.04
    Step(BenchStepArgs),
    /// Freeing and mapping memory on all ranks at once, and copies to the host and back
    #[command(name = "sleep_wake", alias = "sleep-wake")]
    SleepWake(Placed<BenchSleepWakeArgs>),
    /// Whole rollouts with and without speculative decoding; all processes share one engine
    Speculation(Placed<BenchSpeculationArgs>),
    /// Bandwidth of collectives, by operation and size
    Collectives(Placed<BenchCollectivesArgs>),
    /// Compare results of `bench step`: a table, a chart, and a prediction for more GPUs
    Compare(BenchCompareArgs),
}

/// Arguments of `bench compare`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct BenchCompareArgs {
    /// Results of `bench step`, one line each
    pub results: PathBuf,
    /// Folder for compare.json, compare.svg and curves.svg
    #[arg(long)]
    pub output: PathBuf,
    /// A run whose reward curve is plotted: label=metrics.jsonl; may be repeated
    #[arg(long = "curve", value_parser = labelled)]
    pub curves: Vec<(String, PathBuf)>,
}

/// Arguments of `bench train`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct BenchTrainArgs {
    #[command(flatten)]
    pub residual: ResidualArgs,
    #[command(flatten)]
    pub model: ModelArgs,
    /// Sequences per rank and step (with sequence parallelism, per group of ranks)
    #[arg(long, default_value_t = 64, value_parser = count)]
    pub sequences: usize,
    /// Tokens per sequence, half of them scored; at least 2
    #[arg(long, default_value_t = 64, value_parser = number(|len: &usize| (2..=MOST_TOKENS).contains(len), "from 2 to 16777216"))]
    pub sequence_len: usize,
    /// Tokens per prompt instead of half of the sequence
    #[arg(long, value_parser = tokens)]
    pub prompt_len: Option<usize>,
    /// Tokens per completion, all of them scored, instead of half of the sequence
    #[arg(long, value_parser = tokens)]
    pub completion_len: Option<usize>,
    /// Random tokens per completion from a range instead, such as 512..4096, or tail:512..4096 for few long ones
    #[arg(long, value_parser = spread)]
    pub completion_spread: Option<LengthSpread>,
    /// Choose new random lengths for every step, as in training; shows in peak_reserved_bytes how much memory libtorch keeps for changing sizes
    #[arg(long, requires = "completion_spread")]
    pub redraw: bool,
    /// Number of neighbouring sequences that share a prompt
    #[arg(long, default_value_t = 1, value_parser = count)]
    pub group: usize,
    /// Compute the shared prompt of a group once
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    pub share_prompts: bool,
    /// Maximum number of tokens per micro-batch
    #[arg(long, default_value_t = 4096, value_parser = count)]
    pub max_tokens_per_micro_batch: usize,
    /// ZeRO stage
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(0..=3))]
    pub zero_stage: u8,
    /// Ranks that together hold one copy of the sharded state, instead of all ranks (hybrid sharding)
    #[arg(long, value_parser = count)]
    pub shard_group_size: Option<usize>,
    /// Ranks that share each micro-batch (sequence parallel size)
    #[arg(long, default_value_t = 1, value_parser = count)]
    pub sequence_parallel_size: usize,
    /// Dtype in which ranks reduce gradients
    #[arg(long, default_value = "auto", value_parser = word::<Dtype>)]
    pub reduce_dtype: Dtype,
    /// Dtype in which gradients are accumulated over micro-batches
    #[arg(long, default_value = "auto", value_parser = word::<Dtype>)]
    pub grad_accum_dtype: Dtype,
    /// Optimizer: adamw, adamw_8bit or muon
    #[arg(long, default_value = "adamw", value_parser = word::<OptimizerName>)]
    pub optim: OptimizerName,
    /// Train LoRA adapters of this rank on every linear projection instead of all weights
    #[arg(long, value_parser = count)]
    pub lora_r: Option<usize>,
    /// Storage of the frozen base below the adapters: none or nf4
    #[arg(long, default_value = "none", value_parser = word::<Quantization>)]
    #[arg(requires_if("nf4", "lora_r"))]
    pub quantization: Quantization,
    /// Precision of the GEMMs of blocks: none (that of dtype), fp8 (in forward and for input gradients) or fp8_all (for weight gradients, too)
    #[arg(long, default_value = "none", value_parser = word::<MixedPrecision>)]
    pub mixed_precision: MixedPrecision,
    /// How tokens are routed to experts: own (by the random router), uniform, or zipf (the n-th most popular expert 1 / n as often as the first)
    #[arg(long, default_value = "own", value_parser = word::<BenchRouting>)]
    pub routing: BenchRouting,
    /// Which activations backward recomputes
    #[arg(long, default_value = "none", value_parser = word::<GradientCheckpointing>)]
    pub gradient_checkpointing: GradientCheckpointing,
    /// Keep saved inputs of blocks and attention's outputs in pinned host memory until backward; with full or keep_attention
    #[arg(long)]
    pub activation_offload: bool,
    /// Number of blocks, instead of the model's: estimates a large model's speed from a few of its blocks
    #[arg(long, value_parser = count)]
    pub layers: Option<usize>,
    /// Only compute log-probabilities: no backward, no optimizer step
    #[arg(long)]
    pub score: bool,
    /// Times of one step's GPU operations by kind, with their lower bounds
    #[arg(long)]
    pub profile: bool,
    /// Number of timed steps; the median is printed
    #[arg(long, default_value_t = 10, value_parser = count)]
    pub steps: usize,
}

/// Arguments of `bench generate`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct BenchGenerateArgs {
    #[command(flatten)]
    pub residual: ResidualArgs,
    #[command(flatten)]
    pub model: ModelArgs,
    /// Prompts per rank
    #[arg(long, default_value_t = 16, value_parser = count)]
    pub prompts: usize,
    /// Completions per prompt
    #[arg(long, default_value_t = 8, value_parser = count)]
    pub group: usize,
    #[command(flatten)]
    pub lengths: LengthArgs,
    /// Maximum number of sequences decoded at once; 0: all
    #[arg(long, default_value_t = 0)]
    pub max_num_seqs: usize,
    /// Add random LoRA adapters of this rank to every linear projection
    #[arg(long, value_parser = count)]
    pub lora_r: Option<usize>,
    /// Use one GEMM algorithm and one attention split for every batch size
    #[arg(long)]
    pub strict: bool,
    /// Compute with the same bits as training, like the key `exact`; implies --strict
    #[arg(long)]
    pub exact: bool,
    #[command(flatten)]
    pub formats: FormatArgs,
    #[command(flatten)]
    pub speculation: SpeculationArgs,
    /// Fraction of draft tokens that count as accepted, as on real text; texts of random weights repeat nothing
    #[arg(long, value_parser = number(|share: &f64| (0.0..=1.0).contains(share), "from 0 to 1"))]
    pub replayed_acceptance: Option<f64>,
    /// Only decode steps over synthetic batches, on a GPU: long contexts then need no prefill
    #[arg(long)]
    pub steps_only: bool,
    /// Time of every operation of a decode step at every batch size; at the largest also its energy under sustained load
    #[arg(long)]
    pub profile: bool,
    /// Ranks that share one engine
    #[arg(long, visible_alias = "tp", default_value_t = 1, value_parser = count)]
    pub tensor_parallel_size: usize,
    #[command(flatten)]
    pub pipeline: PipelineArgs,
    /// In models with experts, give each rank whole experts
    #[arg(long)]
    pub enable_expert_parallel: bool,
    /// Number of timed repetitions; the median is printed
    #[arg(long, default_value_t = 3, value_parser = count)]
    pub repeats: usize,
}

/// Arguments of `bench speculation`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct BenchSpeculationArgs {
    #[command(flatten)]
    pub residual: ResidualArgs,
    /// Model folder
    #[arg(long)]
    pub model: PathBuf,
    /// File of rows with prompts: JSONL, JSON, Parquet or CSV
    #[arg(long)]
    pub rows: PathBuf,
    /// Speculation methods to compare with the first one, separated by commas
    #[arg(long, value_delimiter = ',', default_values = ["none", "ngram", "auto"], value_parser = word::<Speculation>)]
    pub methods: Vec<Speculation>,
    /// Maximum number of draft tokens per completion and step
    #[arg(long, default_value_t = 7, value_parser = number(|count: &usize| (1..=64).contains(count), "from 1 to 64"))]
    pub num_speculative_tokens: usize,
    /// Numbers of completions per rollout, each measured separately, separated by commas
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8, 64, 256], value_parser = count)]
    pub sequences: Vec<usize>,
    /// Completions per prompt
    #[arg(long, default_value_t = 8, value_parser = count)]
    pub group: usize,
    /// Maximum completion length in tokens
    #[arg(long, default_value_t = 512, value_parser = count)]
    pub max_completion_length: usize,
    /// Softmax temperature; 0 is greedy
    #[arg(long, default_value_t = 1.0)]
    #[arg(value_parser = number(|t: &f32| SamplingParams::is_temperature(*t), "0 (greedy) or at least 0.000001"))]
    pub temperature: f32,
    /// Use the same rows in every rollout, as in later epochs, so that drafts come from earlier completions
    #[arg(long)]
    pub same_rows: bool,
    /// Number of timed rollouts, after one warm-up
    #[arg(long, default_value_t = 3, value_parser = count)]
    pub repeats: usize,
}

/// Arguments of `bench serve`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct BenchServeArgs {
    #[command(flatten)]
    pub residual: ResidualArgs,
    #[command(flatten)]
    pub model: ModelArgs,
    /// Numbers of concurrent streams, each measured separately, separated by commas
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8, 64, 200], value_parser = streams)]
    pub streams: Vec<usize>,
    /// Tokens per prompt
    #[arg(long, default_value_t = 16, value_parser = tokens)]
    pub prompt_len: usize,
    /// Tokens per completion
    #[arg(long, default_value_t = 32, value_parser = tokens)]
    pub completion_len: usize,
    /// Number of timed repetitions; medians are printed
    #[arg(long, default_value_t = 3, value_parser = count)]
    pub repeats: usize,
}

/// Lengths of prompts and completions.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct LengthArgs {
    /// Tokens per prompt
    #[arg(long, default_value_t = 16, value_parser = tokens)]
    pub prompt_len: usize,
    /// Exact number of tokens per completion
    #[arg(long, default_value_t = 32, value_parser = tokens)]
    pub completion_len: usize,
    /// Random tokens per completion from a range instead: 512..4096, or tail:512..4096 with equally many from every doubling
    #[arg(long, value_parser = spread)]
    pub completion_spread: Option<LengthSpread>,
}

/// Arguments of `bench kernels`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct BenchKernelsArgs {
    #[command(flatten)]
    pub place: PlaceArgs,
    #[command(flatten)]
    pub model: ModelArgs,
    /// Number of sequences in a step
    #[arg(long, default_value_t = 256, value_parser = count)]
    pub rows: usize,
    /// Context length of every sequence in tokens
    #[arg(long, default_value_t = 1024, value_parser = count)]
    pub context: usize,
    /// Number of sequences that share a prompt
    #[arg(long, default_value_t = 8, value_parser = count)]
    pub group: usize,
    /// Length of the shared prompt in tokens
    #[arg(long, default_value_t = 512, value_parser = number(|len: &usize| *len <= MOST_TOKENS, "at most 16777216"))]
    pub prompt_len: usize,
}

/// Arguments of `bench step`.
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
    #[command(flatten)]
    pub lengths: LengthArgs,
    /// Number of timed steps; medians are printed
    #[arg(long, default_value_t = 5, value_parser = count)]
    pub steps: usize,
    /// Most tokens of a completion in the two untimed first steps, which warm up; as in the timed steps unless set
    #[arg(long, value_parser = count)]
    pub warm_up_len: Option<usize>,
    /// Any configuration key: key=value, section.key=value (or --section.key value)
    pub overrides: Vec<String>,
}

/// Arguments of `bench sleep_wake`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct BenchSleepWakeArgs {
    /// Memory that is freed and mapped again on each rank, in GiB
    #[arg(long, default_value_t = 1.0, value_parser = number(|gib: &f64| *gib >= 0.001, "at least 0.001"))]
    pub gib: f64,
    /// State that is copied to the host and back on each rank, in GiB
    #[arg(long, default_value_t = 1.0, value_parser = number(|gib: &f64| *gib >= 0.001, "at least 0.001"))]
    pub offload_gib: f64,
    /// Number of sleep and wake cycles
    #[arg(long, default_value_t = 20, value_parser = count)]
    pub cycles: usize,
    /// Pause between sleep and wake in milliseconds, in which the driver clears freed memory
    #[arg(long, default_value_t = 0)]
    pub rest_ms: u64,
}

/// Arguments of `bench collectives`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct BenchCollectivesArgs {
    /// Size of the largest tensor in MiB
    #[arg(long, default_value_t = 1024)]
    #[arg(value_parser = number(|mib: &usize| (1..=1 << 20).contains(mib), "1 to 1048576"))]
    pub max_mib: usize,
}

fn labelled(text: &str) -> Result<(String, PathBuf), String> {
    let (label, path) = text.split_once('=').ok_or("expected label=metrics.jsonl")?;
    Ok((label.to_owned(), path.into()))
}

/// Parses a range of lengths, both ends included.
fn spread(text: &str) -> Result<LengthSpread, String> {
    let (long_tailed, range) = text.strip_prefix("tail:").map_or((false, text), |range| (true, range));
    let ends = range.split_once("..").and_then(|(low, high)| Some((low.parse().ok()?, high.parse().ok()?)));
    let ends = ends.filter(|(low, high): &(usize, usize)| (1..=*high).contains(low));
    let (shortest, longest) = ends.ok_or("expected a range such as 512..4096 or tail:512..4096")?;
    Ok(LengthSpread { shortest, longest, long_tailed })
}
