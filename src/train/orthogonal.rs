//! Muon with sharded state. Every rank holds the momentum of its slice. Each matrix of a block is orthogonalised as a whole by one rank of the shard
//! group, and every rank gets back the update of its slice.
//!
//! For one block after another, the ranks gather the directions in bfloat16. Each rank orthogonalises its matrices (the largest first, each assigned
//! to the rank with the least work). A reduce-scatter of disjoint parts then returns each rank's slice without rounding. Query, key and value, and
//! gate and up, are orthogonalised as separate matrices.

use std::ops::Range;
use std::sync::Arc;

use tch::{Kind, Tensor};

use super::optim::MuonOptions;
use super::sharding::{Sharding, intersection, narrow};
use crate::error::Result;
use crate::model::{BlockMatrix, ParamTable, Unit, UnitLayout};
use crate::ops::muon;
use crate::ranks::ReduceOp;

/// Dtype in which ranks exchange directions, and in which the iteration computes.
const KIND: Kind = Kind::BFloat16;

/// The matrices of all blocks, as in a checkpoint, and which rank orthogonalises which.
#[derive(Debug)]
pub(super) struct Orthogonalizer {
    options: MuonOptions,
    table: Arc<ParamTable>,
    sharding: Sharding,
    units: Vec<UnitMatrices>,
}

/// The matrices of a unit; empty unless it is a block.
#[derive(Debug, Default)]
struct UnitMatrices {
    matrices: Vec<BlockMatrix>,
    owners: Vec<usize>,               // rank within the shard group
    ratios: Vec<(Range<usize>, f64)>, // ranges of the unit's elements
}

impl Orthogonalizer {
    pub(super) fn new(options: MuonOptions, table: Arc<ParamTable>, sharding: Sharding) -> Self {
        let of_unit = |layout: &UnitLayout| {
            let Unit::Block(layer) = layout.unit else { return UnitMatrices::default() };
            let matrices = BlockMatrix::of_layer(&table.spec, layer);
            let owners = owners(&matrices, sharding.shard.size());
            let ratios = ratios(options, &matrices, layout);
            UnitMatrices { matrices, owners, ratios }
        };
        let units = table.units.iter().map(of_unit).collect();
        Self { options, table, sharding, units }
    }

    /// Updates the momentum of some elements with gradients, and writes their part of the matrix to orthogonalise to `direction`.
    pub(super) fn momentum(&self, m: &Tensor, gradient: &Tensor, direction: &Tensor, scale: f64) -> Result<()> {
        let MuonOptions { momentum, nesterov, .. } = self.options;
        muon::momentum(m, gradient, direction, momentum, nesterov, scale)
    }

    /// The orthogonalised directions of this rank's part of a unit (collective). Ranks gather the whole unit, each orthogonalises its matrices, and
    /// their sum is scattered. Every element comes from one rank, so no sum rounds.
    pub(super) fn updates(&self, index: usize, directions: Tensor /* [owned] bf16 */) -> Result<Tensor> {
        let (layout, Sharding { shard, lane, owns_all, .. }) = (&self.table.units[index], &self.sharding);
        let options = (KIND, directions.device());
        let whole = if *owns_all {
            directions
        } else {
            let mut whole = Tensor::f_empty([layout.len as i64], options)?;
            let held = vec![whole.shallow_clone(), directions.shallow_clone()];
            lane.run(held, || shard.all_gather(&directions, &mut whole))?.hold_libtorch()?;
            whole
        };
        let mut updates = Tensor::f_zeros([layout.len as i64], options)?;
        let UnitMatrices { matrices, owners, .. } = &self.units[index];
        for (matrix, _) in matrices.iter().zip(owners).filter(|(_, owner)| **owner == shard.rank()) {
            let shape = [1, matrix.rows() as i64, matrix.columns() as i64];
            let own = matrix.view(layout, &whole).f_reshape(shape)?;
            let mut place = matrix.view(layout, &updates);
            place.f_copy_(&muon::orthogonalized(&own, self.options.ns_steps)?.f_reshape(place.size())?)?;
        }
        drop(whole);
        if shard.size() == 1 {
            return Ok(updates);
        }
        let owned = self.sharding.owned(layout.len);
        let mut own = narrow(&updates, &owned);
        let work = lane.run(vec![updates.shallow_clone()], || match owns_all {
            true => shard.all_reduce(&mut updates, ReduceOp::Sum),
            false => shard.reduce_scatter(&updates.shallow_clone(), &mut own),
        });
        work?.hold_libtorch()?;
        Ok(own)
    }

