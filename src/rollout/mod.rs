//! The generation engine: continuous batching over a paged KV cache, SPMD over a tensor-parallel group. Knows nothing of
//! training.
//!
//! | file | what it is |
//! |---|---|
//! | `engine` | [`Engine`], asleep between rollouts; [`RolloutEngine`], awake |
//! | `session` | an engine that is stepped: `submit` and `step` |
//! | `generate`, `exchange` | closed batches on a session; the requests of all ranks of the group |
//! | `request` | requests and events |
//! | `weights` | what the engine reads of the policy |
//! | `scheduler` | which tokens the next step computes |
//! | `sequence`, `block_manager` | one completion in the making; which KV blocks are free, shared or used |
//! | `kept` | unfinished sequences whose keys and values stay in the cache |
//! | `batch`, `runner`, `attention`, `kv_cache` | a step's tensors; the network over them; its attention; its memory |
//! | `gpu` | the runner of a GPU: recorded decode steps, the sampler on the device |
//! | `sampler`, `filters` | logits to tokens |
//! | `stop` | when a completion ends |

mod attention;
mod batch;
mod block_manager;
mod engine;
mod exchange;
mod filters;
mod generate;
mod gpu;
mod kept;
mod kv_cache;
mod request;
mod routes;
mod runner;
mod sampler;
mod scheduler;
mod sequence;
mod session;
mod stats;
mod stop;
mod weights;

pub use engine::{Engine, EngineOptions, RolloutEngine};
pub use generate::Rollout;
pub use gpu::{StepProfile, engine_buffer_bytes, engine_sum_bytes, engine_table_bytes};
pub use kv_cache::{SPARE_BYTES, kv_block_bytes};
pub use request::{Event, Request, RequestId};
pub use session::{Session, SessionLoad};
pub use stats::EngineStats;
pub use weights::{EngineWeights, QuantizedBlocks};
