//! Gradients, unit by unit, in the accumulation kind: whole until the step, or reduce-scattered the moment a unit's
//! backward ends.

use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use super::sharding::{Sharding, narrow};
use crate::dist::{ReduceOp, all_reduce_f64};
use crate::error::Result;
use crate::memory::{Ledger, Place};
use crate::model::{ParamTable, Unit};

/// Sums of gradients since the last step.
#[derive(Debug)]
pub(crate) struct Gradients {
    table: Arc<ParamTable>,
    sharding: Sharding,
    kind: Kind,
    device: Device,
    units: Vec<Option<Tensor>>, // [len], or [len / S] where gradients are scattered; None is zero
}

impl Gradients {
    /// No memory is taken before the first backward.
    pub(crate) fn new(table: Arc<ParamTable>, sharding: Sharding, kind: Kind, device: Device) -> Self {
        let units = table.units.iter().map(|_| None).collect();
        Self { table, sharding, kind, device, units }
    }

    /// A whole unit [len] to accumulate one backward in; give it back to [`Gradients::end`].
    pub(crate) fn begin(&mut self, unit: Unit) -> Result<Tensor> {
        self.whole(self.table.index(unit))
    }

    /// Ends one backward of a unit. Where gradients are scattered this is collective: the shard group's sum of this rank's
    /// slice is added to what was there.
    pub(crate) fn end(&mut self, unit: Unit, whole: Tensor) -> Result<()> {
        if self.sharding.keeps_gradients {
            return Ok(());
        }
        let index = self.table.index(unit);
        let mut slice = narrow(&whole, &self.sharding.slice(self.table.units[index].len));
        self.sharding.shard.reduce_scatter(&whole, &mut slice)?;
        match &mut self.units[index] {
            Some(sum) => *sum += slice,
            unit => *unit = Some(slice.copy()),
        }
        self.account();
        Ok(())
    }

    /// The kept sum of a unit, or zeros where it is scattered at the end.
    fn whole(&mut self, index: usize) -> Result<Tensor> {
        if let Some(sum) = self.units[index].as_ref().filter(|_| self.sharding.keeps_gradients) {
            return Ok(sum.shallow_clone());
        }
        let zeros = Tensor::f_zeros([self.table.units[index].len as i64], (self.kind, self.device))?;
        if self.sharding.keeps_gradients {
            self.units[index] = Some(zeros.shallow_clone());
            self.account();
        }
        Ok(zeros)
    }

    /// The sum over all ranks of what this rank owns of every unit, reduced in place (collective): the shard group first,
    /// then the replicas. Accumulating goes on only after [`Gradients::zero`].
    pub(crate) fn reduce(&mut self) -> Result<Vec<Tensor>> {
        (0..self.units.len()).map(|index| self.reduce_unit(index)).collect()
    }

    fn reduce_unit(&mut self, index: usize) -> Result<Tensor> {
        let len = self.table.units[index].len;
        let mut owned = if self.sharding.keeps_gradients {
            let mut whole = self.whole(index)?;
            let mut owned = narrow(&whole, &self.sharding.owned(len));
            match self.sharding.owns_all {
                true => self.sharding.shard.all_reduce(&mut whole, ReduceOp::Sum)?,
                false => self.sharding.shard.reduce_scatter(&whole, &mut owned)?,
            }
            owned
        } else {
            let slice_len = self.sharding.slice(len).len() as i64;
            let zeros = || Tensor::f_zeros([slice_len], (self.kind, self.device));
            self.units[index].as_ref().map_or_else(zeros, |sum| Ok(sum.shallow_clone()))?
        };
        self.sharding.replicate.all_reduce(&mut owned, ReduceOp::Sum)?;
        Ok(owned)
    }

    /// The norm of the whole gradient, from [`Gradients::reduce`]'s tensors (collective): one sum of squares in f64 for
    /// every slice of every unit, added slice by slice in rank order, so that every stage gets the same bits.
    pub(crate) fn norm(&self, reduced: &[Tensor]) -> Result<f64> {
        let num_slices = self.sharding.shard.size();
        let mut squares = vec![0.0; num_slices * reduced.len()];
        for (index, owned) in reduced.iter().enumerate() {
            let slice_len = (self.table.units[index].len / num_slices) as i64;
            let first = if self.sharding.owns_all { 0 } else { self.sharding.shard.rank() };
            for (at, slice) in owned.split(slice_len, 0).iter().enumerate() {
                let norm = slice.f_norm_scalaropt_dim_dtype(2.0, [0i64], false, Kind::Double)?.double_value(&[]);
                squares[(first + at) * reduced.len() + index] = norm * norm;
            }
        }
        if !self.sharding.owns_all {
            all_reduce_f64(&*self.sharding.shard, &mut squares, ReduceOp::Sum)?;
        }
        Ok(squares.iter().sum::<f64>().sqrt())
    }

    /// Forgets all sums and keeps the memory where gradients are whole; slices start anew from the next backward's.
    pub(crate) fn zero(&mut self) {
        if !self.sharding.keeps_gradients {
            return self.free();
        }
        for unit in self.units.iter_mut().flatten() {
            let _ = unit.zero_();
        }
    }

    /// Forgets all sums and frees the memory.
    pub(crate) fn free(&mut self) {
        self.units.iter_mut().for_each(|unit| *unit = None);
        self.account();
    }

    fn account(&self) {
        let num_elements: usize = self.units.iter().flatten().map(Tensor::numel).sum();
        Ledger::set("gradients", Place::Device, num_elements * self.kind.elt_size_in_bytes());
    }
}

impl Drop for Gradients {
    fn drop(&mut self) {
        self.free();
    }
}
