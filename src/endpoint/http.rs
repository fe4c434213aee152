//! HTTP routes, API key check and reading of request bodies.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, HttpBody};
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::{Value, json};
use subtle::ConstantTimeEq;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::answer::Answer;
use super::ask::ApiRequest;
use super::client::EngineClient;
use super::counters::Counters;
use super::episodes::{Episode, Episodes};
use super::events::Events;
use super::prompt::ServedModel;
use super::refusal::Refusal;
use crate::http::{Guard, check_json_type};

/// Memory in KiB for all request bodies that are being read or prepared. When it is used up, requests get status 503.
const BODY_ROOM_KIB: usize = 256 << 10;
/// Time limit for receiving a body.
const BODY_TIME: Duration = Duration::from_secs(30);

/// State shared by all HTTP handlers.
#[derive(Debug)]
pub(super) struct HttpState {
    pub model: ServedModel,
    pub client: EngineClient,
    pub api_key: Option<String>,
    pub max_body_bytes: usize,
    pub num_answers: AtomicU64,
    /// The episodes to which requests belong. If set, other requests are not served.
    pub episodes: Option<Arc<Episodes>>,
    /// Semaphore for the memory of bodies being read and prepared, in KiB. A body acquires permits while it arrives.
    pub body_room: Arc<Semaphore>,
}

/// The semaphore for the memory of request bodies, in KiB.
pub(super) fn body_room(max_body_bytes: usize) -> Arc<Semaphore> {
    Arc::new(Semaphore::new(BODY_ROOM_KIB.max(max_body_bytes / 1024 + 1)))
}

/// A request body and its memory permits, which it holds until it is dropped.
struct ReadBody {
    bytes: Vec<u8>,
    room: OwnedSemaphorePermit,
}

pub(super) fn router(service: Arc<HttpState>, guard: Guard) -> Router {
    let (router, paths) = match &service.episodes {
        None => {
            let paths = "/v1/models, /v1/completions, /v1/chat/completions, /health and /metrics";
            let router = Router::new().route("/v1/models", get(models)).route("/v1/models/{*name}", get(one_model));
            let router = router.route("/v1/completions", post(completions));
            (router.route("/v1/chat/completions", post(chat_completions)), paths)
        }
        Some(_) => {
            let paths = "/v1/models and /v1/chat/completions under an episode's base_url, /health and /metrics";
            let router = Router::new().route("/episodes/{episode}/v1/models", get(models));
            (router.route("/episodes/{episode}/v1/chat/completions", post(turn)), paths)
        }
    };
    let router = router
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .fallback(async move || Refusal::new(404, format!("no such path; available are {paths}")))
        .method_not_allowed_fallback(async |method: Method| {
            Refusal::new(405, format!("this path does not support {method}; see the header Allow"))
        })
        .with_state(service);
    guard.before(router, |status, message| Refusal::new(status.as_u16(), message).into_response())
}

async fn health(State(service): State<Arc<HttpState>>) -> Response {
    match service.client.is_stopping() {
        true => Refusal::new(503, "the server is stopping").into_response(),
        false => json_response(&json!({"status": "ok"})),
    }
}

async fn metrics(State(service): State<Arc<HttpState>>) -> Response {
    let page = service.client.shared.counters.page();
    with_type(Body::from(page), "text/plain; version=0.0.4; charset=utf-8")
}

async fn models(State(service): State<Arc<HttpState>>, headers: HeaderMap) -> Response {
    if let Err(refusal) = service.authorize(&headers) {
        return refusal.into_response();
    }
    let models: Vec<_> = service.model.names().map(|name| described(&service.model, name)).collect();
    json_response(&json!({"object": "list", "data": models}))
}

async fn one_model(State(service): State<Arc<HttpState>>, name: PathText, headers: HeaderMap) -> Response {
    let find = || {
        service.authorize(&headers)?;
        let name = text(name)?;
        service.model.check_name(&name)?;
        Ok::<_, Refusal>(json_response(&described(&service.model, &name)))
    };
    find().unwrap_or_else(IntoResponse::into_response)
}

/// The variable part of a URL path.
type PathText = Result<Path<String>, PathRejection>;

fn text(part: PathText) -> Result<String, Refusal> {
    let refuse = |rejection: PathRejection| Refusal::new(400, format!("invalid path: {}", rejection.body_text()));
    part.map(|Path(text)| text).map_err(refuse)
}

/// The entry for `name` in the response of `/v1/models`.
fn described(model: &ServedModel, name: &str) -> serde_json::Value {
    let ServedModel { name: base, max_sequence_length, .. } = model;
    json!({"id": name, "object": "model", "created": 0, "owned_by": "colo-grpo",
        "max_model_len": max_sequence_length, "root": base, "parent": (name != base).then_some(base)})
}

/// Handles a request of an episode.
async fn turn(State(service): State<Arc<HttpState>>, episode: PathText, request: Request) -> Response {
    let episode = text(episode).ok().and_then(|episode| service.episodes.as_ref()?.find(&episode));
    match episode {
        Some(episode) => service.answer(request, true, Some(episode)).await,
        None => Refusal::new(404, "there is no episode with this base_url, or it has ended").into_response(),
    }
}

