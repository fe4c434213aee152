//! Converts whole units of weights to an engine's weights. They are read in place if every rank keeps them whole (ZeRO 0 to 2), gathered
//! unit by unit and reduced to this rank's tensor-parallel slices (ZeRO 3), or dequantized block by block. An engine with pipeline stages uses
//! only the units of the rank's own stage.
#![allow(unsafe_code)]

use std::marker::PhantomData;

use tch::{Device, Kind, Tensor};

use crate::console::units_progress;
use crate::error::Result;
use crate::memory::Arena;
use crate::model::{BlockLora, BlockParams, EmbeddingParams, HeadParams, ParamTable, Stage, StoredBlock, Unit};
use crate::rollout::{EngineRanks, EngineWeights, StoredBlocks};

/// Alignment of the start of a slice, in elements.
const ALIGNMENT: usize = 64;

/// Number of buffers for dequantized blocks: for the block in use and the next one.
const NUM_DEQUANTIZED: usize = 2;

/// This rank's part of the weights while the engine is awake.
#[derive(Debug)]
pub struct EngineSlices {
    part: EnginePart,
    storage: Storage,
    /// Expanded LoRA B matrices of every block, kept while the engine sleeps.
    adapters: Vec<BlockLora>,
}

/// The part of a model that one rank of an engine holds.
#[derive(Debug, Clone)]
struct EnginePart {
    tp_rank: usize,
    tp_size: usize,
    stage: Stage,
}

impl From<&EngineRanks> for EnginePart {
    fn from(ranks: &EngineRanks) -> Self {
        Self { tp_rank: ranks.tp.rank(), tp_size: ranks.tp.size(), stage: ranks.stage() }
    }
}

/// Where the engine's weights are stored.
#[derive(Debug)]
enum Storage {
    /// The engine reads the policy's own memory.
    InPlace,
    /// The engine has its own tensor-parallel slices, which are gathered at every wake.
    Gathered(Arena, Kind),
    /// Quantized in the policy's memory. Two buffers hold dequantized blocks, which are written in turn when they are needed.
    Dequantized(Arena, Kind),
}

impl EngineSlices {
    /// The engine reads the policy's own weights, without a copy or synchronization.
    pub fn in_place(ranks: &EngineRanks) -> Self {
        Self { part: ranks.into(), storage: Storage::InPlace, adapters: Vec::new() }
    }

    /// Slices are gathered at every wake; their virtual addresses are reserved now.
    ///
    /// # Errors
    /// The errors of [`Arena::reserve`].
    pub fn gathered(table: &ParamTable, ranks: &EngineRanks, kind: Kind, device: Device) -> Result<Self> {
        let part = EnginePart::from(ranks);
        let bytes = Self::gathered_bytes(table, part.tp_rank, part.tp_size, &part.stage, kind)?;
        let storage = Storage::Gathered(Arena::reserve("engine_weights", bytes, device)?, kind);
        Ok(Self { part, storage, adapters: Vec::new() })
    }

    /// The policy's blocks are quantized; virtual addresses for two dequantized blocks are reserved now.
    ///
    /// # Errors
    /// The errors of [`Arena::reserve`].
    pub fn dequantized(table: &ParamTable, ranks: &EngineRanks, kind: Kind, device: Device) -> Result<Self> {
        let arena = Arena::reserve("engine_weights", Self::dequantized_bytes(table, kind), device)?;
        Ok(Self { part: ranks.into(), storage: Storage::Dequantized(arena, kind), adapters: Vec::new() })
    }

    /// Size in bytes of the two dequantized blocks.
    pub fn dequantized_bytes(table: &ParamTable, kind: Kind) -> usize {
        NUM_DEQUANTIZED * longest_block(table) * kind.elt_size_in_bytes()
    }

    /// Size in bytes of the gathered slices of one rank of a pipeline stage.
    pub fn gathered_bytes(
        table: &ParamTable,
        tp_rank: usize,
        tp_size: usize,
        stage: &Stage,
        kind: Kind,
    ) -> Result<usize> {
        let part = EnginePart { tp_rank, tp_size, stage: stage.clone() };
        let mut elements = 0;
        // A unit of stride 0 has every shape and no memory.
        let unit = |unit| Ok(Tensor::zeros([1], (kind, Device::Cpu)).expand([table.unit(unit).len as i64], false));
        let mut count = |tensor: &Tensor| {
            elements += tensor.numel().next_multiple_of(ALIGNMENT);
            Ok(tensor.shallow_clone())
        };
        slices(table, &part, true, 0, &mut { unit }, &mut no_adapters, &mut count)?;
        Ok(elements * kind.elt_size_in_bytes())
    }

