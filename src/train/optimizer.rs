//! AdamW over what this rank owns: master weights and both moments, wherever they live.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tch::{Device, Kind, Tensor};

use super::flow::{BUCKET_LEN, Flow};
use super::residence::{Columns, OptimizerHome, Residence, cells};
use super::sharding::{Sharding, intersection, narrow};
use crate::config::OptimizerConfig;
use crate::error::Result;
use crate::model::{ParamTable, UnitLayout};
use crate::ops::adamw;

/// AdamW (arXiv 1711.05101) without the learning rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamOptions {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay of matrices.
    pub weight_decay: f64,
}

impl AdamOptions {
    /// The options of a run.
    pub fn new(config: &OptimizerConfig) -> Self {
        let &OptimizerConfig { adam_beta1, adam_beta2, adam_epsilon, weight_decay, .. } = config;
        Self { beta1: adam_beta1, beta2: adam_beta2, eps: adam_epsilon, weight_decay }
    }
}

/// Master weights, first and second moments of the owned part of every unit.
#[derive(Debug)]
pub(crate) struct Optimizer {
    options: AdamOptions,
    device: Device,
    units: Vec<Owned>,
    num_updates: u64,
    flow: Option<Flow>,          // of the update under way, where the state is streamed
    residence: Mutex<Residence>, // the state moves while the weights are read
}

/// This rank's slice of a unit.
#[derive(Debug)]
struct Owned {
    range: Range<usize>,        // of the unit
    start: usize,               // in the state's columns
    decayed: Vec<Range<usize>>, // of the owned part
}

impl Owned {
    fn columns(&self) -> Range<usize> {
        self.start..self.start + self.range.len()
    }

    /// The ranges of `part` that weight decay applies to, from its start.
    fn decayed(&self, part: &Range<usize>) -> Vec<Range<i64>> {
        let inside = self.decayed.iter().map(|range| intersection(range, part)).filter(|range| !range.is_empty());
        inside.map(|range| (range.start - part.start) as i64..(range.end - part.start) as i64).collect()
    }
}

impl Optimizer {
    /// Zero moments; [`Optimizer::load_master`] fills in the rest.
    pub(crate) fn new(
        table: &ParamTable,
        sharding: &Sharding,
        options: AdamOptions,
        (kind, device): (Kind, Device),
        home: OptimizerHome,
    ) -> Result<Self> {
        let mut count = 0;
        let units = table.units.iter().map(|layout| {
            let range = sharding.owned(layout.len);
            let owned = Owned { start: count, decayed: decayed(layout, &range), range };
            count += owned.range.len();
            owned
        });
        let units = units.collect();
        let residence = Residence::new(Columns { count, kind }, device, home)?;
        Ok(Self { options, device, units, num_updates: 0, flow: None, residence: Mutex::new(residence) })
    }

    /// Takes a unit's master weights from the whole unit.
    pub(crate) fn load_master(&mut self, index: usize, whole: &Tensor) -> Result<()> {
        let master = narrow(whole, &self.units[index].range);
        let zeros = master.f_zeros_like()?;
        let columns = self.units[index].columns();
        self.residence().write(&columns, [&master, &zeros, &zeros])
    }

    /// Counts an update: the exponent of the bias corrections of the [`Optimizer::step`]s that follow, one for each unit in
    /// order.
    pub(crate) fn begin_update(&mut self) -> Result<()> {
        let residence = self.residence.get_mut().unwrap_or_else(PoisonError::into_inner);
        let columns = residence.columns();
        if let Some(pool) = residence.streamed() {
            let owned = self.units.iter().map(Owned::columns);
            self.flow = Some(Flow::start(pool, columns, owned, BUCKET_LEN, self.device)?);
        }
        self.num_updates += 1;
        Ok(())
    }

