//! The macro that declares keys: for each the struct field, its default, its valid range and how it is read and written.

use std::path::PathBuf;

use serde_json::Value;

use super::flat::join;
use super::range::{self, LARGEST, NumberRange};
use super::raw::RawConfig;
use crate::error::Error;
use crate::migration;

/// Text of errors for numbers beyond [`LARGEST`].
const TOO_LARGE: &str = "no number is above 1e30 or below -1e30";

/// A type that the value of a key can have.
pub(crate) trait FromValue: Sized {
    /// Describes the accepted values for messages; numbers must be in `range`.
    fn expected(range: &NumberRange) -> String;
    /// Converts a value; `None` if it has the wrong type or is a number outside of `range`.
    fn from_value(value: &Value, range: &NumberRange) -> Option<Self>;
    /// Converts to a configuration value, from which `from_value` gets the same back.
    fn to_value(&self) -> Value;
}

/// A key as shown in the reference page.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct KeyDoc {
    /// Section heading in the page, if this key starts a section.
    pub section: Option<&'static str>,
    /// Full name of the key.
    pub key: String,
    /// Names of the entries, for a table that is documented as one key.
    pub entries: Vec<String>,
    /// Description of the accepted values.
    pub expected: String,
    /// The default; `None` if the key is required.
    pub default: Option<Value>,
    /// The doc comment of the field.
    pub text: String,
}

/// A key or a table of keys.
pub(crate) trait Field: Sized {
    /// Appends the documentation of all keys at and below `key`; `default`, `range` and `text` are for a single key.
    fn describe(key: &str, default: Option<Self>, range: &NumberRange, text: &str, out: &mut Vec<KeyDoc>);
    /// Reads the value from `raw`, or takes the default; a key without either is required. Errors are added to `wrong`, and the other keys of a table
    /// are still read, so that all errors are reported together.
    fn read(
        raw: &RawConfig,
        key: &str,
        default: Option<Self>,
        range: &NumberRange,
        wrong: &mut Vec<Error>,
    ) -> Option<Self>;
    /// Appends every key at and below `key` with its value.
    fn write(&self, key: &str, out: &mut Vec<(String, Value)>);

    /// The full name of the field `name` in `table`.
    fn key(table: &str, name: &str) -> String {
        join(table, name)
    }
}

/// Whether a number, or one in a list, is larger than [`LARGEST`].
fn is_too_large(value: &Value) -> bool {
    match value {
        Value::Array(entries) => entries.iter().any(is_too_large),
        value => value.as_f64().is_some_and(|number| number.abs() > LARGEST),
    }
}

impl<T: FromValue> Field for T {
    fn describe(key: &str, default: Option<Self>, range: &NumberRange, text: &str, out: &mut Vec<KeyDoc>) {
        let default = default.map(|default| default.to_value());
        let (key, expected, text) = (key.to_owned(), T::expected(range), text.to_owned());
        out.push(KeyDoc { section: None, key, entries: Vec::new(), expected, default, text });
    }

    fn read(
        raw: &RawConfig,
        key: &str,
        default: Option<Self>,
        range: &NumberRange,
        wrong: &mut Vec<Error>,
    ) -> Option<Self> {
        let value = raw.get(key);
        let read = value.map_or(default, |value| T::from_value(value, range));
        if read.is_none() {
            let got = value.map_or_else(|| "nothing".to_owned(), Value::to_string);
            let why = if value.is_none() { " (this key is required)" } else { "" };
            let advice =
                |value| migration::value_advice(key, value).or_else(|| is_too_large(value).then_some(TOO_LARGE));
            let hint = value.and_then(advice).map(|hint| format!("; {hint}"));
            let expected = T::expected(range) + why + &hint.unwrap_or_default();
            wrong.push(raw.locate(Error::invalid_value(key, got, expected)));
        }
        read
    }

    fn write(&self, key: &str, out: &mut Vec<(String, Value)>) {
        out.push((key.to_owned(), self.to_value()));
    }
}

