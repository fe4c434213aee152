//! The network's weights, unit by unit: whole on every rank, or a slice that is gathered for use, beside what is computed
//! before it.

use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use super::sharding::{Sharding, narrow};
use crate::dist::Work;
use crate::error::{Error, Result};
use crate::memory::{Ledger, Place};
use crate::model::{ParamTable, Unit, UnitLayout};

/// Weights in the kind the network computes in.
#[derive(Debug)]
pub(crate) struct Weights {
    owner: &'static str,
    table: Arc<ParamTable>,
    sharding: Sharding,
    kind: Kind,
    device: Device,
    units: Vec<Tensor>,           // [len], or [len / S] where weights are sharded
    spreading: Vec<Option<Work>>, // new weights on their way to ranks that keep them whole
    gathered: Vec<Gathered>,      // in use or upcoming
}

/// A whole unit where weights are sharded.
#[derive(Debug)]
struct Gathered {
    index: usize,
    whole: Tensor,      // [len]
    work: Option<Work>, // on its way
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
        let spreading = units.iter().map(|_| None).collect();
        Ok(Self { owner, table, sharding, kind, device, units, spreading, gathered: Vec::new() })
    }

    /// The layout that all units follow.
    pub(crate) fn table(&self) -> &Arc<ParamTable> {
        &self.table
    }

    /// A whole unit for use in the network. Where weights are sharded this is collective: those `upcoming` are gathered beside
    /// what is computed with it, and all others are let go.
    pub(crate) fn unit(&mut self, unit: Unit, upcoming: &[Unit]) -> Result<Tensor> {
        let index = self.table.index(unit);
        if self.sharding.keeps_weights {
            self.settle(index)?;
            return Ok(self.units[index].shallow_clone());
        }
        let upcoming: Vec<usize> = upcoming.iter().map(|&unit| self.table.index(unit)).collect();
        self.gathered.retain(|kept| kept.index == index || upcoming.contains(&kept.index));
        for wanted in std::iter::once(index).chain(upcoming) {
            if !self.gathered.iter().any(|kept| kept.index == wanted) {
                self.start_gathering(wanted)?;
            }
        }
        let found = self.gathered.iter_mut().find(|kept| kept.index == index).expect("gathered above");
        found.work.take().map_or(Ok(()), Work::hold_libtorch)?;
        Ok(found.whole.shallow_clone())
    }

    fn start_gathering(&mut self, index: usize) -> Result<()> {
        let mut whole = Tensor::f_empty([self.table.units[index].len as i64], (self.kind, self.device))?;
        let (shard, own) = (&self.sharding.shard, &self.units[index]);
        let held = vec![whole.shallow_clone()];
        let work = self.sharding.lane.run(held, || shard.all_gather(own, &mut whole))?;
        self.gathered.push(Gathered { index, whole, work: Some(work) });
        Ok(())
    }

    /// A whole unit: itself where weights are kept whole, else a new tensor gathered from the shard group (collective).
    pub(crate) fn gather(&self, unit: Unit) -> Result<Tensor> {
        let index = self.table.index(unit);
        if self.sharding.keeps_weights {
            self.sharding.lane.join()?;
            return Ok(self.units[index].shallow_clone());
        }
        let mut whole = Tensor::f_empty([self.table.units[index].len as i64], (self.kind, self.device))?;
        self.sharding.shard.all_gather(&self.units[index], &mut whole)?;
        Ok(whole)
    }

    /// What this rank owns of a unit, to be written; [`Weights::spread`] goes after it.
    pub(crate) fn owned(&mut self, index: usize) -> Result<Tensor> {
        self.settle(index)?;
        let unit = &self.units[index];
        let whole = || narrow(unit, &self.sharding.owned(self.table.units[index].len));
        Ok(if self.sharding.keeps_weights { whole() } else { unit.shallow_clone() })
    }

    /// Brings what the ranks of the shard group own of a unit to all that keep the whole (collective), beside what follows.
    pub(crate) fn spread(&mut self, index: usize) -> Result<()> {
        self.gathered.clear();
        if !self.sharding.keeps_weights || self.sharding.owns_all {
            return Ok(());
        }
        let owned = self.owned(index)?;
        let (shard, mut whole) = (&self.sharding.shard, self.units[index].shallow_clone());
        let work = self.sharding.lane.run(Vec::new(), || shard.all_gather(&owned, &mut whole))?;
        self.spreading[index] = Some(work);
        Ok(())
    }

    /// Lets libtorch wait for a unit's new weights.
    fn settle(&mut self, index: usize) -> Result<()> {
        self.spreading[index].take().map_or(Ok(()), Work::hold_libtorch)
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
