//! Gradients, unit by unit, in the accumulation dtype. They are either kept whole until the step, or reduce-scattered as soon as a unit's backward
//! ends, overlapping the next unit's backward.
//!
//! The first gradient of a matrix after a step is written instead of added, so the buffer need not be zeroed
//! ([`BlockParams::begin_gradients`](crate::model::BlockParams::begin_gradients)). Parameters that several operations add to (norms, biases, an
//! untied embedding, experts, adapters) are zeroed first.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use super::sharding::{Sharding, narrow};
use crate::config::Dtype;
use crate::error::{Error, Result};
use crate::memory::{Ledger, MemoryKind};
use crate::model::{ParamName, ParamTable, Unit, UnitLayout};
use crate::ops::linear::Onto;
use crate::ops::norm;
use crate::ranks::{ReduceOp, Work};
use crate::torch;

/// Dtypes of gradients.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct GradientKinds {
    /// Dtype of the sums over micro-batches.
    pub accumulated: Kind,
    /// Dtype in which ranks exchange gradients.
    pub reduced: Kind,
}

/// Dtypes of gradients; `None` is the accumulation dtype for the weights' dtype.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct GradientOptions {
    /// Dtype of the sums over micro-batches (`zero.grad_accum_dtype`).
    pub accumulated: Option<Kind>,
    /// Dtype in which ranks exchange gradients (`zero.reduce_dtype`).
    pub reduced: Option<Kind>,
}

impl GradientOptions {
    /// Converts the dtypes of the configuration.
    pub fn new(accumulated: Dtype, reduced: Dtype) -> Self {
        let kind = |dtype| match dtype {
            Dtype::Auto => None,
            Dtype::Float32 => Some(Kind::Float),
            Dtype::Bfloat16 => Some(Kind::BFloat16),
        };
        Self { accumulated: kind(accumulated), reduced: kind(reduced) }
    }

    pub(super) fn kinds(self, wide: Kind) -> GradientKinds {
        GradientKinds { accumulated: self.accumulated.unwrap_or(wide), reduced: self.reduced.unwrap_or(wide) }
    }
}

/// The buffer that a backward pass of a unit adds its gradients to.
#[derive(Debug)]
pub(crate) struct UnitSum {
    pub flat: Tensor, // [len]
    /// Whether nothing was added yet. If so, the contents are undefined, and values must be written before they are read.
    pub is_new: bool,
}

impl UnitSum {
    /// If the buffer is new, zeroes it except for the parameters that `is_written` selects. Returns whether the GEMMs of these must overwrite or add.
    pub(crate) fn zero_others(&self, layout: &UnitLayout, is_written: &dyn Fn(ParamName) -> bool) -> Result<Onto> {
        if !self.is_new {
            return Ok(Onto::Sum);
        }
        layout.zero_others(&self.flat, is_written)?;
        Ok(Onto::Nothing)
    }
}

/// Norms of gradients that are clipped separately, because the draft head has its own loss.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GradientNorms {
    pub model: f64,
    pub draft_head: f64,
}

/// Sums of gradients since the last step.
#[derive(Debug)]
pub(crate) struct Gradients {
    table: Arc<ParamTable>,
    sharding: Sharding,
    kinds: GradientKinds,
    device: Device,
    units: Vec<Option<Tensor>>, // [len], or [len / S] if gradients are scattered; None is zero
    stale: Vec<bool>,           // whether the buffer holds sums from before the last step, which count as zero
    reductions: VecDeque<Work>, // reductions under way, the oldest first
    finishing: bool,            // whether this backward is the last before the step
    finished: Vec<bool>,        // whether this rank's part is summed over all ranks
}

impl Gradients {
    /// Allocates nothing; memory is taken in the first backward.
    pub(crate) fn new(table: Arc<ParamTable>, sharding: Sharding, kinds: GradientKinds, device: Device) -> Self {
        let units = table.units.iter().map(|_| None).collect();
        let [stale, finished] = [(); 2].map(|()| vec![false; table.units.len()]);
        Self { table, sharding, kinds, device, units, stale, reductions: VecDeque::new(), finishing: false, finished }
    }

    /// Announces that the next backward is the last before the step. All remaining reductions then start as each unit ends.
    pub(crate) fn finish_with_next_backward(&mut self) {
        self.finishing = true;
    }

    /// Returns the whole gradient buffer of a unit, for one backward to add to. Pass it to [`Gradients::end`] afterwards.
    ///
    /// # Errors
    /// `InvalidArgument` if the unit's last backward before the step has already ended.
    pub(crate) fn begin(&mut self, unit: Unit) -> Result<UnitSum> {
        let index = self.table.index(unit);
        if self.finished[index] {
            let expected =
                "an optimizer step or dropped gradients first, as the last backward of this step is done".into();
            return Err(Error::InvalidArgument {
                op: "Gradients::begin",
                expected,
                got: format!("another backward of {unit}"),
            });
        }
        self.whole(index)
    }

