//! The arguments of `bench`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{
    FormatArgs, LaunchArgs, ModelArgs, PipelineArgs, PlaceArgs, Placed, ResidualArgs, SpeculationArgs, count, number,
    word,
};
use crate::bench::{BenchRouting, LengthSpread};
use crate::config::{Dtype, GradientCheckpointing, MixedPrecision, OptimizerName, Quantization, Speculation};
use crate::types::SamplingParams;

/// `bench`.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Tokens per second of forward, backward and AdamW on packed random sequences
    Train(Placed<BenchTrainArgs>),
    /// Tokens per second of the generation engine on random prompts
    Generate(Placed<BenchGenerateArgs>),
    /// Streams over HTTP beside closed batches of the bare engine, and the time to the first token
    Serve(Placed<BenchServeArgs>),
    /// The decode step's kernels, each against the bytes that it must move; needs a GPU
    Kernels(BenchKernelsArgs),
    /// Whole GRPO steps of the trainer: colo-grpo bench step --preset tiny --prompts 8 zero.stage=3 beta=0.04
    Step(BenchStepArgs),
    /// Memory given back and taken again on all ranks at once; copies to the host and back
    #[command(name = "sleep_wake", alias = "sleep-wake")]
    SleepWake(Placed<BenchSleepWakeArgs>),
    /// Whole rollouts of a model's own text with draft tokens and without; all processes share one engine
    Speculation(Placed<BenchSpeculationArgs>),
    /// Bandwidth of collectives by operation and size
    Collectives(Placed<BenchCollectivesArgs>),
    /// Lines of `bench step` side by side: a table, a picture, and what they say of more GPUs
    Compare(BenchCompareArgs),
}

/// `bench compare`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct BenchCompareArgs {
    /// Results of `bench step`, a line each
    pub results: PathBuf,
    /// Folder for compare.json, compare.svg and curves.svg
    #[arg(long)]
    pub output: PathBuf,
    /// A run whose rewards are drawn: label=metrics.jsonl; may be repeated
    #[arg(long = "curve", value_parser = labelled)]
    pub curves: Vec<(String, PathBuf)>,
}

/// `bench train`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct BenchTrainArgs {
    #[command(flatten)]
    pub residual: ResidualArgs,
    #[command(flatten)]
    pub model: ModelArgs,
    /// Sequences per rank and step, or of ranks that share micro-batches
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
    /// Draw lengths anew for every step, as in training: what libtorch keeps for ever other sizes shows in peak_reserved_bytes
    #[arg(long, requires = "completion_spread")]
    pub redraw: bool,
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
    /// Ranks that share each micro-batch, every one with a part of its tokens
    #[arg(long, default_value_t = 1, value_parser = count)]
    pub sequence_parallel_size: usize,
    /// Type that ranks send gradients in
    #[arg(long, default_value = "auto", value_parser = word::<Dtype>)]
    pub reduce_dtype: Dtype,
    /// Type that gradients are added up in over micro-batches
    #[arg(long, default_value = "auto", value_parser = word::<Dtype>)]
    pub grad_accum_dtype: Dtype,
    /// Optimizer: adamw, adamw_8bit or muon
    #[arg(long, default_value = "adamw", value_parser = word::<OptimizerName>)]
    pub optim: OptimizerName,
    /// Train adapters of this rank on every linear projection instead of all weights
    #[arg(long, value_parser = count)]
    pub lora_r: Option<usize>,
    /// How the adapters' base is stored: none or nf4
    #[arg(long, default_value = "none", value_parser = word::<Quantization>)]
    #[arg(requires_if("nf4", "lora_r"))]
    pub quantization: Quantization,
    /// Precision of products of blocks, forward and for the gradients of their inputs: none (that of dtype) or fp8
    #[arg(long, default_value = "none", value_parser = word::<MixedPrecision>)]
    pub mixed_precision: MixedPrecision,
    /// How tokens choose among experts: own (by the random router), uniform, or zipf (the n-th most popular 1 / n as often as the first)
    #[arg(long, default_value = "own", value_parser = word::<BenchRouting>)]
    pub routing: BenchRouting,
    /// The activations that backward computes again
    #[arg(long, default_value = "none", value_parser = word::<GradientCheckpointing>)]
    pub gradient_checkpointing: GradientCheckpointing,
    /// Keep inputs of blocks, and attention's outputs, in pinned host memory until backward; with full or keep_attention
    #[arg(long)]
    pub activation_offload: bool,
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
    /// Most sequences decoded at once; 0: all
    #[arg(long, default_value_t = 0)]
    pub max_num_seqs: usize,
    /// Put adapters of this rank, of random values, on every linear projection
    #[arg(long, value_parser = count)]
    pub lora_r: Option<usize>,
    /// One algorithm of products and one split of attention for every batch size
    #[arg(long)]
    pub strict: bool,
    /// Rows with the bits that training gives them, as with the key `exact`; the engine is strict, too
    #[arg(long)]
    pub exact: bool,
    #[command(flatten)]
    pub formats: FormatArgs,
    #[command(flatten)]
    pub speculation: SpeculationArgs,
    /// Share of draft tokens that are taken for drawn, as in a run on real text; random weights' own texts repeat nothing
    #[arg(long, value_parser = number(|share: &f64| (0.0..=1.0).contains(share), "from 0 to 1"))]
    pub replayed_acceptance: Option<f64>,
    /// Decode steps over made-up batches alone, on a GPU: nothing is generated, so that long contexts cost no prefill
    #[arg(long)]
    pub steps_only: bool,
    /// Time of every operation of a decode step at every batch size, and its launches with the gaps between them; at the largest also its
    /// energy, under lasting load
    #[arg(long)]
    pub profile: bool,
    /// Ranks that share one engine
    #[arg(long, visible_alias = "tp", default_value_t = 1, value_parser = count)]
    pub tensor_parallel_size: usize,
    #[command(flatten)]
    pub pipeline: PipelineArgs,
    /// Each of them has some experts whole, of a model with experts
    #[arg(long)]
    pub enable_expert_parallel: bool,
    /// Timed repetitions; the median is printed
    #[arg(long, default_value_t = 3, value_parser = count)]
    pub repeats: usize,
}

