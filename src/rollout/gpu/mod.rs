//! Engine steps on a GPU. A whole decode step, from the last sampled tokens to the next ones, is captured as a CUDA graph for each batch size and
//! replayed; it allocates nothing and makes no libtorch calls. The host runs one step ahead: it uploads and launches a step before it reads the
//! samples of the previous one.
//!
//! | file | what it is |
//! |---|---|
//! | `state` | what persists between wakes, including the choice of GEMM kernels |
//! | `runner`, `decode` | the steps of one call of `generate`; decode steps |
//! | `buffers`, `expert_buffers`, `delta_columns` | the memory of a step; of the tokens of experts, of the projections of gated delta nets |
//! | `inputs` | what a step is told, packed into one upload |
//! | `masks` | the tokens that structures allow, on their way to the device |
//! | `network`, `sampling` | kernels and products, from token ids to hidden states and on to sampled tokens |
//! | `processing` | what the draws of a step need beside the temperature |
//! | `draft_head`, `draft_steps` | the head that drafts tokens; its rows in decode steps |
//! | `delta_net` | the layers with gated delta nets, from their projections to their states |
//! | `experts` | the layers that have experts, from the router to the weighted sum |
//! | `linears` | products of a block |
//! | `prefill` | attention of prompts |
//! | `stages` | transfers between pipeline stages |
//! | `graphs` | decode steps as CUDA graphs, by batch size |
//! | `op` | names of a step's operations |
//! | `trial` | a decode step over a synthetic batch, for benchmarks |

mod buffers;
mod decode;
mod delta_columns;
mod delta_net;
mod draft_head;
mod draft_steps;
mod expert_buffers;
mod experts;
mod graphs;
mod inputs;
mod linears;
mod masks;
mod network;
mod op;
mod plans;
mod prefill;
mod processing;
mod runner;
mod sampling;
mod stages;
mod state;
mod trial;
mod wait;

pub use self::buffers::{engine_buffer_bytes, engine_sum_bytes};
pub use self::op::DecoderOp;
pub(super) use self::runner::GpuRunner;
pub(super) use self::state::GpuState;
pub use self::state::engine_table_bytes;
pub use self::trial::{TrialBatch, TrialStep};
