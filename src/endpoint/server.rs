//! The server of an engine: what it answers from.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::client::EngineClient;
use super::http::{HttpState, body_room, router};
use super::prompt::ServedModel;
use crate::data::{GrammarCompiler, Tokenizer};
use crate::error::Result;
use crate::http::HttpServer;

/// Options of the server.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// The model's name, as clients ask for it.
    pub model_name: String,
    /// The model's tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// The engine's compiler of structures.
    pub grammars: Arc<GrammarCompiler>,
    /// Longest prompt and completion together, in tokens.
    pub max_sequence_length: usize,
    /// The key that clients must have; `None` lets everybody in.
    pub api_key: Option<String>,
    /// Largest body of a request.
    pub max_body_bytes: usize,
}

/// Starts to answer what comes to `listener`.
///
/// # Errors
/// [`Error::Environment`](crate::Error::Environment) if there is no thread for it.
pub fn open(listener: TcpListener, options: ServerOptions, client: EngineClient) -> Result<HttpServer> {
    let ServerOptions { model_name, tokenizer, grammars, max_sequence_length, api_key, max_body_bytes } = options;
    let model = ServedModel { name: model_name, tokenizer, max_sequence_length, grammars };
    let service = HttpState {
        model,
        client,
        api_key,
        max_body_bytes,
        num_answers: AtomicU64::new(0),
        body_room: body_room(max_body_bytes),
    };
    HttpServer::start(listener, router(Arc::new(service)))
}
