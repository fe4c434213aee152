//! How whole units become an engine's weights: read in place where every rank keeps them whole (ZeRO 0 to 2), gathered
//! unit by unit, of which only this rank's tensor-parallel slices stay (ZeRO 3), or dequantised block by block.
#![allow(unsafe_code)]

use std::marker::PhantomData;

use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::memory::Arena;
use crate::model::{BlockLora, BlockParams, EmbeddingParams, HeadParams, ParamTable, QuantizedBlock, Unit};
use crate::rollout::{EngineWeights, QuantizedBlocks};

/// Elements that a slice's start is aligned to.
const ALIGNMENT: usize = 64;

/// Blocks that are dequantised at once: the one in use and the one after it.
const NUM_DEQUANTIZED: usize = 2;

/// This rank's part of the weights while the engine is awake.
#[derive(Debug)]
pub struct EngineSlices {
    tp_rank: usize,
    tp_size: usize,
    storage: Storage,
    /// B of every block's adapters, expanded, between wakes too.
    adapters: Vec<BlockLora>,
}

/// Where the engine finds blocks.
#[derive(Debug)]
enum Storage {
    /// In the policy's own memory.
    InPlace,
    /// Slices of all of them, gathered at every wake.
    Gathered(Arena, Kind),
    /// Quantised by the policy: two whole blocks, written in turn as they come into use.
    Dequantized(Arena, Kind),
}

impl EngineSlices {
    /// The engine reads the policy's own weights: no copy, no synchronisation.
    pub fn in_place(tp_rank: usize, tp_size: usize) -> Self {
        Self { tp_rank, tp_size, storage: Storage::InPlace, adapters: Vec::new() }
    }

    /// Slices are gathered at every wake; addresses for them are reserved now.
    ///
    /// # Errors
    /// The errors of [`Arena::reserve`].
    pub fn gathered(table: &ParamTable, tp_rank: usize, tp_size: usize, kind: Kind, device: Device) -> Result<Self> {
        let bytes = Self::gathered_bytes(table, tp_rank, tp_size, kind)?;
        let storage = Storage::Gathered(Arena::reserve("engine_weights", bytes, device)?, kind);
        Ok(Self { tp_rank, tp_size, storage, adapters: Vec::new() })
    }

    /// Blocks are quantised: room for two of them is reserved.
    ///
    /// # Errors
    /// The errors of [`Arena::reserve`].
    pub fn dequantized(table: &ParamTable, tp_rank: usize, tp_size: usize, kind: Kind, device: Device) -> Result<Self> {
        let arena = Arena::reserve("engine_weights", Self::dequantized_bytes(table, kind), device)?;
        Ok(Self { tp_rank, tp_size, storage: Storage::Dequantized(arena, kind), adapters: Vec::new() })
    }

    /// Bytes of the two blocks.
    pub fn dequantized_bytes(table: &ParamTable, kind: Kind) -> usize {
        NUM_DEQUANTIZED * longest_block(table) * kind.elt_size_in_bytes()
    }

    /// Bytes of the gathered slices of one rank.
    pub fn gathered_bytes(table: &ParamTable, tp_rank: usize, tp_size: usize, kind: Kind) -> Result<usize> {
        let mut elements = 0;
        // A unit of stride 0 has every shape and no memory.
        let unit = |unit| Ok(Tensor::zeros([1], (kind, Device::Cpu)).expand([table.unit(unit).len as i64], false));
        let mut count = |tensor: &Tensor| {
            elements += tensor.numel().next_multiple_of(ALIGNMENT);
            Ok(tensor.shallow_clone())
        };
        slices(table, (tp_rank, tp_size), true, 0, &mut { unit }, &mut no_adapters, &mut count)?;
        Ok(elements * kind.elt_size_in_bytes())
    }

    /// Memory that the engine's own copies take; none if the policy's weights are read.
    pub fn reserved_bytes(&self) -> usize {
        match &self.storage {
            Storage::InPlace => 0,
            Storage::Gathered(arena, _) | Storage::Dequantized(arena, _) => arena.reserved_bytes(),
        }
    }

