//! The metrics of one step, each with its reduction over ranks.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::ranks::{Collective, all_gather_json};

const OP: &str = "reduce metrics";

/// A metric as ranks exchange it: name, reduction, bits of value and count.
type MetricRow = (String, Reduce, u64, u64);

/// Reduced metrics by name. NaN is the mean, minimum or maximum of no values, and is written as null.
pub type MetricValues = BTreeMap<String, f64>;

/// How the values of several ranks are combined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reduce {
    /// The sum over ranks.
    Sum,
    /// The mean over ranks, weighted by count.
    Mean,
    /// The maximum.
    Max,
    /// The minimum.
    Min,
    /// The value of the lowest rank, for metrics that are equal on all ranks.
    Last,
}

/// Metrics of one rank in one step. Names may differ between ranks; a rank without a name does not take part in its reduction.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepMetrics {
    entries: BTreeMap<String, MetricEntry>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct MetricEntry {
    reduce: Reduce,
    value: f64,
    count: f64,
}

impl StepMetrics {
    /// Sets a value. With [`Reduce::Mean`] it has weight 1 on each rank.
    pub fn set(&mut self, name: impl Into<String>, value: f64, reduce: Reduce) {
        self.entries.insert(name.into(), MetricEntry { reduce, value, count: 1.0 });
    }

    /// Sets a mean by its sum and count, so that ranks are weighted by their counts.
    pub fn set_mean(&mut self, name: impl Into<String>, sum: f64, count: f64) {
        self.entries.insert(name.into(), MetricEntry { reduce: Reduce::Mean, value: sum, count });
    }

    /// This rank's value of a metric; for a mean, this rank's mean.
    pub fn value(&self, name: &str) -> Option<f64> {
        self.entries.get(name).map(MetricEntry::result)
    }

    /// Reduces the metrics over the group and returns the same values on every rank. Collective over `group`.
    ///
    /// # Errors
    /// The errors of the collective; [`Error::Collective`] if ranks declare different reductions for a name.
    pub fn reduce(&self, group: &dyn Collective) -> Result<MetricValues> {
        let mut total: BTreeMap<String, MetricEntry> = BTreeMap::new();
        let all: Vec<Vec<MetricRow>> = all_gather_json(group, OP, &self.rows())?;
        for (name, reduce, value, count) in all.into_iter().flatten() {
            let entry = MetricEntry { reduce, value: f64::from_bits(value), count: f64::from_bits(count) };
            let Some(sum) = total.get_mut(&name) else {
                total.insert(name, entry);
                continue;
            };
            if sum.reduce != entry.reduce {
                let message =
                    format!("ranks disagree on how to reduce metric '{name}': {:?} and {:?}", sum.reduce, entry.reduce);
                let rank = group.ranks()[group.rank()];
                return Err(Error::Collective { op: OP, group: group.name().to_owned(), rank, message });
            }
            sum.add(&entry);
        }
        Ok(total.into_iter().map(|(name, entry)| (name, entry.result())).collect())
    }

    /// The metrics as rows; bit patterns keep every value exact, including NaN and infinities.
    fn rows(&self) -> Vec<MetricRow> {
        let row = |(name, entry): (&String, &MetricEntry)| {
            (name.clone(), entry.reduce, entry.value.to_bits(), entry.count.to_bits())
        };
        self.entries.iter().map(row).collect()
    }
}

impl MetricEntry {
    fn add(&mut self, other: &MetricEntry) {
        match self.reduce {
            Reduce::Sum | Reduce::Mean => {
                self.value += other.value;
                self.count += other.count;
            }
            // f64::max and f64::min skip NaN.
            Reduce::Max => self.value = self.value.max(other.value),
            Reduce::Min => self.value = self.value.min(other.value),
            Reduce::Last => {}
        }
    }

    fn result(&self) -> f64 {
        match self.reduce {
            Reduce::Mean => self.value / self.count,
            Reduce::Sum | Reduce::Max | Reduce::Min | Reduce::Last => self.value,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::testing;

    #[test]
    fn metrics_are_reduced_over_ranks_as_declared() {
        testing::threads(2, |group| {
            let rank = group.rank() as f64;
            let mut metrics = StepMetrics::default();
            metrics.set("num_tokens", 10.0 + rank, Reduce::Sum);
            metrics.set("step_time", 1.0 + rank, Reduce::Max);
            metrics.set("low_min", if rank == 0.0 { f64::NAN } else { 0.25 }, Reduce::Min);
            metrics.set("learning_rate", 0.1 + rank, Reduce::Last);
            metrics.set("plain_mean", rank, Reduce::Mean);
            metrics.set_mean("loss", 3.0 + rank * 6.0, 1.0 + rank);
            metrics.set_mean("nothing", 0.0, 0.0);
            if rank == 1.0 {
                metrics.set("only_here", 7.0, Reduce::Sum);
            }
            let reduced = metrics.reduce(&*group).unwrap();
            assert!(reduced["nothing"].is_nan());
            let got: Vec<_> = reduced.iter().filter(|(_, value)| !value.is_nan()).collect();
            let expected = [
                ("learning_rate", 0.1),
                ("loss", 4.0),
                ("low_min", 0.25),
                ("num_tokens", 21.0),
                ("only_here", 7.0),
                ("plain_mean", 0.5),
                ("step_time", 2.0),
            ];
            let expected = expected.map(|(name, value)| (name.to_owned(), value));
            assert_eq!(got, expected.iter().map(|(name, value)| (name, value)).collect::<Vec<_>>());
        });
    }
}
