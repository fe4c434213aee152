//! Causal attention with grouped queries: packed variable-length sequences in training, paged keys and values in generation. Key/value heads are not
//! repeated for the queries of a group. Softmax statistics are kept in the accumulation type.
//!
//! | file | content |
//! |---|---|
//! | `bounds` | rows of a micro-batch's sequences, with or without shared prompts |
//! | `packed` | attention over these: one attention, or three that are merged |
//! | `merge` | merges two attentions of the same queries |
//! | `runs`, `planned`, `varlen` | one attention over packed runs: rows, data for kernels, computation |
//! | `kernel` | selects the kernel |
//! | `mixed` | runs of different lengths: long ones one by one |
//! | `padded` | runs padded to equal length, for kernels that need that |
//! | `sinks` | logits without a key that take part in the softmax |
//! | `paged`, `entries` | attention over a paged cache; reading and writing that cache |

mod bounds;
mod entries;
mod kernel;
mod merge;
mod mixed;
mod packed;
mod padded;
mod paged;
mod planned;
mod runs;
pub mod sinks;
#[cfg(test)]
mod tests;
mod varlen;

pub use bounds::{Bounds, SharedBounds};
pub use entries::KvEntries;
pub use packed::{PackedLayout, packed_backward, packed_forward};
pub use paged::{PagedLayout, PrefillContext, kv_rows, paged_decode, paged_prefill, write_kv};

pub use crate::torch::{Attended, QkvGradients, SavedAttention};
