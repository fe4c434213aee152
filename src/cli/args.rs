//! The command-line arguments.

mod bench;
mod model;
mod sample;
mod serve;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

pub use bench::*;
pub use model::*;
pub use sample::*;
pub use serve::*;

use crate::config::{Device, Dtype, WorldSize};
use crate::cuda::Capability;
use crate::error::{Error, Result};
use crate::launch::{self, LaunchOptions, OnStop};
use crate::plan::{CompletionLengths, Gpu};
use crate::reward;
use crate::tools;

/// Trains language models with GRPO: every GPU generates, then every GPU trains.
#[derive(Debug, Parser)]
#[command(name = "colo-grpo", version, max_term_width = 100)]
pub struct Cli {
    /// The command; `train` by default.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train with GRPO (the default): colo-grpo --nproc 8 --config run.toml learning_rate=2e-6
    Train(RunArgs),
    /// Supervised training on prompt/completion rows, before GRPO
    Sft(RunArgs),
    /// Sample from a model folder
    Generate(Placed<GenerateArgs>),
    /// Evaluate a model folder on a file of problems: avg@n, pass@k and maj@n
    Eval(Placed<EvalArgs>),
    /// Check that a model computes the same logits as in transformers, before training it
    Verify(VerifyArgs),
    /// Translate a configuration of TRL, open-r1 or verl, and list what became of each key
    Import(ImportArgs),
    /// Serve a model folder over HTTP with an OpenAI-compatible API
    Serve(Placed<ServeArgs>),
    /// Talk with a model in the terminal
    Chat(ChatArgs),
    /// Create a model folder with random weights, from a preset or a config.json
    Init(InitArgs),
    /// Export a trained model from a checkpoint, or merge LoRA adapters into their base model
    Export(ExportArgs),
    /// Show how much memory each part of a run needs in each phase, before it starts
    Plan(PlanArgs),
    /// Print every configuration key with its default, as a starter file
    Config(ConfigArgs),
    /// Write report.html again from a run's output folder
    Report(ReportArgs),
    /// Watch runs in a browser: charts, completions, ranks, warnings
    Watch(WatchArgs),
    /// Print shell completions: colo-grpo completions bash > /etc/bash_completion.d/colo-grpo
    Completions(CompletionsArgs),
    /// Benchmarks; each prints one JSON line
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Write compiled kernels for the given compute capabilities, as packages include them (scripts/package.sh)
    #[command(hide = true)]
    PackageKernels {
        /// Folder to write the files to
        #[arg(long)]
        output: PathBuf,
        /// Compute capabilities, such as 9.0
        #[arg(required = true, value_parser = capability)]
        chips: Vec<Capability>,
    },
    /// Runs the tool `python`; started by a run
    #[command(hide = true, name = tools::PYTHON_COMMAND)]
    PythonWorker {
        /// Settings of the worker, as JSON
        settings: String,
    },
    /// Runs the reward `code`; started by a run
    #[command(hide = true, name = reward::code::SANDBOX_COMMAND)]
    SandboxWorker {
        /// Settings of the worker, as JSON
        settings: String,
    },
}

impl Command {
    /// Whether this process itself loads models or computes, rather than only starting processes that do.
    pub fn computes(&self) -> bool {
        match self {
            Self::Train(args) | Self::Sft(args) => args.launch.num_ranks() == 1,
            Self::Generate(args) => args.launch.num_ranks() == 1,
            Self::Eval(args) => args.launch.num_ranks() == 1,
            Self::Serve(args) => args.launch.num_ranks() == 1,
            Self::Chat(_) | Self::Bench(_) | Self::Verify(_) => true,
            _ => false,
        }
    }

    /// Returns how the command reacts to TERM, INT, USR1 and HUP.
    pub fn on_stop(&self) -> OnStop {
        match self {
            Self::Train(_) | Self::Sft(_) => OnStop::Save,
            Self::Serve(_) | Self::Watch(_) => OnStop::Answer,
            _ => OnStop::End,
        }
    }
}

/// Number of processes and nodes, and the address where they connect.
#[derive(Debug, Clone, Args)]
#[command(rename_all = "snake_case")]
pub struct LaunchArgs {
    /// Number of processes, one per GPU; not needed under torchrun or srun, which start the processes
    #[arg(long, aliases = ["nproc_per_node", "num_processes"], default_value_t = 1, value_parser = processes)]
    pub nproc: usize,
    /// Number of nodes, each with --nproc processes and its own launcher; COLO_GRPO_TOKEN holds a secret that they share
    #[arg(long, default_value_t = 1, value_parser = processes)]
    pub nnodes: usize,
    /// Index of this node, from 0
    #[arg(long, value_name = "NODE", default_value_t = 0)]
    pub node_rank: usize,
    /// Address where ranks connect: of this machine, or with --nnodes of node 0 [default: 127.0.0.1]
    #[arg(long, value_name = "ADDRESS")]
    pub master_addr: Option<String>,
    /// Port where ranks connect [default: a free one; with --nnodes 29500]
    #[arg(long, value_name = "PORT")]
    pub master_port: Option<u16>,
}

