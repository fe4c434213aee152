//! Activation offload (`activation_offload`): tensors that blocks keep for backward are stored in host memory between forward and backward.
//!
//! The copy of a block's input starts before the block's forward is queued, and the copy of attention's output starts after it. So each copy can
//! overlap the computation of a block. Then libtorch's stream waits for the copy, if it still runs, and the memory is freed. So the forward pass
//! holds the tensors of two blocks, however many blocks there are. During a block's backward, the tensors of the block below are copied back to the
//! GPU. The last block's tensors are not offloaded, because its backward is next. Tensors are copied unchanged, so gradients have the same bits as
//! without offload.

use std::collections::VecDeque;

use tch::{Device, Kind, Tensor};

use super::residence::Transitions;
use crate::error::Result;
use crate::memory::{Direction, HostPool, Mark, PendingCopy};
use crate::model::SavedBlock;

/// Alignment of tensors in the pool, in bytes.
pub(super) const ALIGNMENT_BYTES: usize = 256;

/// Host memory for the tensors of one pass, and the copies under way.
#[derive(Debug)]
pub(super) struct ActivationOffload {
    /// The planned pool first; more are added if a micro-batch is longer than planned.
    pools: Vec<HostPool>,
    /// Bytes of the current pool that this pass has used.
    taken: usize,
    /// Index of the current pool.
    pool: usize,
    /// Tensors on the host, by layer.
    blocks: Vec<Vec<HostTensor>>,
    leaving: VecDeque<MovingTensor>,
    arriving: Vec<MovingTensor>,
    /// Copies whose times are not known yet, the oldest first.
    moves: VecDeque<TensorMove>,
    /// Sums of the copies whose times are known, since the last call of `take_moves`.
    moved: Transitions,
}

/// Place and shape of a tensor in a pool.
#[derive(Debug)]
struct HostTensor {
    pool: usize,
    byte_offset: usize,
    shape: Vec<i64>,
    kind: Kind,
    device: Device,
}

#[derive(Debug)]
struct MovingTensor {
    copy: PendingCopy,
    bytes: usize,
    began: Mark,
    ended: Mark,
}

/// A copy that the device's stream already waits for.
#[derive(Debug)]
struct TensorMove {
    bytes: usize,
    began: Mark,
    ended: Mark,
    came: Mark,
}

impl ActivationOffload {
    /// Creates the offload with memory for one micro-batch.
    pub(super) fn new(pool: HostPool) -> Self {
        Self {
            pools: vec![pool],
            taken: 0,
            pool: 0,
            blocks: Vec::new(),
            leaving: VecDeque::new(),
            arriving: Vec::new(),
            moves: VecDeque::new(),
            moved: Transitions::default(),
        }
    }

    /// Starts copying a block's input to the host. Call it before the block's forward is queued. The first block starts a new pass and drops any
    /// remains of an earlier one, which may have failed.
    pub(super) fn before_forward(&mut self, layer: usize, input: &Tensor /* [T, D] */) -> Result<()> {
        if layer == 0 {
            self.drop_unfinished();
            self.sum_moves(TensorMove::is_over)?;
            (self.pool, self.taken) = (0, 0);
        }
        self.blocks.truncate(layer);
        self.blocks.push(Vec::new());
        self.send(&input.f_contiguous()?)
    }

    /// Drops the copies that are still under way after a pass failed, with their tensors.
    pub(super) fn drop_unfinished(&mut self) {
        self.leaving.clear();
        self.arriving.clear();
    }

    /// Takes a block's kept tensors out of `block`. The copy of the input is already under way; the copies of the others start now. Makes the device
    /// wait for earlier copies first.
    pub(super) fn after_forward(&mut self, block: &mut SavedBlock) -> Result<()> {
        self.release()?;
        for (place, tensor) in block.movable().enumerate() {
            let tensor = std::mem::replace(tensor, Tensor::new());
            if place > 0 {
                self.send(&tensor.f_contiguous()?)?;
            }
        }
        Ok(())
    }

