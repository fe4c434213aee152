//! Low-rank adapters (LoRA, arXiv 2106.09685): y = x W^T + (alpha / r) (x A^T) B^T with W frozen.
//!
//! Users adapt projections (`q_proj`), but GEMMs run on fused matrices. The A of a fused matrix's n adapted projections are stacked, [n r, in]. Their
//! B keep the matrix's order of rows, without the rows of other projections: Qkv's are grouped by key/value head, GateUp's alternate. For computation
//! B is expanded to all rows of the matrix and n r columns: each row has its own projection's r columns and zeros elsewhere ([`Lora`]). So one pair
//! of GEMMs suffices for any fused matrix. A tensor-parallel slice of B is a range of rows, like the matrix's; for row-parallel matrices A is sliced
//! by columns like the matrix, and the sum over ranks is shared with it. Projections that a checkpoint stores in one module share an A, [r, in].
//!
//! Every expert has its own adapters, stacked like the experts' matrices: A [E, n r, in], B [E, out, r]. PEFT reads them expert by expert; where
//! transformers has one parameter for all experts, PEFT stacks them itself. PEFT supports this only if gate, up and down are adapted, or down alone,
//! without dropout, in models with experts in all layers. Other cases are refused.
//!
//! | file | content |
//! |---|---|
//! | `spec` | settings, and the shapes of parameters |
//! | `layout` | the parameters of a block's adapters, and their expansion |
//! | `product` | forward and backward for a frozen matrix |
//! | `grouped` | forward and backward for experts' matrices |
//! | `stacked` | several named adapters, one of which is chosen for each row of a batch |
//! | `peft` | adapter folders |
//! | `served` | which adapters the GPU kernels support |

mod grouped;
mod layout;
mod peft;
mod product;
mod served;
mod spec;
mod stacked;
#[cfg(test)]
mod tests;

pub use layout::{BlockLora, Lora};
pub(super) use peft::WEIGHTS as ADAPTER_WEIGHTS;
pub use peft::{AdapterFiles, write_adapters};
pub use spec::{AdapterBase, LoraSpec};