    /// Steps a unit's owned part on `gradient * gradient_scale`; `weight` takes its new master weights in its own kind.
    ///
    /// # Errors
    /// `InvalidArgument` while offloaded.
    pub(crate) fn step(
        &mut self,
        index: usize,
        gradient: &Tensor,
        weight: &mut Tensor,
        lr: f64,
        gradient_scale: f64,
    ) -> Result<()> {
        let AdamOptions { beta1, beta2, eps, weight_decay } = self.options;
        let hyper = adamw::AdamW { lr, beta1, beta2, eps, weight_decay };
        let (owned, num_updates) = (&self.units[index], self.num_updates);
        let mut step = |part: &Range<usize>, [mut master, mut m, mut v]: [Tensor; 3]| {
            let (gradient, mut weight) = (narrow(gradient, part), narrow(weight, part));
            let decayed = owned.decayed(part);
            adamw::step(
                &mut master,
                &mut m,
                &mut v,
                &gradient,
                &mut weight,
                &hyper,
                num_updates,
                gradient_scale,
                &decayed,
            )
        };
        let residence = self.residence.get_mut().unwrap_or_else(PoisonError::into_inner);
        let columns = residence.columns();
        if let (Some(flow), Some(pool)) = (&mut self.flow, residence.streamed()) {
            return flow.step(pool, columns, index, &mut step);
        }
        let state = residence.stepped()?;
        step(&(0..owned.range.len()), [0, 1, 2].map(|row| cells(&state, row, &owned.columns())))
    }

    /// Ends an update: streamed state is on its way home.
    pub(crate) fn end_update(&mut self) -> Result<()> {
        self.flow.take().map_or(Ok(()), Flow::finish)
    }

    /// Copies of master weights and moments of some of a unit's owned part on `device`.
    pub(crate) fn read(&self, index: usize, part: &Range<usize>, device: Device) -> Result<[Tensor; 3]> {
        self.residence().read(&self.columns(index, part), device)
    }

    /// Replaces master weights and moments of some of a unit's owned part.
    pub(crate) fn write(&mut self, index: usize, part: &Range<usize>, values: [&Tensor; 3]) -> Result<()> {
        self.residence().write(&self.columns(index, part), values)
    }

    fn columns(&self, index: usize, part: &Range<usize>) -> Range<usize> {
        let start = self.units[index].start;
        start + part.start..start + part.end
    }

    /// The part of a unit that this rank owns.
    pub(crate) fn owned(&self, index: usize) -> &Range<usize> {
        &self.units[index].range
    }

    /// Updates made so far.
    pub(crate) fn num_updates(&self) -> u64 {
        self.num_updates
    }

    /// Continues from a checkpoint's count.
    pub(crate) fn set_num_updates(&mut self, num_updates: u64) {
        self.num_updates = num_updates;
    }

    /// Bytes of the state.
    pub(crate) fn bytes(&self) -> usize {
        self.residence().columns().bytes()
    }

    /// Where the state is, and its way between device and host.
    pub(crate) fn residence(&self) -> MutexGuard<'_, Residence> {
        self.residence.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// # Errors
    /// `InvalidArgument` while offloaded.
    pub(crate) fn check_here(&self) -> Result<()> {
        self.residence().check_here()
    }
}

/// The ranges of the owned part that weight decay applies to.
fn decayed(layout: &UnitLayout, owned: &Range<usize>) -> Vec<Range<usize>> {
    let params = layout.params.iter().filter(|param| param.decay);
    params
        .map(|param| intersection(&(param.offset..param.offset + param.numel()), owned))
        .filter(|range| !range.is_empty())
        .map(|range| range.start - owned.start..range.end - owned.start)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Param, ParamName, Unit};

    #[test]
    fn only_the_owned_part_of_matrices_decays() {
        let param = |name, numel: i64, offset, decay| Param { name, shape: vec![numel], offset, decay };
        let params = vec![
            param(ParamName::InputNorm, 60, 0, false),
            param(ParamName::Qkv, 120, 64, true),
            param(ParamName::O, 64, 192, true),
            param(ParamName::PostNorm, 60, 256, false),
        ];
        let layout = UnitLayout { unit: Unit::Block(0), params, offset: 0, len: 384 };
        assert_eq!(decayed(&layout, &(0..384)), [64..184, 192..256]);
        assert_eq!(decayed(&layout, &(0..200)), [64..184, 192..200]);
        assert_eq!(decayed(&layout, &(128..256)), [0..56, 64..128]);
        assert!(decayed(&layout, &(256..384)).is_empty());
        let owned = Owned { range: 0..384, start: 7, decayed: decayed(&layout, &(0..384)) };
        assert_eq!(owned.decayed(&(100..250)), [0..84, 92..150]);
        assert_eq!(owned.columns(), 7..391);
    }
}
