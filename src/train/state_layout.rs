//! Which state an element has, by its parameter and the optimizer, and where it lies in the state's memory: one row for each part
//! (master weights, m, v, ..), of all elements that have it in the order of the units.

use std::ops::Range;

use tch::{Kind, Tensor};

use super::optim::Optim;
use super::sharding::intersection;
use crate::config::OptimizerName;
use crate::model::{Param, ParamName, ParamTable, UnitLayout};
use crate::ops::adamw8bit::BLOCK;

/// Matrices with fewer elements keep 32-bit moments, as in bitsandbytes.
const MIN_8BIT_SIZE: usize = 4096;

/// One tensor of a parameter's optimizer state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum StatePart {
    /// Master weights.
    Master,
    /// First moments; of Muon, the momentum.
    M,
    /// Second moments.
    V,
    /// 8-bit codes of first moments.
    MCodes,
    /// 8-bit codes of second moments.
    VCodes,
    /// The largest first moment of every block of codes.
    MAbsmax,
    /// The largest second moment of every block of codes.
    VAbsmax,
}

impl StatePart {
    /// In the order in which their rows lie in memory.
    pub const ALL: [Self; 7] =
        [Self::Master, Self::M, Self::V, Self::MCodes, Self::VCodes, Self::MAbsmax, Self::VAbsmax];

    /// Name of the part in checkpoints.
    pub fn name(self) -> &'static str {
        match self {
            Self::Master => "master",
            Self::M => "m",
            Self::V => "v",
            Self::MCodes => "m_codes",
            Self::VCodes => "v_codes",
            Self::MAbsmax => "m_absmax",
            Self::VAbsmax => "v_absmax",
        }
    }

    /// Element type of the part, where master weights are of kind `wide`.
    pub fn kind(self, wide: Kind) -> Kind {
        match self {
            Self::Master | Self::M | Self::V => wide,
            Self::MCodes | Self::VCodes => Kind::Uint8,
            Self::MAbsmax | Self::VAbsmax => Kind::Float,
        }
    }

    /// Consecutive elements of a parameter that share a value.
    pub fn elements_per_value(self) -> usize {
        if matches!(self, Self::MAbsmax | Self::VAbsmax) { BLOCK } else { 1 }
    }

    /// Values that some consecutive elements have, the first of which begins a value.
    pub fn num_values(self, num_elements: usize) -> usize {
        num_elements.div_ceil(self.elements_per_value())
    }
}

/// The state that is kept of every element of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateForm {
    /// AdamW with moments of the master weights' kind.
    Adam,
    /// AdamW with moments of 8 bits.
    Adam8bit,
    /// Muon.
    Muon,
}

impl StateForm {
    /// Every form.
    pub const ALL: [Self; 3] = [Self::Adam, Self::Adam8bit, Self::Muon];

    /// The tensors of a state of this form.
    pub fn parts(self) -> &'static [StatePart] {
        use StatePart::{M, MAbsmax, MCodes, Master, V, VAbsmax, VCodes};
        match self {
            Self::Adam => &[Master, M, V],
            Self::Adam8bit => &[Master, MCodes, VCodes, MAbsmax, VAbsmax],
            Self::Muon => &[Master, M],
        }
    }

    /// The `optim` that has it.
    pub fn optimizer(self) -> &'static str {
        match self {
            Self::Adam => OptimizerName::AdamW.name(),
            Self::Adam8bit => OptimizerName::AdamW8bit.name(),
            Self::Muon => OptimizerName::Muon.name(),
        }
    }

    /// The form of a parameter's state. Vectors and embeddings keep their moments in 32 bits under every optimizer.
    pub(super) fn of(optim: Optim, param: &Param) -> Self {
        let is_matrix = param.decay && param.name != ParamName::Embedding;
        match optim {
            Optim::AdamW8bit if is_matrix && param.numel() >= MIN_8BIT_SIZE => Self::Adam8bit,
            Optim::Muon(_) if is_matrix && param.name.is_block_matrix() => Self::Muon,
            Optim::AdamW | Optim::AdamW8bit | Optim::Muon(_) => Self::Adam,
        }
    }
}

/// Some values of one part, by their place in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Cells {
    pub kind: Kind,
    pub bytes: Range<usize>,
}

impl Cells {
    pub(super) fn num_values(&self) -> usize {
        self.bytes.len() / self.kind.elt_size_in_bytes()
    }

    /// A view of them in memory [bytes] of u8.
    pub(super) fn view(&self, memory: &Tensor) -> Tensor {
        memory.narrow(0, self.bytes.start as i64, self.bytes.len() as i64).view_dtype(self.kind)
    }
}

/// Consecutive elements of a unit's owned part whose state has one form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StateRun {
    pub elements: Range<usize>, // of the owned part
    pub form: StateForm,
    first: [usize; StatePart::ALL.len()], // value in each part's row
}

/// Where everything lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StateLayout {
    wide: Kind,
    counts: [usize; StatePart::ALL.len()], // values of each part's row
    units: Vec<Vec<StateRun>>,
}

impl StateLayout {
    /// The state of what `owned` says of every unit, given its length.
    pub(super) fn new(table: &ParamTable, optim: Optim, wide: Kind, owned: impl Fn(usize) -> Range<usize>) -> Self {
        let mut layout = Self { wide, counts: [0; StatePart::ALL.len()], units: Vec::new() };
        for unit in &table.units {
            let runs = runs(unit, optim, &owned(unit.len)).into_iter().map(|(elements, form)| {
                let first = layout.counts;
                for part in form.parts() {
                    layout.counts[*part as usize] += part.num_values(elements.len());
                }
                StateRun { elements, form, first }
            });
            let runs = runs.collect();
            layout.units.push(runs);
        }
        layout
    }

