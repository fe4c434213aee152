//! Low-rank adapters (LoRA, arXiv 2106.09685): y = x W^T + (alpha / r) (x A^T) B^T with W frozen.
//!
//! An adapter belongs to a projection as its users know it (`q_proj`), a product to a fused matrix. Of the n adapted
//! projections of a fused matrix the A are stacked, [n r, in], and the B keep the matrix's order of rows, those of other
//! projections left out: Qkv's are grouped by key/value head, GateUp's alternate. For use, B is expanded to all rows of the
//! matrix and n r columns, each row with its own projection's r columns and zeros elsewhere ([`Lora`]): a product is then
//! one pair of products whatever is fused, and a tensor-parallel slice of B is that of the matrix, a range of rows; for
//! row-parallel matrices A is sliced by columns as the matrix is, and its sum over ranks is the product's own. Projections that a checkpoint has
//! in one module share an A, [r, in].
//!
//! Every expert has adapters of its own, one after the other as their matrices are: A [E, n r, in], B [E, out, r]. PEFT reads them
//! expert by expert, and where transformers has one parameter for all experts, stacks them itself; it does so where gate, up and down
//! are adapted or down alone, without dropout, in models whose layers all have experts. Others are refused.
//!
//! | file | what it is |
//! |---|---|
//! | `spec` | settings, and the shapes of parameters |
//! | `layout` | the parameters of a block's adapters, and their expansion |
//! | `product` | forward and backward beside a frozen matrix |
//! | `grouped` | forward and backward beside experts' matrices |
//! | `stacked` | adapters of several names, of which every row of a batch uses one |
//! | `peft` | adapter folders |
//! | `served` | what kernels of a GPU compute with |

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