/// Default port where nodes connect, as in torchrun.
const NODES_PORT: u16 = 29_500;

impl LaunchArgs {
    /// Arguments for one process.
    pub fn alone() -> Self {
        Self { nproc: 1, nnodes: 1, node_rank: 0, master_addr: None, master_port: None }
    }

    /// Number of ranks in all, if this program launches them.
    pub fn num_ranks(&self) -> usize {
        self.nproc * self.nnodes
    }

    /// Number of ranks in all and on each node, if this program launches them.
    pub fn world_size(&self) -> WorldSize {
        WorldSize { ranks: self.num_ranks(), local_ranks: self.nproc }
    }

    /// Refuses a `--node_rank` outside of `nnodes`; otherwise each node would train on its own.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] on `--node_rank`.
    pub fn check_node(&self) -> Result<()> {
        let Self { nnodes, node_rank, .. } = *self;
        let expected = match nnodes {
            _ if node_rank < nnodes => return Ok(()),
            1 => "0, or the number of nodes in --nnodes, which is 1".to_owned(),
            _ => format!("0 to {}: --nnodes is {nnodes}", nnodes - 1),
        };
        Err(Error::invalid_value("--node_rank", node_rank, expected))
    }

    /// Options for launching workers that run this program with `args`.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for a node rank outside of `--nnodes`, or several nodes without an address or port.
    pub fn options(&self, args: Vec<OsString>) -> Result<LaunchOptions> {
        let Self { nproc, nnodes, node_rank, .. } = *self;
        self.check_node()?;
        if nnodes > 1 && self.master_port == Some(0) {
            let expected = format!("a port that is free on node 0; give the same port on all {nnodes} nodes");
            return Err(Error::invalid_value("--master_port", 0, expected));
        }
        if nnodes > 1 && self.master_addr.is_none() {
            let expected = format!("the address of node 0; give the same address on all {nnodes} nodes");
            return Err(Error::invalid_value("--master_addr", "none", expected));
        }
        let master_port = if nnodes > 1 { self.master_port.or(Some(NODES_PORT)) } else { self.master_port };
        let master_addr = self.master_addr.clone().unwrap_or_else(|| launch::LOOPBACK.to_owned());
        let options = LaunchOptions::new(nproc, args);
        Ok(LaunchOptions { num_nodes: nnodes, node_rank, master_addr, master_port, ..options })
    }
}

/// Device and dtype of a command.
#[derive(Debug, Clone, Copy, Args)]
pub struct PlaceArgs {
    /// auto (CUDA where a GPU is visible), cpu or cuda
    #[arg(long, default_value = "auto", value_parser = word::<Device>)]
    pub device: Device,
    /// auto (bfloat16 on CUDA, float32 on a CPU), float32 or bfloat16
    #[arg(long, default_value = "auto", value_parser = word::<Dtype>)]
    pub dtype: Dtype,
}

/// Arguments of a command together with those for its ranks, device and dtype.
#[derive(Debug, Args)]
pub struct Placed<T: Args> {
    #[command(flatten)]
    pub launch: LaunchArgs,
    #[command(flatten)]
    pub place: PlaceArgs,
    #[command(flatten)]
    pub own: T,
}

/// Arguments of a run: a configuration file and overrides.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct RunArgs {
    #[command(flatten)]
    pub launch: LaunchArgs,
    /// Configuration file, TOML or YAML
    #[arg(long)]
    pub config: Option<PathBuf>,
    /// Overrides: key=value, section.key=value (or --section.key value)
    pub overrides: Vec<String>,
}

/// Arguments of `plan`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct PlanArgs {
    #[command(flatten)]
    pub run: RunArgs,
    /// Plan for GPUs with this many GiB free each, instead of this machine (H100: 79, H200: 139)
    #[arg(long, value_parser = number(|gib: &f64| *gib > 0.0 && *gib < 1e6, "above 0 and below 1000000"))]
    pub gpu_memory_gib: Option<f64>,
    /// Host memory of that machine in GiB; unlimited if not given
    #[arg(long, requires = "gpu_memory_gib")]
    #[arg(value_parser = number(|gib: &f64| *gib > 0.0 && *gib < 1e6, "above 0 and below 1000000"))]
    pub host_memory_gib: Option<f64>,
    /// With --nnodes: network bandwidth out of each node in 10^9 bytes per second (400 Gbit/s: 50)
    #[arg(long, default_value_t = 50.0, requires = "nnodes")]
    #[arg(value_parser = number(|rate: &f64| *rate > 0.0 && *rate < 1e6, "above 0 and below 1000000"))]
    pub network_gb_s: f64,
    /// GPU model for predicting step times, h100 or h200; without --gpu_memory_gib the plan also uses its memory
    #[arg(long, value_parser = gpu)]
    pub gpu: Option<Gpu>,
    /// Expected mean prompt length in tokens, for step times [default: max_prompt_length]
    #[arg(long, value_parser = count)]
    pub expected_prompt_length: Option<usize>,
    /// Expected completion length in tokens, for step times: a number, or a range such as 64..1024, or tail:64..1024 with few long ones [default:
    /// max_completion_length]
    #[arg(long)]
    pub expected_completion_length: Option<CompletionLengths>,
    /// Also compare all tensor_parallel_size and pipeline_parallel_size, then all zero.stage and gradient_checkpointing
    #[arg(long)]
    pub compare: bool,
    #[command(flatten)]
    pub model: ModelArgs,
}