/// Declares a struct whose fields are configuration keys. `= default` follows the type; a key without a default is required, and a table uses the
/// defaults of its fields. `=> range` comes last and gives the valid numbers. The keys of a struct marked `flat` belong to the table that contains
/// it. `section "..";` starts a section of the reference page, whose text comes from the fields' doc comments.
macro_rules! keys {
    ($(#[$meta:meta])* pub struct $name:ident $(: $flat:ident)? {
        $($(section $section:literal;)? $(#[$($field_meta:tt)+])* pub $field:ident: $type:ty $(= $default:expr)? $(=> $range:expr)?,)+
    }) => {
        $(#[$meta])*
        pub struct $name { $($(#[$($field_meta)+])* pub $field: $type,)+ }

        impl $crate::config::field::Field for $name {
            fn describe(
                key: &str,
                _: Option<Self>,
                _: &$crate::config::range::NumberRange,
                _: &str,
                out: &mut Vec<$crate::config::field::KeyDoc>,
            ) {
                $({
                    let first = out.len();
                    <$type as $crate::config::field::Field>::describe(
                        &<$type as $crate::config::field::Field>::key(key, stringify!($field)),
                        keys!(@option $($default)?),
                        &keys!(@range $($range)?),
                        [$(keys!(@text $($field_meta)+)),*].concat().trim(),
                        out,
                    );
                    out[first].section = keys!(@option $($section)?);
                })+
            }

            fn read(
                raw: &$crate::config::raw::RawConfig,
                key: &str,
                _: Option<Self>,
                _: &$crate::config::range::NumberRange,
                wrong: &mut Vec<$crate::error::Error>,
            ) -> Option<Self> {
                $(let $field = <$type as $crate::config::field::Field>::read(
                    raw,
                    &<$type as $crate::config::field::Field>::key(key, stringify!($field)),
                    keys!(@option $($default)?),
                    &keys!(@range $($range)?),
                    wrong,
                );)+
                Some(Self { $($field: $field?,)+ })
            }

            fn write(&self, key: &str, out: &mut Vec<(String, serde_json::Value)>) {
                $($crate::config::field::Field::write(
                    &self.$field,
                    &<$type as $crate::config::field::Field>::key(key, stringify!($field)),
                    out,
                );)+
            }

            $(keys!(@$flat);)?
        }
    };
    (@flat) => {
        fn key(table: &str, _: &str) -> String {
            table.to_owned()
        }
    };
    (@option) => { None };
    (@option $value:expr) => { Some($value) };
    (@range) => { $crate::config::range::ANY };
    (@range $range:expr) => { $range };
    (@text doc = $text:literal) => { $text };
    (@text $($other:tt)+) => { "" };
}
pub(crate) use keys;

impl FromValue for bool {
    fn expected(_: &NumberRange) -> String {
        "true or false".into()
    }

    fn from_value(value: &Value, _: &NumberRange) -> Option<Self> {
        value.as_bool()
    }

    fn to_value(&self) -> Value {
        (*self).into()
    }
}

macro_rules! whole_numbers {
    ($($type:ty),+) => { $(impl FromValue for $type {
        fn expected(range: &NumberRange) -> String {
            range.not_negative().of("a whole number")
        }

        /// TOML integers end at `i64::MAX`; larger ones could not be saved in a snapshot.
        fn from_value(value: &Value, range: &NumberRange) -> Option<Self> {
            let number = value.as_i64().filter(|number| range.contains(*number as f64))?;
            number.try_into().ok()
        }

        fn to_value(&self) -> Value {
            (*self).into()
        }
    })+ };
}
whole_numbers!(u8, u64, usize);

impl FromValue for f64 {
    fn expected(range: &NumberRange) -> String {
        range.of("a number")
    }

    fn from_value(value: &Value, range: &NumberRange) -> Option<Self> {
        value.as_f64().filter(|number| number.abs() <= LARGEST && range.contains(*number))
    }

    fn to_value(&self) -> Value {
        (*self).into()
    }
}

impl FromValue for f32 {
    fn expected(range: &NumberRange) -> String {
        f64::expected(range)
    }

    fn from_value(value: &Value, range: &NumberRange) -> Option<Self> {
        let number = f64::from_value(value, &range::ANY)? as f32;
        (number.is_finite() && range.contains(f64::from(number))).then_some(number)
    }

    /// Writes the shortest decimal that reads back as the same f32 (0.9, not 0.8999999761581421).
    fn to_value(&self) -> Value {
        self.to_string().parse::<f64>().unwrap_or(f64::from(*self)).into()
    }
}

impl FromValue for String {
    fn expected(_: &NumberRange) -> String {
        "text".into()
    }

    fn from_value(value: &Value, _: &NumberRange) -> Option<Self> {
        value.as_str().map(str::to_owned)
    }

    fn to_value(&self) -> Value {
        self.as_str().into()
    }
}

impl FromValue for PathBuf {
    fn expected(_: &NumberRange) -> String {
        "a path".into()
    }

    fn from_value(value: &Value, _: &NumberRange) -> Option<Self> {
        value.as_str().filter(|path| !path.is_empty()).map(PathBuf::from)
    }

    fn to_value(&self) -> Value {
        self.to_string_lossy().into()
    }
}

impl<T: FromValue> FromValue for Option<T> {
    fn expected(range: &NumberRange) -> String {
        format!("\"none\" or {}", T::expected(range))
    }

    /// The word `none` is null, as TOML has no null.
    fn from_value(value: &Value, range: &NumberRange) -> Option<Self> {
        if value.is_null() || value == "none" { Some(None) } else { T::from_value(value, range).map(Some) }
    }

    fn to_value(&self) -> Value {
        self.as_ref().map_or_else(|| "none".into(), T::to_value)
    }
}

/// A range: two numbers, the lower one first.
impl FromValue for [f64; 2] {
    fn expected(range: &NumberRange) -> String {
        format!("[low, high], each {}, low not above high", f64::expected(range))
    }

    fn from_value(value: &Value, range: &NumberRange) -> Option<Self> {
        let bounds: Vec<f64> = value.as_array()?.iter().filter_map(|bound| f64::from_value(bound, range)).collect();
        let bounds = <[f64; 2]>::try_from(bounds).ok().filter(|[low, high]| low <= high)?;
        (value.as_array()?.len() == 2).then_some(bounds)
    }

    fn to_value(&self) -> Value {
        self.iter().map(f64::to_value).collect()
    }
}

impl<T: FromValue> FromValue for Vec<T> {
    fn expected(range: &NumberRange) -> String {
        format!("a list [..], or one entry, each {}", T::expected(range))
    }

    /// A single entry may be given without brackets.
    fn from_value(value: &Value, range: &NumberRange) -> Option<Self> {
        match value {
            Value::Array(entries) => entries.iter().map(|entry| T::from_value(entry, range)).collect(),
            one => T::from_value(one, range).map(|one| vec![one]),
        }
    }

    fn to_value(&self) -> Value {
        self.iter().map(T::to_value).collect()
    }
}

/// Names of all keys of `T`, in declaration order.
pub(super) fn names<T: Field>() -> Vec<String> {
    described::<T>().into_iter().map(|key| key.key).collect()
}

/// All names that a configuration file may contain for `T`, in declaration order.
pub(super) fn names_in_files<T: Field>() -> Vec<String> {
    let of_key = |key: KeyDoc| if key.entries.is_empty() { vec![key.key] } else { key.entries };
    described::<T>().into_iter().flat_map(of_key).collect()
}

/// Documentation of all keys of `T`, in declaration order.
pub(crate) fn described<T: Field>() -> Vec<KeyDoc> {
    let mut keys = Vec::new();
    T::describe("", None, &range::ANY, "", &mut keys);
    keys
}
