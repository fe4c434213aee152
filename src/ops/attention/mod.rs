//! Causal attention with grouped queries: packed variable-length sequences for training, paged keys and values for
//! generation. Queries of one group meet their key-value head without repeating it. Softmax statistics are kept in
//! accumulation kind.
//!
//! | file | what it is |
//! |---|---|
//! | `bounds` | where a micro-batch's sequences lie, with or without shared prompts |
//! | `packed` | attention over them: one attention, or three that are merged |
//! | `merge` | two attentions of the same queries as one |
//! | `runs`, `planned`, `varlen` | one attention of packed runs: its rows, what kernels need of them, the computation |
//! | `kernel` | which kernel serves it |
//! | `mixed` | runs of different lengths: the long ones one by one |
//! | `padded` | runs side by side for kernels that take rectangles only |
//! | `sinks` | logits without a key that take part in the softmax |
//! | `paged`, `entries` | attention over a paged cache; what it is made of |

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
