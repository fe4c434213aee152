//! Steps on a GPU: nothing of a decode step enters libtorch or is allocated, and the whole of it, from the last sampled tokens
//! to the next ones, is recorded once for every batch size and replayed. The host runs one step behind: it uploads a step's
//! description and launches it before it reads what the step before has sampled.
//!
//! | file | what it is |
//! |---|---|
//! | `state` | what lasts from one wake to the next, the choice of a step's products too |
//! | `runner` | the steps of one call of `generate` |
//! | `buffers` | the memory of a step |
//! | `inputs` | what a step is told, packed into one upload |
//! | `network`, `sampling` | kernels and products, from token ids to hidden states and on to sampled tokens |
//! | `prefill` | attention of prompts |
//! | `graphs` | decode steps, recorded by batch size |
//! | `profile` | the time of a decode step and of each of its operations |

mod buffers;
mod graphs;
mod inputs;
mod network;
mod prefill;
mod profile;
mod runner;
mod sampling;
mod state;

use crate::model::{DenseSpec, Mlp};

pub use self::buffers::{engine_buffer_bytes, engine_sum_bytes};
pub use self::profile::StepProfile;
pub(super) use self::runner::GpuRunner;
pub(super) use self::state::GpuState;
pub use self::state::engine_table_bytes;

/// The MLP of a block.
///
/// # Panics
/// For experts, which [`crate::model::ModelSpec::validate_gpu_engine`] refuses.
fn dense(mlp: Mlp) -> DenseSpec {
    match mlp {
        Mlp::Dense(dense) => dense,
        Mlp::Experts(_) => panic!("experts were refused"),
    }
}
