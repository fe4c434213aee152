//! The arguments of `serve` and `chat`.

use clap::Args;

use super::{PlaceArgs, ResidualArgs, SamplingArgs, SourceArgs, SupervisionArgs, count, number};
use crate::data::ToolCallParser;
use crate::launch;

/// How tool calls are found in answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolCallFormat {
    /// The format that the chat template shows.
    Auto,
    /// They stay in the text.
    None,
    /// One by its name.
    Named(ToolCallParser),
}

impl std::str::FromStr for ToolCallFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names = ToolCallParser::ALL.map(ToolCallParser::name);
        match (text, names.iter().position(|name| *name == text)) {
            ("auto", _) => Ok(Self::Auto),
            ("none", _) => Ok(Self::None),
            (_, Some(at)) => Ok(Self::Named(ToolCallParser::ALL[at])),
            _ => Err(format!("expected auto, none, {}", names.join(", "))),
        }
    }
}

/// `serve`. All processes share one engine.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct ServeArgs {
    #[command(flatten)]
    pub residual: ResidualArgs,
    #[command(flatten)]
    pub source: SourceArgs,
    /// Name that clients ask for [default: --model]
    #[arg(long)]
    pub served_model_name: Option<String>,
    /// Format of tool calls, which answers then have apart: auto (by the chat template), none, hermes, qwen3_xml, llama3_json,
    /// pythonic, mistral
    #[arg(long, default_value = "auto")]
    pub tool_call_parser: ToolCallFormat,
    /// Address to listen at; 0.0.0.0 lets every machine in
    #[arg(long, default_value = launch::LOOPBACK)]
    pub host: String,
    /// Port to listen at; 0 takes a free one
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// Key that clients must have [default: COLO_GRPO_API_KEY, or none]
    #[arg(long, value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub api_key: Option<String>,
    /// Longest prompt and completion together in tokens [default: the model's context]
    #[arg(long, value_parser = number(|length: &usize| *length >= 2, "at least 2"))]
    pub max_model_length: Option<usize>,
    /// Most completions that wait or run; more are answered with 429
    #[arg(long, default_value_t = 1024, value_parser = count)]
    pub max_queue: usize,
    /// Largest body of a request; larger ones are answered with 413
    #[arg(long, default_value_t = 4 << 20, value_parser = count)]
    pub max_body_bytes: usize,
    /// How long requests under way may go on after TERM or INT, in seconds
    #[arg(long, default_value_t = 30.0)]
    #[arg(value_parser = number(|seconds: &f64| *seconds >= 0.0 && *seconds < 1e7, "from 0 and below 10000000"))]
    pub grace_s: f64,
    #[command(flatten)]
    pub supervision: SupervisionArgs,
}

/// `chat`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct ChatArgs {
    #[command(flatten)]
    pub place: PlaceArgs,
    #[command(flatten)]
    pub residual: ResidualArgs,
    #[command(flatten)]
    pub source: SourceArgs,
    /// System message before the conversation
    #[arg(long)]
    pub system_prompt: Option<String>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}
