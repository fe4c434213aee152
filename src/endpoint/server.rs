//! The HTTP server of an engine.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::client::EngineClient;
use super::episodes::Episodes;
use super::http::{HttpState, body_room, router};
use super::prompt::ServedModel;
use crate::data::{GrammarCompiler, Tokenizer, ToolCallParser};
use crate::error::Result;
use crate::http::{Guard, HttpServer};
use crate::types::SamplingParams;

/// Options of the server.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// The model's name in requests.
    pub model_name: String,
    /// Names of the adapters that requests may choose, in the engine's order.
    pub adapters: Vec<String>,
    /// The model's tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// The engine's grammar compiler.
    pub grammars: Arc<GrammarCompiler>,
    /// The format of the model's tool calls; `None` leaves them in the text.
    pub tool_calls: Option<ToolCallParser>,
    /// Ids that end a completion.
    pub eos_token_ids: Vec<u32>,
    /// Largest number of tokens of prompt and completion together.
    pub max_sequence_length: usize,
    /// The API key that clients must send; `None` accepts every client that `guard` accepts.
    pub api_key: Option<String>,
    /// The host names and origins from which requests are accepted.
    pub guard: Guard,
    /// Largest size of a request body in bytes.
    pub max_body_bytes: usize,
    /// Default sampling parameters of requests. Episodes use their own.
    pub sampling: SamplingParams,
    /// The episodes to which all requests belong, if set.
    pub episodes: Option<Arc<Episodes>>,
}

/// Starts a thread that serves `listener`.
///
/// # Errors
/// [`Error::Environment`](crate::Error::Environment) if the thread cannot be started.
pub fn open(listener: TcpListener, options: ServerOptions, client: EngineClient) -> Result<HttpServer> {
    let ServerOptions { api_key, guard, max_body_bytes, episodes, .. } = options;
    let model = ServedModel {
        name: options.model_name,
        adapters: options.adapters,
        tokenizer: options.tokenizer,
        max_sequence_length: options.max_sequence_length,
        grammars: options.grammars,
        tool_calls: options.tool_calls,
        eos_token_ids: options.eos_token_ids,
        sampling: options.sampling,
    };
    let service = HttpState {
        model,
        client,
        api_key,
        max_body_bytes,
        num_answers: AtomicU64::new(0),
        episodes,
        body_room: body_room(max_body_bytes),
    };
    HttpServer::start(listener, router(Arc::new(service), guard))
}
