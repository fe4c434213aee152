//! Packing, ZeRO shards, AdamW and Muon, learning-rate schedule. Knows nothing of generation.
//!
//! | file | what it is |
//! |---|---|
//! | `gather` | sequences of all ranks, and their experts where they are trained on |
//! | `balance` | sequences to ranks by cost |
//! | `sequence`, `pack`, `micro_batch` | sequences, and how they become micro-batches, prompts shared |
//! | `policy` | the trained model: scores, gradients, the step |
//! | `load` | how one is made: of all weights, or of adapters and a frozen base |
//! | `reference` | a frozen model that only scores |
//! | `network`, `network_options`, `blocks`, `upcoming` | embedding, blocks and head, forward and backward; the units that they read next |
//! | `offload` | kept tensors of blocks in host memory until their backward |
//! | `pass`, `row_part` | what blocks and head need of a micro-batch; this rank's rows of it, where ranks share it |
//! | `adapters` | the trained weights of a frozen network |
//! | `sharding` | which part of every unit a rank keeps, owns and steps |
//! | `weights`, `gradients`, `optimizer` | the three classes of bytes |
//! | `optim`, `orthogonal` | which optimizer; Muon's whole matrices over shards |
//! | `state_layout` | which state an element has, and where it lies in memory |
//! | `residence`, `flow` | where optimizer state lives; how it flows through the device where that is the host |
//! | `state` | optimizer state by parameter and element range, for checkpoints |
//! | `bytes`, `activations`, `moments` | what each class costs, and all at the fullest moment, for the plan |
//! | `schedule` | learning rates |
//!
//! ZeRO is one mechanism with three choices: after use, keep or free the gathered weights; after backward, keep or
//! reduce-scatter the gradients; always step the part that this rank owns. At one world size and without accumulation the
//! stages are bitwise equal where sums run in rank order, as they do in shared memory; between GPUs up to the order in which
//! NCCL adds. The gradient norm is combined from the same partial sums.
//!
//! Collectives run beside computation where they can: a unit's gradients are reduced during the next unit's backward, its
//! weights are gathered during that of the unit before, and new weights travel during the next unit's step.
//!
//! Nothing here opens a phase: the caller wraps scoring, backward and step in `phase::scope`. Every method said to be
//! collective is called by all ranks in the same order.

mod activations;
mod adapters;
mod balance;
mod blocks;
mod bytes;
mod draft_head;
mod flow;
mod gather;
mod gradients;
mod head;
mod load;
mod load_balance;
mod micro_batch;
mod moments;
mod network;
mod network_options;
mod offload;
mod optim;
mod optimizer;
mod orthogonal;
mod pack;
mod pass;
mod policy;
mod reference;
mod residence;
mod routes;
mod row_part;
mod schedule;
mod scores;
mod sequence;
mod sharding;
mod state;
mod state_layout;
mod upcoming;
mod weights;

pub use activations::{ActivationBytes, MicroBatchShape, WORKSPACE_BYTES};
pub use balance::balanced_share;
pub use bytes::{TrainBytes, TrainedModel, reference_bytes};
pub use gather::{ExpertSources, GatheredSequences, gather_sequences};
pub use gradients::GradientOptions;
pub use load::{AdapterOptions, PolicyStart};
pub use micro_batch::MicroBatch;
pub use moments::{Moment, UpdateCourse, fullest_of_reference};
pub use network_options::NetworkOptions;
pub use optim::{MuonOptions, Optim};
pub use optimizer::AdamOptions;
pub use pack::{PackOptions, pack, pad_to_agreed_count};
pub use policy::{Policy, PolicyOptions, StepOutcome};
pub use reference::Reference;
pub use residence::{OptimizerHome, Transitions};
pub use schedule::{Schedule, learning_rate};
pub use scores::{Scores, TokenGradients};
pub use sequence::{Sequence, TeacherTop};
pub use state::{ParamShard, ParamState, StateRange};
pub use state_layout::{StateForm, StatePart};
