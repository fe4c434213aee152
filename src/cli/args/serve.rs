//! The arguments of `serve` and `chat`.

use clap::Args;

use super::{PlaceArgs, ResidualArgs, SamplingArgs, SourceArgs, count, number};
use crate::config::HeartbeatConfig;
use crate::launch;
use crate::phase::Fault;

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
    /// Longest time that a rank may show no sign of life, in seconds
    #[arg(long, default_value_t = HeartbeatConfig::default().timeout_s)]
    #[arg(value_parser = number(|seconds: &f64| *seconds > 0.0 && *seconds < 1e7, "above 0 and below 10000000"))]
    pub heartbeat_timeout_s: f64,
    /// Injected fault, as the configuration key of that name; for tests
    #[arg(long, hide = true)]
    pub fault: Option<Fault>,
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
