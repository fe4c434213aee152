//! The network's weights, unit by unit: whole on every rank, or a slice that is gathered for use.

use std::collections::VecDeque;
use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use super::sharding::{Sharding, narrow};
use crate::error::{Error, Result};
use crate::memory::{Ledger, Place};
use crate::model::{ParamTable, Unit, UnitLayout};

/// Gathered units that stay for the next use: the unit in use and the one before it. A tied head needs both at once, and
/// backward begins with what forward used last.
const NUM_GATHERED_UNITS: usize = 2;

/// Weights in the kind the network computes in.
#[derive(Debug)]
pub(crate) struct Weights {
    owner: &'static str,
    table: Arc<ParamTable>,
    sharding: Sharding,
    kind: Kind,
    device: Device,
    units: Vec<Tensor>,                  // [len], or [len / S] where weights are sharded
    gathered: VecDeque<(usize, Tensor)>, // [len], most recent last
}

impl Weights {
    /// Loads unit by unit, on `owner`'s account in the ledger; `each` sees every whole unit as it comes, with its index.
    pub(crate) fn load(
        owner: &'static str,
        table: Arc<ParamTable>,
        sharding: Sharding,
        (kind, device): (Kind, Device),
        source: &dyn Fn(&UnitLayout) -> Result<Tensor>,
        mut each: impl FnMut(usize, &Tensor) -> Result<()>,
    ) -> Result<Self> {
        let mut units = Vec::with_capacity(table.units.len());
        for (index, layout) in table.units.iter().enumerate() {
            let flat = source(layout)?;
            if flat.size() != [layout.len as i64] {
                return Err(Error::InvalidArgument {
                    op: "Weights::load",
                    expected: format!("[{}] for the {}", layout.len, layout.unit),
                    got: format!("{:?}", flat.size()),
                });
            }
            each(index, &flat)?;
            let kept = if sharding.keeps_weights { 0..layout.len } else { sharding.slice(layout.len) };
            let mut unit = Tensor::f_zeros([kept.len() as i64], (kind, device))?;
            unit.f_copy_(&narrow(&flat, &kept))?;
            units.push(unit);
        }
        let num_elements: usize = units.iter().map(Tensor::numel).sum();
        Ledger::set(owner, Place::Device, num_elements * kind.elt_size_in_bytes());
        Ok(Self { owner, table, sharding, kind, device, units, gathered: VecDeque::new() })
    }

    /// The layout that all units follow.
    pub(crate) fn table(&self) -> &Arc<ParamTable> {
        &self.table
    }

    /// A whole unit for use in the network; the tensor is valid until two other units were asked for or the weights
    /// change. Collective where weights are sharded: whether a unit is still there depends only on the order of calls.
    pub(crate) fn unit(&mut self, unit: Unit) -> Result<Tensor> {
        let index = self.table.index(unit);
        if self.sharding.keeps_weights {
            return Ok(self.units[index].shallow_clone());
        }
        if let Some(at) = self.gathered.iter().position(|(gathered, _)| *gathered == index) {
            let found = self.gathered.remove(at).expect("the position was just found");
            self.gathered.push_back(found);
        } else {
            if self.gathered.len() == NUM_GATHERED_UNITS {
                self.gathered.pop_front();
            }
            let whole = self.gather(unit)?;
            self.gathered.push_back((index, whole));
        }
        Ok(self.gathered[self.gathered.len() - 1].1.shallow_clone())
    }

    /// A whole unit: itself where weights are kept whole, else a new tensor gathered from the shard group (collective).
    pub(crate) fn gather(&self, unit: Unit) -> Result<Tensor> {
        let index = self.table.index(unit);
        if self.sharding.keeps_weights {
            return Ok(self.units[index].shallow_clone());
        }
        let mut whole = Tensor::f_empty([self.table.units[index].len as i64], (self.kind, self.device))?;
        self.sharding.shard.all_gather(&self.units[index], &mut whole)?;
        Ok(whole)
    }

    /// Casts what this rank owns of a unit from its master weights, and spreads it over the shard group (collective) where
    /// every rank keeps the whole.
    pub(crate) fn update(&mut self, index: usize, master: &Tensor) -> Result<()> {
        self.gathered.clear();
        let unit = &mut self.units[index];
        if !self.sharding.keeps_weights {
            unit.f_copy_(master)?;
            return Ok(());
        }
        let mut owned = narrow(unit, &self.sharding.owned(self.table.units[index].len));
        owned.f_copy_(master)?;
        if !self.sharding.owns_all {
            self.sharding.shard.all_gather(&owned, unit)?;
        }
        Ok(())
    }

    /// Frees gathered units.
    pub(crate) fn free_gathered(&mut self) {
        self.gathered.clear();
    }
}

impl Drop for Weights {
    fn drop(&mut self) {
        Ledger::set(self.owner, Place::Device, 0);
    }
}
