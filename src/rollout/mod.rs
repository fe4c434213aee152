//! The generation engine: continuous batching over a paged KV cache. It is SPMD over the ranks of an engine, which split the layers by tensor
//! parallelism, by pipeline stages, or both. It knows nothing of training.
//!
//! | file | what it is |
//! |---|---|
//! | `options`, `engine` | [`EngineOptions`]; [`Engine`], asleep between rollouts; [`RolloutEngine`], awake |
//! | `session` | an engine that is driven step by step: `submit` and `step` |
//! | `run` | the sampling loop; a policy decides what begins and when the session ends |
//! | `batches`, `exchange` | the policy for batches of known groups; gathering the requests of all ranks of the group |
//! | `turns` | how requests follow each other: single turns, and trajectories of several turns with tool calls between |
//! | `request`, `limits` | requests and events; limits of steps and sequences |
//! | `weights`, `copy` | the engine's view of the policy's weights; their quantized copy |
//! | `scheduler` | which tokens the next step computes |
//! | `sequence`, `block_manager` | one completion while it is sampled; which KV blocks are free, shared or used |
//! | `kept` | unfinished sequences whose keys and values stay in the cache |
//! | `batch`, `runner`, `mixer`, `kv_cache` | a step's tensors; the network that runs on them; its attention and gated delta nets; the KV cache |
//! | `draft_head`, `draft_rows` | draft tokens from the model's own head |
//! | `state_pages` | states of gated delta nets, one page per sequence |
//! | `stages`, `pipeline` | which ranks hold which layers; the runner of an engine with several stages |
//! | `gpu` | the runner on a GPU: decode steps as CUDA graphs, sampling on the device |
//! | `speculation` | where draft tokens come from, and how many are worth computing |
//! | `sampler`, `filters` | logits to tokens |
//! | `step_clock` | times of decode steps, agreed on by all ranks |
//! | `stop`, `detokenizer` | when a completion ends; its text so far |

mod batch;
mod batches;
mod block_manager;
mod copy;
mod detokenizer;
mod draft_head;
mod draft_rows;
mod engine;
mod exchange;
mod filters;
mod gpu;
mod kept;
mod kv_cache;
mod limits;
mod mixer;
mod options;
mod pipeline;
mod request;
mod routes;
mod run;
mod runner;
mod sampler;
mod scheduler;
mod sequence;
mod session;
mod speculation;
mod stages;
mod state_pages;
mod stats;
mod step_clock;
mod stop;
mod turns;
mod weights;

pub use batches::{Batches, Rollout, SampledGroup, SampledGroups};
pub use copy::weight_copy_bytes;
pub use engine::{Engine, RolloutEngine, fullest_stage};
pub use gpu::{DecoderOp, TrialBatch, TrialStep, engine_buffer_bytes, engine_sum_bytes, engine_table_bytes};
pub use kv_cache::{SPARE_BYTES, cache_kind, kv_block_bytes};
pub use options::{EngineFormats, EngineOptions};
pub(crate) use request::ParamFault;
pub use request::{Event, Request, RequestId};
#[cfg(test)]
pub(crate) use run::tap;
pub use run::{Flow, SamplingPolicy};
pub use session::{Session, SessionLoad};
pub use speculation::{DraftInjection, SpeculationOptions};
pub use stages::EngineRanks;
pub use state_pages::{draft_input_bytes, state_page_bytes};
pub use stats::{DraftCounts, EngineStats, StageTimes};
pub use stop::CompletionLimit;
pub use turns::{CostMeter, GroupTurns, SingleTurns, TurnTools, Turns};
pub use weights::{EngineWeights, StoredBlocks};
