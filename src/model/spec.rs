//! The shape of a network: everything about a model that is not a weight.

use std::ops::Range;
use std::path::Path;

use tch::Kind;

use super::block::{AttentionSpec, BlockSpec, DenseSpec, ExpertsSpec, Mixer, Mlp, NormPlaces, QkNorm};
use super::families::Family;
use super::params::{shapes, units};
use crate::cuda::kernels::{DecoderSizes, Unserved, unserved};
use crate::error::{Error, Result};
use crate::ops::rope::{Rope, RopeScaling};
use crate::ops::router::RouterOptions;

/// A decoder-only transformer. Field names are those of `config.json` where one exists.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSpec {
    /// Architecture, for `config.json`.
    pub family: Family,
    /// Rows of the embedding and of the head; at least the tokenizer's size.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP, in layers without experts.
    pub intermediate_size: usize,
    /// Experts in place of the MLP.
    pub experts: Option<ExpertLayers>,
    /// Blocks.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of one head; even.
    pub head_dim: usize,
    /// Added to the mean square in every norm.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Scaling of the rotary frequencies.
    pub rope_scaling: Option<RopeScaling>,
    /// The head is the embedding table.
    pub tie_word_embeddings: bool,
    /// Query, key and value have biases.
    pub qkv_bias: bool,
    /// Norms of queries and keys before rope.
    pub qk_norm: Option<QkNorm>,
    /// Norms of the sublayers.
    pub norms: NormPlaces,
    /// A token sees itself and the `sliding_window - 1` before it; `None` sees all.
    pub sliding_window: Option<usize>,
    /// Longest context in tokens.
    pub max_position_embeddings: usize,
    /// Beginning of sequence.
    pub bos_token_id: Option<u32>,
    /// Ids that end a completion.
    pub eos_token_ids: Vec<u32>,
    /// Type of the weights on disk.
    pub dtype: Kind,
}

/// The experts of a model, and which of its layers have them. Field names are those of `config.json`.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertLayers {
    /// Experts of a layer.
    pub num_experts: usize,
    /// Experts of a token.
    pub num_experts_per_tok: usize,
    /// Width of an expert.
    pub moe_intermediate_size: usize,
    /// The weights of a token's experts are divided by their sum.
    pub norm_topk_prob: bool,
    /// Weight of the loss that balances the experts' load.
    pub router_aux_loss_coef: f64,
    /// Every so many-th layer has experts.
    pub decoder_sparse_step: usize,
    /// Layers that have none all the same.
    pub mlp_only_layers: Vec<usize>,
}

impl ExpertLayers {
    /// Whether a layer has experts.
    pub fn are_in(&self, layer: usize) -> bool {
        (layer + 1).is_multiple_of(self.decoder_sparse_step) && !self.mlp_only_layers.contains(&layer)
    }
}

impl ModelSpec {
    /// Number of weights; a tied head counts once.
    pub fn num_params(&self) -> usize {
        let numel = |unit| -> usize { shapes(self, unit).iter().map(|(_, shape)| product(shape)).sum() };
        units(self).map(numel).sum()
    }

    /// Number of weights that one token is computed with: of experts, those of one choice.
    pub fn num_active_params(&self) -> usize {
        let idle = |layer| match self.block(layer).mlp {
            Mlp::Dense(_) => 0,
            Mlp::Experts(experts) => experts.num_idle_params(),
        };
        self.num_params() - (0..self.num_layers).map(idle).sum::<usize>()
    }

    /// Weight of the loss that keeps experts equally busy: as configured, or the model's own.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] on `router_aux_loss_coef` where there are no experts.
    pub fn router_aux_loss_coef(&self, configured: Option<f64>) -> Result<f64> {
        match (&self.experts, configured) {
            (Some(experts), _) => Ok(configured.unwrap_or(experts.router_aux_loss_coef)),
            (None, None) => Ok(0.0),
            (None, Some(coef)) => {
                let expected = "none, or a model with experts: this one's config.json describes none";
                Err(Error::invalid_value("router_aux_loss_coef", coef, expected))
            }
        }
    }

    /// The number of layers with experts before each layer.
    pub fn places_among_expert_layers(&self) -> Vec<i64> {
        let experts = self.experts.as_ref();
        let mut place = 0;
        let mut next = |layer| {
            place += i64::from(experts.is_some_and(|experts| experts.are_in(layer)));
            place
        };
        std::iter::once(0).chain((0..self.num_layers).map(&mut next)).take(self.num_layers).collect()
    }

    /// Experts that one token has in all layers.
    pub fn routed_experts_per_token(&self) -> usize {
        self.num_expert_layers() * self.experts.as_ref().map_or(0, |experts| experts.num_experts_per_tok)
    }

    /// Layers that have experts.
    pub fn num_expert_layers(&self) -> usize {
        let experts = self.experts.as_ref();
        (0..self.num_layers).filter(|&layer| experts.is_some_and(|experts| experts.are_in(layer))).count()
    }