    /// Size of all rows.
    pub(super) fn bytes(&self) -> usize {
        StatePart::ALL.iter().map(|&part| self.row_bytes(part)).sum()
    }

    /// Runs of a unit's owned part, in order.
    pub(super) fn runs(&self, index: usize) -> &[StateRun] {
        &self.units[index]
    }

    pub(super) fn num_units(&self) -> usize {
        self.units.len()
    }

    /// The run that has some elements of a unit's owned part, all of one parameter.
    ///
    /// # Panics
    /// If no run has them.
    pub(super) fn run_of(&self, index: usize, elements: &Range<usize>) -> &StateRun {
        let holds = |run: &&StateRun| run.elements.start <= elements.start && elements.end <= run.elements.end;
        self.units[index].iter().find(holds).unwrap_or_else(|| panic!("{elements:?} of unit {index} in no run"))
    }

    /// Where a part of some elements of a run lies.
    pub(super) fn cells(&self, run: &StateRun, elements: &Range<usize>, part: StatePart) -> Cells {
        let offset = elements.start - run.elements.start;
        assert!(offset.is_multiple_of(part.elements_per_value()), "{elements:?} begin within a block");
        let first = run.first[part as usize] + offset / part.elements_per_value();
        let kind = part.kind(self.wide);
        let before: usize = StatePart::ALL[..part as usize].iter().map(|&part| self.row_bytes(part)).sum();
        let [start, len] = [first, part.num_values(elements.len())].map(|values| values * kind.elt_size_in_bytes());
        Cells { kind, bytes: before + start..before + start + len }
    }

    fn row_bytes(&self, part: StatePart) -> usize {
        self.counts[part as usize] * part.kind(self.wide).elt_size_in_bytes()
    }
}

/// The owned part of a unit by form. What follows a parameter up to the next one is padding and goes with it.
fn runs(layout: &UnitLayout, optim: Optim, owned: &Range<usize>) -> Vec<(Range<usize>, StateForm)> {
    let starts = layout.params.iter().map(|param| param.offset);
    let ends = starts.clone().skip(1).chain([layout.len]);
    let mut runs: Vec<(Range<usize>, StateForm)> = Vec::new();
    for (param, range) in layout.params.iter().zip(starts.zip(ends).map(|(start, end)| start..end)) {
        let inside = intersection(&range, owned);
        if inside.is_empty() {
            continue;
        }
        let (elements, form) = (inside.start - owned.start..inside.end - owned.start, StateForm::of(optim, param));
        match runs.last_mut() {
            Some((last, same)) if *same == form => last.end = elements.end,
            _ => runs.push((elements, form)),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::config::MuonConfig;
    use crate::model::{ModelSpec, Unit};

    fn table(shards: usize) -> ParamTable {
        ParamTable::new(Arc::new(ModelSpec::preset("qwen2.5-0.5b").unwrap()), shards)
    }

    #[test]
    fn adam_moments_of_embeddings_and_vectors_stay_32_bit() {
        let table = table(1);
        let form = |optim, unit, name| StateForm::of(optim, table.unit(unit).param(name).unwrap());
        let block = Unit::Block(3);
        let muon = Optim::new(OptimizerName::Muon, &MuonConfig::default());
        for (optim, matrices) in
            [(Optim::AdamW, StateForm::Adam), (Optim::AdamW8bit, StateForm::Adam8bit), (muon, StateForm::Muon)]
        {
            assert_eq!(form(optim, block, ParamName::Qkv), matrices);
            assert_eq!(form(optim, block, ParamName::Down), matrices);
            assert_eq!(form(optim, block, ParamName::InputNorm), StateForm::Adam);
            assert_eq!(form(optim, block, ParamName::QkvBias), StateForm::Adam);
            assert_eq!(form(optim, Unit::Embedding, ParamName::Embedding), StateForm::Adam);
        }
        let small = |numel| Param { name: ParamName::O, shape: vec![numel, 1], offset: 0, decay: true };
        assert_eq!(StateForm::of(Optim::AdamW8bit, &small(4095)), StateForm::Adam);
        assert_eq!(StateForm::of(Optim::AdamW8bit, &small(4096)), StateForm::Adam8bit);
    }

    /// Slices hold what the whole does, each block of codes in one of them.
    #[test]
    fn shards_never_split_a_moment_block() {
        let table = table(3);
        for optim in [Optim::AdamW, Optim::AdamW8bit, Optim::new(OptimizerName::Muon, &MuonConfig::default())] {
            let whole = StateLayout::new(&table, optim, Kind::Float, |len| 0..len);
            let slices = (0..3)
                .map(|rank| StateLayout::new(&table, optim, Kind::Float, |len| rank * len / 3..(rank + 1) * len / 3));
            let mut bytes = 0;
            for slice in slices {
                bytes += slice.bytes();
                for run in slice.units.iter().flatten().filter(|run| run.form == StateForm::Adam8bit) {
                    assert!(run.elements.start.is_multiple_of(BLOCK) && run.elements.end.is_multiple_of(BLOCK));
                }
            }
            assert_eq!(bytes, whole.bytes(), "{optim:?}");
            let per_element = whole.bytes() as f64 / table.total as f64;
            let expected = match optim {
                Optim::AdamW => 12.0..12.01,
                Optim::AdamW8bit => 6.0..8.0, // embeddings are 28 % of this model
                Optim::Muon(_) => 9.0..10.0,
            };
            assert!(expected.contains(&per_element), "{optim:?}: {per_element}");
        }
    }
}