    /// Ends one backward of a unit. It is collective if gradients are scattered, and in the last backward: the sum over the shard group of this
    /// rank's part, and then the sum over replicas, run during the backward of the next unit. At most one unit's reduction is under way, because each
    /// holds a whole unit.
    pub(crate) fn end(&mut self, unit: Unit, whole: Tensor) -> Result<()> {
        let (index, num_before) = (self.table.index(unit), self.reductions.len());
        if !self.sharding.keeps_gradients {
            self.scatter(index, whole)?;
        }
        if self.finishing {
            self.finish(index)?;
        }
        self.reductions.drain(..num_before).try_for_each(Work::hold_libtorch)
    }

    /// The kept sum of a unit, or a new buffer. Debug builds fill a new buffer with NaN, to reveal values that are never written.
    fn whole(&mut self, index: usize) -> Result<UnitSum> {
        let kept = self.units[index].as_ref().filter(|_| self.sharding.keeps_gradients).map(Tensor::shallow_clone);
        let is_new = mem::take(&mut self.stale[index]) || kept.is_none();
        let len = self.table.units[index].len as i64;
        let flat = kept.map_or_else(|| Tensor::f_empty([len], (self.kinds.accumulated, self.device)), Ok)?;
        if is_new && cfg!(debug_assertions) {
            let _ = flat.shallow_clone().f_fill_(f64::NAN)?;
        }
        if self.sharding.keeps_gradients {
            self.units[index] = Some(flat.shallow_clone());
            self.account();
        }
        Ok(UnitSum { flat, is_new })
    }

    /// Adds the shard group's sum of this rank's slice of `whole` to the kept sum.
    fn scatter(&mut self, index: usize, whole: Tensor) -> Result<()> {
        let (sharding, kinds) = (&self.sharding, self.kinds);
        let range = sharding.slice(self.table.units[index].len);
        let sum = &mut self.units[index];
        let work = sharding.lane.run(vec![whole.shallow_clone()], || {
            let sent = whole.f_to_kind(kinds.reduced)?;
            let mut slice = narrow(&sent, &range);
            sharding.shard.reduce_scatter(&sent, &mut slice)?;
            match sum {
                Some(sum) => drop(sum.f_add_(&slice)?),
                None => *sum = Some(slice.f_to_dtype(kinds.accumulated, false, true)?),
            }
            Ok(())
        })?;
        self.reductions.push_back(work);
        self.account();
        Ok(())
    }

    /// Reduces this rank's part of a unit over all ranks, in place: first over the shard group, if that was not done yet, then over the replicas.
    fn finish(&mut self, index: usize) -> Result<()> {
        let len = self.table.units[index].len;
        if self.units[index].is_none() {
            let kept_len = if self.sharding.keeps_gradients { len } else { self.sharding.slice(len).len() };
            self.units[index] = Some(Tensor::f_zeros([kept_len as i64], (self.kinds.accumulated, self.device))?);
            self.account();
        }
        if mem::take(&mut self.stale[index]) {
            let _ = self.units[index].as_mut().expect("stale memory is there").f_zero_()?;
        }
        self.finished[index] = true;
        let (sharding, kind) = (&self.sharding, self.kinds.reduced);
        let is_summed = !sharding.keeps_gradients || sharding.shard.size() == 1;
        if is_summed && sharding.replicate.size() == 1 {
            return Ok(());
        }
        let sum = self.units[index].as_ref().expect("made above");
        let mut owned = self.owned(index);
        let work = sharding.lane.run(vec![sum.shallow_clone()], || {
            let sent = sum.f_to_kind(kind)?;
            let mut part =
                if sharding.keeps_gradients { narrow(&sent, &sharding.owned(len)) } else { sent.shallow_clone() };
            match (sharding.keeps_gradients, sharding.owns_all) {
                (false, _) => (),
                (true, true) => sharding.shard.all_reduce(&mut part, ReduceOp::Sum)?,
                (true, false) => sharding.shard.reduce_scatter(&sent, &mut part)?,
            }
            sharding.replicate.all_reduce(&mut part, ReduceOp::Sum)?;
            if part.data_ptr() != owned.data_ptr() {
                owned.f_copy_(&part)?;
            }
            Ok(())
        })?;
        self.reductions.push_back(work);
        Ok(())
    }

    /// The part of a unit's sum that this rank owns.
    fn owned(&self, index: usize) -> Tensor {
        let sum = self.units[index].as_ref().expect("a finished unit has a sum");
        match self.sharding.keeps_gradients {
            true => narrow(sum, &self.sharding.owned(self.table.units[index].len)),
            false => sum.shallow_clone(),
        }
    }

    /// The sum over all ranks of every unit's part that this rank owns (collective). Call [`Gradients::zero`] before accumulating again.
    pub(crate) fn reduce(&mut self) -> Result<Vec<Tensor>> {
        for index in 0..self.units.len() {
            if !self.finished[index] {
                self.finish(index)?;
            }
        }
        self.reductions.drain(..).try_for_each(Work::hold_libtorch)?;
        Ok((0..self.units.len()).map(|index| self.owned(index)).collect())
    }