    /// The description of a layer's block.
    pub fn block(&self, layer: usize) -> BlockSpec {
        let hidden = self.hidden_size;
        let attention = AttentionSpec {
            hidden,
            num_heads: self.num_heads,
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            qkv_bias: self.qkv_bias,
            qk_norm: self.qk_norm,
        };
        let mlp = match &self.experts {
            Some(experts) if experts.are_in(layer) => Mlp::Experts(ExpertsSpec {
                expert: DenseSpec { hidden, intermediate: experts.moe_intermediate_size },
                num_experts: experts.num_experts,
                router: RouterOptions {
                    num_experts_per_tok: experts.num_experts_per_tok,
                    norm_topk_prob: experts.norm_topk_prob,
                },
            }),
            _ => Mlp::Dense(DenseSpec { hidden, intermediate: self.intermediate_size }),
        };
        BlockSpec { hidden, mixer: Mixer::Attention(attention), mlp, norms: self.norms }
    }

    /// Its rotary frequencies.
    pub fn rope(&self) -> Rope {
        Rope::new(self.head_dim, self.rope_theta, self.rope_scaling.as_ref())
    }

    /// Floating-point operations of training for every pair of a query and a key that it sees, in all layers: a forward and twice
    /// that for the gradients.
    pub fn training_flop_per_pair(&self) -> usize {
        let Mixer::Attention(attention) = self.block(0).mixer;
        3 * self.num_layers * attention.flop_per_pair()
    }

    /// Elements that the cache has of a token in all layers, on one rank of a tensor-parallel group.
    pub fn cached_elements(&self, tp_size: usize) -> usize {
        let Mixer::Attention(attention) = self.block(0).tp_slice(tp_size).mixer;
        self.num_layers * attention.cached_elements()
    }

    /// Query heads that share one key and value head.
    pub fn heads_per_group(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// Query heads and key/value heads that one rank of a tensor-parallel group computes. Key/value heads are shared by
    /// several ranks when there are fewer heads than ranks.
    pub fn tp_heads(&self, tp_size: usize) -> (usize, usize) {
        (self.num_heads / tp_size, (self.num_kv_heads / tp_size).max(1))
    }

    /// Whether a rank is the first of those that share its key/value heads.
    pub fn has_first_of_key(&self, tp_rank: usize, tp_size: usize) -> bool {
        tp_rank.is_multiple_of((tp_size / self.num_kv_heads).max(1))
    }

    /// Rows of the vocabulary that belong to a rank: contiguous, in rank order, sizes at most one apart.
    pub fn vocab_range(&self, tp_rank: usize, tp_size: usize) -> Range<usize> {
        self.vocab_size * tp_rank / tp_size..self.vocab_size * (tp_rank + 1) / tp_size
    }

    /// Whether weights can be sliced for `tp_size` ranks without copies: `tp_size` divides the query heads and the MLP,
    /// and divides, or is a multiple of, the key/value heads.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] on `tensor_parallel_size`, with the values that this model can take.
    pub fn validate_tp(&self, tp_size: usize) -> Result<()> {
        if self.can_slice(tp_size) {
            return Ok(());
        }
        let valid: Vec<_> = (1..=self.num_heads).filter(|&t| self.can_slice(t)).map(|t| t.to_string()).collect();
        let (heads, kv_heads) = (self.num_heads, self.num_kv_heads);
        let mlp = match &self.experts {
            None => format!("intermediate size {}", self.intermediate_size),
            Some(experts) => format!("experts of intermediate size {}", experts.moe_intermediate_size),
        };
        let expected = format!(
            "one of {} (the model has {heads} query heads, {kv_heads} key/value heads, {mlp})",
            valid.join(", ")
        );
        Err(Error::invalid_value("tensor_parallel_size", tp_size, expected))
    }

    /// Whether the kernels of a GPU serve this shape with weights of `kind`.
    ///
    /// # Errors
    /// [`Error::BadFile`] for the model's `config.json`, with the sizes that are served.
    pub fn validate_gpu(&self, kind: Kind, folder: &Path) -> Result<()> {
        let sizes = DecoderSizes { head_dim: self.head_dim, hidden_size: self.hidden_size };
        let Some(Unserved { name, got, served }) = unserved(sizes, kind) else { return Ok(()) };
        let message = format!(
            "{name} = {got} is not served on a GPU with weights of {kind:?}, but {served} are; device=cpu computes with any, and \
             dtype=float32 on a GPU with other ones than dtype=bfloat16"
        );
        Err(Error::bad_file(folder.join("config.json"), message))
    }

    /// Whether the engine serves this model on a GPU.
    ///
    /// # Errors
    /// [`Error::BadFile`] for the `config.json` of a model with experts.
    pub fn validate_gpu_engine(&self, folder: &Path) -> Result<()> {
        if self.num_expert_layers() == 0 {
            return Ok(());
        }
        let message = "a model with experts cannot be sampled from on a GPU yet: expected one without num_experts; device=cpu \
                       samples from it, and sft trains it on GPUs, too";
        Err(Error::bad_file(folder.join("config.json"), message))
    }

    fn can_slice(&self, tp_size: usize) -> bool {
        tp_size > 0
            && self.num_heads.is_multiple_of(tp_size)
            && self.intermediate_size.is_multiple_of(tp_size)
            && self.experts.as_ref().is_none_or(|experts| experts.moe_intermediate_size.is_multiple_of(tp_size))
            && (self.num_kv_heads.is_multiple_of(tp_size) || tp_size.is_multiple_of(self.num_kv_heads))
    }
}

/// Elements of a shape.
pub(super) fn product(shape: &[i64]) -> usize {
    shape.iter().map(|&size| size as usize).product()
}
