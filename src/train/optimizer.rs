//! The optimizer step over the part of every unit that this rank owns, wherever its master weights and moments are stored.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::{Device, Kind, Tensor};

use super::flow::{BUCKET_LEN, StatePass, StatePiece, StateStream, StepPiece, pieces};
use super::optim::Optim;
use super::orthogonal::Orthogonalizer;
use super::residence::{OptimizerHome, Residence};
use super::sharding::{Sharding, intersection, narrow};
use super::state_layout::{Cells, StateForm, StateLayout, StatePart};
use crate::config::OptimizerConfig;
use crate::error::Result;
use crate::model::{ParamTable, UnitLayout};
use crate::ops::adamw;
use crate::ops::adamw8bit::{self, Moments8bit};
use crate::torch;

/// Options of AdamW (arXiv 1711.05101), without the learning rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamOptions {
    /// Decay rate of the first moment.
    pub beta1: f64,
    /// Decay rate of the second moment.
    pub beta2: f64,
    /// Added to the square root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay, applied to matrices.
    pub weight_decay: f64,
}

impl AdamOptions {
    /// Reads the options from a configuration.
    pub fn new(config: &OptimizerConfig) -> Self {
        let &OptimizerConfig { adam_beta1, adam_beta2, adam_epsilon, weight_decay, .. } = config;
        Self { beta1: adam_beta1, beta2: adam_beta2, eps: adam_epsilon, weight_decay }
    }
}

/// Master weights and moments of the part of every unit that this rank owns.
#[derive(Debug)]
pub(crate) struct Optimizer {
    adam: AdamOptions,
    device: Device,
    units: Vec<Owned>,
    layout: StateLayout,
    maps: Option<adamw8bit::Maps>,
    muon: Option<Orthogonalizer>,
    num_updates: u64,
    flow: Option<StateStream>,   // the stream of this update, if state is streamed
    residence: Mutex<Residence>, // a lock, because state moves while weights are read
}

/// This rank's slice of a unit.
#[derive(Debug)]
struct Owned {
    range: Range<usize>,        // within the unit
    decayed: Vec<Range<usize>>, // within this rank's part
}

impl Owned {
    /// The ranges of `part` that get weight decay, relative to its start.
    fn decayed(&self, part: &Range<usize>) -> Vec<Range<i64>> {
        let inside = self.decayed.iter().map(|range| intersection(range, part)).filter(|range| !range.is_empty());
        inside.map(|range| (range.start - part.start) as i64..(range.end - part.start) as i64).collect()
    }
}

impl Optimizer {
    /// Creates moments of 0; [`Optimizer::load_master`] then sets the master weights.
    pub(super) fn new(
        table: &Arc<ParamTable>,
        sharding: &Sharding,
        (adam, optim): (AdamOptions, Optim),
        (kind, device): (Kind, Device),
        home: OptimizerHome,
    ) -> Result<Self> {
        let units = table.units.iter().map(|layout| {
            let range = sharding.owned(layout.len);
            Owned { decayed: decayed(layout, &range), range }
        });
        let layout = StateLayout::new(table, optim, kind, |len| sharding.owned(len));
        let maps = (optim == Optim::AdamW8bit).then(|| adamw8bit::Maps::new(device)).transpose()?;
        let muon = match optim {
            Optim::Muon(options) => Some(Orthogonalizer::new(options, table.clone(), sharding.clone())),
            Optim::AdamW | Optim::AdamW8bit => None,
        };
        let residence = Mutex::new(Residence::new(layout.bytes(), device, home)?);
        Ok(Self { adam, device, units: units.collect(), layout, maps, muon, num_updates: 0, flow: None, residence })
    }

