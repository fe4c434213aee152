//! The tensor operations of a decoder, each with its backward. Knows nothing of ranks.
//!
//! One file per operation, forward and explicit backward, no autograd. Shapes in the comments: T tokens, D hidden,
//! V vocabulary, H query heads, Hkv key-value heads, G = H / Hkv, hd head_dim, F intermediate, C scored tokens, N sequences.
//! Sums, norms and softmax statistics are kept in [`crate::torch::accumulation_kind`]. Gradients of weights are added in
//! place into the tensors given, which may be views of a flat gradient buffer and of another floating type.
//!
//! On a GPU, float32 and bfloat16 take the fused kernels of [`crate::cuda::kernels`], whose sums come in a fixed order; all
//! else takes libtorch's operations, which are the kernels' reference.
//!
//! Every operation that allocates returns a `Result`: [`crate::Error::OutOfMemory`] where the device has no room, which the
//! caller explains with the key to lower. Views cannot fail and stay plain calls.

pub mod adamw;
pub mod adamw8bit;
pub mod attention;
pub mod delta_net;
pub mod dropout;
pub mod dynamic_map;
pub mod embedding;
pub mod exact;
pub(crate) mod expert_bias;
pub mod fp8;
pub mod grouped;
pub mod head;
pub mod heads;
pub mod int8;
pub mod linear;
pub mod muon;
pub mod norm;
pub mod random;
pub mod rms_norm;
pub mod rope;
pub mod router;
pub mod swiglu;
#[cfg(test)]
pub(crate) mod testing;

use crate::error::Result;

#[cfg(test)]
mod no_memory;

/// `f` of every item in order, up to the first error.
pub(crate) fn try_map<T, U, const N: usize>(items: [T; N], f: impl FnMut(T) -> Result<U>) -> Result<[U; N]> {
    let mapped = items.into_iter().map(f).collect::<Result<Vec<U>>>()?;
    Ok(mapped.try_into().unwrap_or_else(|_| unreachable!("one result for each item")))
}
