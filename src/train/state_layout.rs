//! Which optimizer state each element has, depending on its parameter and the optimizer, and its place in memory. Memory has one row for each part
//! (master weights, m, v, ..), with all elements that have this part in the order of the units.

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
    /// First moments; for Muon, the momentum.
    M,
    /// Second moments.
    V,
    /// 8-bit codes of the first moments.
    MCodes,
    /// 8-bit codes of the second moments.
    VCodes,
    /// The largest absolute first moment of every block of codes.
    MAbsmax,
    /// The largest second moment of every block of codes.
    VAbsmax,
}

impl StatePart {
    /// All parts, in the order of their rows in memory.
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

    /// Dtype of the part, if master weights have dtype `wide`.
    pub fn kind(self, wide: Kind) -> Kind {
        match self {
            Self::Master | Self::M | Self::V => wide,
            Self::MCodes | Self::VCodes => Kind::Uint8,
            Self::MAbsmax | Self::VAbsmax => Kind::Float,
        }
    }

    /// Number of consecutive elements that share one value of this part.
    pub fn elements_per_value(self) -> usize {
        if matches!(self, Self::MAbsmax | Self::VAbsmax) { BLOCK } else { 1 }
    }

    /// Number of values of this part for consecutive elements that start at a value's boundary.
    pub fn num_values(self, num_elements: usize) -> usize {
        num_elements.div_ceil(self.elements_per_value())
    }
}

/// Which state each element of a parameter has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateForm {
    /// AdamW with moments in the master weights' dtype.
    Adam,
    /// AdamW with 8-bit moments.
    Adam8bit,
    /// Muon: master weights and momentum.
    Muon,
}

impl StateForm {
    /// All forms.
    pub const ALL: [Self; 3] = [Self::Adam, Self::Adam8bit, Self::Muon];

    /// The tensors of a state in this form.
    pub fn parts(self) -> &'static [StatePart] {
        use StatePart::{M, MAbsmax, MCodes, Master, V, VAbsmax, VCodes};
        match self {
            Self::Adam => &[Master, M, V],
            Self::Adam8bit => &[Master, MCodes, VCodes, MAbsmax, VAbsmax],
            Self::Muon => &[Master, M],
        }
    }

    /// The value of the key `optim` whose optimizer uses this form.
    pub fn optimizer(self) -> &'static str {
        match self {
            Self::Adam => OptimizerName::AdamW.name(),
            Self::Adam8bit => OptimizerName::AdamW8bit.name(),
            Self::Muon => OptimizerName::Muon.name(),
        }
    }

    /// The form of a parameter's state. Vectors and embeddings have 32-bit moments with every optimizer.
    pub(super) fn of(optim: Optim, param: &Param) -> Self {
        let is_matrix = param.decay && param.name != ParamName::Embedding;
        match optim {
            Optim::AdamW8bit if is_matrix && param.numel() >= MIN_8BIT_SIZE => Self::Adam8bit,
            Optim::Muon(_) if is_matrix && param.name.is_block_matrix() => Self::Muon,
            Optim::AdamW | Optim::AdamW8bit | Optim::Muon(_) => Self::Adam,
        }
    }
}

/// A byte range of the optimizer state's memory, and the dtype of the values in it. All values belong to one part, such as the master weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Cells {
    pub kind: Kind,
    pub bytes: Range<usize>,
}

impl Cells {
    pub(super) fn num_values(&self) -> usize {
        self.bytes.len() / self.kind.elt_size_in_bytes()
    }

    /// A view of these values in the state's memory, a [bytes] u8 tensor.
    pub(super) fn view(&self, memory: &Tensor) -> Tensor {
        memory.narrow(0, self.bytes.start as i64, self.bytes.len() as i64).view_dtype(self.kind)
    }
}

/// Consecutive elements of this rank's part of a unit whose state has one form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StateRun {
    pub elements: Range<usize>, // within this rank's part
    pub form: StateForm,
    first: [usize; StatePart::ALL.len()], // index of the first value in each part's row
}

/// The memory layout of this rank's optimizer state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StateLayout {
    wide: Kind,
    counts: [usize; StatePart::ALL.len()], // number of values in each part's row
    units: Vec<Vec<StateRun>>,
}

impl StateLayout {
    /// Computes the layout. `owned` returns the range that this rank owns of a unit of the given length.
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

    /// Bytes of all rows.
    pub(super) fn bytes(&self) -> usize {
        StatePart::ALL.iter().map(|&part| self.row_bytes(part)).sum()
    }

    /// The runs of this rank's part of a unit, in order.
    pub(super) fn runs(&self, index: usize) -> &[StateRun] {
        &self.units[index]
    }

    pub(super) fn num_units(&self) -> usize {
        self.units.len()
    }

    /// The run that contains a range of this rank's part of a unit, within one parameter.
    ///
    /// # Panics
    /// If no run contains the range.
    pub(super) fn run_of(&self, index: usize, elements: &Range<usize>) -> &StateRun {
        let holds = |run: &&StateRun| run.elements.start <= elements.start && elements.end <= run.elements.end;
        self.units[index].iter().find(holds).unwrap_or_else(|| panic!("{elements:?} of unit {index} in no run"))
    }

    /// The memory of one state part for a range of elements in a run.
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

/// Splits this rank's part of a unit into ranges by form. Padding after a parameter belongs to the parameter before it.
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

    /// The slices together hold the whole state, and no block of codes spans two slices.
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
