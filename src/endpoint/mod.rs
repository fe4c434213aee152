//! An HTTP endpoint with OpenAI's protocol for an engine that is awake. Independent of the owner of the engine's weights, so that a training run can
//! open it as `colo-grpo serve` does.
//!
//! The engine's loop ([`drive`]) runs on every rank's main thread; the server ([`open`]) on a thread of its own, on rank 0 alone. Between the two are
//! channels: a [`EngineClient`] submits requests and receives their tokens, and a [`RequestHandle`] that is dropped ends its request. With several
//! ranks, rank 0 announces before every step what came since the last one, so that all ranks make the same calls in the same order.
//!
//! | file | what it is |
//! |---|---|
//! | `drive` | the engine's loop: announce, submit, step, report |
//! | `announce` | rank 0's broadcast to the other ranks before a step |
//! | `requests` | requests that the engine has, and the receivers of their updates |
//! | `client` | clients on other threads: request handles and limits |
//! | `calls` | tool calls in a growing response |
//! | `counters` | metrics for Prometheus |
//! | `server` | options and start of the server |
//! | `http` | routes, keys, bodies |
//! | `ask` | bodies of requests, checked field by field |
//! | `logprobs` | log-probabilities of tokens |
//! | `output` | request fields for log-probabilities and structured output |
//! | `prompt` | converts texts and conversations to token ids |
//! | `answer`, `events` | completions in OpenAI's form, whole; as a stream |
//! | `episodes` | conversations of agents that use the server, kept as token ids |
//! | `player` | groups whose completions are such episodes, with their processes, server and engine session |
//! | `dialogue` | a conversation in the terminal |
//! | `text` | converts streamed token ids to text |
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
