//! The memory of engines as planned before a run: their own weights, and weights and KV cache of each pipeline stage.

use std::fmt;

use tch::Kind;

use crate::config::{Config, Mode, Quantization};
use crate::error::Result;
use crate::model::{ParamTable, Stage, Stages};
use crate::plan::{MemoryPlan, human};
use crate::rollout::{cache_kind, kv_block_bytes};
use crate::serve::EngineSlices;

/// The planned memory of one rank of a pipeline stage.
#[derive(Debug)]
pub(super) struct StagePlan {
    stage: Stage,
    /// Bytes of the engine's own weights; `None` if it reads the policy's weights in place.
    weight_bytes: Option<usize>,
    kv_cache_bytes: usize,
}

impl StagePlan {
    /// Plans the memory of a rank of `stage`: weights, and a KV cache with as many blocks as in `plan` for the stage's layers.
    pub(super) fn new(
        stage: Stage,
        config: &Config,
        table: &ParamTable,
        kind: Kind,
        plan: &MemoryPlan,
    ) -> Result<Self> {
        let tp_size = config.tensor_parallel_size;
        let (own, cached) = (table.spec.of_layers(&stage.layers), cache_kind(config.kv_cache_dtype, kind));
        let kv_cache_bytes = plan.num_kv_blocks * kv_block_bytes(&own, tp_size, config.kv_block_size, cached);
        let weight_bytes = match config.mode {
            Mode::Split => Some(table.elements_of(&stage.units(&table.spec)) * kind.elt_size_in_bytes()),
            Mode::Colocated if gathers(config, table) => {
                Some(EngineSlices::gathered_bytes(table, 0, tp_size, &stage, kind)?)
            }
            Mode::Colocated => None,
        };
        Ok(Self { stage, weight_bytes, kv_cache_bytes })
    }
}

impl fmt::Display for StagePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { stage, weight_bytes, kv_cache_bytes } = self;
        let (first, last) = (stage.layers.start, stage.layers.end - 1);
        let layers = if first == last { format!("layer {first}") } else { format!("layers {first} to {last}") };
        let weights = weight_bytes.map_or_else(|| "in place".to_owned(), human);
        let head = if stage.is_last() { " and head" } else { "" };
        let cache = human(*kv_cache_bytes);
        write!(f, "stage {}: {layers}{head}, engine weights {weights}, KV cache {cache}", stage.index)
    }
}

/// Whether the engine needs gathered copies of its weights: yes if the policy's weights are sharded; never for quantized weights or in split mode.
pub(super) fn gathers(config: &Config, table: &ParamTable) -> bool {
    let in_place = config.zero.stage < 3 || table.shards == 1 || config.mode == Mode::Split;
    !in_place && config.quantization == Quantization::None
}

/// Bytes of the engine's own weights on each rank; with several stages, the maximum.
pub(super) fn engine_weight_bytes(config: &Config, table: &ParamTable, stages: &Stages, kind: Kind) -> Result<usize> {
    match (gathers(config, table), config.quantization) {
        (true, _) => {
            let tp_size = config.tensor_parallel_size;
            let mut of_stages =
                stages.iter().map(|stage| EngineSlices::gathered_bytes(table, 0, tp_size, &stage, kind));
            of_stages.try_fold(0, |most, bytes| bytes.map(|bytes| bytes.max(most)))
        }
        (false, Quantization::None) => Ok(0),
        (false, _) => Ok(EngineSlices::dequantized_bytes(table, kind)),
    }
}
