//! Packing, ZeRO shards, AdamW and Muon, learning-rate schedule. Knows nothing of generation.
//!
//! | file | what it is |
//! |---|---|
//! | `gather` | gathers sequences on all ranks, and recorded experts where they are trained on |
//! | `balance` | distributes sequences over ranks by cost |
//! | `sequence`, `pack`, `micro_batch` | sequences, and how they are packed into micro-batches, with shared prompts |
//! | `policy` | the trained model: scores, gradients, the optimizer step |
//! | `load` | creates a policy: all weights, or adapters on a frozen base |
//! | `balanced_scores` | scores of a policy with the load-balancing loss of its experts, for evaluation |
//! | `reference` | a frozen model that only scores |
//! | `network`, `network_options`, `blocks`, `upcoming` | embedding, blocks and head, forward and backward; which units are needed next |
//! | `offload` | activations that are kept in host memory until backward |
//! | `pass`, `row_part` | inputs of blocks and head from a micro-batch; this rank's rows if ranks share it |
//! | `adapters` | LoRA adapters of a frozen network |
//! | `sharding` | which part of every unit a rank stores, owns and steps |
//! | `weights`, `gradients`, `optimizer` | weights, gradients and optimizer state |
//! | `optim`, `orthogonal` | choice of optimizer; Muon's orthogonalisation of sharded matrices |
//! | `state_layout` | which optimizer state each element has, and its place in memory |
//! | `residence`, `flow` | where optimizer state is stored; streaming it from the host through the device |
//! | `state` | optimizer state by parameter and element range, for checkpoints |
//! | `bytes`, `activations`, `moments` | memory of each kind, and the peak over all, for the memory plan |
//! | `schedule` | learning rates |
//!
//! ZeRO is one mechanism with three choices: after use, keep or free the gathered weights; after backward, keep or reduce-scatter the gradients;
//! always step the part that this rank owns. At one world size and without accumulation the stages give equal bits where sums run in rank order, as
//! in shared memory. Between GPUs they are equal up to NCCL's order of additions. The gradient norm is combined from the same partial sums at every
//! stage.
//!
//! Collectives overlap computation where possible: a unit's gradients are reduced during the next unit's backward, its weights are gathered while the
//! previous unit computes, and new weights are sent during the next unit's step.
//!
//! Nothing here opens a phase: the caller wraps scoring, backward and step in `phase::scope`. All ranks must call collective methods in the same
//! order.

mod activations;
mod adapters;
mod balance;
mod balanced_scores;
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