    /// Makes the device wait for all tensors being copied to the host, and frees them.
    pub(super) fn release(&mut self) -> Result<()> {
        while let Some(moving) = self.leaving.pop_front() {
            self.moves.push_back(moving.hold_libtorch(&self.pools[0])?);
        }
        Ok(())
    }

    /// Returns a block's tensors, if they were offloaded, and starts copying back those of the block below. Call it before the block's backward is
    /// queued.
    pub(super) fn before_backward(&mut self, layer: usize, block: &mut SavedBlock) -> Result<()> {
        if layer < self.blocks.len() {
            if self.arriving.is_empty() {
                self.fetch(layer)?;
            }
            for (place, moving) in block.movable().zip(std::mem::take(&mut self.arriving)) {
                *place = moving.copy.tensor().shallow_clone();
                self.moves.push_back(moving.hold_libtorch(&self.pools[0])?);
            }
        }
        if layer > 0 && layer <= self.blocks.len() { self.fetch(layer - 1) } else { Ok(()) }
    }

    /// Bytes and times of copies since the last call. Waits until these copies have finished.
    pub(super) fn take_moves(&mut self) -> Result<Transitions> {
        self.sum_moves(|_| Ok(true))?;
        Ok(std::mem::take(&mut self.moved))
    }

    /// Adds the times of the oldest copies to `moved`, until `is_due` is false for a copy.
    fn sum_moves(&mut self, is_due: impl Fn(&TensorMove) -> Result<bool>) -> Result<()> {
        while let Some(oldest) = self.moves.front()
            && is_due(oldest)?
        {
            let TensorMove { bytes, began, ended, came } = oldest;
            self.moved.bytes += bytes;
            self.moved.copying += began.until(ended)?;
            self.moved.exposed += came.until(ended)?;
            self.moves.pop_front();
        }
        Ok(())
    }

    fn send(&mut self, tensor: &Tensor) -> Result<()> {
        let bytes = tensor.numel() * tensor.kind().elt_size_in_bytes();
        let byte_offset = self.place(bytes, tensor.device())?;
        let pool = &mut self.pools[self.pool];
        let began = pool.mark(Direction::Out)?;
        let copy = pool.copy_from_async(byte_offset, tensor)?;
        let ended = pool.mark(Direction::Out)?;
        self.leaving.push_back(MovingTensor { copy, bytes, began, ended });
        let (shape, kind, device) = (tensor.size(), tensor.kind(), tensor.device());
        let stored = HostTensor { pool: self.pool, byte_offset, shape, kind, device };
        self.blocks.last_mut().expect("a block's input is sent first").push(stored);
        Ok(())
    }

    fn fetch(&mut self, layer: usize) -> Result<()> {
        for HostTensor { pool, byte_offset, shape, kind, device } in &self.blocks[layer] {
            let pool = &self.pools[*pool];
            let mut tensor = Tensor::f_empty(shape, (*kind, *device))?;
            let began = pool.mark(Direction::In)?;
            let copy = pool.copy_to_async(*byte_offset, &mut tensor)?;
            let ended = pool.mark(Direction::In)?;
            let bytes = tensor.numel() * kind.elt_size_in_bytes();
            self.arriving.push(MovingTensor { copy, bytes, began, ended });
        }
        Ok(())
    }

    /// Finds `bytes` free bytes and returns their offset in the current pool. If the current pool is full, the next one becomes current. A further
    /// pool that is too small for `bytes` is removed, and a larger one is created.
    fn place(&mut self, bytes: usize, device: Device) -> Result<usize> {
        if self.taken + bytes > self.pools[self.pool].len_bytes() {
            (self.pool, self.taken) = (self.pool + 1, 0);
            while self.pools.get(self.pool).is_some_and(|pool| pool.len_bytes() < bytes) {
                self.pools.remove(self.pool);
            }
            if self.pool == self.pools.len() {
                let bytes = bytes.max(self.pools[0].len_bytes() / 4);
                self.pools.push(HostPool::new("activations_host", bytes, device, &mut |_, _| ())?);
            }
        }
        let byte_offset = self.taken;
        self.taken += bytes.next_multiple_of(ALIGNMENT_BYTES);
        Ok(byte_offset)
    }
}

