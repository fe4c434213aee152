//! Sizes and formats of an engine.

use tch::{Device, Kind};

use super::kv_cache::cache_kind;
use super::speculation::SpeculationOptions;
use super::stages::EngineRanks;
use crate::config::{KvCacheDtype, RolloutQuantization, StateDtype};
use crate::cuda::Placement;
use crate::error::{Error, Result};
use crate::model::ModelSpec;

/// Formats of the engine's weights, KV cache and states.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EngineFormats {
    /// Format of the blocks' weights in GEMMs.
    pub quantization: RolloutQuantization,
    /// Dtype of keys and values in the cache.
    pub kv_cache_dtype: KvCacheDtype,
    /// Dtype of the states of gated delta nets.
    pub state_dtype: StateDtype,
}

impl EngineFormats {
    /// Weights, keys and values in the dtype of the network, states in float32.
    pub const PLAIN: Self = Self {
        quantization: RolloutQuantization::None,
        kv_cache_dtype: KvCacheDtype::Auto,
        state_dtype: StateDtype::Float32,
    };
}

/// Sizes and formats of an engine.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineOptions {
    /// Bytes of this rank's KV cache. The group uses as many blocks as its rank with the smallest cache holds.
    pub kv_cache_bytes: usize,
    /// Tokens per block of the KV cache.
    pub block_size: usize,
    /// Maximum number of sequences that are decoded at once.
    pub max_num_seqs: usize,
    /// Maximum number of tokens that are prefilled in one step.
    pub max_num_batched_tokens: usize,
    /// Maximum length of prompt and completion together, in tokens.
    pub max_model_length: usize,
    /// Dtype of weights, activations and cache.
    pub kind: Kind,
    /// Dtype of the residual stream.
    pub residual: Kind,
    /// Format of the blocks' weights in GEMMs.
    pub quantization: RolloutQuantization,
    /// Dtype of keys and values in the cache.
    pub kv_cache_dtype: KvCacheDtype,
    /// Dtype of the states of gated delta nets.
    pub state_dtype: StateDtype,
    /// Device of the weights and the cache.
    pub device: Device,
    /// Makes a completion's bits depend on nothing but its prompt and random key: not on order, neighbours, chunks or preemption. GEMMs then use one
    /// algorithm for all batch sizes, and prompts the attention of decode steps, which is slower. On one GPU only.
    pub strict: bool,
    /// Gives a token's log-probability the bits that a trainer with the format [`Exact`](crate::model::Exact) computes. On a GPU it requires
    /// `strict`.
    pub exact: bool,
    /// Records in trajectories which experts each token was routed to.
    pub records_experts: bool,
    /// The source and number of draft tokens.
    pub speculation: SpeculationOptions,
}

impl EngineOptions {
    /// Dtype of the KV cache.
    pub(super) fn cache_kind(&self) -> Kind {
        cache_kind(self.kv_cache_dtype, self.kind)
    }

    /// Rows of the largest decode step: sequences and their draft tokens.
    pub(super) fn most_decode_rows(&self) -> usize {
        self.speculation.most_rows(self.max_num_seqs)
    }

    /// Refuses options that exclude each other or that this model does not support.
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