/// `bench speculation`.
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
    /// Ways to draft, side by side; the others are compared with the first
    #[arg(long, value_delimiter = ',', default_values = ["none", "ngram", "auto"], value_parser = word::<Speculation>)]
    pub methods: Vec<Speculation>,
    /// Most draft tokens of a completion in one step
    #[arg(long, default_value_t = 7, value_parser = number(|count: &usize| (1..=64).contains(count), "from 1 to 64"))]
    pub num_speculative_tokens: usize,
    /// Completions of a rollout, each number measured apart
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8, 64, 256], value_parser = count)]
    pub sequences: Vec<usize>,
    /// Completions per prompt
    #[arg(long, default_value_t = 8, value_parser = count)]
    pub group: usize,
    /// Longest completion in tokens
    #[arg(long, default_value_t = 512, value_parser = count)]
    pub max_completion_length: usize,
    /// Softmax temperature; 0 is greedy
    #[arg(long, default_value_t = 1.0)]
    #[arg(value_parser = number(|t: &f32| SamplingParams::is_temperature(*t), "0 (greedy) or at least 0.000001"))]
    pub temperature: f32,
    /// Every rollout has the same rows, as later epochs have: completions of earlier ones are drafted from
    #[arg(long)]
    pub same_rows: bool,
    /// Timed rollouts, after one that is not
    #[arg(long, default_value_t = 3, value_parser = count)]
    pub repeats: usize,
}

/// `bench serve`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct BenchServeArgs {
    #[command(flatten)]
    pub residual: ResidualArgs,
    #[command(flatten)]
    pub model: ModelArgs,
    /// Streams at once, each number measured apart
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8, 64, 200], value_parser = count)]
    pub streams: Vec<usize>,
    /// Tokens per prompt
    #[arg(long, default_value_t = 16, value_parser = count)]
    pub prompt_len: usize,
    /// Tokens per completion
    #[arg(long, default_value_t = 32, value_parser = count)]
    pub completion_len: usize,
    /// Timed repetitions; medians are printed
    #[arg(long, default_value_t = 3, value_parser = count)]
    pub repeats: usize,
}

/// Lengths of what is sampled.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct LengthArgs {
    /// Tokens per prompt
    #[arg(long, default_value_t = 16, value_parser = count)]
    pub prompt_len: usize,
    /// Tokens per completion, exactly
    #[arg(long, default_value_t = 32, value_parser = count)]
    pub completion_len: usize,
    /// Tokens per completion drawn from a range instead: 512..4096, or tail:512..4096 for as many from every doubling
    #[arg(long, value_parser = spread)]
    pub completion_spread: Option<LengthSpread>,
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
    #[command(flatten)]
    pub lengths: LengthArgs,
    /// Timed steps; medians are printed
    #[arg(long, default_value_t = 5, value_parser = count)]
    pub steps: usize,
    /// Most tokens of a completion in the untimed first step, which warms up; as in the timed steps unless set
    #[arg(long, value_parser = count)]
    pub warm_up_len: Option<usize>,
    /// Any configuration key: key=value, section.key=value (also --section.key value)
    pub overrides: Vec<String>,
}

/// `bench sleep_wake`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct BenchSleepWakeArgs {
    /// Memory that sleeps and wakes on each rank, in GiB
    #[arg(long, default_value_t = 1.0, value_parser = number(|gib: &f64| *gib >= 0.001, "at least 0.001"))]
    pub gib: f64,
    /// State that is copied to the host and back on each rank, in GiB
    #[arg(long, default_value_t = 1.0, value_parser = number(|gib: &f64| *gib >= 0.001, "at least 0.001"))]
    pub offload_gib: f64,
    /// Times that it sleeps and wakes
    #[arg(long, default_value_t = 20, value_parser = count)]
    pub cycles: usize,
    /// How long the memory lies idle before it wakes, in milliseconds; a driver clears what it got back meanwhile
    #[arg(long, default_value_t = 0)]
    pub rest_ms: u64,
}

/// `bench collectives`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct BenchCollectivesArgs {
    /// Largest tensor, in MiB
    #[arg(long, default_value_t = 1024)]
    #[arg(value_parser = number(|mib: &usize| (1..=1 << 20).contains(mib), "1 to 1048576"))]
    pub max_mib: usize,
}

fn labelled(text: &str) -> Result<(String, PathBuf), String> {
    let (label, path) = text.split_once('=').ok_or("expected label=metrics.jsonl")?;
    Ok((label.to_owned(), path.into()))
}

/// A range of lengths, both ends included.
fn spread(text: &str) -> Result<LengthSpread, String> {
    let (long_tailed, range) = text.strip_prefix("tail:").map_or((false, text), |range| (true, range));
    let ends = range.split_once("..").and_then(|(low, high)| Some((low.parse().ok()?, high.parse().ok()?)));
    let ends = ends.filter(|(low, high): &(usize, usize)| (1..=*high).contains(low));
    let (shortest, longest) = ends.ok_or("expected a range such as 512..4096 or tail:512..4096")?;
    Ok(LengthSpread { shortest, longest, long_tailed })
}
