//! One declaration per key: the struct's field, its default, how it is read and how it is written.

use std::path::PathBuf;

use serde_json::Value;

use super::raw::RawConfig;
use crate::error::{Error, Result};

/// A value that one key can hold.
pub(crate) trait FromValue: Sized {
    /// What a user may write, for messages.
    fn expected() -> String;
    /// `None` if the value has the wrong type or range.
    fn from_value(value: &Value) -> Option<Self>;
    /// The inverse of `from_value`.
    fn to_value(&self) -> Value;
}

/// A key as a reader of the reference sees it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct KeyDoc {
    /// Heading of the keys that begin with this one.
    pub section: Option<&'static str>,
    /// Its full name.
    pub key: String,
    /// What may be written.
    pub expected: String,
    /// `None` where the key is required.
    pub default: Option<Value>,
    /// What it is, as the field's documentation says.
    pub text: String,
}

/// A key, or a table of keys.
pub(crate) trait Field: Sized {
    /// Appends the keys at and under `key`; `text` and `default` are a single key's.
    fn describe(key: &str, default: Option<Self>, text: &str, out: &mut Vec<KeyDoc>);
    /// Takes the value from `raw`, or the default; without either the key is required.
    fn read(raw: &RawConfig, key: &str, default: Option<Self>) -> Result<Self>;
    /// Appends every key at and under `key` with its value.
    fn write(&self, key: &str, out: &mut Vec<(String, Value)>);

    /// The key of the field `name` in `table`.
    fn key(table: &str, name: &str) -> String {
        join(table, name)
    }
}

impl<T: FromValue> Field for T {
    fn describe(key: &str, default: Option<Self>, text: &str, out: &mut Vec<KeyDoc>) {
        let default = default.map(|default| default.to_value());
        out.push(KeyDoc {
            section: None,
            key: key.to_owned(),
            expected: T::expected(),
            default,
            text: text.to_owned(),
        });
    }

    fn read(raw: &RawConfig, key: &str, default: Option<Self>) -> Result<Self> {
        match (raw.get(key), default) {
            (Some(value), _) => {
                T::from_value(value).ok_or_else(|| raw.locate(Error::invalid_value(key, value, T::expected())))
            }
            (None, Some(default)) => Ok(default),
            (None, None) => {
                Err(Error::invalid_value(key, "nothing", format!("{} (this key is required)", T::expected())))
            }
        }
    }

    fn write(&self, key: &str, out: &mut Vec<(String, Value)>) {
        out.push((key.to_owned(), self.to_value()));
    }
}

/// Declares a struct whose fields are configuration keys. `= default` follows the type; a leaf without one is required,
/// and a table takes its fields' own defaults. The keys of a struct marked `flat` are those of the table that it is in.
/// `section "..";` begins a part of the reference, whose text are the fields' documentation.
macro_rules! keys {
    ($(#[$meta:meta])* pub struct $name:ident $(: $flat:ident)? {
        $($(section $section:literal;)? $(#[$($field_meta:tt)+])* pub $field:ident: $type:ty $(= $default:expr)?,)+
    }) => {
        $(#[$meta])*
        pub struct $name { $($(#[$($field_meta)+])* pub $field: $type,)+ }

        impl $crate::config::field::Field for $name {
            fn describe(key: &str, _: Option<Self>, _: &str, out: &mut Vec<$crate::config::field::KeyDoc>) {
                $({
                    let first = out.len();
                    <$type as $crate::config::field::Field>::describe(
                        &<$type as $crate::config::field::Field>::key(key, stringify!($field)),
                        keys!(@option $($default)?),
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
            ) -> $crate::error::Result<Self> {
                Ok(Self { $(
                    $field: <$type as $crate::config::field::Field>::read(
                        raw,
                        &<$type as $crate::config::field::Field>::key(key, stringify!($field)),
                        keys!(@option $($default)?),
                    )?,
                )+ })
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
    (@text doc = $text:literal) => { $text };
    (@text $($other:tt)+) => { "" };
}
pub(crate) use keys;

/// `table.key`, or `key` at the top.
pub(crate) fn join(table: &str, key: &str) -> String {
    if table.is_empty() { key.to_owned() } else { format!("{table}.{key}") }
}

impl FromValue for bool {
    fn expected() -> String {
        "true or false".into()
    }

    fn from_value(value: &Value) -> Option<Self> {
        value.as_bool()
    }

    fn to_value(&self) -> Value {
        (*self).into()
    }
}

macro_rules! whole_numbers {
    ($($type:ty),+) => { $(impl FromValue for $type {
        fn expected() -> String {
            "a whole number of at least 0".into()
        }

        /// TOML's integers end at `i64::MAX`: larger ones would not survive a snapshot.
        fn from_value(value: &Value) -> Option<Self> {
            value.as_i64().and_then(|number| number.try_into().ok())
        }

        fn to_value(&self) -> Value {
            (*self).into()
        }
    })+ };
}
whole_numbers!(u8, u64, usize);

impl FromValue for f64 {
    fn expected() -> String {
        "a finite number".into()
    }

    fn from_value(value: &Value) -> Option<Self> {
        value.as_f64().filter(|number| number.is_finite())
    }

    fn to_value(&self) -> Value {
        (*self).into()
    }
}

impl FromValue for f32 {
    fn expected() -> String {
        f64::expected()
    }

    fn from_value(value: &Value) -> Option<Self> {
        f64::from_value(value).map(|number| number as f32).filter(|number| number.is_finite())
    }

    /// The shortest decimal that reads back as the same f32 (0.9, not 0.8999999761581421).
    fn to_value(&self) -> Value {
        self.to_string().parse::<f64>().unwrap_or(f64::from(*self)).into()
    }
}

impl FromValue for String {
    fn expected() -> String {
        "text".into()
    }

    fn from_value(value: &Value) -> Option<Self> {
        value.as_str().map(str::to_owned)
    }

    fn to_value(&self) -> Value {
        self.as_str().into()
    }
}

impl FromValue for PathBuf {
    fn expected() -> String {
        "a path".into()
    }

    fn from_value(value: &Value) -> Option<Self> {
        value.as_str().filter(|path| !path.is_empty()).map(PathBuf::from)
    }

    fn to_value(&self) -> Value {
        self.to_string_lossy().into()
    }
}

impl<T: FromValue> FromValue for Option<T> {
    fn expected() -> String {
        format!("{} or \"none\"", T::expected())
    }

    /// TOML has no null: the word `none` is one.
    fn from_value(value: &Value) -> Option<Self> {
        if value.is_null() || value == "none" { Some(None) } else { T::from_value(value).map(Some) }
    }

    fn to_value(&self) -> Value {
        self.as_ref().map_or_else(|| "none".into(), T::to_value)
    }
}

impl<T: FromValue> FromValue for Vec<T> {
    fn expected() -> String {
        format!("a list [..], or one entry, each {}", T::expected())
    }

    /// One entry may stand without brackets.
    fn from_value(value: &Value) -> Option<Self> {
        match value {
            Value::Array(entries) => entries.iter().map(T::from_value).collect(),
            one => T::from_value(one).map(|one| vec![one]),
        }
    }

    fn to_value(&self) -> Value {
        self.iter().map(T::to_value).collect()
    }
}