async fn completions(State(service): State<Arc<HttpState>>, request: Request) -> Response {
    service.answer(request, false, None).await
}

async fn chat_completions(State(service): State<Arc<HttpState>>, request: Request) -> Response {
    service.answer(request, true, None).await
}

impl HttpState {
    async fn answer(self: Arc<Self>, request: Request, is_chat: bool, episode: Option<Arc<Episode>>) -> Response {
        self.try_answer(request, is_chat, episode).await.unwrap_or_else(|refusal| {
            Counters::add(&self.client.shared.counters.refused, usize::from(refusal.status < 500));
            refusal.into_response()
        })
    }

    async fn try_answer(
        self: &Arc<Self>,
        request: Request,
        is_chat: bool,
        episode: Option<Arc<Episode>>,
    ) -> Result<Response, Refusal> {
        self.authorize(request.headers())?;
        check_json_type(request.headers()).map_err(|message| Refusal::new(415, message))?;
        let body = self.body(request).await?;
        // Rendering and tokenizing take processor time: other connections go on meanwhile. The body's room is free behind it: what waits
        // for its answer is bounded by the queue.
        let service = self.clone();
        let prepare = move || {
            let body = body; // as a whole: its room is taken until here
            if let Some(episode) = episode {
                let (ask, request, recorder) = episode.request(&service.model, &body.bytes)?;
                return Ok((ask, vec![request], None, Some(recorder)));
            }
            let ask = ApiRequest::read_with(&body.bytes, is_chat, &service.model.sampling)?;
            service.model.adapter(&ask)?; // an unknown name is told before all else
            let grammar = service.model.grammar(&ask)?;
            let requests = service.model.requests(&ask)?;
            Ok((ask, requests, grammar, None))
        };
        let prepared = tokio::task::spawn_blocking(prepare).await;
        let (ask, requests, _grammar, recorder) = prepared.map_err(|error| Refusal::new(500, error.to_string()))??;
        let ticket = self.client.submit(&requests)?;
        let number = self.num_answers.fetch_add(1, Ordering::Relaxed);
        let (answer, streams) = {
            let (ask, requests) = (ask, requests); // of which nothing else is kept while the answer is made
            (Answer::new(&ask, &requests, &self.model, number)?.recorded_by(recorder), ask.streams)
        };
        if !streams {
            return Ok(json_response(&answer.whole(ticket).await?));
        }
        let events = Body::from_stream(Events::open(answer, ticket).await?);
        let mut response = with_type(events, "text/event-stream; charset=utf-8");
        response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        Ok(response)
    }

    fn too_large(&self) -> Refusal {
        Refusal::new(413, format!("the request body is larger than --max_body_bytes {}", self.max_body_bytes))
    }

    /// Reads a body and acquires memory permits while it arrives. If its headers already say that it is too large, it is rejected at once.
    async fn body(&self, request: Request) -> Result<ReadBody, Refusal> {
        let mut body = request.into_body();
        if body.size_hint().lower() > self.max_body_bytes as u64 {
            return Err(self.too_large());
        }
        let read = async {
            let mut read = ReadBody { bytes: Vec::new(), room: self.room(1)? };
            while let Some(frame) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
                let frame =
                    frame.map_err(|error| Refusal::new(400, format!("cannot read the request body: {error}")))?;
                let Ok(data) = frame.into_data() else { continue };
                let len = read.bytes.len() + data.len();
                if len > self.max_body_bytes {
                    return Err(self.too_large());
                }
                read.room.merge(self.room(len / 1024 - read.bytes.len() / 1024)?);
                read.bytes.extend_from_slice(&data);
            }
            Ok(read)
        };
        match tokio::time::timeout(BODY_TIME, read).await {
            Err(_) => Err(Refusal::new(408, "the request body did not arrive in time")),
            Ok(outcome) => outcome,
        }
    }

    /// Acquires permits for `kib` more KiB of a body.
    fn room(&self, kib: usize) -> Result<OwnedSemaphorePermit, Refusal> {
        let room = Arc::clone(&self.body_room).try_acquire_many_owned(u32::try_from(kib).unwrap_or(u32::MAX));
        room.map_err(|_| Refusal::new(503, "too many requests are being read; try again"))
    }

    /// Checks a request's API key. All bytes are compared, so that the response time reveals nothing about the key.
    fn authorize(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        let Some(key) = &self.api_key else { return Ok(()) };
        let given = headers.get(header::AUTHORIZATION).map_or(&[][..], HeaderValue::as_bytes);
        let given = match given.split_at_checked(b"Bearer ".len()) {
            Some((scheme, token)) if scheme.eq_ignore_ascii_case(b"Bearer ") => token.trim_ascii(),
            _ => &[],
        };
        match given.ct_eq(key.as_bytes()).into() {
            true => Ok(()),
            false => Err(Refusal::new(401, "expected the header 'Authorization: Bearer KEY' with the server's key")),
        }
    }
}

fn json_response(value: &Value) -> Response {
    with_type(Body::from(value.to_string()), "application/json")
}

fn with_type(body: Body, kind: &'static str) -> Response {
    let mut response = Response::new(body);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

#[cfg(test)]
mod tests;
