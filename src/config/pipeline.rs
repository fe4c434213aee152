//! Engines of several ranks: tensor parallelism and pipeline stages (`pipeline_parallel_size`, `pipeline_partition`).

use std::fmt;

use serde_json::Value;

use super::Config;
use super::check::check;
use super::field::FromValue;
use super::numbers::{check_divides, divisors, listed};
use super::range::{COUNT, NumberRange};
use crate::error::{Error, Result};

/// Number of layers of each pipeline stage; as text, numbers separated by commas.
///
/// ```
/// use colo_grpo::Config;
/// use colo_grpo::config::PipelinePartition;
///
/// let words = [
///     "pipeline_parallel_size=3",
///     "pipeline_partition=10,10,8",
///     "tensor_parallel_size=1",
///     "zero.stage=3",
/// ]
/// .map(str::to_owned);
/// let config = Config::load(Some("configs/tiny-cpu.toml".as_ref()), &words)?;
/// assert_eq!(config.pipeline_partition, Some(PipelinePartition(vec![10, 10, 8])));
/// assert_eq!((config.stage_sizes(), config.engine_shape().num_ranks()), (&[10, 10, 8][..], 3));
/// # Ok::<(), colo_grpo::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct PipelinePartition(pub Vec<usize>);

impl std::str::FromStr for PipelinePartition {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let sizes = text.split(',').map(|size| size.trim().parse().ok().filter(|size| *size > 0));
        let sizes: Option<Vec<usize>> = sizes.collect();
        sizes.map(Self).ok_or_else(|| {
            "expected the number of layers of each stage, at least 1, separated by commas: 10,10,8".to_owned()
        })
    }
}

impl fmt::Display for PipelinePartition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&listed(&self.0).replace(' ', ""))
    }
}

impl FromValue for PipelinePartition {
    fn expected(_: &NumberRange) -> String {
        "the number of layers of each stage, at least 1, separated by commas: \"10,10,8\"".to_owned()
    }

    fn from_value(value: &Value, _: &NumberRange) -> Option<Self> {
        match value {
            Value::String(text) => text.parse().ok(),
            other => Vec::from_value(other, &COUNT).map(Self),
        }
    }

    fn to_value(&self) -> Value {
        self.to_string().into()
    }
}

/// The ranks of one engine: pipeline stages, each with a tensor-parallel group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineShape {
    /// Ranks in the tensor-parallel group of each stage.
    pub tensor_parallel_size: usize,
    /// Number of pipeline stages.
    pub pipeline_parallel_size: usize,
}

impl From<usize> for EngineShape {
    /// An engine with one stage of this tensor-parallel size.
    fn from(tensor_parallel_size: usize) -> Self {
        Self { tensor_parallel_size, pipeline_parallel_size: 1 }
    }
}

impl EngineShape {
    /// Number of ranks of the engine. The product of two configured counts fits into 64 bits.
    pub fn num_ranks(self) -> usize {
        self.tensor_parallel_size.saturating_mul(self.pipeline_parallel_size)
    }

    /// Refuses engine sizes that do not divide `num_ranks`; `what` says what these ranks do, for the error.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] on the key that is wrong, with the valid sizes.
    pub fn check_divides(self, num_ranks: usize, what: &str) -> Result<()> {
        check_divides("tensor_parallel_size", self.tensor_parallel_size, num_ranks, what)?;
        if num_ranks.is_multiple_of(self.num_ranks()) {
            return Ok(());
        }
        if self.tensor_parallel_size == 1 {
            return check_divides("pipeline_parallel_size", self.pipeline_parallel_size, num_ranks, what);
        }
        let Self { tensor_parallel_size, pipeline_parallel_size } = self;
        let valid = listed(&divisors(num_ranks / tensor_parallel_size));
        let expected = format!(
            "a divisor of the {num_ranks} ranks that {what}, over tensor_parallel_size = {tensor_parallel_size}: {valid}"
        );
        Err(Error::invalid_value("pipeline_parallel_size", pipeline_parallel_size, expected))
    }
}

impl Config {
    /// The sizes of one engine.
    pub fn engine_shape(&self) -> EngineShape {
        let Self { tensor_parallel_size, pipeline_parallel_size, .. } = *self;
        EngineShape { tensor_parallel_size, pipeline_parallel_size }
    }

    /// Number of layers of each stage as configured; empty if not configured.
    pub fn stage_sizes(&self) -> &[usize] {
        self.pipeline_partition.as_ref().map_or(&[], |partition| &partition.0)
    }

    pub(super) fn check_pipeline(&self) -> Result<()> {
        let num_stages = self.pipeline_parallel_size;
        if let Some(partition) = &self.pipeline_partition {
            let given = partition.0.len();
            let expected = match num_stages {
                1 => format!("none, or pipeline_parallel_size = {given}: without it there is one stage"),
                _ => format!("the layers of {num_stages} stages (pipeline_parallel_size)"),
            };
            check("pipeline_partition", partition, given == num_stages, expected)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::super::tests::{config, message};

    #[test]
    fn pipeline_partitions_are_read_or_refused() {
        let keys = ["pipeline_parallel_size=3", "zero.stage=3", "pipeline_partition=10,10,8"];
        let staged = config(&keys);
        assert_eq!((staged.stage_sizes(), staged.engine_shape().num_ranks()), (&[10, 10, 8][..], 3));
        assert_eq!(Config::from_toml(&staged.to_toml()).unwrap(), staged);
        assert_eq!(config(&[keys[0], keys[1], "pipeline_partition=[10, 10, 8]"]), staged);
        assert!(config(&[]).stage_sizes().is_empty());
        let split = config(&["pipeline_parallel_size=2", "mode=split", "split.rollout_gpus=2"]);
        assert_eq!(split.engine_shape().num_ranks(), 2, "at any zero.stage: trainers have no engine");
        for (keys, part) in [
            (&["pipeline_parallel_size=0"][..], "pipeline_parallel_size = 0: expected a whole number"),
            (&["pipeline_partition=10,10"], "pipeline_partition = 10,10: expected none, or pipeline_parallel_size = 2"),
            (&["pipeline_partition=10,,8"], "expected \"none\" or the number of layers of each stage, at least 1"),
            (&["pipeline_partition=10,0"], "at least 1, separated by commas: \"10,10,8\""),
        ] {
            let got = message(keys);
            assert!(got.contains(part), "{got}");
        }
    }

    #[test]
    fn engine_sizes_must_divide_the_number_of_ranks() {
        let refused = |keys: &[&str], ranks| config(keys).validate_world(ranks).unwrap_err().to_string();
        let staged = ["pipeline_parallel_size=2", "zero.stage=3", "tensor_parallel_size=2"];
        assert!(config(&staged).validate_world(4).is_ok());
        assert_eq!(
            refused(&staged, 6),
            "pipeline_parallel_size = 2: expected a divisor of the 6 ranks that generate, over tensor_parallel_size = 2: 1, 3"
        );
        assert!(refused(&staged, 3).starts_with("tensor_parallel_size = 2: expected a divisor of the 3 ranks"));
        let split = ["pipeline_parallel_size=2", "mode=split", "split.rollout_gpus=3"];
        let uneven = refused(&split, 5);
        assert_eq!(uneven, "pipeline_parallel_size = 2: expected a divisor of the 3 ranks that generate: 1, 3");
        assert!(
            refused(&staged[..2], 1)
                .starts_with("pipeline_parallel_size = 2: expected 1, as there is only one rank to generate")
        );
    }
}
