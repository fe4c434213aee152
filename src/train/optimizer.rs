//! AdamW over what this rank owns: master weights and both moments in one arena range, so that they can leave the device
//! and return as one.
#![allow(unsafe_code)]

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use super::sharding::{Sharding, intersection, narrow};
use crate::error::{Error, Result};
use crate::memory::{Arena, HostPool};
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

/// Master weights, first and second moments of the owned part of every unit.
#[derive(Debug)]
pub(crate) struct Optimizer {
    options: AdamOptions,
    kind: Kind,
    units: Vec<Owned>,
    num_owned: usize,
    num_updates: u64,
    state: Option<Tensor>, // [3, num_owned], a view of the arena; None while offloaded
    arena: Arena,          // dropped after its view
}

/// What this rank owns of a unit.
#[derive(Debug)]
struct Owned {
    range: Range<usize>,      // of the unit
    start: usize,             // in the state's columns
    decayed: Vec<Range<i64>>, // of the owned part
}

impl Optimizer {
    /// Zero moments and master weights; [`Optimizer::load_master`] fills the latter.
    pub(crate) fn new(
        table: &ParamTable,
        sharding: &Sharding,
        options: AdamOptions,
        (kind, device): (Kind, Device),
    ) -> Result<Self> {
        let mut num_owned = 0;
        let units = table.units.iter().map(|layout| {
            let range = sharding.owned(layout.len);
            let owned = Owned { start: num_owned, decayed: decayed(layout, &range), range };
            num_owned += owned.range.len();
            owned
        });
        let units = units.collect();
        let bytes = 3 * num_owned * kind.elt_size_in_bytes();
        let arena = Arena::reserve("optimizer", bytes, device)?;
        let mut optimizer = Self { options, kind, units, num_owned, num_updates: 0, state: None, arena };
        optimizer.state = Some(optimizer.map()?);
        Ok(optimizer)
    }

    /// Takes a unit's master weights from the whole unit.
    pub(crate) fn load_master(&mut self, index: usize, whole: &Tensor) -> Result<()> {
        let [mut master, _, _] = self.unit(index)?;
        master.f_copy_(&narrow(whole, &self.units[index].range))?;
        Ok(())
    }

    /// Counts an update: the exponent of the bias corrections of the [`Optimizer::step`]s that follow.
    pub(crate) fn begin_update(&mut self) {
        self.num_updates += 1;
    }

    /// Steps a unit's owned part on `gradient * gradient_scale`; `weight` takes its new master weights in its own kind.
    pub(crate) fn step(
        &mut self,
        index: usize,
        gradient: &Tensor,
        weight: &mut Tensor,
        lr: f64,
        gradient_scale: f64,
    ) -> Result<()> {
        let [mut master, mut m, mut v] = self.unit(index)?;
        let AdamOptions { beta1, beta2, eps, weight_decay } = self.options;
        let hyper = adamw::AdamW { lr, beta1, beta2, eps, weight_decay };
        let decayed = &self.units[index].decayed;
        adamw::step(&mut master, &mut m, &mut v, gradient, weight, &hyper, self.num_updates, gradient_scale, decayed)
    }

    /// Master weights and moments of a unit's owned part, as views.
    ///
    /// # Errors
    /// `InvalidArgument` while offloaded.
    pub(crate) fn unit(&self, index: usize) -> Result<[Tensor; 3]> {
        let state = self.state()?;
        let Owned { range, start, .. } = &self.units[index];
        let columns = state.narrow(1, *start as i64, range.len() as i64);
        Ok([0, 1, 2].map(|row| columns.get(row)))
    }

    /// The part of a unit that [`Optimizer::unit`] is of.
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

    /// Whether the state is on the device.
    pub(crate) fn is_resident(&self) -> bool {
        self.state.is_some()
    }

    /// Bytes of the state.
    pub(crate) fn bytes(&self) -> usize {
        3 * self.num_owned * self.kind.elt_size_in_bytes()
    }

    /// Copies the state to the start of `pool` and unmaps it. Nothing happens if it is there already.
    pub(crate) fn offload(&mut self, pool: &mut HostPool) -> Result<()> {
        let Some(state) = &self.state else { return Ok(()) };
        pool.copy_from(0, state)?;
        self.state = None;
        self.arena.unmap();
        Ok(())
    }

    /// Maps the range and copies the state back. Nothing happens if it is there already.
    pub(crate) fn reload(&mut self, pool: &HostPool) -> Result<()> {
        if self.state.is_none() {
            let mut state = self.map()?;
            pool.copy_to(0, &mut state)?;
            self.state = Some(state);
        }
        Ok(())
    }

    fn state(&self) -> Result<&Tensor> {
        self.state.as_ref().ok_or_else(|| Error::InvalidArgument {
            op: "optimizer state",
            expected: "it on the device (reload it first)".into(),
            got: "offloaded".into(),
        })
    }

    fn map(&mut self) -> Result<Tensor> {
        self.arena.map(self.bytes())?;
        // SAFETY: the view and all views of it stay in this struct or in one call on it; `offload` drops it before it
        // unmaps the range.
        unsafe { self.arena.tensor(0, &[3, self.num_owned as i64], self.kind) }
    }
}

/// The ranges of the owned part that weight decay applies to.
fn decayed(layout: &UnitLayout, owned: &Range<usize>) -> Vec<Range<i64>> {
    let params = layout.params.iter().filter(|param| param.decay);
    params
        .map(|param| intersection(&(param.offset..param.offset + param.numel()), owned))
        .filter(|range| !range.is_empty())
        .map(|range| (range.start - owned.start) as i64..(range.end - owned.start) as i64)
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
    }
}
