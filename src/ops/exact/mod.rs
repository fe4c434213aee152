//! The operations of a forward whose results depend on one token alone: its own values, the weights, and the keys and values that it
//! sees. With `exact` the engine and the trainer both compute by them, so that a token has the same bits in both, whatever is
//! computed beside it.
//!
//! libtorch promises no such thing on a CPU. The sums of its products change with the number of rows, and an element-wise
//! function of many elements has other bits in the last ones, which are computed one by one. So on a CPU every sum here is written out, in one
//! order: a product adds K up in [`LANES`] sums that are then added in order, and softmax adds its terms in the order of the keys. That
//! is slow, and meant for tests and small models.
//!
//! On a GPU the operations are the kernels of the engine's own steps (`gpu`): the trainer calls the same machine code.
//!
//! | file | what it is |
//! |---|---|
//! | `rows` | products, norms and SwiGLU |
//! | `heads` | norms and rotation of queries and keys |
//! | `attention` | one query and the keys that it sees |
//! | `head` | the log-probability of a token |
//! | `gpu` | all of them on a GPU |
//! | `tiles` | attention on a GPU, of neighbouring rows together |

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

/// Sums that a product's terms are dealt to in turn; they are added in order at the end.
const LANES: usize = 16;

/// sum of a[k] b[k], in one order.
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
