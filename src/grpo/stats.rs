//! Statistics of a loss as sums, counts and extremes, which merge over micro-batches and ranks.

use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};
use crate::torch;

/// A metric that can still be merged with others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Aggregate {
    /// A mean, stored as sum and count.
    Mean {
        /// Sum of the values.
        sum: f64,
        /// Number, or total weight, of the values.
        count: f64,
    },
    /// The minimum; infinity without values.
    Min(f64),
    /// The maximum; minus infinity without values.
    Max(f64),
}

impl Aggregate {
    /// The metric's current value: 0 for the mean of no values, NaN for the extreme of no values.
    pub fn value(self) -> f64 {
        match self {
            Aggregate::Mean { sum, count } => sum / count.max(1.0),
            Aggregate::Min(value) | Aggregate::Max(value) if value.is_infinite() => f64::NAN,
            Aggregate::Min(value) | Aggregate::Max(value) => value,
        }
    }
}

/// Metrics of one or more micro-batches, by TRL's names.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LossStats {
    entries: Vec<(&'static str, Aggregate)>,
}

impl LossStats {
    /// Names and aggregates in a fixed order, the same for every micro-batch of one configuration.
    pub fn entries(&self) -> &[(&'static str, Aggregate)] {
        &self.entries
    }

    /// Merges another micro-batch's statistics.
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

/// [`LossStats`] on the device where they were computed, in float64: on a GPU, reading each number would wait for the device.
#[derive(Debug)]
pub struct DeviceStats {
    entries: Vec<(&'static str, Reduction)>,
    sums: Tensor,  // [S]: sum and count of each mean
    least: Tensor, // [E]: minima, and negated maxima
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Reduction {
    Mean,
    Min,
    Max,
}

impl DeviceStats {
    /// Merges another micro-batch's statistics without waiting for the device.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the two report different metrics.
    pub fn merge(&mut self, other: &DeviceStats) -> Result<()> {
        if self.entries != other.entries {
            let (expected, got) = (format!("{:?}", self.entries), format!("{:?}", other.entries));
            return Err(Error::InvalidArgument { op: "DeviceStats::merge", expected, got });
        }
        self.sums = &self.sums + &other.sums;
        self.least = self.least.minimum(&other.least);
        Ok(())
    }

    /// Appends statistics with other names.
    ///
    /// # Errors
    /// Any error of device work that was queued before.
    pub fn join(mut self, other: DeviceStats) -> Result<DeviceStats> {
        self.entries.extend(other.entries);
        let joined = |a: &Tensor, b: &Tensor| Tensor::f_cat(&[a, b], 0);
        Ok(DeviceStats {
            sums: joined(&self.sums, &other.sums)?,
            least: joined(&self.least, &other.least)?,
            entries: self.entries,
        })
    }

    /// Reads all numbers in one copy.
    ///
    /// # Errors
    /// Any error of device work that was queued before.
    pub fn read(&self) -> Result<LossStats> {
        let values = torch::f64_vec(&Tensor::f_cat(&[&self.sums, &self.least], 0)?)?;
        let (sums, least) = values.split_at(self.sums.numel());
        let (mut sums, mut least) = (sums.iter().copied(), least.iter().copied());
        let mut sum = || sums.next().expect("two for every mean");
        let mut least = || least.next().expect("one for every extreme");
        let entries = self.entries.iter().map(|(name, role)| {
            let aggregate = match role {
                Reduction::Mean => Aggregate::Mean { sum: sum(), count: sum() },
                Reduction::Min => Aggregate::Min(least()),
                Reduction::Max => Aggregate::Max(-least()),
            };
            (*name, aggregate)
        });
        Ok(LossStats { entries: entries.collect() })
    }
}

/// Collects statistics as scalar tensors on the device.
#[derive(Debug)]
pub(crate) struct StatsRecorder {
    entries: Vec<(&'static str, Reduction)>,
    sums: Vec<Tensor>,
    least: Vec<Tensor>,
    device: Device,
}

impl StatsRecorder {
    pub fn new(device: Device) -> Self {
        Self { entries: Vec::new(), sums: Vec::new(), least: Vec::new(), device }
    }

    /// Records the mean `sum / count`, both scalars.
    pub fn mean(&mut self, name: &'static str, sum: &Tensor, count: &Tensor) {
        self.entries.push((name, Reduction::Mean));
        self.sums.extend([sum.to_kind(Kind::Double), count.to_kind(Kind::Double)]);
    }

    /// Records the mean over the elements that are not NaN.
    pub fn mean_of(&mut self, name: &'static str, values: &Tensor) {
        let count = values.isnan().logical_not().sum(Kind::Double);
        self.mean(name, &values.to_kind(Kind::Double).nansum(None::<i64>, false, Kind::Double), &count);
    }

    /// Records the minimum of the elements that are not NaN.
    pub fn min(&mut self, name: &'static str, values: &Tensor) {
        self.entries.push((name, Reduction::Min));
        self.least.push(least(values));
    }

    /// Records the maximum of the elements that are not NaN.
    pub fn max(&mut self, name: &'static str, values: &Tensor) {
        self.entries.push((name, Reduction::Max));
        self.least.push(least(&-values));
    }

    /// The recorded statistics.
    pub fn finish(self) -> Result<DeviceStats> {
        let joined = |scalars: &[Tensor]| match scalars {
            [] => Tensor::f_empty([0], (Kind::Double, self.device)),
            scalars => Tensor::f_stack(scalars, 0),
        };
        Ok(DeviceStats { sums: joined(&self.sums)?, least: joined(&self.least)?, entries: self.entries })
    }
}

/// The minimum of the values that are not NaN, in float64; infinity if there are none.
fn least(values: &Tensor) -> Tensor {
    let values = values.to_kind(Kind::Double);
    let bound = Tensor::full([1], f64::INFINITY, (Kind::Double, values.device()));
    Tensor::cat(&[values.masked_fill(&values.isnan(), f64::INFINITY), bound], 0).amin([0i64], false)
}
