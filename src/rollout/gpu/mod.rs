//! Engine steps on a GPU. A whole decode step, from the last sampled tokens to the next ones, is captured as a CUDA graph for each batch size and
//! replayed; it allocates nothing and makes no libtorch calls. The host runs one step ahead: it uploads and launches a step before it reads the
//! samples of the previous one.
//!
//! | file | what it is |
//! |---|---|
//! | `state` | what persists between wakes, including the choice of GEMM kernels |
//! | `runner` | the steps of one call of `generate` |
//! | `buffers`, `expert_buffers`, `delta_columns` | the memory of a step, of its experts and of the projections of gated delta nets |
//! | `inputs` | the inputs of a step, packed into one upload |
//! | `masks` | upload of the tokens that structured output allows |
//! | `network`, `sampling` | kernels and GEMMs: from token ids to hidden states, and from those to sampled tokens |
//! | `processing` | logits processing that a step's draws need besides temperature |
//! | `delta_net` | layers with gated delta nets |
//! | `experts` | layers with experts: router, GEMMs, weighted sum |
//! | `linears` | the GEMMs of a block |
//! | `prefill` | attention of prompts |
//! | `stages` | transfers between pipeline stages |
//! | `graphs` | decode steps as CUDA graphs, by batch size |
//! | `op` | names of a step's operations |
//! | `trial` | a decode step over a synthetic batch, for benchmarks |

mod buffers;
mod delta_columns;
mod delta_net;
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