    /// Updates the master weights of some elements of this rank's part of a unit.
    pub(super) fn apply(
        &self,
        index: usize,
        elements: &Range<usize>,
        [master, update, weight]: [&Tensor; 3],
        lr: f64,
        weight_decay: f64,
    ) -> Result<()> {
        let first = self.sharding.owned(self.table.units[index].len).start + elements.start;
        for (range, ratio) in &self.units[index].ratios {
            let inside = intersection(range, &(first..first + elements.len()));
            if !inside.is_empty() {
                let part = inside.start - first..inside.end - first;
                let [master, update, weight] = [master, update, weight].map(|tensor| narrow(tensor, &part));
                muon::apply(&master, &update, &weight, lr, weight_decay, *ratio)?;
            }
        }
        Ok(())
    }
}

/// Peak bytes of a block's step in addition to its state: directions, gathered directions, updates, and the iteration's temporaries.
pub(super) fn orthogonal_bytes(table: &ParamTable, is_sharded: bool) -> usize {
    let blocks = || {
        table.units.iter().filter_map(|layout| match layout.unit {
            Unit::Block(layer) => Some((layer, layout.len)),
            _ => None,
        })
    };
    let len = blocks().map(|(_, len)| len).max().unwrap_or(0);
    let iteration = |matrix: &BlockMatrix| {
        let [least, most] = [matrix.rows().min(matrix.columns()), matrix.rows().max(matrix.columns())];
        4 * least * most + 2 * least * least // the copies to iterate on and its product; both polynomials
    };
    let of_layer = |(layer, _)| BlockMatrix::of_layer(&table.spec, layer).iter().map(iteration).max();
    let iteration = blocks().filter_map(of_layer).max().unwrap_or(0);
    let exchanged = if is_sharded { 2 * len + len / table.shards } else { 2 * len };
    KIND.elt_size_in_bytes() * (exchanged + iteration)
}

/// Assigns each matrix to a rank: the largest first, each to the rank with the least work.
fn owners(matrices: &[BlockMatrix], num_ranks: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..matrices.len()).collect();
    order.sort_by_key(|&index| std::cmp::Reverse(cost(&matrices[index])));
    let (mut loads, mut owners) = (vec![0; num_ranks], vec![0; matrices.len()]);
    for index in order {
        let rank = (0..num_ranks).min_by_key(|&rank| loads[rank]).unwrap_or(0);
        loads[rank] += cost(&matrices[index]);
        owners[index] = rank;
    }
    owners
}

/// Multiplications of one iteration.
fn cost(matrix: &BlockMatrix) -> usize {
    let [least, most] = [matrix.rows().min(matrix.columns()), matrix.rows().max(matrix.columns())];
    least * least * (2 * most + least)
}

/// Multipliers of the learning rate for a block's elements; neighbours with equal multipliers are merged.
fn ratios(options: MuonOptions, matrices: &[BlockMatrix], block: &UnitLayout) -> Vec<(Range<usize>, f64)> {
    let of_matrix = |matrix: &BlockMatrix| {
        let ratio = muon::lr_ratio(options.adjust_lr, matrix.rows(), matrix.columns());
        matrix.ranges(block).into_iter().map(move |range| (range, ratio))
    };
    let mut all: Vec<_> = matrices.iter().flat_map(of_matrix).collect();
    all.sort_by_key(|(range, _)| range.start);
    let mut ratios: Vec<(Range<usize>, f64)> = Vec::new();
    for (range, ratio) in all {
        match ratios.last_mut() {
            Some((last, same)) if last.end == range.start && *same == ratio => last.end = range.end,
            _ => ratios.push((range, ratio)),
        }
    }
    ratios
}
