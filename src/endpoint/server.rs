//! The server of an engine: what it answers from.

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
    /// The model's name, as clients ask for it.
    pub model_name: String,
    /// Names of the adapters that requests choose among, in the engine's order.
    pub adapters: Vec<String>,
    /// The model's tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// The engine's compiler of structures.
    pub grammars: Arc<GrammarCompiler>,
    /// The format of the model's tool calls; none leaves them in the text.
    pub tool_calls: Option<ToolCallParser>,
    /// Ids that end a completion.
    pub eos_token_ids: Vec<u32>,
    /// Longest prompt and completion together, in tokens.
    pub max_sequence_length: usize,
    /// The key that clients must have; `None` lets everybody in whom `guard` lets in.
    pub api_key: Option<String>,
    /// The hosts and origins whose requests are answered.
    pub guard: Guard,
    /// Largest body of a request.
    pub max_body_bytes: usize,
    /// How a request is sampled that does not say; episodes have values of their own.
    pub sampling: SamplingParams,
    /// Episodes that all requests belong to, if there are some.
    pub episodes: Option<Arc<Episodes>>,
}

/// Starts to answer what comes to `listener`.
///
/// # Errors
/// [`Error::Environment`](crate::Error::Environment) if there is no thread for it.
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
