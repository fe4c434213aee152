//! The generation engine: continuous batching over a paged KV cache, SPMD over the ranks of an engine, which share layers, or have some
//! each. Knows nothing of training.
//!
//! | file | what it is |
//! |---|---|
//! | `options`, `engine` | [`EngineOptions`]; [`Engine`], asleep between rollouts; [`RolloutEngine`], awake |
//! | `session` | an engine that is stepped: `submit` and `step` |
//! | `run` | the loop of every session: what a policy begins and when it ends |
//! | `batches`, `exchange` | the policy of batches, closed or several at once; the requests of all ranks of the group |
//! | `turns` | how requests follow one another: single turns, and trajectories of several, between which tools run |
//! | `request`, `limits` | requests and events; bounds of steps and sequences |
//! | `weights`, `copy` | what the engine reads of the policy; its copy in a format that rounds |
//! | `scheduler` | which tokens the next step computes |
//! | `sequence`, `block_manager` | one completion in the making; which KV blocks are free, shared or used |
//! | `kept` | unfinished sequences whose keys and values stay in the cache |
//! | `batch`, `runner`, `mixer`, `kv_cache` | a step's tensors; the network over them; its attention and gated delta nets; its memory |
//! | `draft_head`, `draft_rows` | drafts by the model's own head |
//! | `state_pages` | states of gated delta nets, a page a sequence |
//! | `stages`, `pipeline` | which ranks have which layers; the runner of an engine with several stages |
//! | `gpu` | the runner of a GPU: recorded decode steps, the sampler on the device |
//! | `speculation` | draft tokens: where they come from, and how many pay |
//! | `sampler`, `filters` | logits to tokens |
//! | `step_clock` | times of decode steps, the same ones on all ranks |
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
