//! The metric lines of a run in compact form: eight bytes per value.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::ser::{SerializeMap, SerializeSeq};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use super::step::MetricValues;

/// Metric lines in the order in which they were written. Lines with equal names share the names. Serialised as a list of objects with `step` first,
/// like transformers' `log_history`. A clone shares the lines.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LogHistory {
    shapes: Vec<Arc<[String]>>,
    lines: Vec<Arc<HistoryLine>>,
}

#[derive(Debug)]
struct HistoryLine {
    step: u64,
    names: Arc<[String]>,
    values: Box<[f64]>,
}

impl LogHistory {
    /// Appends a line.
    pub fn push(&mut self, step: u64, values: &MetricValues) {
        let has_names = |shape: &&Arc<[String]>| shape.iter().eq(values.keys());
        let names = match self.shapes.iter().rev().find(has_names) {
            Some(shape) => shape.clone(),
            None => {
                let shape: Arc<[String]> = values.keys().cloned().collect();
                self.shapes.push(shape.clone());
                shape
            }
        };
        self.lines.push(Arc::new(HistoryLine { step, names, values: values.values().copied().collect() }));
    }

    /// Every metric of every line, oldest first.
    pub fn numbers(&self) -> impl Iterator<Item = (&str, f64)> {
        self.lines.iter().flat_map(|line| line.names.iter().map(String::as_str).zip(line.values.iter().copied()))
    }

    /// A metric's values with their steps, oldest first. Lines without it, or where it is NaN, are left out.
    pub fn points(&self, name: &str) -> impl DoubleEndedIterator<Item = (u64, f64)> {
        let of = move |line: &Arc<HistoryLine>| {
            let place = line.names.iter().position(|other| other == name)?;
            Some((line.step, line.values[place])).filter(|(_, value)| value.is_finite())
        };
        self.lines.iter().filter_map(of)
    }

    /// The lines that have a metric whose name begins with `prefix`.
    pub fn with(&self, prefix: &str) -> Self {
        let has = |line: &&Arc<HistoryLine>| line.names.iter().any(|name| name.starts_with(prefix));
        Self { shapes: self.shapes.clone(), lines: self.lines.iter().filter(has).cloned().collect() }
    }

    /// The lines; each is serialised as an object.
    pub fn lines(&self) -> impl Iterator<Item = &impl Serialize> {
        self.lines.iter().map(|line| &**line)
    }
}

/// Compares bits, so that NaN equals itself.
impl PartialEq for HistoryLine {
    fn eq(&self, other: &Self) -> bool {
        let bits = |line: &Self| line.values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        (self.step, &self.names, bits(self)) == (other.step, &other.names, bits(other))
    }
}

impl Serialize for HistoryLine {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(1 + self.values.len()))?;
        map.serialize_entry("step", &self.step)?;
        self.names.iter().zip(&self.values).try_for_each(|(name, value)| map.serialize_entry(name, value))?;
        map.end()
    }
}

impl Serialize for LogHistory {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_seq(Some(self.lines.len()))?;
        self.lines().try_for_each(|line| list.serialize_element(line))?;
        list.end()
    }
}

impl<'de> Deserialize<'de> for LogHistory {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut history = Self::default();
        for mut line in Vec::<BTreeMap<String, Value>>::deserialize(deserializer)? {
            let step = line.remove("step").and_then(|step| step.as_u64()).unwrap_or(0);
            let values = line.into_iter().map(|(name, value)| (name, value.as_f64().unwrap_or(f64::NAN)));
            history.push(step, &values.collect());
        }
        Ok(history)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(values: &[(&str, f64)]) -> MetricValues {
        values.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
    }

    #[test]
    fn metric_history_returns_the_recorded_values() {
        let mut history = LogHistory::default();
        history.push(1, &values(&[("loss", 0.1 + 0.2), ("kl", f64::NAN)]));
        history.push(1, &values(&[("eval_reward", 0.5)]));
        history.push(2, &values(&[("loss", -3.0), ("kl", 1e-300)]));
        let text = serde_json::to_string(&history).unwrap();
        let expected = r#"[{"step":1,"kl":null,"loss":0.30000000000000004},{"step":1,"eval_reward":0.5},"#;
        assert_eq!(text, format!("{expected}{}", r#"{"step":2,"kl":1e-300,"loss":-3.0}]"#));
        let again: LogHistory = serde_json::from_str(&text).unwrap();
        assert_eq!(again, history);
        assert_eq!((again.lines().count(), again.shapes.len()), (3, 2));
        let of = |name| again.numbers().filter(|number| number.0 == name).map(|number| number.1).collect::<Vec<_>>();
        assert_eq!(of("loss"), [0.1 + 0.2, -3.0]);
        assert!(matches!(of("kl")[..], [none, 1e-300] if none.is_nan()));
    }

    /// A line of forty metrics must be much smaller than as JSON objects, which took eight kilobytes on every rank.
    #[test]
    fn metric_history_takes_eight_bytes_per_value() {
        let line: MetricValues = (0..40).map(|number| (format!("metric/{number}"), f64::from(number))).collect();
        let mut history = LogHistory::default();
        (0..1000).for_each(|step| history.push(step, &line));
        let names: Vec<_> = history.lines.iter().map(|line| Arc::as_ptr(&line.names)).collect();
        assert!(names.iter().all(|shape| std::ptr::eq(*shape, names[0])));
        assert!(history.lines.iter().all(|line| std::mem::size_of_val(&*line.values) == 40 * 8));
        assert!(history.clone().lines.iter().zip(&history.lines).all(|(copy, line)| Arc::ptr_eq(copy, line)));
    }
}
