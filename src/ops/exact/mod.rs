//! Bit-exact operations of a forward: the result for a token depends only on its own values, the weights, and the keys and values that it attends to.
//! With `exact = true` both the engine and the trainer use them, so a token has the same bits in both, whatever else is in the batch.
//!
//! On a CPU, libtorch does not guarantee this: the order of a GEMM's sums changes with the number of rows, and elementwise functions round the last
//! elements of a tensor differently, because these are not vectorized. So on a CPU every sum here is explicit, in one order: a GEMM sums K in
//! [`LANES`] partial sums, which are then added in order; softmax adds its terms in the order of the keys. This is slow, and meant for tests and
//! small models.
//!
//! On a GPU the operations are the kernels of the engine's steps (`gpu`): the trainer calls the same machine code.
//!
//! | file | content |
//! |---|---|
//! | `rows` | GEMMs, norms and SwiGLU |
//! | `heads` | norms and rotary embedding of queries and keys |
//! | `attention` | attention of one query |
//! | `head` | the log-probability of a token |
//! | `gpu` | all of these on a GPU |
//! | `tiles` | attention of consecutive rows together, on a GPU |

mod attention;
mod gpu;
mod head;
mod heads;
mod rows;
#[cfg(test)]
mod tests;
mod tiles;

pub use attention::{ExactAttention, VisibleKeys, attend};
pub use gpu::SPLIT_TOKENS;
pub use head::{log_sum_exp, logits, logprobs};
pub use heads::{heads, norm_all};
pub use rows::{activate, adapt, product, product_wide, rms_norm};
pub use tiles::CachedTiles;

/// Number of partial sums among which a GEMM's terms are distributed in turn; they are added in order at the end.
const LANES: usize = 16;

/// Computes the sum of a[k] b[k], in one order.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (a_whole, a_rest) = a.as_chunks::<LANES>();
    let (b_whole, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a_whole.iter().zip(b_whole) {
        lanes.iter_mut().zip(a).zip(b).for_each(|((sum, a), b)| *sum += a * b);
    }
    let whole: f32 = lanes.iter().sum();
    a_rest.iter().zip(b_rest).fold(whole, |sum, (a, b)| sum + a * b)
}