    /// Memory in bytes of the engine's own copies; 0 if it reads the policy's weights.
    pub fn reserved_bytes(&self) -> usize {
        match &self.storage {
            Storage::InPlace => 0,
            Storage::Gathered(arena, _) | Storage::Dequantized(arena, _) => arena.reserved_bytes(),
        }
    }

    /// This rank's weights, created from whole units and the blocks' adapters. Collective if `unit` is.
    ///
    /// # Errors
    /// The errors of `unit` and `adapters`; [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn of_units<'a>(
        &'a mut self,
        table: &ParamTable,
        version: u64,
        unit: &mut dyn FnMut(Unit) -> Result<Tensor>,
        adapters: &dyn Fn(usize) -> Result<BlockLora>,
        stored: &'a [StoredBlock],
    ) -> Result<EngineWeights<'a>> {
        let part = &self.part;
        let mut gathered = units_progress("gather", part.stage.units(&table.spec).len());
        let unit = &mut |of: Unit| -> Result<Tensor> {
            let flat = unit(of)?;
            gathered();
            Ok(flat)
        };
        let kept = &mut self.adapters;
        kept.resize_with(table.spec.num_layers(), BlockLora::default);
        let adapters = &mut |layer: usize| -> Result<BlockLora> {
            adapters(layer)?
                .tp_slice(&table.spec.layers[layer].linears(), part.tp_rank, part.tp_size)?
                .kept_in(&mut kept[layer])
        };
        let (arena, kind) = match &mut self.storage {
            Storage::Gathered(arena, kind) => (arena, kind),
            Storage::Dequantized(arena, kind) => {
                let buffers = block_buffers(arena, longest_block(table), *kind)?;
                // A rank's channels of a convolution are no view but a copy, taken here; they are not quantised, and nobody trains them.
                let copies = part.tp_size > 1 && table.spec.delta_net().is_some();
                let mut in_turn = |of: Unit| match of {
                    Unit::Block(layer) => {
                        let layout = table.unit(of);
                        let block = buffers[layer % NUM_DEQUANTIZED].narrow(0, 0, layout.len as i64);
                        if copies {
                            stored[layer].copy_plain(layout, &block)?;
                        }
                        Ok(block)
                    }
                    Unit::Embedding | Unit::DraftHead | Unit::Head => unit(of),
                };
                let keep = &mut |tensor: &Tensor| Ok(tensor.shallow_clone());
                let weights = slices(table, part, false, version, &mut in_turn, adapters, keep)?;
                let stored = Some(StoredBlocks { table: table.clone(), blocks: stored, buffers });
                return Ok(EngineWeights { stored, ..weights });
            }
            Storage::InPlace => {
                return slices(table, part, false, version, unit, adapters, &mut |tensor| Ok(tensor.shallow_clone()));
            }
        };
        arena.map(arena.reserved_bytes())?;
        let len = (arena.reserved_bytes() / kind.elt_size_in_bytes()) as i64;
        // SAFETY: views of it live in the returned weights, which borrow `self`: `release`, which unmaps, needs `&mut self`.
        let flat = unsafe { arena.tensor(0, &[len], *kind) }?;
        let mut at = 0;
        slices(table, part, true, version, unit, adapters, &mut |slice| {
            let mut kept = flat.narrow(0, at, slice.numel() as i64).view(slice.size().as_slice());
            kept.f_copy_(slice)?;
            at += slice.numel().next_multiple_of(ALIGNMENT) as i64;
            Ok(kept)
        })
    }

    /// Frees the memory of gathered slices.
    pub fn release(&mut self) {
        if let Storage::Gathered(arena, _) | Storage::Dequantized(arena, _) = &mut self.storage {
            arena.unmap();
        }
    }
}

/// Number of elements of the longest block, because blocks of a model may differ.
fn longest_block(table: &ParamTable) -> usize {
    (0..table.spec.num_layers()).map(|layer| table.unit(Unit::Block(layer)).len).max().unwrap_or(0)
}

/// Maps the arena's memory and returns the blocks' buffers.
fn block_buffers(arena: &mut Arena, len: usize, kind: Kind) -> Result<[Tensor; NUM_DEQUANTIZED]> {
    arena.map(arena.reserved_bytes())?;
    // SAFETY: views of it live in the engine's weights, which borrow the slices: `release`, which unmaps, needs `&mut self`.
    let both = unsafe { arena.tensor(0, &[NUM_DEQUANTIZED as i64, len as i64], kind) }?;
    Ok([both.get(0), both.get(1)])
}