impl TensorMove {
    /// Whether the copy's times are known without waiting.
    fn is_over(&self) -> Result<bool> {
        Ok(self.came.is_past()? && self.ended.is_past()?)
    }
}

impl MovingTensor {
    fn hold_libtorch(self, pool: &HostPool) -> Result<TensorMove> {
        let Self { copy, bytes, began, ended } = self;
        let came = pool.mark_libtorch()?;
        copy.hold_libtorch()?;
        Ok(TensorMove { bytes, began, ended, came })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::{AdamOptions, GradientOptions, NetworkOptions, Optim, Policy, PolicyOptions};
    use super::*;
    use crate::config::GradientCheckpointing;
    use crate::model::{ModelSpec, ParamTable, Plain, init_unit_on};
    use crate::ranks::World;

    const DEVICE: Device = Device::Cpu;

    fn pool(bytes: usize) -> HostPool {
        HostPool::new("offload_unit_test", bytes, DEVICE, &mut |_, _| ()).unwrap()
    }

    /// Creates a tensor of this many bytes.
    fn tensor(bytes: usize) -> Tensor {
        Tensor::ones([bytes as i64], (Kind::Uint8, DEVICE))
    }

    /// On a GPU, each copy that is not summed up holds three CUDA events.
    #[test]
    fn moves_that_are_over_do_not_pile_up() {
        let mut offload = ActivationOffload::new(pool(4096));
        for _ in 0..5 {
            offload.before_forward(0, &tensor(100)).unwrap();
            offload.release().unwrap();
            assert_eq!(offload.moves.len(), 1);
        }
        assert_eq!(offload.take_moves().unwrap().bytes, 500);
        assert_eq!(offload.take_moves().unwrap(), Transitions::default());
    }

    /// Runs micro-batches that need more memory than planned, with tensors that first grow and then shrink.
    #[test]
    fn pools_that_are_too_small_give_way() {
        let mut offload = ActivationOffload::new(pool(1 << 16));
        let mut pools_of = |bytes: usize, count: usize| {
            for layer in 0..count {
                offload.before_forward(layer, &tensor(bytes)).unwrap();
                offload.release().unwrap();
            }
            offload.pools[1..].iter().map(HostPool::len_bytes).collect::<Vec<_>>()
        };
        assert_eq!(pools_of(1 << 14, 6), [1 << 14; 2]);
        assert_eq!(pools_of(1 << 15, 4), [1 << 15; 2]);
        assert_eq!(pools_of(1 << 14, 6), [1 << 15; 2]);
    }

    /// A pass may fail in a block's backward, while the tensors of the block below are being copied back.
    #[test]
    fn tensors_on_their_way_are_dropped_with_the_gradients() {
        let table = Arc::new(ParamTable::new(Arc::new(ModelSpec::preset("micro").unwrap()), 1));
        let options = PolicyOptions {
            stage: 0,
            network: NetworkOptions { kind: Kind::Float, residual: Kind::Float, device: DEVICE, format: &Plain },
            gradient_checkpointing: GradientCheckpointing::Full,
            optim: Optim::AdamW,
            adam: AdamOptions { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 },
            gradients: GradientOptions::default(),
        };
        let mesh = World::single().mesh(1, 1).unwrap();
        let policy = Policy::new(table, &mesh, options, &|layout| init_unit_on(layout, 1, Kind::Float, DEVICE));
        let mut policy = policy.unwrap().with_activation_offload(pool(4096));
        let offload = policy.network.offload.as_mut().unwrap();
        offload.before_forward(0, &tensor(100)).unwrap();
        offload.fetch(0).unwrap();
        assert_eq!((offload.leaving.len(), offload.arriving.len()), (1, 1));
        policy.drop_gradients();
        let offload = policy.network.offload.as_ref().unwrap();
        assert_eq!((offload.leaving.len(), offload.arriving.len()), (0, 0));
    }
}
