//! What a loss reports, as sums, counts and extremes that add up over micro-batches and ranks.

use tch::{Kind, Tensor};

use crate::error::{Error, Result};

/// A metric that can still be added to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Aggregate {
    /// A mean, as its sum and its count.
    Mean {
        /// Sum of the values.
        sum: f64,
        /// Number (or weight) of the values.
        count: f64,
    },
    /// The least value; infinity where there is none.
    Min(f64),
    /// The greatest value; minus infinity where there is none.
    Max(f64),
}

impl Aggregate {
    /// The metric's value so far: 0 for a mean of nothing, NaN for an extreme of nothing.
    pub fn value(self) -> f64 {
        match self {
            Aggregate::Mean { sum, count } => sum / count.max(1.0),
            Aggregate::Min(value) | Aggregate::Max(value) if value.is_infinite() => f64::NAN,
            Aggregate::Min(value) | Aggregate::Max(value) => value,
        }
    }
}

/// Metrics of one micro-batch or of several, by TRL's names.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LossStats {
    entries: Vec<(&'static str, Aggregate)>,
}

impl LossStats {
    /// Names and aggregates in a fixed order, the same for every micro-batch of one configuration.
    pub fn entries(&self) -> &[(&'static str, Aggregate)] {
        &self.entries
    }

    /// Adds another micro-batch's statistics; empty statistics take them over.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the two report different metrics.
    pub fn merge(&mut self, other: &LossStats) -> Result<()> {
        if self.entries.is_empty() {
            self.entries.clone_from(&other.entries);
            return Ok(());
        }
        let names = |stats: &LossStats| {
            stats.entries.iter().map(|(name, value)| (*name, std::mem::discriminant(value))).collect::<Vec<_>>()
        };
        if names(self) != names(other) {
            let (expected, got) = (format!("{:?}", names(self)), format!("{:?}", names(other)));
            return Err(Error::InvalidArgument { op: "LossStats::merge", expected, got });
        }
        for ((_, mine), (_, theirs)) in self.entries.iter_mut().zip(&other.entries) {
            *mine = match (*mine, *theirs) {
                (Aggregate::Mean { sum, count }, Aggregate::Mean { sum: more, count: further }) => {
                    Aggregate::Mean { sum: sum + more, count: count + further }
                }
                (Aggregate::Min(a), Aggregate::Min(b)) => Aggregate::Min(a.min(b)),
                (Aggregate::Max(a), Aggregate::Max(b)) => Aggregate::Max(a.max(b)),
                _ => unreachable!("aggregates were compared above"),
            };
        }
        Ok(())
    }
}

/// Collects scalar tensors and reads them in one host copy: on a GPU each read would wait for the device.
#[derive(Debug, Default)]
pub(crate) struct Recorder {
    names: Vec<(&'static str, Aggregate)>,
    scalars: Vec<Tensor>,
}

impl Recorder {
    /// `sum / count`, both scalars.
    pub fn mean(&mut self, name: &'static str, sum: &Tensor, count: &Tensor) {
        self.names.push((name, Aggregate::Mean { sum: 0.0, count: 0.0 }));
        self.scalars.extend([sum.to_kind(Kind::Double), count.to_kind(Kind::Double)]);
    }

    /// Mean over all elements.
    pub fn mean_of(&mut self, name: &'static str, values: &Tensor) {
        self.mean(name, &values.sum(Kind::Double), &values.ones_like().sum(Kind::Double));
    }

    /// The least element that is not NaN.
    pub fn min(&mut self, name: &'static str, values: &Tensor) {
        self.names.push((name, Aggregate::Min(0.0)));
        self.scalars.push(-(-with_bound(values)).amax([0], false));
    }

    /// The greatest element that is not NaN.
    pub fn max(&mut self, name: &'static str, values: &Tensor) {
        self.names.push((name, Aggregate::Max(0.0)));
        self.scalars.push((-with_bound(&-values)).amax([0], false));
    }

    /// Reads what was recorded.
    pub fn read(self) -> Result<LossStats> {
        let mut values = Vec::<f64>::try_from(&Tensor::f_stack(&self.scalars, 0)?)?.into_iter();
        let mut next = || values.next().unwrap_or(f64::NAN);
        let entries = self.names.into_iter().map(|(name, kind)| {
            let filled = match kind {
                Aggregate::Mean { .. } => Aggregate::Mean { sum: next(), count: next() },
                Aggregate::Min(_) => Aggregate::Min(next()),
                Aggregate::Max(_) => Aggregate::Max(next()),
            };
            (name, filled)
        });
        Ok(LossStats { entries: entries.collect() })
    }
}

/// Values as float64 without NaN, and an infinity behind them, so that there is always a least one.
fn with_bound(values: &Tensor) -> Tensor {
    let values = values.to_kind(Kind::Double);
    let bound = Tensor::full([1], f64::INFINITY, (Kind::Double, values.device()));
    Tensor::cat(&[values.masked_fill(&values.isnan(), f64::INFINITY), bound], 0)
}