/// Creates the engine's weights from whole units, which are read in the order of [`Stage::units`]. `keep` returns the part of each slice that
/// outlives its unit. With `split_embedding` the embedding table is reduced to this rank's vocabulary rows.
fn slices<'a>(
    table: &ParamTable,
    EnginePart { tp_rank, tp_size, stage }: &EnginePart,
    split_embedding: bool,
    version: u64,
    unit: &mut dyn FnMut(Unit) -> Result<Tensor>,
    adapters: &mut dyn FnMut(usize) -> Result<BlockLora>,
    keep: &mut dyn FnMut(&Tensor) -> Result<Tensor>,
) -> Result<EngineWeights<'a>> {
    let (spec, tp_rank, tp_size) = (&table.spec, *tp_rank, *tp_size);
    let rows = spec.vocab_range(tp_rank, tp_size);
    let own_rows = |table: &Tensor| table.narrow(0, rows.start as i64, rows.len() as i64);
    let mut words = None; // the table of embeddings, or this rank's rows
    if stage.has_table(spec) {
        let whole = EmbeddingParams::view(table.unit(Unit::Embedding), &unit(Unit::Embedding)?).table;
        words = Some(if split_embedding { keep(&own_rows(&whole))? } else { whole });
    }
    let mut blocks = Vec::with_capacity(stage.layers.len());
    let mut options = (Kind::Float, Device::Cpu);
    for layer in stage.layers.clone() {
        let flat = unit(Unit::Block(layer))?;
        options = (flat.kind(), flat.device());
        let whole = BlockParams::view(spec, table.unit(Unit::Block(layer)), &flat);
        let block = whole.tp_slice(tp_rank, tp_size)?.try_map(keep)?;
        blocks.push(block.with_adapters(adapters(layer)?));
    }
    let mut draft_head = None;
    if stage.is_last() && spec.draft_head.is_some() {
        let whole = BlockParams::view(spec, table.unit(Unit::DraftHead), &unit(Unit::DraftHead)?);
        draft_head = Some(whole.tp_slice(tp_rank, tp_size)?.try_map(keep)?);
    }
    let no_rows = Tensor::f_zeros([0, spec.hidden_size as i64], options)?;
    let (mut lm_head, mut final_norm) = (no_rows.shallow_clone(), Tensor::f_zeros([0], options)?);
    if stage.is_last() {
        let head = HeadParams::view(table.unit(Unit::Head), &unit(Unit::Head)?);
        lm_head = match (&head.lm_head, &words) {
            (Some(table), _) => keep(&own_rows(table))?,
            (None, Some(words)) if split_embedding => words.shallow_clone(),
            (None, Some(words)) => own_rows(words),
            (None, None) => unreachable!("a tied head has the embedding's table"),
        };
        final_norm = keep(&head.final_norm)?;
    }
    let embedding = words.filter(|_| stage.is_first()).unwrap_or(no_rows);
    Ok(EngineWeights {
        embedding,
        blocks,
        draft_head,
        final_norm,
        lm_head,
        stored: None,
        num_adapters: 0,
        version,
        policy: PhantomData,
    })
}

/// The adapters of each block for a model without adapters.
pub(super) fn no_adapters(_layer: usize) -> Result<BlockLora> {
    Ok(BlockLora::default())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::model::{ModelSpec, Stages};

    #[test]
    fn loaded_weight_slices_cover_every_matrix_once() {
        let spec = Arc::new(ModelSpec::preset("micro").unwrap());
        let table = ParamTable::new(spec.clone(), 1);
        let of_stage =
            |rank, size, stage: &Stage| EngineSlices::gathered_bytes(&table, rank, size, stage, Kind::Float).unwrap();
        let one = Stages::one(&spec).stage(0);
        let bytes = |tp_size| -> Vec<usize> { (0..tp_size).map(|rank| of_stage(rank, tp_size, &one)).collect() };
        let whole = 4 * spec.num_params();
        assert!((whole..whole + 64 * 4 * 24).contains(&bytes(1)[0]), "{} for {whole}", bytes(1)[0]);
        let halves = bytes(2);
        assert_eq!(halves[0], halves[1]);
        assert!(halves[0] < whole * 6 / 10, "{halves:?} for {whole}");
        let stages = Stages::new(&spec, 2, &[]).unwrap();
        let staged: Vec<usize> = stages.iter().map(|stage| of_stage(0, 1, &stage)).collect();
        let table_bytes = 4 * spec.vocab_size * spec.hidden_size; // tied: on both
        assert_eq!(staged.iter().sum::<usize>(), bytes(1)[0] + table_bytes);
        assert!(staged.iter().all(|bytes| *bytes < whole), "{staged:?} for {whole}");
    }
}
