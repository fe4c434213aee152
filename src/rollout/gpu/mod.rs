//! Steps on a GPU: nothing of a decode step enters libtorch or is allocated, and the whole of it, from the last sampled tokens
//! to the next ones, is recorded once for every batch size and replayed. The host runs one step behind: it uploads a step's
//! description and launches it before it reads what the step before has sampled.
//!
//! | file | what it is |
//! |---|---|
//! | `state` | what lasts from one wake to the next, the choice of a step's products too |
//! | `runner` | the steps of one call of `generate` |
//! | `buffers`, `expert_buffers`, `delta_columns` | the memory of a step; of the tokens of experts, of the projections of gated delta nets |
//! | `inputs` | what a step is told, packed into one upload |
//! | `masks` | the tokens that structures allow, on their way to the device |
//! | `network`, `sampling` | kernels and products, from token ids to hidden states and on to sampled tokens |
//! | `processing` | what the draws of a step need beside the temperature |
//! | `delta_net` | the layers with gated delta nets, from their projections to their states |
//! | `experts` | the layers that have experts, from the router to the weighted sum |
//! | `linears` | products of a block |
//! | `prefill` | attention of prompts |
//! | `stages` | what goes from stage to stage, of an engine that has several |
//! | `graphs` | decode steps, recorded by batch size |
//! | `op` | the operations of a step, by name |
//! | `trial` | a decode step over a made-up batch, for benchmarks |

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
