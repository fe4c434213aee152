//! The command line as the user may write it.

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
    /// The command; `train` if nothing else is named.
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
    /// Watch runs in a browser while they are under way: charts, completions, ranks, warnings
    Watch(WatchArgs),
    /// Completions of the command line for a shell: colo-grpo completions bash > /etc/bash_completion.d/colo-grpo
    Completions(CompletionsArgs),
    /// Benchmarks; each prints one JSON line
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Writes the machine code of all kernels for chips, as packages bring it (scripts/package.sh)
    #[command(hide = true)]
    PackageKernels {
        /// Folder of the files
        #[arg(long)]
        output: PathBuf,
        /// Compute capabilities, such as 9.0
        #[arg(required = true, value_parser = capability)]
        chips: Vec<Capability>,
    },
    /// Serves the tool `python`; started by a run
    #[command(hide = true, name = tools::PYTHON_COMMAND)]
    PythonWorker {
        /// Settings of the worker as JSON
        settings: String,
    },
    /// Serves the reward `code`; started by a run
    #[command(hide = true, name = reward::code::SANDBOX_COMMAND)]
    SandboxWorker {
        /// Settings of the worker as JSON
        settings: String,
    },
}

impl Command {
    /// Whether this process computes itself, and does not only start those that do.
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

    /// The effect of TERM, INT, USR1 or HUP.
    pub fn on_stop(&self) -> OnStop {
        match self {
            Self::Train(_) | Self::Sft(_) => OnStop::Save,
            Self::Serve(_) | Self::Watch(_) => OnStop::Answer,
            _ => OnStop::End,
        }
    }
}

/// How many processes, and where they meet.
#[derive(Debug, Clone, Args)]
#[command(rename_all = "snake_case")]
pub struct LaunchArgs {
    /// Processes, one per GPU; not under torchrun or srun, which start them
    #[arg(long, aliases = ["nproc_per_node", "num_processes"], default_value_t = 1, value_parser = processes)]
    pub nproc: usize,
    /// Nodes, each with --nproc processes and a launcher of its own; COLO_GRPO_TOKEN has a secret that they share
    #[arg(long, default_value_t = 1, value_parser = processes)]
    pub nnodes: usize,
    /// Which of the nodes this one is, from 0
    #[arg(long, value_name = "NODE", default_value_t = 0)]
    pub node_rank: usize,
    /// Address that the ranks meet at: this machine's, or with --nnodes that of node 0 [default: 127.0.0.1]
    #[arg(long, value_name = "ADDRESS")]
    pub master_addr: Option<String>,
    /// Port that the ranks meet at [default: a free one; with --nnodes 29500]
    #[arg(long, value_name = "PORT")]
    pub master_port: Option<u16>,
}

/// Where nodes meet unless told otherwise, as with torchrun.
const NODES_PORT: u16 = 29_500;

impl LaunchArgs {
    /// One process.
    pub fn alone() -> Self {
        Self { nproc: 1, nnodes: 1, node_rank: 0, master_addr: None, master_port: None }
    }

    /// Ranks in all, where this program launches them.
    pub fn num_ranks(&self) -> usize {
        self.nproc * self.nnodes
    }

    /// Ranks in all and on each node, where this program launches them.
    pub fn world_size(&self) -> WorldSize {
        WorldSize { ranks: self.num_ranks(), local_ranks: self.nproc }
    }

    /// Refuses a node that is none of `nnodes`: without it each node would train alone.
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

