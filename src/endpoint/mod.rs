//! An HTTP endpoint with OpenAI's protocol over an engine that is awake. Knows nothing of whose weights the engine reads, so that
//! a training run can open it as `colo-grpo serve` does.
//!
//! The engine's loop ([`drive`]) runs on every rank's main thread; the server ([`open`]) on a thread of its own, on rank 0
//! alone. Between the two are channels: a [`EngineClient`] submits requests and hears of their tokens, and a [`RequestHandle`] that is dropped
//! ends its request. With several ranks, rank 0 announces before every step what came since the last one, so that all ranks make
//! the same calls in the same order.
//!
//! | file | what it is |
//! |---|---|
//! | `drive` | the engine's loop: announce, submit, step, report |
//! | `announce` | what rank 0 tells the other ranks before a step |
//! | `requests` | requests that the engine has, and who waits for them |
//! | `client` | who asks: tickets, and how many there may be |
//! | `calls` | tool calls in an answer, as it grows |
//! | `counters` | what is counted, for Prometheus |
//! | `server` | what the server answers from |
//! | `http` | routes, keys, bodies |
//! | `ask` | bodies of requests, checked field by field |
//! | `logprobs` | log-probabilities of tokens |
//! | `output` | what answers look like: log-probabilities and structure |
//! | `prompt` | texts and conversations to token ids |
//! | `answer`, `events` | completions in OpenAI's form, whole; as a stream |
//! | `episodes` | conversations of harnesses that play against the server, kept as token ids |
//! | `player` | groups whose completions are such episodes: their processes, their server and the engine's session |
//! | `dialogue` | a conversation in the terminal |
//! | `text` | token ids to text as they come |
//! | `refusal` | errors in OpenAI's form |

mod announce;
mod answer;
mod ask;
mod calls;
mod client;
mod counters;
mod dialogue;
mod drive;
mod episodes;
mod events;
mod fields;
mod http;
mod logprobs;
mod output;
mod player;
mod prompt;
mod refusal;
mod requests;
mod server;
mod text;

pub use client::{ClientLimits, EngineChannel, engine_channel};
pub use dialogue::Dialogue;
pub use drive::drive;
pub use player::{EpisodePlayer, PlayerOptions};
pub use server::{ServerOptions, open};