    /// This rank's weights from whole units and what blocks' adapters compute with; collective if `unit` is.
    ///
    /// # Errors
    /// The errors of `unit` and `adapters`; [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn of_units<'a>(
        &'a mut self,
        table: &ParamTable,
        version: u64,
        unit: &mut dyn FnMut(Unit) -> Result<Tensor>,
        adapters: &dyn Fn(usize) -> Result<BlockLora>,
        quantized: &'a [QuantizedBlock],
    ) -> Result<EngineWeights<'a>> {
        let tp = (self.tp_rank, self.tp_size);
        let kept = &mut self.adapters;
        kept.resize_with(table.spec.num_layers, BlockLora::default);
        let adapters = &mut |layer: usize| -> Result<BlockLora> {
            adapters(layer)?.tp_slice(&table.spec.block(layer).linears(), tp.0, tp.1)?.kept_in(&mut kept[layer])
        };
        let (arena, kind) = match &mut self.storage {
            Storage::Gathered(arena, kind) => (arena, kind),
            Storage::Dequantized(arena, kind) => {
                let buffers = block_buffers(arena, longest_block(table), *kind)?;
                let mut in_turn = |of: Unit| match of {
                    Unit::Block(layer) => Ok(buffers[layer % NUM_DEQUANTIZED].narrow(0, 0, table.unit(of).len as i64)),
                    Unit::Embedding | Unit::Head => unit(of),
                };
                let keep = &mut |tensor: &Tensor| Ok(tensor.shallow_clone());
                let weights = slices(table, tp, false, version, &mut in_turn, adapters, keep)?;
                let quantized = Some(QuantizedBlocks { table: table.clone(), blocks: quantized, buffers });
                return Ok(EngineWeights { quantized, ..weights });
            }
            Storage::InPlace => {
                return slices(table, tp, false, version, unit, adapters, &mut |tensor| Ok(tensor.shallow_clone()));
            }
        };
        arena.map(arena.reserved_bytes())?;
        let len = (arena.reserved_bytes() / kind.elt_size_in_bytes()) as i64;
        // SAFETY: views of it live in the returned weights, which borrow `self`: `release`, which unmaps, needs `&mut self`.
        let flat = unsafe { arena.tensor(0, &[len], *kind) }?;
        let mut at = 0;
        slices(table, tp, true, version, unit, adapters, &mut |slice| {
            let mut kept = flat.narrow(0, at, slice.numel() as i64).view(slice.size().as_slice());
            kept.f_copy_(slice)?;
            at += slice.numel().next_multiple_of(ALIGNMENT) as i64;
            Ok(kept)
        })
    }

    /// Gives gathered slices' memory back.
    pub fn release(&mut self) {
        if let Storage::Gathered(arena, _) | Storage::Dequantized(arena, _) = &mut self.storage {
            arena.unmap();
        }
    }
}

/// Elements of the longest block: those of a model may differ.
fn longest_block(table: &ParamTable) -> usize {
    (0..table.spec.num_layers).map(|layer| table.unit(Unit::Block(layer)).len).max().unwrap_or(0)
}

/// The blocks' buffers in the arena, mapped.
fn block_buffers(arena: &mut Arena, len: usize, kind: Kind) -> Result<[Tensor; NUM_DEQUANTIZED]> {
    arena.map(arena.reserved_bytes())?;
    // SAFETY: views of it live in the engine's weights, which borrow the slices: `release`, which unmaps, needs `&mut self`.
    let both = unsafe { arena.tensor(0, &[NUM_DEQUANTIZED as i64, len as i64], kind) }?;
    Ok([both.get(0), both.get(1)])
}

/// The engine's weights from whole units. `keep` says what stays of each slice once its unit is gone; with
/// `split_embedding` the table is reduced to this rank's vocabulary rows.
fn slices<'a>(
    table: &ParamTable,
    (tp_rank, tp_size): (usize, usize),
    split_embedding: bool,
    version: u64,
    unit: &mut dyn FnMut(Unit) -> Result<Tensor>,
    adapters: &mut dyn FnMut(usize) -> Result<BlockLora>,
    keep: &mut dyn FnMut(&Tensor) -> Result<Tensor>,
) -> Result<EngineWeights<'a>> {
    let spec = &table.spec;
    let rows = spec.vocab_range(tp_rank, tp_size);
    let own_rows = |table: &Tensor| table.narrow(0, rows.start as i64, rows.len() as i64);
    let whole = EmbeddingParams::view(table.unit(Unit::Embedding), &unit(Unit::Embedding)?).table;
    let embedding = if split_embedding { keep(&own_rows(&whole))? } else { whole };
    let mut blocks = Vec::with_capacity(spec.num_layers);
    for layer in 0..spec.num_layers {
        let whole = BlockParams::view(spec, table.unit(Unit::Block(layer)), &unit(Unit::Block(layer))?);
        let block = whole.tp_slice(tp_rank, tp_size)?.try_map(keep)?;
        blocks.push(block.with_adapters(adapters(layer)?));
    }
    let head = HeadParams::view(table.unit(Unit::Head), &unit(Unit::Head)?);
    let lm_head = match &head.lm_head {
        Some(table) => keep(&own_rows(table))?,
        None if split_embedding => embedding.shallow_clone(),
        None => own_rows(&embedding),
    };
    let final_norm = keep(&head.final_norm)?;
    Ok(EngineWeights {
        embedding,
        blocks,
        final_norm,
        lm_head,
        quantized: None,
        num_adapters: 0,
        version,
        policy: PhantomData,
    })
}

/// The adapters of a model without any.
pub(super) fn no_adapters(_layer: usize) -> Result<BlockLora> {
    Ok(BlockLora::default())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::model::ModelSpec;

    #[test]
    fn the_ranks_slices_make_up_the_matrices_once() {
        let spec = Arc::new(ModelSpec::preset("micro").unwrap());
        let table = ParamTable::new(spec.clone(), 1);
        let bytes = |tp_size| -> Vec<usize> {
            (0..tp_size).map(|rank| EngineSlices::gathered_bytes(&table, rank, tp_size, Kind::Float).unwrap()).collect()
        };
        let whole = 4 * spec.num_params();
        assert!((whole..whole + 64 * 4 * 24).contains(&bytes(1)[0]), "{} for {whole}", bytes(1)[0]);
        let halves = bytes(2);
        assert_eq!(halves[0], halves[1]);
        assert!(halves[0] < whole * 6 / 10, "{halves:?} for {whole}");
    }
}