    /// Sets a unit's master weights from the whole unit.
    pub(crate) fn load_master(&mut self, index: usize, whole: &Tensor) -> Result<()> {
        let master = narrow(whole, &self.units[index].range);
        for run in self.layout.runs(index) {
            for &part in run.form.parts() {
                let cells = self.layout.cells(run, &run.elements, part);
                let values = match part {
                    StatePart::Master => narrow(&master, &run.elements),
                    StatePart::MCodes => fresh(&cells, f64::from(adamw8bit::ZERO_M_CODE))?,
                    _ => fresh(&cells, 0.0)?,
                };
                self.residence().write(&[cells], &[values])?;
            }
        }
        Ok(())
    }

    /// Starts an update. It counts as the exponent of the bias corrections of the following [`Optimizer::step`] calls, one for each unit in order.
    pub(crate) fn begin_update(&mut self) -> Result<()> {
        let residence = self.residence.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(pool) = residence.streamed() {
            self.flow = Some(StateStream::start(pool, &self.layout, BUCKET_LEN, self.device)?);
        }
        self.num_updates += 1;
        Ok(())
    }

    /// Steps this rank's part of a unit on `gradient * gradient_scale`; `weight` receives the new master weights in its own dtype. Collective if Muon
    /// steps matrices of the unit.
    ///
    /// # Errors
    /// `InvalidArgument` while the state is offloaded.
    pub(crate) fn step(
        &mut self,
        index: usize,
        gradient: &Tensor,
        weight: &mut Tensor,
        lr: f64,
        gradient_scale: f64,
    ) -> Result<()> {
        let AdamOptions { beta1, beta2, eps, weight_decay } = self.adam;
        let hyper = adamw::AdamW { lr, beta1, beta2, eps, weight_decay };
        let Self { units, maps, muon, layout, flow, residence, num_updates, device, .. } = self;
        let residence = residence.get_mut().unwrap_or_else(PoisonError::into_inner);
        let has_muon = layout.runs(index).iter().any(|run| run.form == StateForm::Muon);
        let muon = muon.as_ref().filter(|_| has_muon);
        let owned_len = units[index].range.len() as i64;
        let directions = muon.map(|_| Tensor::f_zeros([owned_len], (Kind::BFloat16, *device))).transpose()?;
        let mut moments = |piece: &StatePiece, mut state: Vec<Tensor>| {
            let part = &piece.elements;
            let (gradient, mut weight) = (narrow(gradient, part), narrow(weight, part));
            match (piece.form, &mut state[..], &*maps, muon, &directions) {
                (StateForm::Adam, [master, m, v], ..) => {
                    let (count, decayed) = (*num_updates, units[index].decayed(part));
                    adamw::step(master, m, v, &gradient, &mut weight, &hyper, count, gradient_scale, &decayed)
                }
                (StateForm::Adam8bit, [master, codes @ ..], Some(maps), ..) => {
                    let moments = Moments8bit::of(codes);
                    adamw8bit::step(
                        master,
                        &moments,
                        maps,
                        &gradient,
                        &mut weight,
                        &hyper,
                        *num_updates,
                        gradient_scale,
                    )
                }
                (StateForm::Muon, [m], _, Some(muon), Some(directions)) => {
                    muon.momentum(m, &gradient, &narrow(directions, part), gradient_scale)
                }
                (form, ..) => unreachable!("{form:?} has the tensors of its optimizer"),
            }
        };
        each_piece(layout, residence, flow, (index, StatePass::Moments), &mut moments)?;
        let (Some(muon), Some(directions)) = (muon, directions) else { return Ok(()) };
        let updates = muon.updates(index, directions)?;
        each_piece(layout, residence, flow, (index, StatePass::Master), &mut |piece, state| {
            let [update, weight] = [&updates, &*weight].map(|whole| narrow(whole, &piece.elements));
            muon.apply(index, &piece.elements, [&state[0], &update, &weight], lr, weight_decay)
        })
    }

    /// Ends an update: streamed state is copied back to the host.
    pub(crate) fn end_update(&mut self) -> Result<()> {
        self.flow.take().map_or(Ok(()), StateStream::finish)
    }

    /// Which optimizer state (see `StateForm`) the elements in `part` have. `part` is a range of this rank's slice of unit `index`, within one
    /// parameter.
    pub(crate) fn form(&self, index: usize, part: &Range<usize>) -> StateForm {
        self.layout.run_of(index, part).form
    }