    /// The norms of the model's and of the draft head's whole gradient, from the tensors of [`Gradients::reduce`] (collective). One sum of squares in
    /// f64 is computed for every slice of every unit, and these are added in rank order, so that every ZeRO stage gets the same bits. The host reads
    /// from the GPU once.
    pub(crate) fn norms(&self, reduced: &[Tensor]) -> Result<GradientNorms> {
        let (shard, owns_all) = (&self.sharding.shard, self.sharding.owns_all);
        let num_slices = shard.size();
        let num_own = if owns_all { num_slices } else { 1 };
        let slices = |(index, owned): (usize, &Tensor)| {
            let len = self.table.units[index].len / num_slices; // 0 for a block without adapters
            (0..num_own).map(|slice| owned.narrow(0, (slice * len) as i64, len as i64)).collect::<Vec<_>>()
        };
        let slices: Vec<Tensor> = reduced.iter().enumerate().flat_map(slices).collect();
        let squares = norm::sums_of_squares(&slices)?.view([reduced.len() as i64, -1]).tr(); // [own slices, units]
        let mut all = Tensor::f_zeros([num_slices as i64, reduced.len() as i64], (Kind::Double, self.device))?;
        let first = if owns_all { 0 } else { shard.rank() as i64 };
        all.narrow(0, first, squares.size()[0]).f_copy_(&squares)?;
        if !owns_all {
            shard.all_reduce(&mut all, ReduceOp::Sum)?;
        }
        let (all, units) = (torch::f64_vec(&all)?, self.table.units.iter().map(|layout| layout.unit).cycle());
        let norm = |is_head: bool| {
            let own = all.iter().zip(units.clone()).filter(|(_, unit)| (*unit == Unit::DraftHead) == is_head);
            own.map(|(squares, _)| squares).sum::<f64>().sqrt()
        };
        Ok(GradientNorms { model: norm(false), draft_head: norm(true) })
    }

    /// Drops all sums. Whole gradients keep their memory; scattered slices are allocated again in the next backward.
    pub(crate) fn zero(&mut self) {
        if !self.sharding.keeps_gradients {
            return self.free();
        }
        self.restart();
        self.stale.iter_mut().zip(&self.units).for_each(|(stale, unit)| *stale = unit.is_some());
    }

    /// Drops all sums and frees the memory.
    pub(crate) fn free(&mut self) {
        self.restart();
        self.units.iter_mut().for_each(|unit| *unit = None);
        self.stale.fill(false);
        self.account();
    }

    fn restart(&mut self) {
        self.reductions.clear();
        self.finishing = false;
        self.finished.fill(false);
    }

    fn account(&self) {
        let num_elements: usize = self.units.iter().flatten().map(Tensor::numel).sum();
        Ledger::set("gradients", MemoryKind::Device, num_elements * self.kinds.accumulated.elt_size_in_bytes());
    }
}

impl Drop for Gradients {
    fn drop(&mut self) {
        self.free();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ModelSpec;
    use crate::ranks::World;

    /// Sums from before a step count as zero after it, whether or not the unit had a backward since.
    #[test]
    fn gradients_are_cleared_after_a_step() {
        let table = Arc::new(ParamTable::new(Arc::new(ModelSpec::preset("micro").unwrap()), 1));
        let mesh = World::single().mesh(1, 1).unwrap();
        let sharding = Sharding::new(&table, &mesh, 0).unwrap();
        let kinds = GradientKinds { accumulated: Kind::Float, reduced: Kind::Float };
        let mut gradients = Gradients::new(table.clone(), sharding, kinds, Device::Cpu);
        let mut most = |units: &[Unit]| {
            for &unit in units {
                let sum = gradients.begin(unit).unwrap();
                assert!(sum.is_new);
                assert_eq!(sum.zero_others(table.unit(unit), &|_| false).unwrap(), Onto::Nothing);
                let _ = sum.flat.shallow_clone().fill_(3.0);
                gradients.end(unit, sum.flat).unwrap();
                let sum = gradients.begin(unit).unwrap();
                assert_eq!(sum.zero_others(table.unit(unit), &|_| false).unwrap(), Onto::Sum);
                gradients.end(unit, sum.flat).unwrap();
            }
            let sums = gradients.reduce().unwrap();
            gradients.zero();
            sums.iter().map(|sum| sum.abs().max().double_value(&[])).collect::<Vec<_>>()
        };
        let all: Vec<Unit> = table.units.iter().map(|layout| layout.unit).collect();
        assert!(most(&all[1..]).iter().zip([0.0].into_iter().chain(std::iter::repeat(3.0))).all(|(a, b)| *a == b));
        assert!(most(&[]).iter().all(|most| *most == 0.0));
        assert_eq!(most(&all[..1])[..2], [3.0, 0.0]);
    }
}
