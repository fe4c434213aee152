//! Optimizer state by parameter and element range, which another world size, stage or shard group can read. Padding is left out: it depends on the
//! number of shards, but a parameter's elements do not.

use std::ops::Range;

use tch::{Device, Tensor};

use super::policy::Policy;
use super::sharding::{intersection, narrow};
use super::state_layout::{StateForm, StatePart};
use crate::error::{Error, Result};
use crate::model::{Param, ParamName, Unit};
use crate::torch::accumulation_kind;

/// Optimizer state of consecutive elements of a parameter.
#[derive(Debug)]
pub struct ParamState {
    /// Which tensors the state consists of.
    pub form: StateForm,
    /// One tensor for each part of the form, in order.
    pub tensors: Vec<Tensor>,
}

impl ParamState {
    /// Creates AdamW's state, in the accumulation dtype.
    pub fn adam(master: Tensor, m: Tensor, v: Tensor) -> Self {
        Self { form: StateForm::Adam, tensors: vec![master, m, v] }
    }

    /// One part of the state, if its form has that.
    pub fn part(&self, part: StatePart) -> Option<&Tensor> {
        let index = self.form.parts().iter().position(|&own| own == part)?;
        self.tensors.get(index)
    }
}

/// A range of a parameter's elements, with their optimizer state.
#[derive(Debug)]
pub struct ParamShard {
    /// The parameter's unit.
    pub unit: Unit,
    /// The parameter.
    pub name: ParamName,
    /// Range of elements, in row-major order of the layout's shape.
    pub elements: Range<usize>,
    /// Optimizer state of these elements.
    pub state: ParamState,
}

/// A range of a parameter's elements, with the form of their state.
#[derive(Debug, Clone)]
pub struct StateRange {
    /// The parameter's unit.
    pub unit: Unit,
    /// The parameter.
    pub name: ParamName,
    /// Range of elements, in row-major order of the layout's shape.
    pub elements: Range<usize>,
    /// The form of their optimizer state.
    pub form: StateForm,
}

impl Policy {
    /// Whether this rank must save [`Policy::export_state`], if the ranks in `ranks` write a checkpoint together. Each rank of a shard group saves
    /// its own slice, at every stage; with several shard groups (hybrid) only the first one saves.
    pub fn saves_state(&self, ranks: &Range<usize>) -> bool {
        let replicas = &self.sharding.replicate;
        replicas.ranks().iter().find(|rank| ranks.contains(rank)) == Some(&replicas.ranks()[replicas.rank()])
    }

    /// The form of the optimizer state of a parameter's elements.
    pub fn state_form(&self, param: &Param) -> StateForm {
        StateForm::of(self.optim(), param)
    }

    /// Bytes of the state of all parameters over all ranks, without padding.
    pub fn whole_state_bytes(&self) -> usize {
        let wide = accumulation_kind(self.kind());
        let of_param = |param: &Param| -> usize {
            let parts = self.state_form(param).parts().iter();
            parts.map(|part| part.num_values(param.numel()) * part.kind(wide).elt_size_in_bytes()).sum()
        };
        self.trained_table().units.iter().flat_map(|layout| &layout.params).map(of_param).sum()
    }

    /// The ranges that [`Policy::export_state`] will return, in the same order, without copying.
    pub fn state_ranges(&self) -> impl Iterator<Item = StateRange> + '_ {
        self.shares().map(|(index, param, elements)| StateRange {
            unit: self.trained_table().units[index].unit,
            name: param.name,
            form: self.optimizer.form(index, &self.part(index, param, &elements)),
            elements,
        })
    }

    /// Copies this rank's slice of the state to the host, one parameter at a time. The slices of a shard group form the whole state without overlap.
    /// Save [`Policy::num_updates`] with it.
    ///
    /// # Errors
    /// The errors of the device.
    pub fn export_state(&self) -> impl Iterator<Item = Result<ParamShard>> + '_ {
        self.shares().map(|(index, param, elements)| {
            let part = self.part(index, param, &elements);
            let (form, tensors) = (self.optimizer.form(index, &part), self.optimizer.read(index, &part, Device::Cpu)?);
            let unit = self.trained_table().units[index].unit;
            Ok(ParamShard { unit, name: param.name, elements, state: ParamState { form, tensors } })
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

    /// Replaces the state of this rank's part by what `read` returns for each range of a parameter, and the weights by its master weights (collective
    /// below stage 3). Gradients added so far are not changed.
    ///
    /// # Errors
    /// `InvalidArgument` for a tensor of another length, [`Error::InvalidValue`] for the state of another optimizer, and the errors of `read`.
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
                let state = read(layout.unit, param.name, elements.clone())?;
                let part = self.part(index, param, &elements);
                check(&state, self.optimizer.form(index, &part), &elements, (layout.unit, param.name))?;
                self.optimizer.write(index, &part, &state.tensors)?;
                let mut weight = narrow(&self.network.trained_mut().owned(index)?, &part);
                weight.f_copy_(&state.tensors[0])?; // master weights come first in every form
            }
            self.network.trained_mut().spread(index)?;
        }
        self.optimizer.set_num_updates(num_updates);
        self.version += 1;
        Ok(())
    }

    /// The range of elements within this rank's part of the unit. This rank must own all of them.
    fn part(&self, index: usize, param: &Param, elements: &Range<usize>) -> Range<usize> {
        let start = param.offset + elements.start - self.optimizer.owned(index).start;
        start..start + elements.len()
    }
}

/// The elements of a parameter that are in a range of its unit.
fn share(param: &Param, range: &Range<usize>) -> Range<usize> {
    let inside = intersection(&(param.offset..param.offset + param.numel()), range);
    if inside.is_empty() { 0..0 } else { inside.start - param.offset..inside.end - param.offset }
}

/// Refuses the state of another optimizer, and tensors of another length.
fn check(state: &ParamState, form: StateForm, elements: &Range<usize>, (unit, name): (Unit, ParamName)) -> Result<()> {
    let parts = |form: StateForm| form.parts().iter().map(|part| part.name()).collect::<Vec<_>>().join(", ");
    if state.form != form {
        let expected = format!(
            "the optimizer of the checkpoint, which stores {} for {name:?}; this one stores {}",
            parts(state.form),
            parts(form)
        );
        return Err(Error::invalid_value("optim", form.optimizer(), expected));
    }
    let lens = form.parts().iter().map(|part| [part.num_values(elements.len()) as i64]);
    if state.tensors.iter().map(Tensor::size).eq(lens) {
        return Ok(());
    }
    Err(Error::InvalidArgument {
        op: "Policy::import_state",
        expected: format!("{} for elements {elements:?} of {name:?} of the {unit}", parts(form)),
        got: format!("{:?}", state.tensors.iter().map(Tensor::size).collect::<Vec<_>>()),
    })
}