    /// Copies the optimizer state of the elements in `part` to `device`, one tensor for each part of their form. `part` is a range of this rank's
    /// slice of unit `index`, within one parameter.
    pub(crate) fn read(&self, index: usize, part: &Range<usize>, device: Device) -> Result<Vec<Tensor>> {
        self.residence().read(&self.cells(index, part), device)
    }

    /// Replaces the optimizer state of the elements in `part`, a range of this rank's slice of unit `index` within one parameter.
    pub(crate) fn write(&mut self, index: usize, part: &Range<usize>, values: &[Tensor]) -> Result<()> {
        self.residence().write(&self.cells(index, part), values)
    }

    fn cells(&self, index: usize, part: &Range<usize>) -> Vec<Cells> {
        let run = self.layout.run_of(index, part);
        run.form.parts().iter().map(|&kept| self.layout.cells(run, part, kept)).collect()
    }

    /// The range of a unit that this rank owns.
    pub(crate) fn owned(&self, index: usize) -> &Range<usize> {
        &self.units[index].range
    }

    /// Number of updates so far.
    pub(crate) fn num_updates(&self) -> u64 {
        self.num_updates
    }

    /// Sets the number of updates from a checkpoint.
    pub(crate) fn set_num_updates(&mut self, num_updates: u64) {
        self.num_updates = num_updates;
    }

    /// Bytes of the optimizer state.
    pub(crate) fn bytes(&self) -> usize {
        self.residence().bytes()
    }

    /// The place of the state, and its transfers between device and host.
    pub(crate) fn residence(&self) -> MutexGuard<'_, Residence> {
        self.residence.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// # Errors
    /// `InvalidArgument` while the state is offloaded.
    pub(crate) fn check_here(&self) -> Result<()> {
        self.residence().check_here()
    }
}

/// Calls the step on the pieces of one pass over a unit, wherever the state is stored.
fn each_piece(
    layout: &StateLayout,
    residence: &mut Residence,
    flow: &mut Option<StateStream>,
    (index, pass): (usize, StatePass),
    step: &mut StepPiece<'_>,
) -> Result<()> {
    if let (Some(flow), Some(pool)) = (flow, residence.streamed()) {
        return flow.step(pool, (index, pass), step);
    }
    let state = residence.stepped()?;
    let pieces = pieces(layout, index, usize::MAX).into_iter().filter(|piece| piece.pass == pass);
    for piece in pieces {
        step(&piece, piece.cells.iter().map(|cells| cells.view(&state)).collect())?;
    }
    Ok(())
}

/// Initial values of an optimizer's state.
fn fresh(cells: &Cells, value: f64) -> Result<Tensor> {
    torch::full(&[cells.num_values() as i64], value, (cells.kind, Device::Cpu))
}

/// The ranges of this rank's part that get weight decay.
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
    fn weight_decay_applies_to_owned_matrix_elements_only() {
        let param = |name, numel: i64, offset, decay| Param { name, shape: vec![numel], offset, decay };
        let params = vec![
            param(ParamName::InputNorm, 60, 0, false),
            param(ParamName::Qkv, 120, 64, true),
            param(ParamName::O, 64, 192, true),
            param(ParamName::PostNorm, 60, 256, false),
        ];
        let layout = UnitLayout { unit: Unit::Block(0), params, offset: 0, len: 384, zero_centred_norms: false };
        assert_eq!(decayed(&layout, &(0..384)), [64..184, 192..256]);
        assert_eq!(decayed(&layout, &(0..200)), [64..184, 192..200]);
        assert_eq!(decayed(&layout, &(128..256)), [0..56, 64..128]);
        assert!(decayed(&layout, &(256..384)).is_empty());
        let owned = Owned { range: 0..384, decayed: decayed(&layout, &(0..384)) };
        assert_eq!(owned.decayed(&(100..250)), [0..84, 92..150]);
    }
}
