//! How the policy's weights reach the engine: read in place where every rank keeps them whole (ZeRO 0 to 2), or gathered
//! unit by unit, of which only this rank's tensor-parallel slices stay (ZeRO 3).
#![allow(unsafe_code)]

use std::marker::PhantomData;

use tch::{Device, Kind, Tensor};

use crate::error::Result;
use crate::memory::Arena;
use crate::model::{BlockParams, EmbeddingParams, HeadParams, ParamTable, Unit};
use crate::rollout::EngineWeights;
use crate::train::Policy;

/// Elements that a slice's start is aligned to.
const ALIGNMENT: usize = 64;

/// This rank's part of the weights while the engine is awake.
#[derive(Debug)]
pub struct EngineSlices {
    tp_rank: usize,
    tp_size: usize,
    storage: Option<(Arena, Kind)>, // None reads in place
}

impl EngineSlices {
    /// The engine reads the policy's own weights: no copy, no synchronisation.
    pub fn in_place(tp_rank: usize, tp_size: usize) -> Self {
        Self { tp_rank, tp_size, storage: None }
    }

    /// Slices are gathered at every wake; addresses for them are reserved now.
    pub fn gathered(table: &ParamTable, tp_rank: usize, tp_size: usize, kind: Kind, device: Device) -> Result<Self> {
        let bytes = Self::gathered_bytes(table, tp_rank, tp_size, kind)?;
        Ok(Self { tp_rank, tp_size, storage: Some((Arena::reserve("engine_weights", bytes, device)?, kind)) })
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
        slices(table, (tp_rank, tp_size), true, 0, &mut { unit }, &mut count)?;
        Ok(elements * kind.elt_size_in_bytes())
    }

    /// This rank's weights of the policy's current version (collective at stage 3).
    pub(super) fn gather<'a>(&'a mut self, policy: &'a Policy) -> Result<EngineWeights<'a>> {
        let table = policy.table().clone();
        self.of_units(&table, policy.version(), &mut |unit| policy.unit_weights(unit))
    }

    /// This rank's weights from whole units.
    pub(super) fn of_units<'a>(
        &'a mut self,
        table: &ParamTable,
        version: u64,
        unit: &mut dyn FnMut(Unit) -> Result<Tensor>,
    ) -> Result<EngineWeights<'a>> {
        let tp = (self.tp_rank, self.tp_size);
        let Some((arena, kind)) = &mut self.storage else {
            return slices(table, tp, false, version, unit, &mut |tensor| Ok(tensor.shallow_clone()));
        };
        arena.map(arena.reserved_bytes())?;
        let len = (arena.reserved_bytes() / kind.elt_size_in_bytes()) as i64;
        // SAFETY: views of it live in the returned weights, which borrow `self`: `release`, which unmaps, needs `&mut self`.
        let flat = unsafe { arena.tensor(0, &[len], *kind) }?;
        let mut at = 0;
        slices(table, tp, true, version, unit, &mut |slice| {
            let mut kept = flat.narrow(0, at, slice.numel() as i64).view(slice.size().as_slice());
            kept.f_copy_(slice)?;
            at += slice.numel().next_multiple_of(ALIGNMENT) as i64;
            Ok(kept)
        })
    }

    /// Gives gathered slices' memory back.
    pub(super) fn release(&mut self) {
        if let Some((arena, _)) = &mut self.storage {
            arena.unmap();
        }
    }
}

/// The engine's weights from whole units. `keep` says what stays of each slice once its unit is gone; with
/// `split_embedding` the table is reduced to this rank's vocabulary rows.
fn slices<'a>(
    table: &ParamTable,
    (tp_rank, tp_size): (usize, usize),
    split_embedding: bool,
    version: u64,
    unit: &mut dyn FnMut(Unit) -> Result<Tensor>,
    keep: &mut dyn FnMut(&Tensor) -> Result<Tensor>,
) -> Result<EngineWeights<'a>> {
    let spec = &table.spec;
    let rows = spec.vocab_range(tp_rank, tp_size);
    let own_rows = |table: &Tensor| table.narrow(0, rows.start as i64, rows.len() as i64);
    let whole = EmbeddingParams::view(table.unit(Unit::Embedding), &unit(Unit::Embedding)?).table;
    let embedding = if split_embedding { keep(&own_rows(&whole))? } else { whole };
    let mut blocks = Vec::with_capacity(spec.num_layers);
    for layer in 0..spec.num_layers {
        let block = BlockParams::view(table.unit(Unit::Block(layer)), &unit(Unit::Block(layer))?);
        blocks.push(block.tp_slice(spec, tp_rank, tp_size).try_map(keep)?);
    }
    let head = HeadParams::view(table.unit(Unit::Head), &unit(Unit::Head)?);
    let lm_head = match &head.lm_head {
        Some(table) => keep(&own_rows(table))?,
        None if split_embedding => embedding.shallow_clone(),
        None => own_rows(&embedding),
    };
    Ok(EngineWeights { embedding, blocks, final_norm: keep(&head.final_norm)?, lm_head, version, policy: PhantomData })
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