    /// The workers to launch, which run this program with `args`.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for a node that is none of them, or nodes without a place to meet.
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
    /// With --nnodes: what the network takes out of each node, in 10^9 bytes a second (400 Gbit/s: 50)
    #[arg(long, default_value_t = 50.0, requires = "nnodes")]
    #[arg(value_parser = number(|rate: &f64| *rate > 0.0 && *rate < 1e6, "above 0 and below 1000000"))]
    pub network_gb_s: f64,
    /// Kind of GPU that the step's seconds are predicted for, h100 or h200; without --gpu_memory_gib the plan has its memory, too
    #[arg(long, value_parser = gpu)]
    pub gpu: Option<Gpu>,
    /// Mean tokens of a prompt, for the seconds [default: max_prompt_length]
    #[arg(long, value_parser = count)]
    pub expected_prompt_length: Option<usize>,
    /// Tokens of completions, for the seconds: a number, or a range such as 64..1024 or tail:64..1024, which has few long ones
    /// [default: max_completion_length]
    #[arg(long)]
    pub expected_completion_length: Option<CompletionLengths>,
    /// Print every tensor_parallel_size and pipeline_parallel_size, then every zero.stage and gradient_checkpointing, side by side, first
    #[arg(long)]
    pub compare: bool,
    #[command(flatten)]
    pub model: ModelArgs,
}

/// `import`.
#[derive(Debug, Args)]
pub struct ImportArgs {
    /// An open-r1 recipe or a file for `trl grpo --config` (YAML), a configuration of verl (YAML), or the shell script that starts verl,
    /// `trl grpo`, `python -m trl.scripts.grpo` or open-r1's grpo.py (.sh)
    pub file: PathBuf,
    /// The version of TRL that the file was written for, whose defaults are written out (0.18, 1.16) [default: the one that a
    /// requirements.txt, setup.py or pyproject.toml beside or above the file pins, 0.18 for keys of open-r1's, else 1.16]
    #[arg(long)]
    pub trl_version: Option<String>,
    /// The TOML file to write, which must be new [default: standard output]
    #[arg(long)]
    pub output: Option<PathBuf>,
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

/// `completions`.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub shell: clap_complete::Shell,
}

/// `watch`.
#[derive(Debug, Args)]
pub struct WatchArgs {
    /// Output folders of runs, or folders that have such below them
    #[arg(required = true)]
    pub folders: Vec<PathBuf>,
    #[command(flatten)]
    pub hosts: HostArgs,
    /// Port to listen at; 0 takes a free one
    #[arg(long, default_value_t = 8090)]
    pub port: u16,
}

/// A kind of GPU whose steps are recorded.
fn gpu(text: &str) -> Result<Gpu, String> {
    let names = Gpu::ALL.map(|gpu| gpu.name).join(" or ");
    Gpu::named(&text.to_lowercase()).ok_or(format!("expected {names}"))
}

/// A compute capability.
fn capability(text: &str) -> Result<Capability, String> {
    let numbers = text.split_once('.');
    let parts = numbers.and_then(|(major, minor)| Some(Capability::new(major.parse().ok()?, minor.parse().ok()?)));
    parts.ok_or("expected a compute capability such as 9.0".to_owned())
}

/// A word that a configuration key takes.
fn word<T: serde::de::DeserializeOwned>(text: &str) -> Result<T, String> {
    serde_json::from_value(text.into()).map_err(|error| error.to_string())
}

/// A number of which there must be one.
fn count(text: &str) -> Result<usize, String> {
    number(|count: &usize| *count >= 1, "a whole number of at least 1")(text)
}

/// Completions of one prompt, for all of which there is memory.
fn completions(text: &str) -> Result<usize, String> {
    number(|count: &usize| (1..=65_536).contains(count), "a whole number from 1 to 65536")(text)
}

/// A number of processes or of nodes, which multiply without overflow.
fn processes(text: &str) -> Result<usize, String> {
    number(|count: &usize| (1..=16_384).contains(count), "a whole number from 1 to 16384")(text)
}

/// The first word of random keys.
fn seed(text: &str) -> Result<u64, String> {
    number(|_: &u64| true, "a whole number from 0 to 18446744073709551615 (2^64 - 1)")(text)
}

fn number<T: std::str::FromStr>(
    holds: fn(&T) -> bool,
    expected: &'static str,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync {
    move |text| text.parse().ok().filter(holds).ok_or_else(|| format!("expected {expected}"))
}
