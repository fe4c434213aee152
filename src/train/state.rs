//! Optimizer state by parameter and element range, so that another world size, stage or shard group can read it. Padding
//! is left out: only the layout's offsets depend on the number of shards, a parameter's own elements do not.

use std::ops::Range;

use tch::{Device, Tensor};

use super::policy::Policy;
use super::sharding::{intersection, narrow};
use crate::error::{Error, Result};
use crate::model::{Param, ParamName, Unit};

/// Master weights and moments of some consecutive elements of a parameter, in the accumulation kind.
#[derive(Debug)]
pub struct ParamState {
    /// Master weights.
    pub master: Tensor, // [elements]
    /// First moments.
    pub m: Tensor, // [elements]
    /// Second moments.
    pub v: Tensor, // [elements]
}

/// A range of a parameter with its state.
#[derive(Debug)]
pub struct ParamShard {
    /// The parameter's unit.
    pub unit: Unit,
    /// The parameter.
    pub name: ParamName,
    /// Which of its elements, in row-major order of the layout's shape.
    pub elements: Range<usize>,
    /// Their state.
    pub state: ParamState,
}

impl Policy {
    /// Whether [`Policy::export_state`] must be saved on this rank. Each rank of a shard group saves its own slice, at every
    /// stage; with several shard groups (hybrid) the first does so alone.
    pub fn saves_state(&self) -> bool {
        self.sharding.replicate.rank() == 0
    }

    /// The ranges that [`Policy::export_state`] will return, in its order, without a copy: unit, parameter and elements.
    pub fn state_ranges(&self) -> impl Iterator<Item = (Unit, ParamName, Range<usize>)> + '_ {
        self.shares().map(|(index, param, elements)| (self.trained_table().units[index].unit, param.name, elements))
    }

    /// Copies this rank's slice on the host, one parameter at a time. Over a shard group the slices make up the whole state
    /// without overlap. [`Policy::num_updates`] belongs to it.
    ///
    /// # Errors
    /// Those of the device.
    pub fn export_state(&self) -> impl Iterator<Item = Result<ParamShard>> + '_ {
        self.shares().map(|(index, param, elements)| {
            let [master, m, v] = self.optimizer.read(index, &self.part(index, param, &elements), Device::Cpu)?;
            let unit = self.trained_table().units[index].unit;
            Ok(ParamShard { unit, name: param.name, elements, state: ParamState { master, m, v } })
        })
    }

    /// This rank's slice: index of the unit, parameter and elements.
    fn shares(&self) -> impl Iterator<Item = (usize, &Param, Range<usize>)> {
        self.trained_table().units.iter().enumerate().flat_map(|(index, layout)| {
            let slice = self.sharding.slice(layout.len);
            let shares = layout.params.iter().map(move |param| (index, param, share(param, &slice)));
            shares.filter(|(_, _, elements)| !elements.is_empty())
        })
    }

    /// Replaces the state of what this rank owns by what `read` returns for each range of a parameter, and the weights by
    /// its master weights (collective below stage 3). Gradients added so far are left alone.
    ///
    /// # Errors
    /// `InvalidArgument` for a tensor of another length, and what `read` returns.
    pub fn import_state(
        &mut self,
        num_updates: u64,
        read: &mut dyn FnMut(Unit, ParamName, Range<usize>) -> Result<ParamState>,
    ) -> Result<()> {
        let table = self.trained_table().clone();
        for (index, layout) in table.units.iter().enumerate() {
            for param in &layout.params {
                let elements = share(param, self.optimizer.owned(index));
                if elements.is_empty() {
                    continue;
                }
                let ParamState { master, m, v } = read(layout.unit, param.name, elements.clone())?;
                for new in [&master, &m, &v] {
                    check_len(new, &elements, layout.unit, param.name)?;
                }
                let part = self.part(index, param, &elements);
                self.optimizer.write(index, &part, [&master, &m, &v])?;
                let mut weight = narrow(&self.network.trained_mut().owned(index)?, &part);
                weight.f_copy_(&master)?;
            }
            self.network.trained_mut().spread(index)?;
        }
        self.optimizer.set_num_updates(num_updates);
        self.version += 1;
        Ok(())
    }

    /// Some of a parameter's elements, all of them owned by this rank, in its part of the unit.
    fn part(&self, index: usize, param: &Param, elements: &Range<usize>) -> Range<usize> {
        let start = param.offset + elements.start - self.optimizer.owned(index).start;
        start..start + elements.len()
    }
}

/// The elements of a parameter that lie in a range of its unit.
fn share(param: &Param, range: &Range<usize>) -> Range<usize> {
    let inside = intersection(&(param.offset..param.offset + param.numel()), range);
    if inside.is_empty() { 0..0 } else { inside.start - param.offset..inside.end - param.offset }
}

fn check_len(tensor: &Tensor, elements: &Range<usize>, unit: Unit, name: ParamName) -> Result<()> {
    if tensor.size() == [elements.len() as i64] {
        return Ok(());
    }
    Err(Error::InvalidArgument {
        op: "Policy::import_state",
        expected: format!("[{}] for elements {elements:?} of {name:?} of the {unit}", elements.len()),
        got: format!("{:?}", tensor.size()),
    })
}
