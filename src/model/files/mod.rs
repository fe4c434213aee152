//! Weight files: safetensors with Hugging Face names and shapes, one file or shards with an index.
//!
//! `names` maps our parameters to Hugging Face's, `header` checks a file before anything is allocated from it, `scaled` reads FP8 matrices, `read`
//! and `write` transfer one unit at a time.

mod header;
mod identity;
mod interleaved;
mod mxfp4;
pub(super) mod names;
mod read;
mod scaled;
mod write;

#[cfg(test)]
mod tests;

pub(crate) use header::MappedFile;
pub(super) use header::dtype_of;
pub use read::WeightFiles;
pub(super) use read::has_own_head;
pub use write::WeightWriter;
pub(crate) use write::{TORCH_FORMAT, encode_header, sync};

/// File name of unsharded weights.
pub(super) const SINGLE: &str = "model.safetensors";
/// File name of the index, which maps tensors to shards.
pub(super) const INDEX: &str = "model.safetensors.index.json";
