//! LoRA adapters of a frozen network, the only weights that train.

use tch::Tensor;

use super::gradients::UnitSum;
use super::weights::Weights;
use crate::error::Result;
use crate::model::{BlockLora, BlockParams, LoraSpec, ModelSpec, Unit, UnitLayout};
use crate::ops::dropout::Dropout;
use crate::ops::random::RandomKey;

/// Separates dropout's random numbers from other uses of the same seed.
const STREAM: u64 = 0x6472_6f70; // "drop"

/// The LoRA adapters of all blocks. Every rank holds all adapter weights at every ZeRO stage: they are small, and the engine reads them too.
#[derive(Debug)]
pub(crate) struct Adapters {
    pub weights: Weights,
    /// A frozen copy of the initial adapters for the reference model. Without it, the reference is the base model.
    initial: Option<Weights>,
    pub lora: LoraSpec,
    key: RandomKey,
}

/// Which adapters a forward pass uses.
#[derive(Debug, Clone, Copy)]
pub(crate) enum AdapterUse {
    /// None: the frozen base model alone.
    Off,
    /// The frozen adapters that training started from, or none if no copy was kept.
    Initial,
    /// The current adapters.
    On,
    /// The current adapters with dropout, as in training; the masks belong to one pass.
    Dropped(Dropout),
}

impl Adapters {
    /// `rank` is part of the dropout key, because ranks train on different tokens.
    pub(crate) fn new(weights: Weights, initial: Option<Weights>, lora: LoraSpec, seed: u64, rank: usize) -> Self {
        Self { weights, initial, lora, key: RandomKey::new(seed, STREAM).fold(rank as u64) }
    }

    /// The use of the adapters when training on a micro-batch of an update.
    pub(crate) fn training_use(&self, update: u64, micro_batch: u64) -> AdapterUse {
        let rate = self.lora.dropout;
        if rate == 0.0 {
            return AdapterUse::On;
        }
        AdapterUse::Dropped(Dropout { rate, key: self.key.fold(update).fold(micro_batch) })
    }

    /// The adapters of a block for a pass.
    pub(crate) fn block(&mut self, layer: usize, adapter_use: AdapterUse) -> Result<BlockLora> {
        let (weights, dropout) = match adapter_use {
            AdapterUse::Off => (None, None),
            AdapterUse::Initial => (self.initial.as_mut(), None),
            AdapterUse::On => (Some(&mut self.weights), None),
            AdapterUse::Dropped(dropout) => (Some(&mut self.weights), Some(dropout.fold(layer as u64))),
        };
        let Some(weights) = weights else { return Ok(BlockLora::default()) };
        let flat = weights.unit(Unit::Block(layer), &[])?;
        self.expand(layer, &flat, dropout)
    }

    /// The adapters of a block for the engine.
    pub(crate) fn engine_block(&self, layer: usize) -> Result<BlockLora> {
        self.expand(layer, &self.weights.gather(Unit::Block(layer))?, None)
    }

    fn expand(&self, layer: usize, flat: &Tensor, dropout: Option<Dropout>) -> Result<BlockLora> {
        BlockLora::expand(self.spec(), &self.lora, self.layout(layer), flat, dropout)
    }

    /// The gradient tensors that a block's backward adds to. Call [`Adapters::end_gradients`] afterwards.
    pub(crate) fn gradients(&self, layer: usize, sum: &UnitSum) -> Result<BlockParams> {
        sum.zero_others(self.layout(layer), &|_| false)?;
        let gradients = BlockLora::gradients(self.spec(), &self.lora, self.layout(layer), &sum.flat)?;
        Ok(BlockParams::default().with_adapters(gradients))
    }

    /// Collects the adapters' gradients of a block into its flat gradient.
    pub(crate) fn end_gradients(&self, layer: usize, gradients: &BlockParams, flat: &Tensor) -> Result<()> {
        let own = |matrix| gradients.linear(matrix).lora.as_ref();
        BlockLora::add_to(own, self.spec(), &self.lora, self.layout(layer), flat)
    }

    fn spec(&self) -> &ModelSpec {
        &self.weights.table().spec
    }

    fn layout(&self, layer: usize) -> &UnitLayout {
        self.weights.table().unit(Unit::Block(layer))
    }
}
