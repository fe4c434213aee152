//! The tensor operations of a decoder, each with its backward. Knows nothing of ranks.
//!
//! One file per operation, forward and explicit backward, no autograd. Shapes in the comments: T tokens, D hidden,
//! V vocabulary, H query heads, Hkv key-value heads, G = H / Hkv, hd head_dim, F intermediate, C scored tokens, N sequences.
//! Sums, norms and softmax statistics are kept in [`crate::torch::accumulation_kind`]. Gradients of weights are added in
//! place into the tensors given, which may be views of a flat gradient buffer and of another floating type.
//!
//! On a GPU, float32 and bfloat16 take the fused kernels of [`crate::cuda::kernels`], whose sums come in a fixed order; all
//! else takes libtorch's operations, which are the kernels' reference.

pub mod adamw;
pub mod attention;
pub mod dropout;
pub mod embedding;
pub mod head;
pub mod heads;
pub mod linear;
pub mod nf4;
pub mod norm;
pub mod random;
pub mod rms_norm;
pub mod rope;
pub mod swiglu;
#[cfg(test)]
pub(crate) mod testing;
