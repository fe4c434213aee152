//! Python types that minijinja represents as lists: tuples, ranges, and dictionary views. They print as in Python.

use std::sync::Arc;

use minijinja::value::{Enumerator, Object, ObjectRepr};
use minijinja::{Error, Value};

use super::invalid;

/// Largest length of a range, as in Jinja's sandbox.
const MAX_RANGE: i64 = 100_000;

/// A Python tuple.
#[derive(Debug)]
pub(super) struct Tuple(Vec<Value>);

impl Object for Tuple {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.0.get(key.as_usize()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.0.len())
    }
}

/// A Python range, created by `range(..)`.
#[derive(Debug)]
struct JinjaRange {
    start: i64,
    stop: i64,
    step: i64,
    len: usize,
}

impl Object for JinjaRange {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let index = key.as_usize().filter(|&index| index < self.len)?;
        Some(Value::from(self.start + index as i64 * self.step))
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.len)
    }
}

/// A dictionary view, created by `x.keys()`, `x.values()` or `x.items()`.
#[derive(Debug)]
struct View {
    name: &'static str,
    items: Vec<Value>,
}

impl Object for View {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.items.clone())
    }
}

/// Creates a tuple of `items`.
pub(super) fn tuple(items: impl IntoIterator<Item = Value>) -> Value {
    Value::from_object(Tuple(items.into_iter().collect()))
}

/// Creates a range like Python: `range(stop)`, `range(start, stop)`, `range(start, stop, step)`.
pub(super) fn range(first: i64, second: Option<i64>, step: Option<i64>) -> Result<Value, Error> {
    let (start, stop, step) = (second.map_or(0, |_| first), second.unwrap_or(first), step.unwrap_or(1));
    let span = i128::from(stop) - i128::from(start);
    let len = match step {
        0 => return Err(invalid("range() arg 3 must not be zero")),
        step => ((span + i128::from(step - step.signum())) / i128::from(step)).max(0),
    };
    match len > MAX_RANGE.into() {
        true => Err(invalid(format!("a range of more than {MAX_RANGE} is too large"))),
        false => Ok(Value::from_object(JinjaRange { start, stop, step, len: len as usize })),
    }
}

/// The view that the dictionary method `method` returns; `None` for other methods, and if the value is not a dictionary.
pub(super) fn view(value: &Value, method: &str) -> Option<Value> {
    let map = value.as_object().filter(|map| map.repr() == ObjectRepr::Map)?;
    let pairs = map.try_iter_pairs()?;
    let (name, items): (_, Vec<Value>) = match method {
        "keys" => ("dict_keys", pairs.map(|(key, _)| key).collect()),
        "values" => ("dict_values", pairs.map(|(_, value)| value).collect()),
        "items" => ("dict_items", pairs.map(|(key, value)| tuple([key, value])).collect()),
        _ => return None,
    };
    Some(Value::from_object(View { name, items }))
}

/// The Python notation of a tuple, range or view: opening text, items, closing text. `None` for other values.
pub(super) fn parts(value: &Value) -> Option<(String, Vec<Value>, &'static str)> {
    if let Some(Tuple(items)) = value.downcast_object_ref() {
        return Some(("(".to_owned(), items.clone(), if items.len() == 1 { ",)" } else { ")" }));
    }
    if let Some(View { name, items }) = value.downcast_object_ref() {
        return Some((format!("{name}(["), items.clone(), "])"));
    }
    let JinjaRange { start, stop, step, .. } = value.downcast_object_ref()?;
    let items: Vec<i64> = if *step == 1 { vec![*start, *stop] } else { vec![*start, *stop, *step] };
    Some(("range(".to_owned(), items.into_iter().map(Value::from).collect(), ")"))
}
