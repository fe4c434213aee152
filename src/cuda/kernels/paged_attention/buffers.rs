//! Buffers of the attention kernel on tensor cores.

use tch::{Device, Kind, Tensor};

use super::super::launch::{Argument, address, invalid};
use super::{AttentionShape, ITEM_HEADS, WIDE_DIM};
use crate::cuda::Context;
use crate::cuda::capability::Capability;
use crate::error::Result;

/// Blocks that one multiprocessor can run at once, limited by registers.
const BLOCKS_PER_PROCESSOR: usize = 2;
/// 32-bit words of a work item.
const ITEM_WORDS: usize = 12;

/// Buffers of the tensor-core kernel; `None` if the fallback kernel is used.
#[derive(Debug)]
pub(super) struct TensorCoreBuffers {
    /// Number of thread blocks that process items.
    pub(super) num_blocks: usize,
    /// Key/value heads times chunks of up to [`ITEM_HEADS`] query heads.
    pub(super) columns: usize,
    /// Maximum number of partial results per column.
    pub(super) capacity: usize,
    /// Whether `ringed_attention` supports this shape and split on this GPU.
    pub(super) can_ring: bool,
    pub(super) header: Tensor,   // [4] i32
    pub(super) items: Tensor,    // [at least capacity + max_rows, 12] i32
    pub(super) pieces: Tensor,   // [max_rows, 2] i32
    pub(super) scratch: Tensor,  // [4, max_rows] i32
    pub(super) arrived: Tensor,  // [max_rows, columns] i32, zero between launches
    pub(super) partials: Tensor, // [capacity, columns, 8 (hd + 2)] f32
}

impl TensorCoreBuffers {
    pub(super) fn new(
        shape: &AttentionShape,
        device: Device,
        max_rows: usize,
        split_tokens: Option<usize>,
        most_tokens: usize,
    ) -> Result<Self> {
        let Device::Cuda(gpu) = device else { return Err(invalid("attention_plan", "a GPU", device)) };
        let context = Context::retain(gpu)?;
        let num_blocks = BLOCKS_PER_PROCESSOR * context.num_processors()?;
        let is_hopper = context.compute_capability()? == Capability::HOPPER;
        let partial = partials(shape, max_rows, split_tokens, most_tokens);
        let [capacity, columns, _] = partial;
        let zeros = |shape: &[usize]| {
            let shape: Vec<i64> = shape.iter().map(|&size| size as i64).collect();
            Tensor::f_zeros(shape, (Kind::Int, device))
        };
        Ok(Self {
            num_blocks,
            columns,
            capacity,
            can_ring: is_hopper && shape.head_dim < WIDE_DIM && split_tokens.is_none(),
            header: zeros(&[4])?,
            // Every block reads one item before it knows how many there are.
            items: zeros(&[(capacity + max_rows).max(num_blocks), ITEM_WORDS])?,
            pieces: zeros(&[max_rows, 2])?,
            scratch: zeros(&[4, max_rows])?,
            arrived: zeros(&[max_rows, columns])?,
            partials: Tensor::f_empty(partial.map(|size| size as i64), (Kind::Float, device))?,
        })
    }

    pub(super) fn tensors(&self) -> [&Tensor; 6] {
        [&self.header, &self.items, &self.pieces, &self.scratch, &self.arrived, &self.partials]
    }

    pub(super) fn addresses(&self, gpu: usize) -> Result<[Argument; 6]> {
        let mut addresses = [Argument::NULL; 6];
        for (at, tensor) in addresses.iter_mut().zip(self.tensors()) {
            *at = address("attention_plan", tensor, tensor.kind(), tensor.numel(), gpu)?;
        }
        Ok(addresses)
    }
}

/// Returns (capacity, columns, numbers per partial result). Without a fixed split the plan adapts to the capacity, about four pieces per row and more
/// for few rows; a fixed split needs enough for the longest contexts.
pub(super) fn partials(
    shape: &AttentionShape,
    max_rows: usize,
    split_tokens: Option<usize>,
    context: usize,
) -> [usize; 3] {
    let capacity = split_tokens.map_or(4 * max_rows + 1024, |split| max_rows.saturating_mul(context.div_ceil(split)));
    let columns = shape.num_kv_heads * (shape.num_heads / shape.num_kv_heads).div_ceil(ITEM_HEADS);
    [capacity, columns, ITEM_HEADS * (shape.head_dim + 2)]
}
