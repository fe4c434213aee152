//! Keys that accept one of a few words.

use serde_json::Value;

use super::field::FromValue;
use super::range::NumberRange;

/// Declares an enum whose variants are written as words.
macro_rules! choices {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        pub enum $name { $($(#[$vdoc])* #[serde(rename = $text)] $variant),+ }

        impl $name {
            /// Every accepted spelling.
            pub const NAMES: &[&str] = &[$($text),+];

            /// Every choice, in the order of [`Self::NAMES`].
            pub const ALL: &[Self] = &[$($name::$variant),+];

            /// The spelling used in configuration files.
            pub fn name(self) -> &'static str {
                match self { $($name::$variant => $text),+ }
            }
        }

        impl $crate::config::field::FromValue for $name {
            fn expected(_: &$crate::config::range::NumberRange) -> String {
                format!("one of {}", Self::NAMES.join(", "))
            }

            fn from_value(value: &serde_json::Value, _: &$crate::config::range::NumberRange) -> Option<Self> {
                match value.as_str()? { $($text => Some($name::$variant),)+ _ => None }
            }

            fn to_value(&self) -> serde_json::Value {
                self.name().into()
            }
        }
    };
}

pub(super) use choices;

/// A choice, or the word `auto`, which leaves the choice to the plan.
///
/// ```
/// use colo_grpo::Config;
/// use colo_grpo::config::{AutoOr, GradientCheckpointing};
///
/// let words = ["sequence_parallel_size=auto", "gradient_checkpointing=full"].map(str::to_owned);
/// let config = Config::load(Some("configs/tiny-cpu.toml".as_ref()), &words)?;
/// assert_eq!(config.sequence_parallel_size, AutoOr::Auto); // the least with which the plan fits
/// assert_eq!(config.gradient_checkpointing, AutoOr::Given(GradientCheckpointing::Full));
/// # Ok::<(), colo_grpo::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AutoOr<T> {
    /// The plan chooses.
    Auto,
    /// The value given in the configuration.
    Given(T),
}

impl<T: FromValue> FromValue for AutoOr<T> {
    fn expected(range: &NumberRange) -> String {
        format!("auto or {}", T::expected(range))
    }

    fn from_value(value: &Value, range: &NumberRange) -> Option<Self> {
        if value == "auto" { Some(Self::Auto) } else { T::from_value(value, range).map(Self::Given) }
    }

    fn to_value(&self) -> Value {
        match self {
            Self::Auto => "auto".into(),
            Self::Given(choice) => choice.to_value(),
        }
    }
}

impl<T: FromValue> serde::Serialize for AutoOr<T> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.to_value().serialize(serializer)
    }
}
