//! The tensor operations of a decoder, each with its backward. Knows nothing of ranks.
//!
//! One file per operation, with forward and explicit backward, without autograd. Shapes in the comments: T tokens, D hidden, V vocabulary, H query
//! heads, Hkv key/value heads, G = H / Hkv, hd head_dim, F intermediate, C scored tokens, N sequences. Sums, norms and softmax statistics are kept in
//! [`crate::torch::accumulation_kind`]. Gradients of weights are added in place to the given tensors, which may be views of a flat gradient buffer
//! and have another floating type.
//!
//! On a GPU, float32 and bfloat16 use the fused kernels of [`crate::cuda::kernels`], whose sums have a fixed order; everything else uses libtorch's
//! operations, which are the kernels' reference.
//!
//! Every operation that allocates returns a `Result`: [`crate::Error::OutOfMemory`] if the device has no memory, to which the caller adds the
//! configuration key to lower. Views cannot fail and are plain calls.

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
pub mod mxfp4;
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

/// Calls `f` for every item in order, up to the first error.
pub(crate) fn try_map<T, U, const N: usize>(items: [T; N], f: impl FnMut(T) -> Result<U>) -> Result<[U; N]> {
    let mapped = items.into_iter().map(f).collect::<Result<Vec<U>>>()?;
    Ok(mapped.try_into().unwrap_or_else(|_| unreachable!("one result for each item")))
}
