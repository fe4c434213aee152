//! Keys for LoRA adapters (`lora.*`), named as in PEFT's `LoraConfig`.

use serde_json::Value;

use super::TargetModule;
use super::check::check;
use super::field::{FromValue, keys};
use super::range::{BELOW_ONE, NumberRange, above, from_to};
use crate::error::Result;

/// Maximum rank of adapters.
pub(crate) const MAX_RANK: usize = 1 << 16;
/// The word for every linear projection of a block.
const ALL_LINEAR: &str = "all-linear";

keys! {
    /// Keys for LoRA (`lora.*`): the base is frozen and adapters are trained.
    ///
    /// Adapters of queries and values beside a base in 4 bits, whose divergence from that base is in the loss:
    ///
    /// ```
    /// use colo_grpo::Config;
    /// use colo_grpo::config::{LoraConfig, Quantization, ReferenceModel, TargetModule, TargetModules};
    ///
    /// let words = [
    ///     "lora.r=8",
    ///     "lora.target_modules=[\"q_proj\", \"v_proj\"]",
    ///     "quantization=nf4",
    ///     "beta=0.04",
    ///     "reference=base",
    /// ]
    /// .map(str::to_owned);
    /// let config = Config::load(Some("configs/tiny-cpu.toml".as_ref()), &words)?;
    /// let lora: &LoraConfig = &config.lora;
    /// assert_eq!(lora.target_modules, TargetModules::Some(vec![TargetModule::QProj, TargetModule::VProj]));
    /// assert_eq!((config.quantization, config.reference), (Quantization::Nf4, ReferenceModel::Base));
    /// # Ok::<(), colo_grpo::Error>(())
    /// ```
    #[derive(Debug, Clone, PartialEq, serde::Serialize)]
    pub struct LoraConfig {
        /// Rank of the adapters; `none` trains all weights without adapters.
        pub r: Option<usize> = None => from_to(1.0, MAX_RANK as f64),
        /// LoRA alpha: the adapters' output is scaled by `alpha / r`.
        pub alpha: f64 = 32.0 => above(0.0),
        /// Dropout probability of elements of an adapter's input in training.
        pub dropout: f64 = 0.0 => BELOW_ONE,
        /// Projections that get adapters: a list of names, or `all-linear`.
        pub target_modules: TargetModules = TargetModules::AllLinear,
    }
}

impl LoraConfig {
    pub(super) fn check(&self) -> Result<()> {
        let targets = self.target_modules.to_value().to_string();
        let repeated = self.target_modules.modules().len() != self.target_modules.len();
        check("lora.target_modules", &targets, !repeated, "each projection at most once")?;
        check("lora.target_modules", targets, self.target_modules.len() > 0, "at least one projection")
    }
}

/// The projections that get adapters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TargetModules {
    /// Every linear projection that the model's blocks have.
    AllLinear,
    /// Only the listed projections get adapters.
    Some(Vec<TargetModule>),
}

impl TargetModules {
    /// The projections, each once, in order; for `all-linear` those of any model.
    pub fn modules(&self) -> Vec<TargetModule> {
        let mut modules = match self {
            Self::AllLinear => TargetModule::ALL.to_vec(),
            Self::Some(modules) => modules.clone(),
        };
        modules.sort();
        modules.dedup();
        modules
    }

    fn len(&self) -> usize {
        match self {
            Self::AllLinear => TargetModule::NAMES.len(),
            Self::Some(modules) => modules.len(),
        }
    }
}

impl serde::Serialize for TargetModules {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        self.to_value().serialize(serializer)
    }
}

impl FromValue for TargetModules {
    fn expected(_: &NumberRange) -> String {
        format!("\"{ALL_LINEAR}\" or a list of {}", TargetModule::NAMES.join(", "))
    }

    fn from_value(value: &Value, range: &NumberRange) -> Option<Self> {
        match value {
            Value::String(text) if text == ALL_LINEAR => Some(Self::AllLinear),
            _ => Vec::from_value(value, range).map(Self::Some),
        }
    }

    fn to_value(&self) -> Value {
        match self {
            Self::AllLinear => ALL_LINEAR.into(),
            Self::Some(modules) => modules.to_value(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Quantization;
    use super::super::tests::{config, message};
    use super::*;

    #[test]
    fn lora_targets_are_a_word_or_a_list() {
        assert_eq!(config(&["lora.r=8"]).lora.target_modules.modules(), TargetModule::ALL);
        let some = config(&["lora.r=8", "lora.target_modules=[\"v_proj\", \"q_proj\"]"]);
        assert_eq!(some.lora.target_modules.modules(), [TargetModule::QProj, TargetModule::VProj]);
        let one = config(&["lora.r=8", "lora.target_modules=o_proj", "quantization=nf4"]);
        assert_eq!(one.quantization, Quantization::Nf4);
        assert_eq!(one.lora.target_modules.modules(), [TargetModule::OProj]);
    }

    #[test]
    fn repeated_or_empty_lora_targets_are_refused() {
        for (overrides, expected) in [
            (&["lora.r=0"][..], "lora.r = 0: expected \"none\" or a whole number from 1 to 65536 (command line)"),
            (&["lora.r=8", "lora.alpha=0"], "lora.alpha = 0: expected a number above 0"),
            (&["lora.r=8", "lora.dropout=1"], "lora.dropout = 1: expected a number in [0, 1)"),
            (&["lora.r=8", "lora.target_modules=[\"qkv_proj\"]"], "or a list of q_proj, k_proj"),
            (&["lora.r=8", "lora.target_modules=[]"], "at least one projection"),
            (&["lora.r=8", "lora.target_modules=[\"q_proj\", \"q_proj\"]"], "at most once"),
            (&["quantization=int8", "lora.r=8"], "one of none, nf4"),
        ] {
            let error = message(overrides);
            assert!(error.contains(expected), "{overrides:?}: {error}");
        }
    }
}
