//! Routes, keys and bodies.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::extract::{DefaultBodyLimit, FromRequest, Path, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use super::answer::Answer;
use super::ask::ApiRequest;
use super::client::EngineClient;
use super::counters::Counters;
use super::episodes::{Episode, Episodes};
use super::events::Events;
use super::prompt::ServedModel;
use super::refusal::Refusal;

/// Bodies that are being read at a time, in KiB; more are answered with 503.
const BODY_ROOM_KIB: u32 = 256 << 10;
/// How long a body may take to arrive.
const BODY_TIME: Duration = Duration::from_secs(30);

/// State that every HTTP handler reads.
#[derive(Debug)]
pub(super) struct HttpState {
    pub model: ServedModel,
    pub client: EngineClient,
    pub api_key: Option<String>,
    pub max_body_bytes: usize,
    pub num_answers: AtomicU64,
    /// The episodes that requests belong to, where there are some: no other request is served then.
    pub episodes: Option<Arc<Episodes>>,
    /// Permits for bodies that are being read and prepared, in KiB.
    pub body_room: Semaphore,
}

/// Room for all bodies that are being read at a time.
pub(super) fn body_room(max_body_bytes: usize) -> Semaphore {
    Semaphore::new(BODY_ROOM_KIB.max(kib(max_body_bytes)) as usize)
}

fn kib(bytes: usize) -> u32 {
    u32::try_from(bytes / 1024 + 1).unwrap_or(u32::MAX)
}

pub(super) fn router(service: Arc<HttpState>) -> Router {
    let max_body_bytes = service.max_body_bytes;
    let (router, paths) = match &service.episodes {
        None => {
            let paths = "/v1/models, /v1/completions, /v1/chat/completions, /health and /metrics";
            let router = Router::new().route("/v1/models", get(models)).route("/v1/models/{*name}", get(one_model));
            let router = router.route("/v1/completions", post(completions));
            (router.route("/v1/chat/completions", post(chat_completions)), paths)
        }
        Some(_) => {
            let paths = "/v1/models and /v1/chat/completions behind an episode's base_url, /health and /metrics";
            let router = Router::new().route("/episodes/{episode}/v1/models", get(models));
            (router.route("/episodes/{episode}/v1/chat/completions", post(turn)), paths)
        }
    };
    router
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .fallback(async move || Refusal::new(404, format!("no such path; there are {paths}")))
        .method_not_allowed_fallback(async |method: Method| {
            Refusal::new(405, format!("this path does not take {method}; the header Allow names what it takes"))
        })
        .layer(DefaultBodyLimit::max(max_body_bytes))
        .with_state(service)
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

/// The variable part of a path, if it is text.
type PathText = Result<Path<String>, PathRejection>;

fn text(part: PathText) -> Result<String, Refusal> {
    let refuse = |rejection: PathRejection| Refusal::new(400, format!("the path: {}", rejection.body_text()));
    part.map(|Path(text)| text).map_err(refuse)
}

/// What `/v1/models` says of a name.
fn described(model: &ServedModel, name: &str) -> serde_json::Value {
    let ServedModel { name: base, max_sequence_length, .. } = model;
    json!({"id": name, "object": "model", "created": 0, "owned_by": "colo-grpo",
        "max_model_len": max_sequence_length, "root": base, "parent": (name != base).then_some(base)})
}

/// A request of an episode.
async fn turn(State(service): State<Arc<HttpState>>, episode: PathText, request: Request) -> Response {
    let episode = text(episode).ok().and_then(|episode| service.episodes.as_ref()?.find(&episode));
    match episode {
        Some(episode) => service.answer(request, true, Some(episode)).await,
        None => Refusal::new(404, "no episode has this base_url, or it has ended").into_response(),
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
        let length = self.length(request.headers())?;
        let room = self.body_room.try_acquire_many(kib(length));
        let _room = room.map_err(|_| Refusal::new(503, "too many requests are being read; try again"))?;
        let body = self.body(request).await?;
        // Rendering and tokenizing take processor time: other connections go on meanwhile.
        let service = self.clone();
        let prepare = move || {
            if let Some(episode) = episode {
                let (ask, request, recorder) = episode.request(&service.model, &body)?;
                return Ok((ask, vec![request], None, Some(recorder)));
            }
            let ask = ApiRequest::read_with(&body, is_chat, &service.model.sampling)?;
            service.model.adapter(&ask)?; // an unknown name is told before all else
            let grammar = service.model.grammar(&ask)?;
            let requests = service.model.requests(&ask)?;
            Ok((ask, requests, grammar, None))
        };
        let prepared = tokio::task::spawn_blocking(prepare).await;
        let (ask, requests, _grammar, recorder) = prepared.map_err(|error| Refusal::new(500, error.to_string()))??;
        let ticket = self.client.submit(&requests)?;
        let number = self.num_answers.fetch_add(1, Ordering::Relaxed);
        let answer = Answer::new(&ask, &requests, &self.model, number)?.recorded_by(recorder);
        match ask.streams {
            true => {
                let mut response = with_type(
                    Body::from_stream(Events::open(answer, ticket).await?),
                    "text/event-stream; charset=utf-8",
                );
                response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
                Ok(response)
            }
            false => Ok(json_response(&answer.whole(ticket).await?)),
        }
    }

    /// Bytes of a body, by its head; the most there may be where that does not say.
    fn length(&self, headers: &HeaderMap) -> Result<usize, Refusal> {
        let length = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
        let length: usize = length.unwrap_or(self.max_body_bytes);
        if length > self.max_body_bytes { Err(self.too_large()) } else { Ok(length) }
    }

    fn too_large(&self) -> Refusal {
        Refusal::new(413, format!("the body is larger than --max_body_bytes {}", self.max_body_bytes))
    }

    async fn body(&self, request: Request) -> Result<Bytes, Refusal> {
        match tokio::time::timeout(BODY_TIME, Bytes::from_request(request, &())).await {
            Err(_) => Err(Refusal::new(408, "the body did not arrive in time")),
            Ok(Ok(body)) => Ok(body),
            Ok(Err(rejection)) if BytesRejection::status(&rejection).as_u16() == 413 => Err(self.too_large()),
            Ok(Err(rejection)) => Err(Refusal::new(400, rejection.body_text())),
        }
    }

    /// Whether a request has the key. Every byte is compared, so that an answer's time says nothing of the key.
    fn authorize(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        let Some(key) = &self.api_key else { return Ok(()) };
        let given = headers.get(header::AUTHORIZATION).map_or(&[][..], HeaderValue::as_bytes);
        let given = given.strip_prefix(b"Bearer ").unwrap_or_default();
        let differs = given.iter().zip(key.as_bytes()).fold(0, |differs, (a, b)| differs | (a ^ b));
        match given.len() == key.len() && differs == 0 {
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