/// Arguments of `import`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct ImportArgs {
    /// Open-r1 recipe or file for `trl grpo --config` (YAML), verl configuration (YAML), or a shell script that starts verl, `trl grpo`, `python -m
    /// trl.scripts.grpo` or open-r1's grpo.py (.sh)
    pub file: PathBuf,
    /// TRL version that the file was written for, whose defaults are written out (0.18, 1.16) [default: the version pinned by a requirements.txt,
    /// setup.py or pyproject.toml beside or above the file, 0.18 for keys of open-r1, else the last version that has all keys of the file]
    #[arg(long)]
    pub trl_version: Option<String>,
    /// TOML file to write; it must not exist [default: standard output]
    #[arg(long)]
    pub output: Option<PathBuf>,
}

/// Arguments of `config`.
#[derive(Debug, Args)]
pub struct ConfigArgs {
    /// Print the keys of supervised fine-tuning
    #[arg(long)]
    pub sft: bool,
    /// Print the page docs/config.md instead
    #[arg(long, conflicts_with = "sft")]
    pub markdown: bool,
}

/// Arguments of `report`.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// The run's output folder
    pub output_dir: PathBuf,
}

/// Arguments of `completions`.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub shell: clap_complete::Shell,
}

/// Arguments of `watch`.
#[derive(Debug, Args)]
pub struct WatchArgs {
    /// Output folders of runs, or folders that contain such folders
    #[arg(required = true)]
    pub folders: Vec<PathBuf>,
    #[command(flatten)]
    pub hosts: HostArgs,
    /// Port to listen on; 0 uses a free one
    #[arg(long, default_value_t = 8090)]
    pub port: u16,
}

/// Parses the name of a GPU model with measured step times.
fn gpu(text: &str) -> Result<Gpu, String> {
    let names = Gpu::ALL.map(|gpu| gpu.name).join(" or ");
    Gpu::named(&text.to_lowercase()).ok_or(format!("expected {names}"))
}

/// Parses a compute capability.
fn capability(text: &str) -> Result<Capability, String> {
    let numbers = text.split_once('.');
    let parts = numbers.and_then(|(major, minor)| Some(Capability::new(major.parse().ok()?, minor.parse().ok()?)));
    parts.ok_or("expected a compute capability such as 9.0".to_owned())
}

/// Parses a word that a configuration key accepts.
fn word<T: serde::de::DeserializeOwned>(text: &str) -> Result<T, String> {
    serde_json::from_value(text.into()).map_err(|error| error.to_string())
}

/// Parses a number of at least 1.
fn count(text: &str) -> Result<usize, String> {
    number(|count: &usize| *count >= 1, "a whole number of at least 1")(text)
}

/// The most tokens of a prompt, a completion or a sequence of a benchmark.
const MOST_TOKENS: usize = 1 << 24;

/// Parses a number of tokens of a benchmark's prompts or completions, limited so that sums do not overflow.
fn tokens(text: &str) -> Result<usize, String> {
    number(|count: &usize| (1..=MOST_TOKENS).contains(count), "a whole number from 1 to 16777216")(text)
}

/// Parses a number of concurrent streams, limited so that they fit into memory.
fn streams(text: &str) -> Result<usize, String> {
    number(|count: &usize| (1..=65_536).contains(count), "a whole number from 1 to 65536")(text)
}

/// Parses a number of completions per prompt, limited so that they fit into memory.
fn completions(text: &str) -> Result<usize, String> {
    number(|count: &usize| (1..=65_536).contains(count), "a whole number from 1 to 65536")(text)
}

/// Parses a number of processes or nodes, limited so that their product does not overflow.
fn processes(text: &str) -> Result<usize, String> {
    number(|count: &usize| (1..=16_384).contains(count), "a whole number from 1 to 16384")(text)
}

/// Parses a random seed.
fn seed(text: &str) -> Result<u64, String> {
    number(|_: &u64| true, "a whole number from 0 to 18446744073709551615 (2^64 - 1)")(text)
}

fn number<T: std::str::FromStr>(
    holds: fn(&T) -> bool,
    expected: &'static str,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync {
    move |text| text.parse().ok().filter(holds).ok_or_else(|| format!("expected {expected}"))
}
