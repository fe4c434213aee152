//! The arguments of `serve` and `chat`.

use clap::Args;

use super::{
    FormatArgs, GenerationArgs, PipelineArgs, PlaceArgs, ResidualArgs, SamplingArgs, SourceArgs, SpeculationArgs,
    SupervisionArgs, count, number,
};
use crate::data::ToolCallParser;
use crate::error::{Error, Result};
use crate::http::parse_origin;
use crate::launch;
use crate::serve::{EngineDivision, NamedAdapter};

/// How tool calls are recognized in answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolCallFormat {
    /// Tool calls are parsed in the format detected from the chat template.
    Auto,
    /// Tool calls stay in the text.
    None,
    /// Tool calls are parsed in this format.
    Named(ToolCallParser),
}

impl std::str::FromStr for ToolCallFormat {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let names = ToolCallParser::NAMES;
        match (text, names.iter().position(|name| *name == text)) {
            ("auto", _) => Ok(Self::Auto),
            ("none", _) => Ok(Self::None),
            (_, Some(at)) => Ok(Self::Named(ToolCallParser::ALL[at])),
            _ => Err(format!("expected auto, none, {}", names.join(", "))),
        }
    }
}

/// LoRA adapters served together with the model.
#[derive(Debug, Clone, Args)]
#[command(rename_all = "snake_case")]
pub struct AdapterArgs {
    /// LoRA adapters of --model, served under their own name; may be repeated
    #[arg(long = "adapter", value_name = "NAME=FOLDER", value_parser = named_adapter)]
    pub adapters: Vec<NamedAdapter>,
}

impl AdapterArgs {
    /// The adapters, with names that differ from each other and from the model's.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for a repeated name.
    pub fn checked(&self, model_name: &str) -> Result<&[NamedAdapter]> {
        let mut names = vec![model_name];
        for NamedAdapter { name, .. } in &self.adapters {
            if names.contains(&name.as_str()) {
                let expected =
                    format!("a name that no other adapter has and that differs from the model's name '{model_name}'");
                return Err(Error::invalid_value("--adapter", name, expected));
            }
            names.push(name);
        }
        Ok(&self.adapters)
    }
}

fn named_adapter(text: &str) -> std::result::Result<NamedAdapter, String> {
    match text.split_once('=') {
        Some((name, folder)) if !name.is_empty() && !folder.is_empty() => {
            Ok(NamedAdapter { name: name.to_owned(), folder: folder.into() })
        }
        _ => Err("expected NAME=FOLDER".to_owned()),
    }
}

/// Address and names of a server.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct HostArgs {
    /// Address to listen on; with 0.0.0.0 every machine can connect
    #[arg(long, default_value = launch::LOOPBACK)]
    pub host: String,
    /// Further names by which clients may address the server, besides its addresses, --host, localhost and the machine's own name; separated by
    /// commas
    #[arg(long, value_delimiter = ',')]
    pub allowed_hosts: Vec<String>,
}

/// Arguments of `serve`. All processes share one engine.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct ServeArgs {
    #[command(flatten)]
    pub residual: ResidualArgs,
    #[command(flatten)]
    pub generation: GenerationArgs,
    #[command(flatten)]
    pub source: SourceArgs,
    #[command(flatten)]
    pub adapters: AdapterArgs,
    /// Model name for requests [default: --model]
    #[arg(long)]
    pub served_model_name: Option<String>,
    /// Format of tool calls, which answers then return separately: auto (by the chat template), none, hermes, qwen3_xml, llama3_json, pythonic,
    /// mistral, glm45, openai
    #[arg(long, default_value = "auto")]
    pub tool_call_parser: ToolCallFormat,
    #[command(flatten)]
    pub pipeline: PipelineArgs,
    /// In models with experts, give each process whole experts instead of a slice of every expert
    #[arg(long)]
    pub enable_expert_parallel: bool,
    #[command(flatten)]
    pub formats: FormatArgs,
    #[command(flatten)]
    pub speculation: SpeculationArgs,
    /// Port to listen on; 0 uses a free one
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    #[command(flatten)]
    pub hosts: HostArgs,
    /// Origins of web pages that may send requests, as SCHEME://NAME:PORT, or * for all; separated by commas [default: none]
    #[arg(long, value_delimiter = ',', value_parser = parse_origin)]
    pub allowed_origins: Vec<String>,
    /// API key that clients must send [default: COLO_GRPO_API_KEY, or none]
    #[arg(long)]
    pub api_key: Option<String>,
    /// Maximum length of prompt and completion together, in tokens [default: the model's context]
    #[arg(long, value_parser = number(|length: &usize| *length >= 2, "at least 2"))]
    pub max_model_length: Option<usize>,
    /// Maximum number of waiting and running completions; more are answered with 429
    #[arg(long, default_value_t = 1024, value_parser = count)]
    pub max_queue: usize,
    /// Maximum size of a request body in bytes; larger ones are answered with 413
    #[arg(long, default_value_t = 4 << 20, value_parser = count)]
    pub max_body_bytes: usize,
    /// Time in seconds that current requests may continue after TERM or INT
    #[arg(long, default_value_t = 30.0)]
    #[arg(value_parser = number(|seconds: &f64| *seconds >= 0.0 && *seconds < 1e7, "from 0 and below 10000000"))]
    pub grace_s: f64,
    #[command(flatten)]
    pub supervision: SupervisionArgs,
}

impl ServeArgs {
    /// How `num_ranks` ranks divide the model.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for pipeline stages that do not divide the ranks.
    pub fn division(&self, num_ranks: usize) -> Result<EngineDivision<'_>> {
        self.pipeline.engine_shape(1).check_divides(num_ranks, "generate")?;
        Ok(EngineDivision {
            shape: self.pipeline.engine_shape(num_ranks / self.pipeline.pipeline_parallel_size),
            pipeline_partition: self.pipeline.sizes(),
            enable_expert_parallel: self.enable_expert_parallel,
        })
    }
}

/// Arguments of `chat`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct ChatArgs {
    #[command(flatten)]
    pub place: PlaceArgs,
    #[command(flatten)]
    pub residual: ResidualArgs,
    #[command(flatten)]
    pub generation: GenerationArgs,
    #[command(flatten)]
    pub source: SourceArgs,
    #[command(flatten)]
    pub adapters: AdapterArgs,
    /// System message before the conversation
    #[arg(long)]
    pub system_prompt: Option<String>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}
