//! Size and shape of an engine.

use tch::{Device, Kind};

use super::kv_cache::cache_kind;
use super::speculation::SpeculationOptions;
use super::stages::EngineRanks;
use crate::config::{KvCacheDtype, RolloutQuantization, StateDtype};
use crate::cuda::Placement;
use crate::error::{Error, Result};
use crate::model::ModelSpec;

/// How an engine's products read weights, and how it stores what it keeps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EngineFormats {
    /// How products read the weights of blocks.
    pub quantization: RolloutQuantization,
    /// How keys and values are stored.
    pub kv_cache_dtype: KvCacheDtype,
    /// How states of gated delta nets are stored.
    pub state_dtype: StateDtype,
}

impl EngineFormats {
    /// Weights, keys and values in the type of the network, states in float32.
    pub const PLAIN: Self = Self {
        quantization: RolloutQuantization::None,
        kv_cache_dtype: KvCacheDtype::Auto,
        state_dtype: StateDtype::Float32,
    };
}

/// Size and shape of an engine.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineOptions {
    /// KV cache of this rank; the group uses as many blocks as its poorest rank has.
    pub kv_cache_bytes: usize,
    /// Tokens per KV block.
    pub block_size: usize,
    /// Most sequences decoded at once.
    pub max_num_seqs: usize,
    /// Most tokens prefilled in one step.
    pub max_num_batched_tokens: usize,
    /// Longest prompt and completion together.
    pub max_model_length: usize,
    /// Type of weights, activations and cache.
    pub kind: Kind,
    /// Type of the residual stream.
    pub residual: Kind,
    /// How products read the weights of blocks.
    pub quantization: RolloutQuantization,
    /// How keys and values are stored.
    pub kv_cache_dtype: KvCacheDtype,
    /// How states of gated delta nets are stored.
    pub state_dtype: StateDtype,
    /// Where weights and cache are.
    pub device: Device,
    /// A completion's bits depend on nothing but its prompt and key: not on order, neighbours, chunks or preemption. One
    /// algorithm for a product whatever the batch, one attention for prompts and decode steps; slower. On one GPU only.
    pub strict: bool,
    /// A token's log-probability has the bits that a trainer with the format [`Exact`](crate::model::Exact) gives it. On a GPU `strict` goes with it.
    pub exact: bool,
    /// Trajectories have the experts that their tokens went to.
    pub records_experts: bool,
    /// How tokens are drafted.
    pub speculation: SpeculationOptions,
}

impl EngineOptions {
    /// Type of the cache.
    pub(super) fn cache_kind(&self) -> Kind {
        cache_kind(self.kv_cache_dtype, self.kind)
    }

    /// Rows of the largest decode step: sequences and drafts.
    pub(super) fn most_decode_rows(&self) -> usize {
        self.speculation.most_rows(self.max_num_seqs)
    }

    /// Refuses options that do not go together, or not with this model.
    pub(super) fn check(&self, spec: &ModelSpec, ranks: &EngineRanks) -> Result<()> {
        let placement = Placement { on_cuda: self.device.is_cuda(), kind: self.kind };
        let own = [
            ("strict", self.strict.into()),
            ("exact", self.exact.into()),
            ("rollout_quantization", self.quantization.name().into()),
            ("kv_cache_dtype", self.kv_cache_dtype.name().into()),
            ("mamba_ssm_cache_dtype", self.state_dtype.name().into()),
            ("speculation", self.speculation.method.name().into()),
            ("tensor_parallel_size", ranks.tp.size().into()),
            ("pipeline_parallel_size", ranks.stages.count().into()),
        ];
        if self.exact && placement.on_cuda && !self.block_size.is_power_of_two() {
            let expected = "a power of two, at least 16, with exact = true on a GPU: other blocks have another kernel of attention than training";
            return Err(Error::invalid_value("kv_block_size", self.block_size, expected));
        }
        spec.check_with(placement.settings().into_iter().chain(own))
    }
}
