//! Keys and values of a paged cache, as kernels read them.

use tch::Tensor;

use super::fp8::ScaledRows;

/// Keys and values in the blocks of a cache.
#[derive(Debug, Clone, Copy)]
pub struct KvBlocks<'a> {
    pub(super) keys: &'a Tensor,   // [num_blocks, Hkv, block_size, hd]
    pub(super) values: &'a Tensor, // like keys
    /// Scales of 8-bit keys and values, one per token and head.
    pub(super) scales: Option<[&'a Tensor; 2]>, // [num_blocks, Hkv, block_size]
}

impl<'a> KvBlocks<'a> {
    /// A cache in the type of the queries.
    pub fn plain(keys: &'a Tensor, values: &'a Tensor) -> Self {
        Self { keys, values, scales: None }
    }

    /// An 8-bit cache, in e4m3 (sm_89 or later) or int8, with queries in bfloat16. GEMMs are in f16, which represents all 8-bit values exactly;
    /// queries beyond 65,504 are clamped.
    pub fn scaled(keys: &'a ScaledRows, values: &'a ScaledRows) -> Self {
        Self { keys: &keys.values, values: &values.values, scales: Some([&keys.scales, &values.scales]) }
    }
}
